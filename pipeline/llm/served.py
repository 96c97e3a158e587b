"""The engines as they serve: GenAI's pipeline with continuous batching, and transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.core import Frozen
from pipeline.errors import InternalError, ModelError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.export import genai, last_line
from pipeline.llm.hf import load_model
from pipeline.llm.reference import Ids
from pipeline.llm.source import Source
from pipeline.measurement.clock import monotonic

GIB = 1 << 30
MAX_CACHE_GIB = 4


class Room(Frozen):
    """What an opened engine is to have room for."""

    context: int  # tokens of the longest request
    cache_values_per_token: int
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer, its log-probabilities, and when its tokens came."""

    tokens: Ids  # [n]
    log_probs: NDArray[np.float64]  # [n]; empty if the library gives none
    times_s: tuple[float, ...]  # from the request to each token, [n]


class Generator(Protocol):
    """An opened engine."""

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        """Continue a prompt greedily by exactly this number of tokens."""
        ...


def open_generator(engine: LanguageEngine, source: Source, room: Room) -> Generator:
    """Open an engine."""
    if engine.library == "openvino_genai":
        return Served(engine, room)
    return InTransformers(source, room.threads)


class Served:
    """GenAI's pipeline with continuous batching and paged attention."""

    def __init__(self, engine: LanguageEngine, room: Room) -> None:
        library = genai()
        scheduler = library.SchedulerConfig()
        needed = room.context * room.cache_values_per_token * 4 * 2
        scheduler.cache_size = min(MAX_CACHE_GIB, math.ceil(needed / GIB))
        scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
        try:
            self._pipeline = library.ContinuousBatchingPipeline(
                str(engine.root), scheduler, "CPU", engine.properties(room.threads)
            )
        except RuntimeError as error:
            raise ModelError(
                f"OpenVINO GenAI cannot open {engine.label}: {last_line(error)}",
                "leave this candidate out",
            ) from error
        self._library, self._requests = library, 0

    def log_probs(self, ids: Ids) -> NDArray[np.float64]:
        """Return the log-probability of each token after the first: [n - 1]."""
        options = self._options(1)
        options.echo = True
        _, log_probs, _ = self._run(ids, options)
        return _expected(log_probs, ids.size + 1)[1 : ids.size]

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        answer, log_probs, times_s = self._run(prompt, self._options(tokens))
        return Generation(answer, _expected(log_probs, tokens), times_s)

    def _options(self, tokens: int) -> Any:
        options = self._library.GenerationConfig()
        options.max_new_tokens = options.min_new_tokens = tokens
        options.do_sample, options.ignore_eos, options.logprobs = False, True, 1
        return options

    def _run(self, ids: Ids, options: Any) -> tuple[Ids, NDArray[np.float64], tuple[float, ...]]:
        import openvino as ov

        self._requests += 1
        begin = monotonic()
        handle = self._pipeline.add_request(self._requests, ov.Tensor(ids[None]), options)
        tokens, log_probs, times_s = list[int](), list[float](), list[float]()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                for part in handle.read().values():
                    tokens += part.generated_ids
                    log_probs += part.generated_log_probs
                    times_s += [monotonic() - begin] * len(part.generated_ids)
        return np.asarray(tokens), np.asarray(log_probs), tuple(times_s)


class InTransformers:
    """The model in PyTorch, in fp32, with its cache: what a user has without Crucible."""

    def __init__(self, source: Source, threads: int = 0) -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self._model = load_model(source)

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        import torch

        times_s, answer = list[float](), list[int]()
        begin = monotonic()
        with torch.inference_mode():
            given, cache = torch.tensor(prompt)[None], None
            for _ in range(tokens):
                out = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                given, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                answer.append(int(given))
                times_s.append(monotonic() - begin)
        return Generation(np.asarray(answer), np.empty(0), tuple(times_s))


def _expected(log_probs: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """InternalError unless GenAI gave one number for each token."""
    if log_probs.size != count:
        raise InternalError(f"expected {count} log-probabilities of GenAI, got {log_probs.size}")
    return log_probs
