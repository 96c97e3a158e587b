"""The backends by name.

Each is a light module, imported on first use. It imports its library only when it needs it.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from pipeline.backends.base import Backend, Loaded
from pipeline.core import Engine
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


def load_to_serve(engine: Engine, device: str = "") -> Loaded:
    """Load an engine whose idle threads soon sleep.

    In a service, clients and the server need the CPU beside the engine.
    """
    if engine.target.backend != "onnxruntime":
        return load(engine, device)
    from pipeline.backends.onnxruntime import backend as onnxruntime_

    return onnxruntime_.load(engine, device, serves=True)
