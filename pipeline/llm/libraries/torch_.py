"""Our decoder in PyTorch, on a GPU or on a CPU. On a CPU it is only as fast as PyTorch is eagerly.

An engine's folder has the joined weights, what else the network needs, the tokenizer as Hugging
Face writes it, and the settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.backends.pytorch.session import cpu_target, host_target
from pipeline.core.artifacts import Target
from pipeline.core.progress import Progress, silent
from pipeline.errors import BackendUnavailable, InternalError, UnsupportedError
from pipeline.llm.engine import SETTINGS_FILE, ExportedModel, LanguageEngine
from pipeline.llm.export import settings_of
from pipeline.llm.hf import check_tokenizer, load_model, load_tokenizer
from pipeline.llm.libraries.protocol import ScoredGenerator, ScoredGraph
from pipeline.llm.plan import Device, LanguageCandidate, LanguagePlan, WeightFormat
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Room
from pipeline.llm.source import INSTALL as INSTALL
from pipeline.llm.source import Description, Source
from pipeline.llm.speed.roofline import StepParts
from pipeline.llm.texts import Documents
from pipeline.llm.ways import STEP_TOKENS, WayScore, way_score

if TYPE_CHECKING:
    from pipeline.llm.torch_engine.scored import ScoredDecoder

PACKAGES: tuple[str, ...] = ("safetensors", "tokenizers")
FP8_CAPABILITY = (8, 9)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def target(device: Device) -> Target:
    """Return the first GPU, or this CPU. BackendUnavailable without a GPU that PyTorch can use."""
    if device == "cpu":
        return cpu_target("pytorch")
    found = host_target("pytorch")
    if found.compute_capability is None:
        raise BackendUnavailable(
            "`device: gpu` needs a GPU that PyTorch can use, and this host has none",
            "compile on a host with an NVIDIA GPU and PyTorch for CUDA, or set `device: cpu`",
        )
    return found


def default_candidates(
    about: Description, source: Source, plan: LanguagePlan
) -> tuple[LanguageCandidate, ...]:
    forms: list[WeightFormat] = ["bf16", "int8", "int4_asym"]
    if plan.effort == "high":
        forms.append("int4_sym")
        # of the bits of int8, and less exact
        if plan.device == "gpu" and has_fp8(target("gpu")):
            forms.append("fp8")
    return tuple(LanguageCandidate(library="torch", weights=each) for each in forms)


def has_fp8(device: Target) -> bool:
    """Return True if a device multiplies fp8."""
    numbers = (device.compute_capability or "0.0").split(".")
    return tuple(map(int, numbers)) >= FP8_CAPABILITY


def export(
    source: Source, about: Description, device: Device, out: Path, progress: Progress = silent
) -> ExportedModel:
    """Write the tokenizer and the settings. Weights stay in the source until they are built."""
    progress(None, "reading the weights")
    tokenizer = load_tokenizer(source)
    check_tokenizer(tokenizer, about.vocabulary, source)
    if not tokenizer.is_fast:
        raise UnsupportedError(
            "this library needs a fast tokenizer, which tokenizer.json describes",
            "add the tokenizer.json of this model to its folder",
        )
    model = load_model(source)
    largest = max(float(each.detach().abs().max()) for each in model.parameters())
    tokenizer.save_pretrained(out)
    settings = settings_of(source, about, model, tokenizer)
    (out / SETTINGS_FILE).write_text(settings.model_dump_json(indent=1), encoding="utf-8")
    return ExportedModel(root=out, file=SETTINGS_FILE, largest_weight=largest, device=device)


def build(
    exported: ExportedModel,
    recipe: LanguageCandidate,
    source: Source,
    calibration: Documents | None,
    out: Path,
    progress: Progress = silent,
) -> LanguageEngine:
    """Write an engine into `out`. UnsupportedError for fp8 on a device without it."""
    from pipeline.llm.torch_engine.files import WEIGHTS_FILE, write_network
    from pipeline.llm.torch_engine.quantise import quantised
    from pipeline.llm.torch_engine.weights import DTYPES, network_of

    found = target(exported.device)
    if recipe.weights == "fp8" and not has_fp8(found):
        raise UnsupportedError(
            "fp8 needs a GPU of compute capability 8.9 or later, and this device has"
            f" {found.compute_capability or 'none'}",
            "take int8 instead",
        )

    progress(None, f"weights as {recipe.weights}")
    network = network_of(load_model(source).to(DTYPES[recipe.kv_cache]))
    if recipe.weights in ("int8", "fp8", "int4_sym", "int4_asym"):
        where = "cuda" if found.compute_capability else "cpu"
        network = quantised(network, recipe.weights, recipe.group_size, where)
    write_network(network, out)
    for name in (*TOKENIZER_FILES, SETTINGS_FILE):
        if (exported.root / name).is_file():
            shutil.copyfile(exported.root / name, out / name)
    return LanguageEngine(
        root=out,
        file=WEIGHTS_FILE,
        library="torch",
        recipe=recipe,
        target=found,
        weight_bytes=(out / WEIGHTS_FILE).stat().st_size,
    )


def open_served(engine: LanguageEngine, room: Room) -> ScoredDecoder:
    from pipeline.llm.torch_engine.scored import ScoredDecoder

    return ScoredDecoder(engine, room)


def open_graph(engine: LanguageEngine, room: Room, served: ScoredGenerator) -> ScoredGraph:
    """Return the same decoder in its other role: its step is the one that serves."""
    return _decoder(served).graph


def _decoder(served: ScoredGenerator) -> ScoredDecoder:
    from pipeline.llm.torch_engine.scored import ScoredDecoder

    if not isinstance(served, ScoredDecoder):
        raise InternalError(f"expected a ScoredDecoder, got {type(served).__name__}")
    return served


def compare_ways(
    engine: LanguageEngine,
    room: Room,
    served: ScoredGenerator,
    prompts: Sequence[Ids],
    alone: Sequence[Generation],
) -> tuple[WayScore, ...]:
    """Serve prompts in a batch that begins together, and as the service does: each begins while
    the others go on. Our decoder keeps no prefixes.
    """
    decoder, tokens = _decoder(served), alone[0].tokens.size
    batch = decoder.generate_together(prompts, tokens)
    in_slots = decoder.generate_in_slots(prompts, tokens)
    return (
        way_score(f"in a batch of {len(prompts)}", alone, batch),
        way_score(f"in slots, prompt in chunks of {STEP_TOKENS}", alone, in_slots),
    )


def weight_bytes_read(engine: LanguageEngine) -> int:
    """Return the bytes of all weights but of an embedding of its own, of which one row is read."""
    from pipeline.llm.torch_engine.files import read_network

    return read_network(engine.root, "cpu").weight_bytes


def measure_parts(
    engine: LanguageEngine,
    room: Room,
    prompt: Ids,
    tokens: int,
    progress: Progress = silent,
) -> StepParts:
    """Raise UnsupportedError: one recorded graph makes the whole step."""
    raise UnsupportedError(
        "our decoder makes a token in one recorded step, whose parts are not timed",
        "profile it with Nsight Systems",
    )
