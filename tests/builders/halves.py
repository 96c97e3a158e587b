"""A backend for tests that computes true fp16 and bf16 on a CPU, slowly, and a way to run stages in
this process, where it is known.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from pipeline.backends.base import Loaded, Session, no_layers
from pipeline.backends.feed_checks import engine_digest
from pipeline.backends.layer_timing import HostTimer
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.errors import UnsupportedError
from pipeline.execution.child_process import TimeLimit
from pipeline.results.benchmarks import BenchmarkReport, Benchmarks
from pipeline.results.layer_table import LayerTable
from pipeline.stages.benchmark import benchmark
from tests.builders.layers import layer, table
from tests.builders.report import benchmark as made_up_benchmark


class Halves:
    """A backend that runs graphs by ONNX's reference implementation: what is fp16 in the graph is
    computed in fp16, and overflows.
    """

    PRECISIONS = frozenset(Precision)
    DISTRIBUTIONS: tuple[str, ...] = ()
    layers = staticmethod(no_layers)

    def __init__(
        self,
        name: str = "halves",
        at_opt: Mapping[int, Path] | None = None,
        refused: frozenset[Precision] = frozenset(),
        wrong: frozenset[Precision] = frozenset(),
    ) -> None:
        self.name, self.built = name, list[str]()
        self.at_opt = (
            at_opt or {}
        )  # opt of the batch -> the graph that engines tuned for it compute
        self.refused, self.wrong = refused, wrong

    def probe(self) -> Target:
        return Target(backend=self.name, version="1", device="a double")

    def check_recipe(self, recipe: Recipe, target: Target) -> None:
        """Takes all."""

    def unsupported(
        self, model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
    ) -> tuple[Refusal, ...]:
        return ()

    def build(
        self, model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress
    ) -> Engine:
        if recipe.precision in self.refused:
            raise UnsupportedError(f"no {recipe.precision} here", "another GPU")
        self.built.append(recipe.label)
        shutil.copyfile(model.path, out / "model.onnx")
        return Engine(
            root=out,
            file="model.onnx",
            digest=engine_digest(model, recipe, options, self.probe()),
            target=self.probe(),
            recipe=recipe,
            inputs=model.inputs,
            outputs=model.outputs,
            profiles=options.profiles,
            threads=1,
            size_bytes=model.path.stat().st_size,
        )

    def load(self, engine: Engine, device: str = "") -> Loaded:
        path = self.at_opt.get(engine.profiles[0].dims["batch"].opt, engine.path)
        return HalvesLoaded(
            engine, ReferenceEvaluator(str(path)), engine.recipe.precision in self.wrong
        )


class TellingHalves(Halves):
    """Halves that tells what it runs: a layer for each MatMul, in the type that it reads; fp32
    takes four times as long as fp16.

    `as_called`: each layer runs what its node reads, else everything runs in fp32, whatever the
    graph says.
    """

    def __init__(self, name: str = "halves", as_called: bool = True) -> None:
        super().__init__(name)
        self.as_called = as_called

    def layers(self, engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable:
        graph = onnx.shape_inference.infer_shapes(onnx.load(engine.path)).graph
        types = {
            value.name: value.type.tensor_type.elem_type
            for value in (*graph.value_info, *graph.input)
        }
        layers = []
        for node in graph.node:
            if node.op_type == "MatMul":
                low = types[node.input[0]] == onnx.TensorProto.FLOAT16 and self.as_called
                layers.append(
                    layer("fp16", 1e-5, nodes=(node.name,))
                    if low
                    else layer("fp32", 4e-5, nodes=(node.name,))
                )
        return table(*layers)


class HalvesLoaded:
    def __init__(self, engine: Engine, evaluator: ReferenceEvaluator, wrong: bool) -> None:
        self.engine, self.evaluator, self.wrong = engine, evaluator, wrong

    def session(self, profile: int | None = None) -> Session:
        return HalvesSession(self)

    def close(self) -> None: ...


class HalvesSession:
    def __init__(self, loaded: HalvesLoaded) -> None:
        self.inputs, self.outputs = loaded.engine.inputs, loaded.engine.outputs
        self.loaded = loaded
        self.feeds: Tensors = {}
        self.results: list[np.ndarray[Any, Any]] = []

    def bind(self, feeds: Tensors) -> None:
        self.feeds = dict(feeds)

    def execute(self) -> None:
        with np.errstate(all="ignore"):
            self.results = [
                -output if self.loaded.wrong else output
                for output in self.loaded.evaluator.run(None, self.feeds)
            ]

    def fetch(self) -> Tensors:
        return dict(zip([spec.name for spec in self.outputs], self.results, strict=True))

    def upload(self) -> None: ...
    def download(self) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...

    def timer(self) -> HostTimer:
        return HostTimer()


def run_here(
    function: Callable[..., Any],
    *arguments: Any,
    name: str,
    log: Path | None = None,
    progress: Progress = silent,
    limit: TimeLimit | None = None,
) -> Any:
    """Stages in this process, where the double is known; latencies are made up, an engine of 16
    bits the fastest.
    """
    if function is not benchmark:
        return function(*arguments, progress)
    entries: Sequence[RaceEntry[Engine]] = arguments[0]
    results = tuple(_made_up(entry) for entry in entries)
    return Benchmarks(
        created="2026-03-02T10:11:00+00:00",
        results=results,
        baseline=entries[0].engine.recipe.label,
    )


def _made_up(entry: RaceEntry[Engine]) -> BenchmarkReport:
    """A baseline takes 8 ms, an engine of 16 bits 2 ms, any other 4 ms."""
    recipe = entry.engine.recipe
    if entry.role is Role.BASELINE:
        return made_up_benchmark(recipe.label, 8.0, None)
    return made_up_benchmark(
        recipe.label, 2.0 if recipe.precision in (Precision.FP16, Precision.BF16) else 4.0, 8.0
    )
