"""Ways to make tokens on a GPU: transformers as its users call it, and our decoder.

Each way answers prompts of equal length greedily, and tells when each token came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.llm.reference import Ids
from pipeline.llm.torch_engine.decoder import Decoder, Way
from pipeline.llm.torch_engine.network import Network
from pipeline.llm.torch_engine.quantise import Form, quantised
from pipeline.llm.torch_engine.weights import network_of
from pipeline.measurement.clock import monotonic

Weights = Literal["bf16"] | Form

TOKENIZER_FREE = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
"""No token ends an answer: all have the same length."""


SCORE_DEVIATION = 1.6
"""Of random queries times keys. Flatter attention hardly tells positions: in a model of 8 layers,
frequencies that are 2 % off cause a divergence of 0.03 nats with it, and 0.0006 without.
"""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one round."""

    tokens: NDArray[np.int64]  # [requests, tokens]
    times_s: tuple[float, ...]  # from the request to each token


class Contestant(Protocol):
    """One way, opened."""

    weight_bytes: int  # which making a token reads

    def answer(self, prompts: Sequence[Ids], tokens: int) -> Answers: ...

    def scores(self, prompts: Sequence[Ids], following: NDArray[np.int64]) -> torch.Tensor | None:
        """Return the scores of each of the following tokens, [requests, tokens, vocabulary], read
        one by one; None where the library gives none.
        """
        ...


@dataclass(slots=True)
class Model:
    """A random model, and its networks as they are asked for."""

    module: Any
    networks: dict[str, Network] = field(default_factory=dict)

    def network(self, weights: Weights) -> Network:
        if "bf16" not in self.networks:
            self.networks["bf16"] = network_of(self.module)
        if weights != "bf16" and weights not in self.networks:
            self.networks[weights] = quantised(self.networks["bf16"], weights)
        return self.networks[weights]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(each.numel() * each.element_size() for each in self.module.parameters())


def random_model(sizes: dict[str, int], device: str) -> Model:
    """Make a Llama of random weights in bf16 on a device."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **(sizes | TOKENIZER_FREE))
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.eval().requires_grad_(requires_grad=False)
    factor = SCORE_DEVIATION**0.5 / (config.initializer_range * config.hidden_size**0.5)
    for layer in module.model.layers:
        layer.self_attn.q_proj.weight *= factor
        layer.self_attn.k_proj.weight *= factor
    return Model(module)


# -- transformers ------------------------------------------------------------


class Transformers:
    """`generate`, with the dynamic cache, or the static one that transformers compiles itself."""

    def __init__(self, model: Model, *, static: bool) -> None:
        self._module = model.module
        self._cache = {"cache_implementation": "static"} if static else {}
        self.weight_bytes = model.network("bf16").weight_bytes

    def answer(self, prompts: Sequence[Ids], tokens: int) -> Answers:
        from transformers import StoppingCriteriaList

        device = self._module.device
        given = torch.from_numpy(np.stack(prompts)).to(device)
        clock = Clock(device)
        with torch.no_grad():
            out = self._module.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **self._cache,
            )
        found = out[:, given.shape[1] :].cpu().numpy()
        return Answers(found, clock.times_s())

    def scores(self, prompts: Sequence[Ids], following: NDArray[np.int64]) -> torch.Tensor | None:
        return None


class Clock:
    """A stopping criterion that stops nothing, and notes when the device had each token."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks = [self._mark()]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._marks.append(self._mark())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def times_s(self) -> tuple[float, ...]:
        first, *others = self._marks
        if not self._on_gpu:
            return tuple(each - first for each in others)
        torch.cuda.synchronize()
        return tuple(first.elapsed_time(each) / 1e3 for each in others)


def eager_scores(module: Any, prompts: Sequence[Ids], following: NDArray[np.int64]) -> torch.Tensor:
    """Return what transformers scores the following tokens in one reading: [requests, tokens,
    vocabulary] fp32.
    """
    whole = np.concatenate([np.stack(prompts), following], 1)
    with torch.no_grad():
        given = torch.from_numpy(whole[:, :-1]).to(module.device)
        scores: torch.Tensor = module(
            given, use_cache=False, logits_to_keep=following.shape[1]
        ).logits.float()
    return scores


# -- ours --------------------------------------------------------------------


class Ours:
    """Our decoder: on a GPU, its step is a CUDA graph."""

    def __init__(self, network: Network, context: int, way: Way) -> None:
        self.weight_bytes = network.weight_bytes
        self._decoder = Decoder(network, context, way)

    def answer(self, prompts: Sequence[Ids], tokens: int) -> Answers:
        answers = self._decoder.generate_together(prompts, tokens)
        return Answers(np.stack([each.tokens for each in answers]), answers[0].times_s)

    def scores(self, prompts: Sequence[Ids], following: NDArray[np.int64]) -> torch.Tensor | None:
        batch = self._decoder.batch(len(prompts))
        batch.start(prompts)
        found = [batch.scores.clone()]
        found += [batch.read_next(column.tolist()) for column in following[:, :-1].T]
        return torch.stack(found, 1)


Opener = Callable[[Model, int], Contestant]


def _ours(way: Way, weights: Weights) -> Opener:
    return lambda model, context: Ours(model.network(weights), context, way)


WAYS: dict[str, Opener] = {
    "transformers eager": lambda model, context: Transformers(model, static=False),
    "ours eager": _ours("eager", "bf16"),
    "ours eager int8": _ours("eager", "int8"),
    "ours compiled": _ours("compiled", "bf16"),
    "ours fused": _ours("fused", "bf16"),
    "ours fused int8": _ours("fused", "int8"),
    "ours overlapped": _ours("overlapped", "bf16"),
    "ours overlapped int8": _ours("overlapped", "int8"),
    "ours overlapped int4": _ours("overlapped", "int4_asym"),
    "ours overlapped int4_sym": _ours("overlapped", "int4_sym"),
    "ours overlapped fp8": _ours("overlapped", "fp8"),
    "ours compiled int8": _ours("compiled", "int8"),
    "ours compiled int4": _ours("compiled", "int4_asym"),
    "ours compiled int4_sym": _ours("compiled", "int4_sym"),
    "ours compiled fp8": _ours("compiled", "fp8"),
    "transformers static": lambda model, context: Transformers(model, static=True),
}
"""In the order in which they are opened. transformers' own compilation is last: it takes longest
and is given up when the time is over.
"""

ONE_REQUEST = (
    "ours fused",
    "ours fused int8",
    "ours overlapped",
    "ours overlapped int8",
    "ours overlapped int4",
    "ours overlapped int4_sym",
    "ours overlapped fp8",
    "transformers static",
)
"""Left out for several requests: kernels for one row, or long compilations."""
