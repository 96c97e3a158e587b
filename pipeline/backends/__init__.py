"""The backends by name.

Each is a light module, imported on first use. It imports its library only when it needs it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.base import Backend, Loaded
from pipeline.backends.feed_checks import input_array
from pipeline.backends.tracing import HostOnly, Tracer
from pipeline.core.artifacts import Engine
from pipeline.errors import PlanError

BACKENDS: dict[str, str | Backend] = {
    "onnxruntime": "onnxruntime.backend",
    "openvino": "openvino.backend",
    "tensorrt": "tensorrt.backend",
    "tensorrt_rtx": "tensorrt.rtx",
    "pytorch": "pytorch.backend",
    "torch": "pytorch.programs",
}
"""A module of this package, or a test double.

Modules are imported one by one: a child process runs one backend, and importing all takes a quarter
of its start.
"""

TRACERS = {
    "onnxruntime": "onnxruntime.tracing",
    "openvino": "openvino.tracing",
    "tensorrt": "tensorrt.tracing",
    "pytorch": "pytorch.tracing",
    "torch": "pytorch.tracing",
}
"""Modules of this package with `open_tracer`, by the backend whose engines they trace."""

if TYPE_CHECKING:
    from pipeline.backends.onnxruntime import backend as onnxruntime_
    from pipeline.backends.openvino import backend as openvino_
    from pipeline.backends.pytorch import backend as pytorch_
    from pipeline.backends.pytorch import programs as torch_programs
    from pipeline.backends.tensorrt import backend as tensorrt_
    from pipeline.backends.tensorrt import rtx as tensorrt_rtx_

    _RUN_GRAPHS: tuple[Backend, ...] = (onnxruntime_, openvino_, tensorrt_, tensorrt_rtx_)
    _RUN_PYTORCH: tuple[Backend, ...] = (pytorch_, torch_programs)


def backend(name: str) -> Backend:
    """Return the backend of this name. PlanError, with the nearest name, if there is none."""
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(BACKENDS)}"
        raise PlanError(f"unknown backend '{name}'", hint)
    entry = BACKENDS[name]
    return importlib.import_module(f"{__name__}.{entry}") if isinstance(entry, str) else entry


def load(engine: Engine, device: str = "") -> Loaded:
    """Load an engine with the backend that built it."""
    return backend(engine.target.backend).load(engine, device)


def open_tracer(engine: Engine, profile: int = 0) -> Tracer:
    """Open an engine that records what happens inside it. Its session runs in this profile.

    A backend that records nothing is opened as usual: the calls of the host can be traced.
    """
    name = engine.target.backend
    if name not in TRACERS or not isinstance(BACKENDS[name], str):  # a double records nothing
        return HostOnly(load(engine), profile)
    tracer: Tracer = importlib.import_module(f"{__name__}.{TRACERS[name]}").open_tracer(
        engine, profile
    )
    return tracer


def load_to_serve(engine: Engine, device: str = "") -> Loaded:
    """Load an engine whose idle threads soon sleep.

    In a service, clients and the server need the CPU beside the engine.
    """
    if engine.target.backend != "onnxruntime":
        return load(engine, device)
    from pipeline.backends.onnxruntime import backend as onnxruntime_

    return onnxruntime_.load(engine, device, serves=True)


def input_buffer(engine: Engine, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array for an input, in page-locked memory if the engine is TensorRT's.

    Sessions then read it without a copy on the host. DataError if there is no input of this name
    and shape, HostError if the host cannot lock that much memory.
    """
    if engine.target.backend != "tensorrt":
        return input_array(engine.inputs, name, shape)
    from pipeline.backends import cuda

    allocate = partial(cuda.page_locked_array, cuda.runtime())
    return input_array(engine.inputs, name, shape, allocate)


def page_lock(engine: Engine, memory: NDArray[np.uint8]) -> Callable[[], object]:
    """Let TensorRT's sessions read inputs straight from `memory`, without a copy on the host.

    Return the function that undoes it, to be called before the memory is freed. Nothing happens for
    engines of other backends, and for memory so small that a copy is faster. HostError if the host
    cannot lock that much memory.
    """
    from pipeline.backends import cuda

    if engine.target.backend != "tensorrt" or memory.nbytes < cuda.WORTH_ASKING:
        return lambda: None
    return cuda.page_lock(cuda.runtime(), memory)
