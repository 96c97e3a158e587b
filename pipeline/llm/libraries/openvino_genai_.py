"""OpenVINO GenAI on a CPU: paged attention, and weights that NNCF compresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.core.artifacts import Target
from pipeline.core.progress import Progress, silent
from pipeline.llm import export as graph
from pipeline.llm import weights
from pipeline.llm.engine import ACTIVATION_GROUP, ExportedModel, LanguageEngine
from pipeline.llm.libraries.protocol import ScoredGenerator
from pipeline.llm.plan import Device, LanguageCandidate, LanguagePlan
from pipeline.llm.reference import Ids
from pipeline.llm.scoring import Graph
from pipeline.llm.served import Generation, Room, Served
from pipeline.llm.source import INSTALL, Description, Source
from pipeline.llm.speed.roofline import measure_parts, weight_bytes_read
from pipeline.llm.ways import STEP_TOKENS, WayScore, way_score
from pipeline.llm.weights import build

__all__ = [
    "INSTALL",
    "PACKAGES",
    "build",
    "compare_ways",
    "default_candidates",
    "export",
    "measure_parts",
    "open_graph",
    "open_served",
    "target",
    "weight_bytes_read",
]

PACKAGES: tuple[str, ...] = ("gguf", "nncf", "openvino_genai", "openvino_tokenizers")

GROUPS = (32, 64)  # of int4 weights, where they divide a row


def default_candidates(
    about: Description, source: Source, plan: LanguagePlan
) -> tuple[LanguageCandidate, ...]:
    """Return what is tried unless the plan says so."""
    found = [
        LanguageCandidate(weights="fp16", kv_cache="f16"),
        LanguageCandidate(weights="int8", kv_cache="f16"),
        LanguageCandidate(weights="int8"),
        LanguageCandidate(weights="int8", arithmetic="int8"),
    ]
    groups = [size for size in GROUPS if about.hidden % size == 0]
    found += [LanguageCandidate(weights="int4_asym", group_size=size) for size in groups]
    found += [
        LanguageCandidate(weights="int4_asym", group_size=size, arithmetic="int8")
        for size in groups
        if size % ACTIVATION_GROUP == 0
    ]
    if source.kind == "gguf" and about.is_quantised:
        found.append(LanguageCandidate(weights="stored"))
    if plan.effort == "high":
        found += [
            LanguageCandidate(weights="int4_asym", group_size=size, awq=True, scale_estimation=True)
            for size in groups
        ]
    return tuple(found)


def target(device: Device) -> Target:
    """Return this CPU: a plan for a GPU has no candidate of this library."""
    return weights.target()


def export(
    source: Source, about: Description, device: Device, out: Path, progress: Progress = silent
) -> ExportedModel:
    return graph.export(source, about, out, progress)


def open_served(engine: LanguageEngine, room: Room) -> Served:
    return Served(engine, room)


def open_graph(engine: LanguageEngine, room: Room, served: ScoredGenerator) -> Graph:
    return Graph(engine, room.threads)


def compare_ways(
    engine: LanguageEngine,
    room: Room,
    served: ScoredGenerator,
    prompts: Sequence[Ids],
    alone: Sequence[Generation],
) -> tuple[WayScore, ...]:
    """Serve prompts in a batch, in chunks, and with a prefix from the cache."""
    tokens = alone[0].tokens.size
    batch = served.generate_together(prompts, tokens)
    other = Served(engine, room, prefix_caching=True, step_tokens=STEP_TOKENS)
    chunked = [other.generate(prompt, tokens) for prompt in prompts]
    cached = [other.generate(prompt, tokens) for prompt in prompts]  # their blocks are there now
    return (
        way_score(f"in a batch of {len(prompts)}", alone, batch),
        way_score(f"prompt in chunks of {STEP_TOKENS}", alone, chunked),
        way_score("with a prefix from the cache", alone, cached),
    )
