"""A double for Serving that computes with numpy, and a server process that serves it.

with serving_models(home) as server:          a real server behind a real socket; server.url
double = DoubleServing()                      in this process
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.serving_inputs import BatchSpec, InputRecipe
from service.auth import Caller
from service.errors import NotFound, TimedOut, TooMany, Unavailable, Unprocessable
from service.inference import (
    InferAnswer,
    InferRequest,
    ModelState,
    Served,
    ServedDevice,
    Statistics,
    Timing,
    Total,
)
from service.regions import array_of
from tests.service.integration.test_server import Server, serving

DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)
LOCAL_OWNER = "local"  # of whoever asks where no keys are needed
TIMING = Timing(queue_s=0.001, copy_in_s=0.002, compute_s=0.003, copy_out_s=0.004, batch_size=1)

Compute = Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the double's repository."""

    inputs: Mapping[str, tuple[str, tuple[int | str, ...]]]  # dtype and shape by name
    outputs: Mapping[str, tuple[str, tuple[int | str, ...]]]
    compute: Compute
    axes: Mapping[str, int | None] = field(default_factory=dict)
    owner: str = LOCAL_OWNER
    versions: tuple[int, ...] = (1,)  # the last one is the current
    image: InputRecipe | None = None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: Callable[[Tensors], float] = lambda _: 0.0  # how long it computes
    state: ModelState = "ready"
    queue_limit: int = 1000
    timeout_s: float = 30.0

    def served(self, name: str, version: int) -> Served:
        inputs, outputs = (
            tuple(
                TensorSpec(name=each, dtype=dtype, shape=shape)
                for each, (dtype, shape) in specs.items()
            )
            for specs in (self.inputs, self.outputs)
        )
        batch = (
            BatchSpec(axes=self.axes, maximum=8, proved=True)
            if self.axes
            else BatchSpec(axes={}, reason="there is no batch axis")
        )
        reason = "the worker died three times" if self.state == "failed" else ""
        return Served(
            name,
            version,
            self.owner,
            (ServedDevice(device="cpu", state=self.state, reason=reason),),
            "onnxruntime",
            inputs,
            outputs,
            batch,
            self.state,
            reason,
            max_batch=batch.maximum,
            image=self.image,
            labels=self.labels,
        )


def _same(dtype: str, shape: tuple[int | str, ...]) -> Model:
    axes = {"x": 0, "y": 0} if shape and shape[0] == "batch" else {}
    return Model(
        {"x": (dtype, shape)}, {"y": (dtype, shape)}, lambda feeds: {"y": feeds["x"].copy()}, axes
    )


ROW: tuple[int | str, ...] = ("batch", 4)
PAIR = {"sum": ("float32", ROW), "difference": ("float32", ROW)}


def _add(feeds: Tensors) -> Tensors:
    a, b = (feeds[name].astype(np.float32) for name in "ab")
    return {"sum": a + b, "difference": a - b}


def _mean_of_channels(feeds: Tensors) -> Tensors:
    return {"scores": feeds["image"].mean(axis=(2, 3), dtype=np.float32)}


IMAGE = InputRecipe(
    input="image", size=(8, 8), resize=10, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
)
MODELS: Mapping[str, Model] = {
    **{f"same_{dtype}": _same(dtype, ("batch", "n")) for dtype in DTYPES},
    "add": Model(
        {"a": ("float32", ROW), "b": ("float32", ROW)},
        PAIR,
        _add,
        dict.fromkeys(("a", "b", *PAIR), 0),
        versions=(1, 2),
    ),
    "scalar": _same("float32", ()),
    "wide": _same("float32", ("batch", 3, 224, 224)),
    "photos": Model(
        {"image": ("float32", ("batch", 3, 8, 8))},
        {"scores": ("float32", ("batch", 3))},
        _mean_of_channels,
        {"image": 0, "scores": 0},
        image=IMAGE,
        labels={"scores": ("red", "green", "blue")},
    ),
    "broken": replace(
        _same("float32", ROW), compute=lambda feeds: {"y": np.full_like(feeds["x"], np.nan)}
    ),
    "slow": replace(
        _same("float32", ("batch", 1)),
        seconds=lambda feeds: float(feeds["x"][0, 0]),
        timeout_s=20.0,
    ),
    "narrow": replace(
        _same("float32", ("batch", 1)), seconds=lambda feeds: float(feeds["x"][0, 0]), queue_limit=1
    ),
    "failed": replace(_same("float32", ROW), state="failed"),
    "theirs": replace(_same("float32", ROW), owner="somebody"),
}
"""`slow` and `narrow` compute for as many seconds as their input says, one request at a time."""

OBSERVED = ("slow", "narrow")
UNLOADED = ("scalar",)  # at the start


def on_two_gpus() -> Served:
    """A model with two instances on each of two GPUs, the second of which has failed."""
    devices = (
        ServedDevice(device="gpu:0", state="ready", memory_bytes=3000),
        ServedDevice(device="gpu:3", state="failed", reason="its worker <b>died</b>"),
    )
    return replace(MODELS["wide"].served("wide", 1), devices=devices, instances=2)


class DoubleServing:
    """Serving, of MODELS. One request of a model computes at a time; the others wait in its
    queue.
    """

    def __init__(
        self, models: Mapping[str, Model] = MODELS, unloaded: tuple[str, ...] = ()
    ) -> None:
        self._models = models
        self._loaded = {name for name in models if name not in unloaded}
        self._served = {
            name: tuple(model.served(name, version) for version in model.versions)
            for name, model in models.items()
        }
        self._turns = {name: asyncio.Lock() for name in models}
        self._waiting: Counter[str] = Counter()
        no = Total()
        self._statistics = {
            name: Statistics(name, models[name].versions[-1], no, no, no, no, no, no, 0, 0, 0)
            for name in models
        }

    def served(self, caller: Caller) -> tuple[Served, ...]:
        shown = sorted(
            name for name in self._loaded if caller.sees in (None, self._models[name].owner)
        )
        return tuple(each for name in shown for each in self._served[name])

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        shown = [each for each in self.served(caller) if version in (None, each.version)]
        names = sorted({deployment.model for deployment in shown})
        if model is None and len(names) > 1:
            raise Unprocessable(
                f"several models are deployed: {', '.join(names)}",
                "name one: POST /models/NAME/infer",
            )
        matches = [deployment for deployment in shown if model in (None, deployment.model)]
        if not matches:
            raise NotFound(
                f"no model '{model}'{f' in version {version}' if version else ''} is deployed",
                "GET /models lists them",
            )
        return matches[-1]

    async def infer(self, request: InferRequest) -> InferAnswer:
        served = self.find(request.caller, request.model, request.version)
        model = self._models[served.model]
        if served.state != "ready":
            raise Unavailable(f"model '{served.model}' is {served.state}: {served.reason}")
        _check(served, request)
        _log(served.model, "waits")
        async with self._turn(
            served.model, min(request.timeout_s or model.timeout_s, model.timeout_s)
        ):
            _log(served.model, "computes")
            inputs = {name: array_of(tensor) for name, tensor in request.inputs.items()}
            await asyncio.sleep(model.seconds(inputs))
            outputs = model.compute(inputs)
        rows = next(iter(request.inputs.values())).shape[0] if served.batch.axes else 1
        self._count(served.model, succeeded=1, executions=1, rows=rows)
        selection = {name: outputs[name] for name in request.outputs or outputs}
        return InferAnswer(
            served.model,
            served.version,
            served.device,
            selection,
            replace(TIMING, batch_size=rows),
            request.id,
        )

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]:
        return tuple(
            self._statistics[name] for name in sorted({each.model for each in self.served(caller)})
        )

    async def load(self, caller: Caller, model: str) -> Served:
        if model not in self._models:
            raise NotFound(f"no model '{model}' is in the repository", "promote one first")
        self._loaded.add(model)
        return self.find(caller, model)

    async def unload(self, caller: Caller, model: str) -> None:
        self.find(caller, model)
        self._loaded.remove(model)

    @asynccontextmanager
    async def _turn(self, name: str, timeout_s: float) -> AsyncIterator[None]:
        if self._waiting[name] >= self._models[name].queue_limit:
            raise TooMany(
                f"the queue of '{name}' is full: {self._waiting[name]} requests wait",
                "try again in a moment",
                1,
            )
        try:
            async with asyncio.timeout(timeout_s):
                self._waiting[name] += 1
                try:
                    await self._turns[name].acquire()
                except asyncio.CancelledError:
                    self._count(name, dropped=1)
                    raise
                finally:
                    self._waiting[name] -= 1
                try:
                    yield
                finally:
                    self._turns[name].release()
        except TimeoutError:
            self._count(name, failed=1)
            raise TimedOut(
                f"no answer within {timeout_s:g} s",
                "raise the request's timeout, or send fewer at once",
            ) from None

    def _count(
        self,
        name: str,
        succeeded: int = 0,
        failed: int = 0,
        executions: int = 0,
        rows: int = 0,
        dropped: int = 0,
    ) -> None:
        old = self._statistics[name]

        def more(total: Total, seconds: float) -> Total:
            return Total(total.count + succeeded, total.seconds + succeeded * seconds)

        batch = old.batches.get(rows, Total())
        self._statistics[name] = replace(
            old,
            succeeded=more(old.succeeded, 0.01),
            failed=Total(old.failed.count + failed, old.failed.seconds),
            queue=more(old.queue, TIMING.queue_s),
            copy_in=more(old.copy_in, TIMING.copy_in_s),
            compute=more(old.compute, TIMING.compute_s),
            copy_out=more(old.copy_out, TIMING.copy_out_s),
            executions=old.executions + executions,
            rows=old.rows + rows,
            dropped=old.dropped + dropped,
            batches=(
                {**old.batches, rows: more(batch, TIMING.compute_s)} if succeeded else old.batches
            ),
            last_request_ms=int(time.time() * 1000),
        )


def _log(model: str, event: str) -> None:
    """Write down how far a request came, for those who act while it is there."""
    if model in OBSERVED:
        print(json.dumps({"event": event, "model": model}), file=sys.stderr, flush=True)


def _check(served: Served, request: InferRequest) -> None:
    """Unprocessable where names, dtypes or shapes are not the model's."""
    specs = {spec.name: spec for spec in served.inputs}
    if set(request.inputs) != set(specs):
        raise Unprocessable(
            f"expected the inputs {', '.join(specs)}, got {', '.join(request.inputs) or 'none'}",
            "send all of them and no others",
        )
    if unknown := set(request.outputs) - {spec.name for spec in served.outputs}:
        raise Unprocessable(
            f"no output '{sorted(unknown)[0]}'",
            f"ask for some of {', '.join(spec.name for spec in served.outputs)}",
        )
    for name, array in request.inputs.items():
        spec = specs[name]
        fits = len(array.shape) == len(spec.shape) and all(
            isinstance(dim, str) or dim == size
            for dim, size in zip(spec.shape, array.shape, strict=True)
        )
        if not fits or array.dtype != np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype)):
            message = (
                f"input '{name}': expected {spec.dtype} {list(spec.shape)}, got {array.dtype}"
                f" {list(array.shape)}"
            )
            raise Unprocessable(message, "send what GET /models shows")


def serving_models(home: Path, **settings: object) -> AbstractContextManager[Server]:
    """A server process with all MODELS but those UNLOADED."""
    return serving(home, module="tests.service.builders.serving_models", **settings)


def statistics_of(double: DoubleServing, caller: Caller, model: str) -> Statistics:
    """Statistics of one model."""
    return next(each for each in double.statistics(caller) if each.model == model)


def some_arrays(
    dtype: str, shape: tuple[int, ...] = (3, 5)
) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """Ordinary values of a dtype, and its smallest and largest."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = int(np.prod(shape))
    yield (np.arange(size) % 7).astype(kind).reshape(shape)
    if dtype == "bool":
        return
    info = (
        ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
        if dtype == "bfloat16"
        else np.finfo(kind)
        if kind.kind == "f"
        else np.iinfo(kind)
    )
    yield np.resize(np.array([info.min, info.max], kind), shape)
