"""From the exported model to an engine: the weights in the format of a candidate."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends.openvino import backend as openvino_
from pipeline.core.artifacts import Target
from pipeline.core.progress import Progress, silent
from pipeline.errors import UnsupportedError
from pipeline.llm.engine import (
    DETOKENIZER_FILE,
    MODEL_FILE,
    PROPERTIES_FILE,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    ExportedModel,
    LanguageEngine,
)
from pipeline.llm.export import genai_graph
from pipeline.llm.hf import load_tokenizer, token_ids
from pipeline.llm.plan import LanguageCandidate
from pipeline.llm.source import Source
from pipeline.llm.texts import Documents

CALIBRATION_TOKENS = 256  # of each text


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
    if recipe.weights == "stored":
        _as_stored(source, out)
    elif recipe.weights == "fp16":
        for name in (MODEL_FILE, Path(MODEL_FILE).with_suffix(".bin").name):
            shutil.copyfile(exported.root / name, out / name)
    else:
        _compress(exported, recipe, source, calibration, out)
    for name in (TOKENIZER_FILE, DETOKENIZER_FILE):
        for file in (name, Path(name).with_suffix(".bin").name):
            shutil.copyfile(exported.root / file, out / file)
    shutil.copyfile(exported.root / SETTINGS_FILE, out / SETTINGS_FILE)
    engine = LanguageEngine(
        root=out,
        file=MODEL_FILE,
        library="openvino_genai",
        recipe=recipe,
        target=target(),
        weight_bytes=(out / MODEL_FILE).with_suffix(".bin").stat().st_size,
    )
    properties = json.dumps(engine.properties(), indent=1) + "\n"
    (out / PROPERTIES_FILE).write_text(properties, encoding="utf-8")
    return engine


def target() -> Target:
    """Return this CPU. BackendUnavailable without OpenVINO."""
    return openvino_.probe()


def _as_stored(source: Source, out: Path) -> None:
    """Let GenAI read the user's file itself."""
    if source.kind != "gguf":
        raise UnsupportedError("`stored` is for GGUF files", "leave it out")
    link = out / "stored.gguf"
    link.symlink_to(source.path)
    genai_graph(link)
    link.unlink()


def _compress(
    exported: ExportedModel,
    recipe: LanguageCandidate,
    source: Source,
    calibration: Documents | None,
    out: Path,
) -> None:
    import nncf
    import openvino as ov

    logging.getLogger("nncf").setLevel(logging.ERROR)
    modes = nncf.CompressWeightsMode
    mode = {
        "int8": modes.INT8_ASYM,
        "int4_sym": modes.INT4_SYM,
        "int4_asym": modes.INT4_ASYM,
    }[recipe.weights]
    options: dict[str, Any] = {"mode": mode}
    if recipe.weights.startswith("int4"):
        options |= {"group_size": recipe.group_size or -1, "ratio": 1.0}
    if recipe.awq or recipe.scale_estimation:
        options |= {"awq": recipe.awq, "scale_estimation": recipe.scale_estimation}
        if calibration is not None:
            options["dataset"] = nncf.Dataset(list(_feeds(source, calibration)))
    graph = ov.Core().read_model(exported.path)
    try:
        compressed = nncf.compress_weights(graph, **options)
    except Exception as error:
        if not type(error).__module__.startswith("nncf"):
            raise
        raise UnsupportedError(
            f"NNCF cannot make {recipe.label}: {error}", "choose another group_size"
        ) from error
    ov.save_model(compressed, out / MODEL_FILE, compress_to_fp16=False)


def _feeds(source: Source, calibration: Documents) -> Iterator[dict[str, Any]]:
    tokenizer = load_tokenizer(source)
    for text in calibration.texts:
        ids = np.asarray([token_ids(tokenizer, text, CALIBRATION_TOKENS)], dtype=np.int64)
        yield {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1])[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
