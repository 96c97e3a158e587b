"""Texts to tokens, by the tokenizers of models, which are untrusted: a helper does it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from pipeline.errors import DamagedError
from service.errors import TooLarge, Unprocessable
from service.offload.pool import HelperDied, Helpers
from service.offload.tokenizer_worker import MAX_OUTPUT_BYTES, MISSING, OUT_OF_TIME, WORK_S
from service.sandbox.layers import Sandbox

ANSWER_S = 60.0  # with the start of a helper on a busy host
COUNT_BYTES = 2**20  # of the counts of all texts, which come first

Text = str | tuple[int, ...]


class TextTokens:
    """Makes tokens in one helper, which is replaced when it dies. Call `close` at the end."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._helpers = Helpers(
            1,
            "service.offload.tokenizer_worker",
            sandbox=sandbox,
            work_s=ANSWER_S,
            max_answer_bytes=MAX_OUTPUT_BYTES + COUNT_BYTES,
        )

    async def tokens(
        self, tokenizer: Path, digest: str, texts: Sequence[Text], most: int
    ) -> list[NDArray[np.int32]]:
        """Return the tokens of each text, by the tokenizer in a file with this sha256.

        Unprocessable: a text has none, more than `most`, or one that the tokenizer does not know;
        or the tokenizer takes too much time or memory. DamagedError: the file has changed.
        """
        body = orjson.dumps(texts)
        try:
            length, answer = await self._ask([body], digest, 0, most)
            if length == MISSING:
                content = await asyncio.to_thread(_read, tokenizer, digest)
                length, answer = await self._ask([content, body], digest, len(content), most)
        except HelperDied as error:
            is_slow = error.returncode == -OUT_OF_TIME
            reason = f"took more than {WORK_S:g} s" if is_slow else "crashed its process"
            raise Unprocessable(f"the tokenizer {reason}", "send shorter texts") from None
        except TooLarge as error:
            raise Unprocessable(error.message, error.next_step) from None
        numbers = np.frombuffer(answer, np.int32)
        counts = numbers[: len(texts)]
        is_whole = len(counts) == len(texts) and counts.sum() == len(numbers) - len(texts)
        if not is_whole or counts.min() < 1 or counts.max() > most:
            raise Unprocessable("the tokenizer returned no tokens", "send shorter texts")
        return np.split(numbers[len(texts) :], np.cumsum(counts)[:-1])

    async def _ask(
        self, parts: Sequence[bytes], digest: str, length: int, most: int
    ) -> tuple[int, bytes]:
        return await self._helpers.ask("tokenize", parts, digest=digest, length=length, most=most)

    async def close(self) -> None:
        """End the helper."""
        await self._helpers.close()


def _read(file: Path, digest: str) -> bytes:
    """Read a tokenizer. DamagedError unless its sha256 is `digest`."""
    advice = "promote the job of this version again, which restores its files"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"the tokenizer of this model cannot be read: {error}", advice) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise DamagedError("the tokenizer of this model has changed", advice)
    return content
