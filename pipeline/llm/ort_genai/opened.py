"""An opened folder of ONNX Runtime GenAI: as it serves, and as the gate scores it.

The library has no continuous batching on a CPU. Requests at once have a generator each, and take
turns token by token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, ModelError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.export import last_line
from pipeline.llm.reference import Ids
from pipeline.llm.scoring import log_softmax
from pipeline.llm.served import Generation
from pipeline.measurement.clock import monotonic

EXTRA = "onnxruntime-genai"
INSTALL = install_command("llm", EXTRA)
LOGITS = "logits"  # the graph's output, of all tokens that were read at once
CACHE_VALUE_BYTES = 4  # the builder's graphs for CPUs keep keys and values in fp32

Logs = NDArray[np.float64]


def library() -> Any:
    """Import the library, or raise BackendUnavailable."""
    try:
        import onnxruntime_genai
    except ImportError as error:
        raise BackendUnavailable(f"the package `{EXTRA}` is not installed", INSTALL) from error
    onnxruntime_genai.disable_telemetry_events()
    return onnxruntime_genai


class OpenModel:
    """The weights, which all requests share. With `profile`, the session writes its times into a
    file whose name begins so, when it ends.
    """

    def __init__(
        self, engine: LanguageEngine, threads: int = 0, profile: Path | None = None
    ) -> None:
        self._library = library()
        session: dict[str, int | str] = {"intra_op_num_threads": threads} if threads else {}
        if profile is not None:
            session["enable_profiling"] = str(profile)
        overlay = {"model": {"decoder": {"session_options": session}}}
        try:
            config = self._library.Config(str(engine.root))
            config.overlay(json.dumps(overlay))
            self._model = self._library.Model(config)
        except RuntimeError as error:
            raise ModelError(
                f"ONNX Runtime GenAI cannot open {engine.label}: {last_line(error)}",
                "leave this candidate out",
            ) from error

    def text(self, tokens: int) -> Text:
        """Begin a text of at most this number of tokens."""
        parameters = self._library.GeneratorParams(self._model)
        parameters.set_search_options(do_sample=False, max_length=tokens)
        return Text(self._library.Generator(self._model, parameters))


class Text:
    """A text that grows, with its keys and values."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def read(self, ids: Ids) -> NDArray[np.float32]:
        """Read the next tokens at once. Return the logits of the successor of the last one:
        [vocabulary].
        """
        self._generator.append_tokens(ids.astype(np.int32))
        logits: NDArray[np.float32] = self._generator.get_logits()[0, -1]
        return logits

    def read_all(self, ids: Ids) -> NDArray[np.float32]:
        """Read the next tokens at once. Return the logits of all successors: [n, vocabulary]."""
        self._generator.append_tokens(ids.astype(np.int32))
        logits = self._generator.get_output(LOGITS)[0]
        return np.array(logits, dtype=np.float32)


class Served:
    """Greedy answers, with the steps that serve. `chunk` limits the tokens of a prompt that are
    read at once; 0: no limit.
    """

    def __init__(self, model: OpenModel, values_per_token: int = 0, chunk: int = 0) -> None:
        self._model, self._values, self._chunk = model, values_per_token, chunk

    @property
    def model(self) -> OpenModel:
        return self._model

    def log_probs(self, ids: Ids) -> Logs:
        """Return the log-probability of each token after the first, read at once: [n - 1]."""
        logits = self._model.text(ids.size).read_all(ids[:-1])
        found: Logs = log_softmax(logits)[np.arange(ids.size - 1), ids[1:]]
        return found

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        """Continue a prompt greedily by exactly this number of tokens."""
        (answer,) = self.generate_together([prompt], tokens)
        return answer

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts that take turns, token by token."""
        begin = monotonic()
        texts = [self._model.text(prompt.size + tokens) for prompt in prompts]
        answers = [list[int]() for _ in prompts]
        logs, times = [list[float]() for _ in prompts], [list[float]() for _ in prompts]
        for _ in range(tokens):
            for text, prompt, answer, log, time_s in zip(
                texts, prompts, answers, logs, times, strict=True
            ):
                logits = text.read(np.array(answer[-1:])) if answer else self._begin(text, prompt)
                token = int(logits.argmax())
                answer.append(token)
                log.append(float(log_softmax(logits)[token]))
                time_s.append(monotonic() - begin)
        return tuple(
            Generation(np.array(answer), np.array(log), tuple(time_s))
            for answer, log, time_s in zip(answers, logs, times, strict=True)
        )

    def _begin(self, text: Text, prompt: Ids) -> NDArray[np.float32]:
        chunk = self._chunk or prompt.size
        for at in range(0, prompt.size, chunk):
            logits = text.read(prompt[at : at + chunk])
        return logits

    def cache_bytes_per_token(self) -> float:
        return float(CACHE_VALUE_BYTES * self._values)


class Scored:
    """Whole distributions, through the cache."""

    def __init__(self, model: OpenModel, facts: dict[str, str]) -> None:
        self._model, self.facts = model, facts

    def log_probs(self, ids: Ids, one_by_one: int) -> Logs:
        """Return the log-probabilities of all successors, [n, vocabulary]. The last `one_by_one`
        tokens are read one by one.
        """
        text, first = self._model.text(ids.size + 1), ids.size - one_by_one
        parts = [text.read_all(ids[:first])]
        parts += [text.read_all(ids[at : at + 1]) for at in range(first, ids.size)]
        return log_softmax(np.concatenate(parts))
