"""Real ONNX Runtime engines of small graphs, and deployments of them."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from prometheus_client import CollectorRegistry

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, Tensors
from pipeline.onnx_graph.files import onnx_model
from pipeline.report.bundle import seal
from pipeline.serving_inputs import BatchSpec
from service.auth import LOCAL
from service.inference import InferAnswer, InferRequest
from service.regions import Inputs, RegionTensor
from service.registry.models import DeploymentOptions, Version
from service.sandbox.process_tree import MARK
from service.serving.deployment import Deployment, DeploymentSpec
from service.serving.stats import Figures

Array = NDArray[Any]
Shape = Sequence[str | int]
WIDTH = 8
MODEL = f"m{os.getpid()}"  # tests may run twice on one machine, and look for what is left of theirs
BATCH = Profile(dims={"batch": DimRange(min=1, opt=4, max=16)})
PROVED = BatchSpec(axes={"x": 0, "y": 0}, maximum=16, proved=True)


def engine_of(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Mapping[str, tuple[int, Shape]],
    constants: Mapping[str, Array] | None = None,
    profiles: tuple[Profile, ...] = (BATCH,),
    backend: str = "onnxruntime",
) -> Engine:
    """An fp32 engine as the pipeline builds it."""
    source = folder / uuid.uuid4().hex
    out = source / "engine"
    out.mkdir(parents=True)
    values = [
        [helper.make_tensor_value_info(name, *shape) for name, shape in each.items()]
        for each in (inputs, outputs)
    ]
    initializers = [
        numpy_helper.from_array(array, name) for name, array in (constants or {}).items()
    ]
    graph = helper.make_graph(nodes, "g", *values, initializers)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        source / "model.onnx",
    )
    options = BuildOptions(profiles=profiles, threads=1)
    recipe = Recipe(
        backend=backend,
        precision=Precision.FP32,
        realised_in="graph" if backend == "onnxruntime" else "runtime",
    )
    model = onnx_model(source, "model.onnx")
    engine = backends.backend(backend).build(model, recipe, options, out, silent)
    seal(engine.root, engine)
    return engine


def linear(
    folder: Path, layers: int = 1, width: int = WIDTH, backend: str = "onnxruntime"
) -> Engine:
    """x float32 [batch, width] -> y float32 [batch, width]: products with matrices that keep every
    row's size.
    """
    random = np.random.default_rng(0)
    weights = {
        f"w{n}": np.linalg.qr(random.standard_normal((width, width)))[0].astype(np.float32)
        for n in range(layers)
    }
    names = ["x", *(f"h{n}" for n in range(layers - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[n], f"w{n}"], [names[n + 1]]) for n in range(layers)]
    shape = (TensorProto.FLOAT, ["batch", width])
    return engine_of(folder, nodes, {"x": shape}, {"y": shape}, weights, backend=backend)


def looked_up(folder: Path) -> Engine:
    """x int64 [batch] -> y float32 [batch]: row 0 to 9 of a table, and no other."""
    table = np.arange(10, dtype=np.float32)
    shapes = {"x": (TensorProto.INT64, ["batch"])}, {"y": (TensorProto.FLOAT, ["batch"])}
    return engine_of(
        folder, [helper.make_node("Gather", ["table", "x"], ["y"])], *shapes, {"table": table}
    )


def marked(number: float, rows: int = 1, width: int = WIDTH) -> Array:
    """Rows by which a request is known again."""
    return (np.arange(rows * width, dtype=np.float32).reshape(rows, width) + 1) * np.float32(
        number + 1
    )


def direct(engine: Engine, feeds: Tensors) -> Tensors:
    """What a session of our own answers."""
    return run_session(backends.load(engine).session(), feeds)


def asking(inputs: Inputs, **more: Any) -> InferRequest:
    return InferRequest(LOCAL, None, inputs, **more)


class Bench:
    """A deployment, and what stands beside it."""

    def __init__(
        self, deployment: Deployment, figures: Figures, registry: CollectorRegistry
    ) -> None:
        self.deployment, self.figures, self.registry = deployment, figures, registry

    async def ask(self, array: Array | RegionTensor, **more: Any) -> InferAnswer:
        return await self.deployment.infer(asking({"x": array}, **more))

    def count(self, state: str) -> float:
        labels = {"model": self.deployment.model, "version": "1", "state": state}
        return self.registry.get_sample_value("crucible_inference_requests_total", labels) or 0.0


def version_of_engine(engine: Engine, batch: BatchSpec, model: str) -> Version:
    """The first version of a model, as its promotion would describe it."""
    return Version(
        model=model,
        version=1,
        owner="local",
        job="job",
        created="2026-01-01T00:00:00.000+00:00",
        verdict="accepted",
        override=False,
        before=None,
        label=engine.recipe.label,
        backend=engine.target.backend,
        precision=engine.recipe.precision,
        target=engine.target.device,
        on_gpu=engine.target.compute_capability is not None,
        size_bytes=engine.size_bytes,
        inputs=engine.inputs,
        outputs=engine.outputs,
        profiles=engine.profiles,
        batch=batch,
    )


@asynccontextmanager
async def deployed(
    folder: Path, engine: Engine, batch: BatchSpec = PROVED, worker: Sequence[str] = (), **more: Any
) -> AsyncIterator[Bench]:
    """Loaded and ready; closed at the end, and then no process and no file of it is left."""
    registry = CollectorRegistry()
    figures = Figures(registry)
    version = version_of_engine(engine, batch, more.pop("model", MODEL))
    devices, load_s = more.pop("devices", ("cpu",)), more.pop("load_s", 180.0)
    spec = DeploymentSpec(version, engine, DeploymentOptions(**more), devices, load_s)
    work = folder / f"work-{uuid.uuid4().hex}"
    deployment = await Deployment.start(spec, work, figures, worker)
    try:
        yield Bench(deployment, figures, registry)
    finally:
        await deployment.close()
        assert not work.exists()
        assert processes_of(f"serve-{version.model}-") == []


def processes_of(mark: str) -> list[int]:
    """All processes with a mark that begins so."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(variable.startswith(f"{MARK}={mark}".encode()) for variable in variables):
            processes.append(int(file.parent.name))
    return processes


def play(
    story: Callable[[], Awaitable[None]],
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(asyncio.wait_for(story(), 300))
