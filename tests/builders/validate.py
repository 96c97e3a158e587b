"""A bench for validation tests: real ONNX Runtime engines of small graphs whose errors are known by
construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile
from pipeline.data.samples import SampleSet, SelectionSet, open_set
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.schema import AccuracyConfig, Thresholds
from pipeline.postprocess import Steps
from pipeline.results.accuracy import ValidationReport
from pipeline.stages.validate import run_reference, validate

CLASSES = 4
PROFILES = (Profile(dims={"batch": DimRange(min=1, opt=4, max=64)}),)
Output = tuple[str, int, Sequence[object] | None]
"""Name, element type, shape."""

LOGITS: tuple[Output, ...] = (("logits", TensorProto.FLOAT, ["batch", CLASSES]),)
LENIENT = Thresholds(min_cosine=None)

Node = tuple[str, Sequence[str], str]
"""Operator, inputs (names or numbers, which become constants), output."""


@dataclass(frozen=True)
class Bench:
    """A folder in which engines are built and sets written."""

    folder: Path

    def engine(
        self,
        nodes: Sequence[Node],
        outputs: Sequence[Output] = LOGITS,
        name: str = "",
    ) -> Engine:
        graph_nodes, constants = [], {}
        for operator, inputs, output in nodes:
            names = []
            for item in inputs:
                if not item.isidentifier():
                    constants[f"c{item}"] = numpy_helper.from_array(
                        np.array(float(item), np.float32), f"c{item}"
                    )
                names.append(item if item.isidentifier() else f"c{item}")
            attributes = {"to": TensorProto.INT64} if operator == "Cast" else {}
            graph_nodes.append(helper.make_node(operator, names, [output], **attributes))
        values = [helper.make_tensor_value_info(*output) for output in outputs]
        inputs_info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", CLASSES])]
        graph = helper.make_graph(graph_nodes, "g", inputs_info, values, list(constants.values()))
        source = self.folder / f"model{len(list(self.folder.iterdir()))}{name}"
        out = source / "engine"
        out.mkdir(parents=True)
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
            source / "model.onnx",
        )
        recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
        return onnxruntime_.build(
            onnx_model(source, "model.onnx"),
            recipe,
            BuildOptions(profiles=PROFILES, threads=1),
            out,
        )

    def samples(
        self, x: np.ndarray, labels: np.ndarray | None = None, kind: type[SampleSet] = SelectionSet
    ) -> SampleSet:
        path = self.folder / f"set{len(list(self.folder.iterdir()))}.npz"
        labelled: dict[str, Any] = {} if labels is None else {"labels": labels}
        np.savez(path, x=x.astype(np.float32), **labelled)
        return open_set(kind, (path,), self.engine(SAME).inputs, PROFILES)

    def validate(
        self,
        candidate: Engine,
        samples: SampleSet,
        options: AccuracyConfig | None = None,
        reference: Engine | None = None,
        batch: int = 8,
        steps: Steps | None = None,
    ) -> ValidationReport:
        out = self.folder / f"reference{len(list(self.folder.iterdir()))}"
        out.mkdir()
        expected = run_reference(reference or self.engine(SAME), samples, {}, batch, (), out)
        return validate(
            candidate, expected, samples, options or AccuracyConfig(), steps or {}, batch
        )


SAME: tuple[Node, ...] = (("Identity", ["x"], "logits"),)
TWO = (("a", TensorProto.FLOAT, ["batch", CLASSES]), ("b", TensorProto.FLOAT, ["batch", CLASSES]))
BOTH: tuple[Node, ...] = (("Identity", ["x"], "a"), ("Neg", ["x"], "b"))


def one_hot(labels: np.ndarray) -> np.ndarray:
    """Logits with a 2 at each label, else 0."""
    return 2 * np.take(np.eye(CLASSES, dtype=np.float32), labels, axis=0)


def labelled(samples: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels that agree."""
    labels = np.arange(samples) % CLASSES
    noise = np.linspace(0, 0.1, samples, dtype=np.float32)[:, None] * np.arange(
        CLASSES, dtype=np.float32
    )
    return one_hot(labels) + noise, labels  # all samples differ, and argmax is the label
