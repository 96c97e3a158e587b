"""The backends by name. Each is a light module, imported when it is first asked for; the library
behind it is imported when it is used.
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
"""A module of this package, or a stand-in for one. A child runs one backend, and to import all
takes a quarter of its start.
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
    """The backend of this name; PlanError with the near name if there is none."""
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(BACKENDS)}"
        raise PlanError(f"unknown backend '{name}'", hint)
    found = BACKENDS[name]
    return importlib.import_module(f"{__name__}.{found}") if isinstance(found, str) else found


def load(engine: Engine, device: str = "") -> Loaded:
    """An engine in memory, by the backend that built it."""
    return backend(engine.target.backend).load(engine, device)


def load_to_serve(engine: Engine, device: str = "") -> Loaded:
    """As `load`, but threads that wait for work soon sleep: beside the engine, whoever asks and who
    passes it on want the CPU too.
    """
    if engine.target.backend != "onnxruntime":
        return load(engine, device)
    from pipeline.backends.onnxruntime import backend as onnxruntime_

    return onnxruntime_.load(engine, device, serves=True)
