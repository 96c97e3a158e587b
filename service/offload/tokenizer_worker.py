"""A helper process that makes tokens of texts: `python -m service.offload.tokenizer_worker`.

A tokenizer comes with a model, so its patterns are a stranger's program. It runs in a process
without rights (service/sandbox), with a limit of time and memory, as chat templates do. The helper
keeps some tokenizers by their digest. It asks for one that it lacks.
"""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from pipeline.distribution import install_command
from service.errors import TooLarge, Unprocessable
from service.offload.worker import limit_memory, serve
from service.sandbox.framing import Parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORK_S = 10.0  # of CPU time: a million tokens take about 2 s
OUT_OF_TIME = signal.SIGPROF
MEMORY_BYTES = 2**30  # beyond what the process has at its start
MAX_OUTPUT_BYTES = 64 * 2**20
KEPT = 4  # tokenizers
MISSING = 1  # in place of the length of a head: send the request again, with the tokenizer
NEXT_STEP = "send shorter texts"


class Vocabulary:
    """A tokenizer, and the tokens that it knows."""

    def __init__(self, content: bytes) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Unprocessable(
                "the server lacks the library tokenizers",
                f"ask the operator for `{install_command('embeddings')}`",
            ) from None
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:  # noqa: BLE001  tokenizers raises no other class
            raise Unprocessable(
                f"the tokenizer of this model cannot be read: {str(error)[:200]}",
                "compile the model again with another tokenizer",
            ) from None
        # files of sentence-transformers cut texts, and fill them up
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def tokens(self, number: int, text: str | list[int], most: int) -> list[int]:
        """Return the tokens of input `number`. Unprocessable if they are none, unknown, or more
        than `most`.
        """
        place = f"input {number}"
        if isinstance(text, str):
            tokens: list[int] = self._tokenizer.encode(text).ids
        else:
            tokens = text
        if unknown := [token for token in tokens if not 0 <= token < self._size]:
            raise Unprocessable(
                f"{place} has the token {unknown[0]}, this model has {self._size} tokens",
                "send tokens of this model's own tokenizer, or text",
            )
        if len(tokens) > most:
            raise Unprocessable(
                f"{place} has {len(tokens)} tokens, this model takes at most {most}",
                "send a shorter text, or its parts as inputs of their own",
            )
        if not tokens:
            raise Unprocessable(f"{place} has no tokens", "send a text that is not empty")
        return tokens


_kept: OrderedDict[str, Vocabulary] = OrderedDict()


def tokenize(body: bytes, digest: str, length: int, most: int) -> tuple[int, Parts]:
    """Return the tokens of texts as int32: how many of each, and then those of all.

    The body is a tokenizer of `length` bytes, or none if it is kept under this digest, and then the
    texts as JSON. A text may be tokens already, which are checked.
    """
    signal.setitimer(signal.ITIMER_PROF, WORK_S)
    try:
        if length:
            _kept[digest] = Vocabulary(body[:length])
        if digest not in _kept:
            return MISSING, ()
        _kept.move_to_end(digest)
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
        return 0, _tokens(_kept[digest], orjson.loads(body[length:]), most)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _tokens(vocabulary: Vocabulary, texts: list[Any], most: int) -> Parts:
    lists, size = [], 4 * len(texts)
    for number, text in enumerate(texts):
        lists.append(np.array(vocabulary.tokens(number, text, most), np.int32))
        size += lists[-1].nbytes
        if size > MAX_OUTPUT_BYTES:
            raise TooLarge(f"the texts have more than {MAX_OUTPUT_BYTES // 4} tokens", NEXT_STEP)
    counts = np.array([len(each) for each in lists], np.int32)
    return [each.tobytes() for each in (counts, *lists)]


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core, and no threads
    limit_memory(MEMORY_BYTES)
    serve({"tokenize": tokenize})
