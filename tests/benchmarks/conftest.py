"""The modules of benchmarks/, by their names."""

from importlib import import_module
from types import ModuleType

import pytest

GPU = (
    "gpu.async_curve",
    "gpu.bare",
    "gpu.contest",
    "gpu.facts",
    "gpu.gpu_models",
    "gpu.host",
    "gpu.measure_row",
    "gpu.nets",
    "gpu.parts",
    "gpu.plans",
    "gpu.rows",
    "gpu.tactics",
    "gpu.torch_peers",
    "pages.gpu_model_rows",
)
SERVING = (
    "common",
    "serving.client",
    "serving.crucible",
    "serving.figures",
    "serving.models",
    "serving.peers_list",
    "serving.perf_analyzer",
    "serving.processes",
    "serving.rounds",
    "serving.serving",
    "serving.setups",
    "serving.soak",
)


def modules(places: tuple[str, ...]) -> dict[str, ModuleType]:
    """By the last part of their names, which differ."""
    by_name = {place.rpartition(".")[2]: import_module(f"benchmarks.{place}") for place in places}
    assert len(by_name) == len(places)
    return by_name


@pytest.fixture
def gpu() -> dict[str, ModuleType]:
    """`gpu_models`, what it is made of, and its tables."""
    return modules(GPU)


@pytest.fixture
def bench() -> dict[str, ModuleType]:
    """The benchmarks of serving, what they share, and their tables."""
    return modules(SERVING)
