"""The roof of the time between tokens, and what the rest of that time is.

To make one token, an engine reads all its weights once, with their scales, and all keys and values
before it. Reading that from memory takes so long; no engine whose weights no cache holds is faster.
An embedding of which only one row is read does not count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.plan import LanguageBenchmark
from pipeline.llm.reference import Ids
from pipeline.llm.scoring import Graph
from pipeline.llm.served import Room, Served

DECOMPRESSION = ("Convert", "Subtract", "Multiply", "Reshape", "Transpose")
"""Operators between a constant and its use that make weights of what is stored."""

PRODUCTS = ("FullyConnected", "MatMul", "LLMMLP", "QKVProjection")
PROFILED_TOKENS = 8
REPEATS = 3


class Roofline(Frozen):
    """What one token must read, how long that takes, and how near an engine comes to it."""

    weight_bytes: int = Field(description="With scales and zero points, as they are stored.")
    cache_bytes: int = Field(
        description="Keys and values of half an answer, of all requests of the first level."
    )
    memory_bytes_per_s: float = Field(
        description="Of a buffer that no cache holds, in the same run."
    )
    resident_bytes_per_s: float = Field(
        description="Of a buffer as large as the weights: caches may hold part of it."
    )
    floor_s: float = Field(description="Time to read all of it from memory.")
    share: float = Field(description="`floor_s` of the time to the next token.")
    resident_share: float = Field(description="The same with `resident_bytes_per_s`.")


class StepParts(Frozen):
    """Where the time between two tokens of one request goes, in seconds.

    Operators, sampling and the rest are those of the pipeline that serves. How operators share
    their time was measured on the graph that was scored, whose attention is not paged.
    """

    products_s: float = Field(description="Matrix products, which read the weights.")
    attention_s: float = Field(description="Attention.")
    other_operators_s: float = Field(description="All other operators.")
    sampling_s: float = Field(description="The choice of the token.")
    scheduling_s: float = Field(description="What is left: scheduler, blocks, copies, Python.")

    @property
    def total_s(self) -> float:
        operators = self.products_s + self.attention_s + self.other_operators_s
        return operators + self.sampling_s + self.scheduling_s


def roofline(
    weight_bytes: int,
    cache_bytes_per_token: float,
    options: LanguageBenchmark,
    rates: tuple[float, float],
    next_token_s: float,
) -> Roofline:
    """Return the roofline at the first level. `rates`: of memory, and of a buffer as large as the
    weights, in bytes per second.
    """
    context = options.prompt_tokens + options.output_tokens / 2
    cache_bytes = int(cache_bytes_per_token * context * options.concurrency[0])
    memory, resident = rates
    floor_s = (weight_bytes + cache_bytes) / memory
    return Roofline(
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        memory_bytes_per_s=memory,
        resident_bytes_per_s=resident,
        floor_s=floor_s,
        share=floor_s / next_token_s,
        resident_share=(weight_bytes + cache_bytes) / resident / next_token_s,
    )


def weight_bytes_read(engine: LanguageEngine) -> int:
    """Return the bytes of the constants that one token reads in full, as they are stored."""
    import openvino as ov

    total = 0
    for node in ov.Core().read_model(engine.path).get_ops():
        if node.get_type_name() == "Constant" and _uses(node) != {"Gather"}:
            bits = math.prod(node.shape) * node.get_element_type().bitwidth
            total += bits // 8
    return total


def _uses(node: Any) -> set[str]:
    """Return the types of the operators that read a constant, decompressed or not."""
    found = set[str]()
    for output in node.outputs():
        for target in output.get_target_inputs():
            user = target.get_node()
            kind = user.get_type_name()
            found |= _uses(user) if kind in DECOMPRESSION and _is_constant(user) else {kind}
    return found


def _is_constant(node: Any) -> bool:
    if node.get_type_name() == "Constant":
        return True
    sources = [each.get_source_output().get_node() for each in node.inputs()]
    return node.get_type_name() in DECOMPRESSION and all(map(_is_constant, sources))


def measure_parts(
    engine: LanguageEngine,
    room: Room,
    prompt: Ids,
    tokens: int,
    progress: Progress = silent,
) -> StepParts:
    """Measure where the time between tokens goes, for one request."""
    progress(None, f"parts of a step: {engine.label}")
    served = Served(engine, room)
    served.generate(prompt, 2)
    steps = [served.step_times(prompt, tokens) for _ in range(REPEATS)]
    total_s, operators_s, sampling_s = (
        statistics.median(each) for each in zip(*steps, strict=True)
    )
    del served
    graph = Graph(engine, room.threads, profile=True)
    graph.log_probs(prompt, min(PROFILED_TOKENS, prompt.size - 1))
    shares = operator_shares(graph.operator_s)
    return StepParts(
        products_s=operators_s * shares["products"],
        attention_s=operators_s * shares["attention"],
        other_operators_s=operators_s * shares["other"],
        sampling_s=sampling_s,
        scheduling_s=max(0.0, total_s - operators_s - sampling_s),
    )


def operator_shares(operator_s: Mapping[str, float]) -> dict[str, float]:
    """Return the share of `products`, `attention` and `other` in the time of all operators."""
    found = dict.fromkeys(("products", "attention", "other"), 0.0)
    for kind, seconds in operator_s.items():
        is_product = kind.startswith(PRODUCTS)
        found["attention" if "Attention" in kind else "products" if is_product else "other"] += (
            seconds
        )
    total = sum(found.values())
    return {name: seconds / total if total else 0.0 for name, seconds in found.items()}
