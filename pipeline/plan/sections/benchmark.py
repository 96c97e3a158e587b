"""The section `benchmark`, and the objective."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from pipeline.core.frozen import Frozen
from pipeline.plan.sections.written import as_tuple

BASELINE = re.compile(
    r"(eager|traced|compile(?: (reduce-overhead|max-autotune))?)(?: (fp32|tf32|fp16|bf16))?"
)
"""Name of a baseline: kind, mode of torch.compile, precision."""


def _known_baseline(name: str) -> str:
    if name not in ("default", "best") and not BASELINE.fullmatch(name):
        kinds = "expected default, best, or eager, traced or compile"
        rest = "mode (reduce-overhead, max-autotune) and precision (fp32, tf32, fp16, bf16)"
        raise ValueError(f"{kinds}, with {rest}, as in `compile max-autotune fp16`")
    return name


BaselineName = Annotated[str, AfterValidator(_known_baseline)]
Baselines = Annotated[
    tuple[BaselineName, ...],
    BeforeValidator(as_tuple, json_schema_input_type=BaselineName | tuple[BaselineName, ...]),
]


class LatencyLimit(Frozen):
    """The objective `{max_latency_ms: 15}`: the highest throughput within a limit of the p99."""

    max_latency_ms: float = Field(
        gt=0, allow_inf_nan=False, description="Largest p99 of a request, ms."
    )

    @property
    def limit_s(self) -> float:
        return self.max_latency_ms / 1e3


def _word_or_limit(value: object) -> str:
    """Choose the form of `objective`, so that only the errors of this form are reported."""
    return "(limit)" if isinstance(value, Mapping | LatencyLimit) else "(word)"


def _known_objective(value: object) -> object:
    if value not in ("latency", "throughput"):
        raise ValueError("expected latency, throughput or {max_latency_ms: 15}")
    return value


_ObjectiveWord = Annotated[
    Literal["latency", "throughput"], BeforeValidator(_known_objective), Tag("(word)")
]
Objective = Annotated[
    _ObjectiveWord | Annotated[LatencyLimit, Tag("(limit)")], Discriminator(_word_or_limit)
]


class BenchmarkConfig(Frozen):
    """Duration and sizes of the measurement."""

    sizes: tuple[dict[str, int], ...] = Field(
        default=(),
        description=(
            "The shapes to measure: a list of `{symbol: size}`. The first decides which candidate"
            " is fastest. Default: the opt of each profile."
        ),
    )
    duration_s: float = Field(
        default=3.0,
        gt=0,
        description=(
            "Measuring time per candidate and shape, s. Six processes share it. An engine that is"
            " far behind gets fewer processes. An engine that is hard to tell from another gets"
            " more."
        ),
    )
    budget_s: float = Field(
        default=60.0,
        gt=0,
        description=(
            "Time of the whole benchmark, s. It ends earlier once the verdict rests on narrow"
            " intervals. It may take twice as long to run the four processes that a ratio needs."
            " If the ratio is still unclear then, the verdict is `unproven`."
        ),
    )
    warmup_s: float = Field(
        default=0.2, ge=0, description="Warm-up by time, s. The processes share it."
    )
    warmup_runs: int = Field(
        default=10, ge=0, description="Warm-up by count. Both warm-ups are met."
    )
    threads: int = Field(
        default=0, ge=0, description="Threads per engine. 0: all cores that this process may use."
    )
    baselines: Baselines = Field(
        default=("default",),
        description=(
            "What you run today: a list of names. For a PyTorch model, eager in fp32 is always"
            " measured."
        ),
    )
