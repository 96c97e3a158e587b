"""The engines as they serve: GenAI's pipeline with continuous batching, and transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.core.frozen import Frozen
from pipeline.errors import InternalError, ModelError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.export import genai, last_line
from pipeline.llm.hf import load_model, use_cores
from pipeline.llm.reference import Ids
from pipeline.llm.source import Source
from pipeline.measurement.clock import monotonic

Logs = NDArray[np.float64]

GIB = 1 << 30
MAX_CACHE_GIB = 4


class Room(Frozen):
    """What an opened engine is to have room for."""

    context: int  # tokens of the longest request
    cache_values_per_token: int
    threads: int = 0
    requests: int = 1  # at once


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer, its log-probabilities, and when its tokens came."""

    tokens: Ids  # [n]
    log_probs: Logs  # [n]; empty if the library gives none
    times_s: tuple[float, ...]  # from the request to each token, [n]


class Generator(Protocol):
    """An opened engine."""

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts, sent at once, greedily by exactly this number of tokens each."""
        ...

    def cache_bytes_per_token(self) -> float:
        """Return the memory of keys and values per token so far, 0 where it is not known."""
        ...


def open_generator(engine: LanguageEngine, source: Source, room: Room) -> Generator:
    """Open an engine, or the model in transformers."""
    from pipeline.llm.libraries.registry import library_of

    if engine.library != "transformers":
        return library_of(engine.library).open_served(engine, room)
    return InTransformers(source, room.threads, on_gpu=engine.is_on_gpu)


@dataclass(slots=True)
class _Parts:
    """What a request has got so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class Served:
    """GenAI's pipeline with continuous batching and paged attention.

    `prefix_caching` keeps keys and values of earlier prompts: a repeated one costs nothing, so it
    is off where time is measured. `step_tokens` limits the tokens of one step, so that longer
    prompts are read in chunks; 0 leaves GenAI's limit.
    """

    def __init__(
        self,
        engine: LanguageEngine,
        room: Room,
        *,
        prefix_caching: bool = False,
        step_tokens: int = 0,
    ) -> None:
        library = genai()
        scheduler = library.SchedulerConfig()
        needed = room.context * room.cache_values_per_token * 4 * 2 * room.requests
        scheduler.cache_size = min(MAX_CACHE_GIB, math.ceil(needed / GIB))
        scheduler.enable_prefix_caching = prefix_caching
        if step_tokens:
            scheduler.max_num_batched_tokens = step_tokens
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
        self._longest = 0  # tokens that were in the cache at once
        self.steps = 0

    def log_probs(self, ids: Ids) -> Logs:
        """Return the log-probability of each token after the first: [n - 1]."""
        (log_probs,) = self.log_probs_together([ids])
        return log_probs

    def log_probs_together(self, texts: Sequence[Ids]) -> tuple[Logs, ...]:
        """Return those of several texts, which are sent at once."""
        options = self._options(1)
        options.echo = True
        found = self._run(texts, options)
        return tuple(
            _expected(parts.log_probs, ids.size + 1)[1 : ids.size]
            for ids, parts in zip(texts, found, strict=True)
        )

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        """Continue a prompt greedily by exactly this number of tokens."""
        (answer,) = self.generate_together([prompt], tokens)
        return answer

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        return tuple(
            Generation(
                np.asarray(parts.tokens), _expected(parts.log_probs, tokens), tuple(parts.times_s)
            )
            for parts in self._run(prompts, self._options(tokens))
        )

    def step_times(self, prompt: Ids, tokens: int) -> tuple[float, float, float]:
        """Return the mean time between tokens, and that of operators and of sampling in it, in
        seconds: what an answer takes beyond its first token, by GenAI's own clock.
        """
        import openvino as ov

        times = []
        for count in (1, tokens):
            options = self._options(count)
            (result,) = self._pipeline.generate([ov.Tensor(prompt[None])], [options])
            raw = result.perf_metrics.raw_metrics
            microseconds = (raw.generate_durations, raw.inference_durations, raw.sampling_durations)
            times.append([sum(each) / 1e6 for each in microseconds])
        total_s, operators_s, sampling_s = (
            (all_s - first_s) / (tokens - 1) for first_s, all_s in zip(*times, strict=True)
        )
        return total_s, operators_s, sampling_s

    def cache_bytes_per_token(self) -> float:
        """Return the memory of keys and values per token: of the blocks that the largest requests
        filled, with scales.
        """
        metrics = self._pipeline.get_metrics()
        used = metrics.max_cache_usage / 100 * metrics.kv_cache_size_in_bytes
        return float(used) / max(self._longest, 1)

    def _options(self, tokens: int) -> Any:
        options = self._library.GenerationConfig()
        options.max_new_tokens = options.min_new_tokens = tokens
        options.do_sample, options.ignore_eos, options.logprobs = False, True, 1
        return options

    def _run(self, prompts: Sequence[Ids], options: Any) -> list[_Parts]:
        import openvino as ov

        begin, handles = monotonic(), []
        for prompt in prompts:
            self._requests += 1
            handles.append(
                self._pipeline.add_request(self._requests, ov.Tensor(prompt[None]), options)
            )
        found = [_Parts() for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            self.steps += 1
            for handle, parts in zip(handles, found, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        parts.tokens += output.generated_ids
                        parts.log_probs += output.generated_log_probs
                        parts.times_s += [monotonic() - begin] * len(output.generated_ids)
        # the last token of an answer is never read
        tokens = sum(ids.size + options.max_new_tokens - 1 for ids in prompts)
        self._longest = max(self._longest, tokens)
        return found


class InTransformers:
    """The model in PyTorch, in fp32 or on a GPU in bf16, with its cache: what a user has without
    Crucible.
    """

    def __init__(self, source: Source, threads: int = 0, *, on_gpu: bool = False) -> None:
        import torch

        use_cores(threads)
        self._model = load_model(source)
        if on_gpu:
            self._model = self._model.to("cuda", torch.bfloat16)

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts of equal length as one batch."""
        import torch

        times_s, answers = list[float](), list[Ids]()
        begin = monotonic()
        with torch.inference_mode():
            given, cache = torch.tensor(np.stack(prompts)), None  # [requests, n]
            given = given.to(self._model.device)
            for _ in range(tokens):
                out = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                given, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                answers.append(given[:, 0].cpu().numpy())
                times_s.append(monotonic() - begin)
        columns = np.stack(answers, 1)  # [requests, tokens]
        return tuple(Generation(row, np.empty(0), tuple(times_s)) for row in columns)

    def cache_bytes_per_token(self) -> float:
        return 0.0


def _expected(log_probs: Sequence[float], count: int) -> Logs:
    """InternalError unless GenAI gave one number for each token."""
    if len(log_probs) != count:
        raise InternalError(f"expected {count} log-probabilities of GenAI, got {len(log_probs)}")
    return np.asarray(log_probs)
