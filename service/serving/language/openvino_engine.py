"""OpenVINO GenAI: continuous batching, paged attention, and prefixes from the cache."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.errors import UnsupportedError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.export import genai, last_line
from service.language.generation import Finish
from service.serving.language.engines import News
from service.serving.language.messages import Generate, Load

BLOCK = 32  # tokens in a block of the cache on a CPU
MAX_SEED = 2**63 - 1


class OpenvinoEngine:
    """GenAI's pipeline. It mixes up the log-probabilities of prompts with other requests of a
    step.
    """

    scores_prompts_alone = True
    cache_bytes = device_bytes = 0

    def __init__(self, engine: LanguageEngine, load: Load, ends: frozenset[int]) -> None:
        self._library, self._ends = genai(), ends
        self.keeps_prefixes = load.prefix_caching
        scheduler = self._library.SchedulerConfig()
        scheduler.num_kv_blocks = -(-load.cache_tokens // BLOCK)
        scheduler.enable_prefix_caching = load.prefix_caching
        try:
            self._pipeline = self._library.ContinuousBatchingPipeline(
                str(engine.root), scheduler, "CPU", engine.properties()
            )
        except RuntimeError as error:
            raise UnsupportedError(
                f"OpenVINO GenAI cannot open {load.name}: {last_line(error)}",
                "compile the model again with the libraries of this server",
            ) from error
        self.tokenizer = OpenvinoTokenizer(self._pipeline.get_tokenizer())

    @property
    def is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    @property
    def cache_usage(self) -> float:
        """Share of the cache that requests use which have not ended."""
        if not self.is_busy:
            return 0.0
        return min(1.0, max(0.0, float(self._pipeline.get_metrics().cache_usage) / 100))

    def check(self, message: Generate) -> None:
        self._options(message, 1).validate()

    def begin(self, message: Generate, prompt: Sequence[int], most: int) -> OpenvinoAnswer:
        import openvino as ov

        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        options = self._options(message, most)
        handle = self._pipeline.add_request(message.number, ids, options)
        return OpenvinoAnswer(self._library, handle)

    def step(self) -> None:
        self._pipeline.step()

    def _options(self, message: Generate, most: int) -> Any:
        sampling, options = message.sampling, self._library.GenerationConfig()
        options.max_new_tokens = most
        options.logprobs = int(message.log_probs)
        options.echo = message.log_probs and message.echo
        if self._ends:
            options.eos_token_id = min(self._ends)
            options.stop_token_ids = set(self._ends)
        else:
            options.ignore_eos = True
        options.presence_penalty = sampling.presence_penalty
        options.frequency_penalty = sampling.frequency_penalty
        options.do_sample = sampling.temperature > 0
        if options.do_sample:
            options.temperature, options.top_p = sampling.temperature, sampling.top_p
            if sampling.top_k:
                options.top_k = sampling.top_k
            seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
            options.rng_seed = seed & MAX_SEED
        return options


class OpenvinoAnswer:
    """The handle of a request."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> News:
        ids, log_probs, reason = list[int](), list[float](), None
        while self._handle.can_read():
            for part in self._handle.read().values():
                ids += part.generated_ids
                log_probs += part.generated_log_probs
                reason = part.finish_reason
        status = self._handle.get_status()
        if status == self._library.GenerationStatus.IGNORED:
            return News([], [], has_no_room=True)
        finish: Finish | None = None
        if status == self._library.GenerationStatus.FINISHED:
            is_stop = reason == self._library.GenerationFinishReason.STOP
            finish = "stop" if is_stop else "length"
        return News(ids, log_probs, finish)

    def leave(self) -> None:
        self._handle.cancel()


class OpenvinoTokenizer:
    """The tokenizer as OpenVINO's models."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        inputs = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return [int(token) for token in inputs.input_ids.data.ravel()]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
