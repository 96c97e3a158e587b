"""ONNX Runtime GenAI on a CPU, as its own builder makes it.

An engine's folder has the graph, its weights, genai_config.json, the tokenizer as Hugging Face
writes it, and the settings.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.artifacts import Target
from pipeline.core.progress import Progress, silent
from pipeline.errors import BackendUnavailable, InternalError
from pipeline.host.environment import cpu_flags, cpu_name
from pipeline.llm.engine import SETTINGS_FILE, ExportedModel, LanguageEngine
from pipeline.llm.libraries.protocol import ScoredGenerator, ScoredGraph
from pipeline.llm.libraries.torch_ import export as export
from pipeline.llm.ort_genai.files import (
    GRAPH_FILE,
    WEIGHTS_FILE,
    build_folder,
    constant_bytes_read,
)
from pipeline.llm.ort_genai.opened import EXTRA, OpenModel, Scored, Served
from pipeline.llm.ort_genai.opened import INSTALL as INSTALL
from pipeline.llm.ort_genai.parts import step_parts
from pipeline.llm.plan import Device, LanguageCandidate, LanguagePlan
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Room
from pipeline.llm.source import Description, Source
from pipeline.llm.speed.roofline import StepParts
from pipeline.llm.texts import Documents
from pipeline.llm.ways import STEP_TOKENS, WayScore, way_score

PACKAGES: tuple[str, ...] = ("onnxruntime_genai", "onnx", "onnx_ir", "tokenizers")


def target(device: Device) -> Target:
    """Return this CPU. BackendUnavailable without the library."""
    try:
        version = importlib.metadata.version(EXTRA)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailable(f"the package `{EXTRA}` is not installed", INSTALL) from error
    return Target(backend=EXTRA, version=version, device=cpu_name(), cpu_flags=cpu_flags())


def default_candidates(
    about: Description, source: Source, plan: LanguagePlan
) -> tuple[LanguageCandidate, ...]:
    """Return the formats of which the answers are worth scoring. fp32 is slower than all of them,
    and transformers has it.
    """
    return tuple(
        LanguageCandidate(library="onnxruntime_genai", weights=weights, group_size=32)
        for weights in ("int8", "int4_asym")
    )


def build(
    exported: ExportedModel,
    recipe: LanguageCandidate,
    source: Source,
    calibration: Documents | None,
    out: Path,
    progress: Progress = silent,
) -> LanguageEngine:
    """Write an engine into `out`."""
    progress(None, f"weights as {recipe.weights}")
    build_folder(source, recipe, out)
    for file in exported.root.iterdir():  # the tokenizer that was checked, and the settings
        if file.name == SETTINGS_FILE or file.name.startswith("tokenizer"):
            (out / file.name).write_bytes(file.read_bytes())
    return LanguageEngine(
        root=out,
        file=GRAPH_FILE,
        library="onnxruntime_genai",
        recipe=recipe,
        target=target("cpu"),
        weight_bytes=(out / WEIGHTS_FILE).stat().st_size,
    )


def open_served(engine: LanguageEngine, room: Room) -> Served:
    return Served(OpenModel(engine, room.threads), room.cache_values_per_token)


def open_graph(engine: LanguageEngine, room: Room, served: ScoredGenerator) -> ScoredGraph:
    """Return the same model in its other role."""
    weights = "" if engine.recipe is None else engine.recipe.weights
    return Scored(_own(served).model, {"weights": weights, "kv_cache": "f32"})


def compare_ways(
    engine: LanguageEngine,
    room: Room,
    served: ScoredGenerator,
    prompts: Sequence[Ids],
    alone: Sequence[Generation],
) -> tuple[WayScore, ...]:
    """Serve prompts in turns, and in chunks: no prefix is kept."""
    tokens = alone[0].tokens.size
    turns = served.generate_together(prompts, tokens)
    other = Served(_own(served).model, chunk=STEP_TOKENS)
    chunked = [other.generate(prompt, tokens) for prompt in prompts]
    return (
        way_score(f"in turns with {len(prompts) - 1} others", alone, turns),
        way_score(f"prompt in chunks of {STEP_TOKENS}", alone, chunked),
    )


def _own(served: ScoredGenerator) -> Served:
    if not isinstance(served, Served):
        raise InternalError(f"expected Served of ONNX Runtime GenAI, got {type(served).__name__}")
    return served


def weight_bytes_read(engine: LanguageEngine) -> int:
    """Return the bytes of the constants that one token reads in full."""
    return constant_bytes_read(engine.path)


def measure_parts(
    engine: LanguageEngine,
    room: Room,
    prompt: Ids,
    tokens: int,
    progress: Progress = silent,
) -> StepParts:
    """Measure where the time between tokens goes, for one request."""
    progress(None, f"parts of a step: {engine.label}")
    return step_parts(engine, room.threads, prompt, tokens)
