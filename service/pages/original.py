"""The answer of the original model beside that of its engine, and how far they differ.

The original is the ONNX file that a job was sent. It runs in fp32 by ONNX Runtime on the CPU, in a
worker of its own that ends after this one request. As the reference of a compile does, it takes
what the plan's preprocessing makes of the inputs; the plan's postprocessing follows in numpy.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.accuracy.metrics.arithmetic import cosine_per_sample, mask_nonfinite
from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import TensorSpec
from pipeline.errors import CrucibleError, StoreError
from pipeline.execution.stage_runner import installed
from pipeline.host.environment import cpu_flags, cpu_name, usable_cores
from pipeline.plan.baselines import AS_WRITTEN
from pipeline.plan.schema import Plan
from pipeline.postprocess import names_of, postprocessed, sources_of
from pipeline.preprocess import preprocessed
from pipeline.report.bundle import seal
from service import logs
from service.codecs.tensors import Array
from service.context import Service
from service.errors import Unprocessable
from service.registry.models import Version
from service.sandbox.layers import Sandbox
from service.serving.memory_check import free_bytes
from service.serving.worker_client import BatchResult, Order, Task, Worker
from service.storage.layout import Folders, Work

CPU = "cpu"
LOAD_S, RUN_S = 60.0, 30.0
MAX_BYTES = 2 * 2**30  # of the model's files, which are copied and hashed
NEEDED = 3  # times the model's files: memory of ONNX Runtime while it optimises a graph
OUTPUT_BYTES = 2**16  # room for outputs at first; the worker asks for more
# Classes that these metrics look at: `auto` is top1 for scores with labels.
TOP = {"auto": 1, "top1": 1, "top5": 5}

log = logs.get("service.pages")
Arrays = Mapping[str, Array]


class NoOriginal(Exception):
    """There is no answer of the original model. The message says why."""


@dataclass(frozen=True, slots=True)
class Original:
    """The model that a job was sent."""

    model: Path
    files: tuple[Path, ...]  # of the model: with those of its external data
    size_bytes: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class OriginalAnswer:
    """The answer of the original model, as the engine's outputs."""

    outputs: Arrays
    metric: str  # of the plan's accuracy


# -- what a job still holds --------------------------------------------------


def original_of(version: Version, folders: Folders) -> Original:
    """Find the original model of a version. NoOriginal if it cannot be run beside the engine."""
    uploads = folders.uploads(version.job)
    try:
        plan = folders.load_plan(version.job)
    except StoreError:
        raise NoOriginal("its job no longer holds the model that it was sent") from None
    model = plan.model.path
    if model is None or model.suffix != ".onnx":
        raise NoOriginal("it is a PyTorch program, and this page runs ONNX only")
    if not model.absolute().is_relative_to(uploads.absolute()):
        raise NoOriginal("it was not sent to this service, but is a file of its configuration")
    if plan.serving.packing is not None:
        raise NoOriginal("the engine takes several sequences in one row, which the original cannot")
    return _with_files(model, uploads, plan)


def _with_files(model: Path, uploads: Path, plan: Plan) -> Original:
    # Beside the model of an archive there may be its external data. A single file has none.
    files = (model,) if model.parent == uploads else tuple(sorted(model.parent.rglob("*")))
    files = tuple(file for file in files if file.is_file() and not file.is_symlink())
    if model not in files:
        raise NoOriginal("its job no longer holds the model that it was sent")
    size_bytes = sum(file.stat().st_size for file in files)
    if size_bytes > MAX_BYTES:
        raise NoOriginal(f"its files have {_mib(size_bytes)}, and this page runs {_mib(MAX_BYTES)}")
    free = free_bytes(CPU)
    if free is not None and free < NEEDED * size_bytes:
        raise NoOriginal(
            f"it may need {_mib(NEEDED * size_bytes)} of memory, and {_mib(free)} are free"
        )
    return Original(model, files, size_bytes, plan)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


# -- running it --------------------------------------------------------------


async def answer_of_original(service: Service, version: Version, inputs: Arrays) -> OriginalAnswer:
    """Run the original model of a version once. NoOriginal if it cannot be run, or fails."""
    await asyncio.to_thread(service.files.fetch, service.folders.uploads(version.job))
    original = await asyncio.to_thread(original_of, version, service.folders)
    if service.comparing.locked():
        raise NoOriginal("another one is running for somebody else; send the request again")
    if not service.has_disk_reserve():
        raise NoOriginal("the disk of the service is nearly full, and its files are copied")
    folder = service.folders.serving / f"original-{secrets.token_hex(4)}"
    async with service.comparing:
        try:
            with service.serving_on(CPU, folder.name):
                outputs = await _run(original, version, inputs, folder, service.sandbox)
        except Unprocessable as error:
            raise NoOriginal(f"it did not take this request: {error.message}") from error
        except (CrucibleError, OSError) as error:  # its message may name paths of the server
            log.error("original.failed", model=version.model, worker=folder.name, error=str(error))
            raise NoOriginal("it could not be loaded or run; the server's log says why") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return OriginalAnswer(outputs, original.plan.accuracy.metric)


async def _run(
    original: Original, version: Version, inputs: Arrays, folder: Path, sandbox: Sandbox
) -> dict[str, Array]:
    steps = original.plan.preprocess
    feeds = await asyncio.to_thread(preprocessed, inputs, steps)
    engine = await asyncio.to_thread(_engine_of, original, version, feeds, folder / "engine")
    order = Order(
        name=folder.name,
        engine_name=f"the original of '{version.model}'",
        engine=engine,
        warm=(),
        runs=0,
        device=CPU,
        work=Work(folder / "worker"),
        load_s=LOAD_S,
        stuck_s=RUN_S,
        sandbox=sandbox,
    )
    worker = await Worker.start(order)
    try:
        arrays = await _run_once(worker, [feeds[spec.name] for spec in engine.inputs])
    finally:
        await worker.end()
    outputs = {spec.name: array for spec, array in zip(engine.outputs, arrays, strict=True)}
    return await asyncio.to_thread(postprocessed, outputs, original.plan.postprocess)


async def _run_once(worker: Worker, inputs: Sequence[Array]) -> list[Array]:
    """Return the outputs of one run, as arrays of our own."""
    done: asyncio.Future[list[Array]] = asyncio.get_running_loop().create_future()

    def fill(targets: Sequence[Array]) -> None:
        for target, array in zip(targets, inputs, strict=True):
            np.copyto(target, array)

    def then(result: BatchResult | CrucibleError) -> None:
        if done.done():  # the request has been cancelled
            return
        if isinstance(result, CrucibleError):
            done.set_exception(result)
        else:
            done.set_result([array.copy() for array in result.outputs])

    worker.run(Task(tuple(array.shape for array in inputs), OUTPUT_BYTES, fill, then))
    return await done


def _engine_of(original: Original, version: Version, feeds: Arrays, root: Path) -> Engine:
    """Copy the model to `root`, and describe it as an engine that takes these feeds.

    A copy, because the files of an engine are opened to the user of its worker.
    """
    for file in original.files:
        target = root / file.relative_to(original.model.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        target.chmod(0o644)
    engine = Engine(
        root=root,
        file=original.model.name,
        digest=f"{version.job}-original",
        target=Target(
            backend="onnxruntime",
            version=installed("onnxruntime"),
            device=cpu_name(),
            cpu_flags=cpu_flags(),
        ),
        recipe=Recipe(backend="onnxruntime", precision=Precision.FP32, variant=AS_WRITTEN),
        inputs=tuple(
            TensorSpec(name=spec.name, dtype=str(array.dtype), shape=array.shape)
            for spec in version.inputs
            for array in (feeds[spec.name],)
        ),
        outputs=_outputs_of(original.plan, version),
        profiles=(),
        threads=max(1, usable_cores() // 2),  # engines that serve need the CPU, too
        size_bytes=original.size_bytes,
    )
    seal(root, engine)
    return engine


def _outputs_of(plan: Plan, version: Version) -> tuple[TensorSpec, ...]:
    """Return the outputs of the original, of which the engine may give indices and values."""
    specs = {spec.name: spec for spec in version.outputs}
    found = []
    for name in sources_of(specs, plan.postprocess):
        if name in specs:
            found.append(specs[name])
            continue
        step = plan.postprocess[name]
        reduced = specs[names_of(name, step)[0]]
        rank = len(reduced.shape) + (1 if step.argmax else 0)
        shape = tuple(f"{name}_{axis}" for axis in range(rank))
        found.append(TensorSpec(name=name, dtype="float32", shape=shape))
    return tuple(found)


# -- the difference ----------------------------------------------------------


def difference_text(array: Array, expected: Array, metric: str, are_scores: bool) -> str:
    """Describe how far an output is from the original's.

    `metric`: of the plan's accuracy. `are_scores`: the output looks like class scores. Their
    highest classes are compared, unless the metric says otherwise.
    """
    top = TOP.get(metric, 0) if are_scores else 0
    if array.shape != expected.shape:
        return f"The original's shape is {list(expected.shape)}."
    if not array.size:
        return "Both are empty."
    if array.dtype.kind in "iub":
        equal = int(np.count_nonzero(array == expected))
        return f"{equal} of {array.size} values are equal."
    mine, theirs = (np.asarray(each, np.float64) for each in (array, expected))
    return f"{_errors_text(mine, theirs)}; {_task_text(mine, theirs, top)}."


def _errors_text(mine: np.ndarray[tuple[int, ...], np.dtype[np.float64]], theirs: Array) -> str:
    masked, reference, nan, inf = mask_nonfinite(mine, theirs.astype(np.float64))
    text = f"Largest absolute difference {np.abs(masked - reference).max():.3g}"
    one_sided = [f"{count} {what}" for count, what in ((nan, "NaN"), (inf, "infinite")) if count]
    return f"{text}, and {' and '.join(one_sided)} on one side only" if one_sided else text


def _task_text(
    mine: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    theirs: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    top: int,
) -> str:
    """Return whether the highest classes are the same, or the cosine of each row."""
    if top:
        count = min(top, mine.shape[-1])
        best = [
            np.sort(np.argsort(-each, axis=-1, kind="stable")[..., :count], axis=-1)
            for each in (mine, theirs)
        ]
        same = (best[0] == best[1]).all(axis=-1)
        classes = "highest class is" if count == 1 else f"{count} highest classes are"
        return f"the {classes} the same in {np.count_nonzero(same)} of {same.size} rows"
    rows = [each.reshape(len(each) if each.ndim > 1 else 1, -1) for each in (mine, theirs)]
    cosine = float(np.min(cosine_per_sample(*rows)))
    of_rows = f", the smallest of {len(rows[0])} rows" if len(rows[0]) > 1 else ""
    return f"cosine {cosine:.6f}{of_rows}"
