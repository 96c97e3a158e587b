"""What a worker asks of the library that serves its engine, and the choice of the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import UnsupportedError
from pipeline.llm.engine import LanguageEngine
from service.language.generation import Finish
from service.serving.language.messages import Generate, Load


@dataclass(frozen=True, slots=True)
class News:
    """What came of an answer since it was read last. Lists of one length, a value per token.

    Where the prompt is scored, its tokens come first; the log-probability of the first one says
    nothing.
    """

    ids: list[int]
    log_probs: list[float]
    finish: Finish | None = None
    has_no_room: bool = False  # it was refused, because the cache cannot hold it


class EngineAnswer(Protocol):
    """A running answer."""

    def read(self) -> News: ...

    def leave(self) -> None:
        """End it: nobody wants what would come."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back. Threads may share it."""

    def encode(self, text: str, special_tokens: bool) -> list[int]: ...
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str: ...


class StepEngine(Protocol):
    """An opened engine. All but `check` and the tokenizer belong to one thread."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def keeps_prefixes(self) -> bool:
        """True if prompts may come from a cache: then they have no log-probabilities."""
        ...

    @property
    def scores_prompts_alone(self) -> bool:
        """True if a prompt that is scored must have its step for itself."""
        ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache that the engine has taken already; 0 if it grows with its use."""
        ...

    @property
    def device_bytes(self) -> int:
        """Memory of a GPU that the engine surely holds, the cache included; 0 on a CPU."""
        ...

    @property
    def cache_usage(self) -> float:
        """Share of the cache that running answers use."""
        ...

    def check(self, message: Generate) -> None:
        """Raise ValueError, TypeError or RuntimeError for sampling that is not possible."""
        ...

    def begin(self, message: Generate, prompt: Sequence[int], most: int) -> EngineAnswer:
        """Begin an answer of at most `most` tokens."""
        ...

    def step(self) -> None:
        """Run once for all answers."""
        ...


def open_engine(engine: LanguageEngine, load: Load, ends: frozenset[int]) -> StepEngine:
    """Open an engine with the library that made it. `ends`: tokens that end an answer."""
    if engine.library == "openvino_genai":
        from service.serving.language.openvino_engine import OpenvinoEngine

        return OpenvinoEngine(engine, load, ends)
    if engine.library == "onnxruntime_genai":
        from pipeline.llm.ort_genai.opened import OpenModel
        from service.serving.language.onnxruntime_engine import OnnxruntimeEngine
        from service.serving.language.tokenizer import FastTokenizer

        model, tokenizer = OpenModel(engine), FastTokenizer(engine)
        return OnnxruntimeEngine(model, tokenizer, load.cache_tokens, ends)
    if engine.library == "torch":
        from service.serving.language.tokenizer import FastTokenizer
        from service.serving.language.torch_engine.engine import TorchEngine, open_slots

        return TorchEngine(open_slots(engine, load), FastTokenizer(engine), ends)
    raise UnsupportedError(
        f"{load.name} is an engine of {engine.library}, which this server does not serve",
        "compile the model with candidates of openvino_genai, onnxruntime_genai or torch",
    )
