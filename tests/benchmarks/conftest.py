"""The modules of benchmarks/gpu and gpu_models itself, imported as the script imports them."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.execution import child_process as process

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "bare",
    "choice",
    "contest",
    "facts",
    "host",
    "measure_row",
    "parts",
    "plans",
    "rows",
    "tactics",
    "torch_peers",
    "async_curve",
    "nets",
)
SCRIPTS = ("common", "gpu_models", "gpu_model_tables")
SERVING = ("client", "crucible", "figures", "models", "peers_list", "processes", "rounds", "setups")
SERVING_SCRIPTS = ("common", "serving", "serving_tables", "soak", "perf_analyzer")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(
        process, "IMPORT_PATH", os.pathsep.join((str(BENCHMARKS), process.IMPORT_PATH))
    )  # a script's own process begins so
    before = set(sys.modules)
    yield {
        **{name: import_module(f"gpu.{name}") for name in NAMES},
        **{name: import_module(name) for name in SCRIPTS},
    }
    for name in set(sys.modules) - before:
        if name in ("gpu", *SCRIPTS) or name.startswith("gpu."):
            sys.modules.pop(name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/serving_, and the scripts that they belong to."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield {
        **{name: import_module(f"serving_.{name}") for name in SERVING},
        **{name: import_module(name) for name in SERVING_SCRIPTS},
    }
    for name in set(sys.modules) - before:
        if name in SERVING_SCRIPTS or name.partition(".")[0] == "serving_":
            sys.modules.pop(name)
