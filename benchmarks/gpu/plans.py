"""From a row to its plan, its feeds and its graph, as a user of Crucible would have them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.rows import Row
from pipeline.compiler.context import CompileContext, open_context
from pipeline.compiler.graph import export_model, preprocess_model, simplify_model
from pipeline.core.artifacts import OnnxModel
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.execution.stage_event import StageEvent
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.plan.files import home, plan_from_document
from pipeline.plan.schema import Plan

HERE = Path(__file__).resolve().parent
CALIBRATION_ROWS = 16  # random, for speed only
CALIBRATION_TOKENS = 4096  # enough of them, where a row is long
VOCABULARY = 30522
BECAUSE = "for speed only: the ranges of int8 change no latency"


def document_of(row: Row, data: Path, profiles: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The plan of a row, as a user would write it."""
    text = any(row.dtype(name) == "int64" for name in row.inputs)
    generated = {
        "generate": "random",
        "samples": 2 if row.batch > 1 else CALIBRATION_ROWS,
        "because": BECAUSE,
        "seed": 2,
    }
    return {
        "name": row.name,
        "model": {
            "entrypoint": f"nets:{row.model}",
            "python_path": str(HERE),
            "weights_from": "random: speed does not depend on the values",
            "inputs": [
                {"name": name, "dtype": row.dtype(name), "shape": list(shape)}
                for name, shape in row.inputs.items()
            ],
            "outputs": [row.output],
        },
        "profiles": list(profiles),
        "data": {"calibration": [str(data)] if text else generated},
        "calibration": {"language_model": text, "batch": CALIBRATION_ROWS},
        "simplify": {"rewrite_attention": False},  # but for ways whose names say `surgery`
    }


def text_feeds(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    """Ids from the whole vocabulary, and masks of padded texts: a single row is three quarters
    full; of several the first is whole.
    """
    random = np.random.default_rng(seed)
    rows, tokens = next(iter(shapes.values()))
    drawn = random.integers(max(1, tokens // 4), tokens + 1, rows - 1)
    lengths = np.array([tokens, *drawn]) if rows > 1 else np.array([max(1, tokens * 3 // 4)])
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    ids = random.integers(1000, VOCABULARY, (rows, tokens))
    made = {"input_ids": ids * mask if "attention_mask" in shapes else ids, "attention_mask": mask}
    return {name: made[name] for name in shapes}


def feeds_of(inputs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int = 0) -> Tensors:
    """What every engine of a race is fed."""
    shapes = {spec.name: spec.resolve(sizes) for spec in inputs}
    return (
        text_feeds(shapes, seed)
        if "input_ids" in shapes
        else draw_feeds(tuple(inputs), sizes, seed)
    )


def calibration_file(row: Row, folder: Path, sizes: Mapping[str, int]) -> Path:
    """Padded texts, a few batches of them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{row.name}.npz"
    shapes = {
        name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in shape)
        for name, shape in row.inputs.items()
    }
    rows, tokens = next(iter(shapes.values()))
    batches = max(2, min(CALIBRATION_ROWS // rows, CALIBRATION_TOKENS // (rows * tokens)))
    arrays = [text_feeds(shapes, seed) for seed in range(1, batches + 1)]
    joined: dict[str, Any] = {
        name: np.concatenate([each[name] for each in arrays]) for name in shapes
    }
    np.savez(file, **joined)
    return file


def plan_of(
    row: Row,
    overrides: Iterable[str] = (),
    profiles: Sequence[Mapping[str, Any]] = (),
    sizes: Mapping[str, int] | None = None,
) -> Plan:
    folder = home() / "gpu_models"
    data = calibration_file(row, folder, sizes or {}) if "input_ids" in row.inputs else folder
    return plan_from_document(
        document_of(row, data, profiles), base=HERE, name=row.name, overrides=overrides
    )


def tell(event: StageEvent) -> None:
    if event.state in ("started", "finished", "reused", "failed"):
        took = f" {event.seconds:.1f} s" if event.state == "finished" else ""
        print(
            f"   {event.stage} {event.subject} {event.state}{took} {event.text}",
            file=sys.stderr,
            flush=True,
        )


def graph_of(plan: Plan) -> tuple[CompileContext, OnnxModel]:
    """The plan's context with its exported, simplified graph."""
    context = open_context(plan, Runner(Store(home()), emit=tell))
    return context, simplify_model(context, preprocess_model(context, export_model(context)))
