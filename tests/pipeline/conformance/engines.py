"""Builds the cases, on every backend that takes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline import backends
from pipeline.backends.base import Loaded
from pipeline.core.artifacts import CODE_BACKENDS, BuildOptions, Engine, TensorRTOptions
from pipeline.core.recipe import Precision, Recipe
from tests.pipeline.conformance.models import CASES, Case

ON_GPU = ("tensorrt", "tensorrt_rtx")
NAMES = tuple(name for name in backends.BACKENDS if name not in CODE_BACKENDS)  # they run graphs
ON_CPU = tuple(name for name in NAMES if name not in ON_GPU)
GRAPH_BACKENDS = [
    pytest.param(name, marks=pytest.mark.gpu) if name in ON_GPU else name for name in NAMES
]
CAPABILITY = {"tensorrt_rtx": "8.9"}  # a backend that builds for a GPU that is not here

EngineOf = Callable[[str, Case], Engine]
Open = Callable[[Case], Loaded]


def _pairs(backends_and_cases: Sequence[tuple[str, Case]], need_gpu: Sequence[str]) -> list[Any]:
    marks = {name: [pytest.mark.gpu] if name in need_gpu else [] for name in NAMES}
    return [
        pytest.param(name, case, marks=marks[name], id=f"{name}-{case.name}")
        for name, case in backends_and_cases
    ]


RUNS = _pairs(
    [(name, case) for name in NAMES for case in CASES if name not in case.refused_by], ON_GPU
)
REFUSED = _pairs(
    [(name, case) for name in NAMES for case in CASES if name in case.refused_by], ("tensorrt",)
)


def build(backend: str, case: Case, out: Path) -> Engine:
    recipe = Recipe(
        backend=backend, precision=Precision.FP32, compute_capability=CAPABILITY.get(backend)
    )
    quick = TensorRTOptions(
        optimization_level=1
    )  # what an engine answers does not depend on how long its kernels were chosen
    options = BuildOptions(profiles=case.profiles, threads=1, tensorrt=quick)
    out.mkdir(parents=True)
    return backends.backend(backend).build(
        case.write(out.parent / f"{out.name}-source"),
        recipe,
        options,
        out,
        lambda fraction, text, figures=None: None,
    )


def copied(engine: Engine, root: Path) -> Engine:
    """An engine whose files may be damaged."""
    shutil.copytree(engine.root, root)
    return engine.model_copy(update={"root": root})
