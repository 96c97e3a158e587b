"""An engine serves on its own kind of device."""

from pathlib import Path

import pytest

from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import Precision, Recipe
from service.devices.choice import all_devices_for, device_for
from service.devices.gpus import GpuKind
from service.errors import Unprocessable
from tests.builders.report import engine


@pytest.mark.parametrize(
    ("device", "on_gpu", "expected"),
    [
        (None, False, "cpu"),
        (None, True, "gpu:0"),
        ("gpu:1", True, "gpu:1"),
        ("cpu", True, ""),
        ("gpu:0", False, ""),
        ("gpu:7", True, ""),
    ],
)
def test_an_engine_runs_on_its_own_kind_of_device(
    device: str | None, on_gpu: bool, expected: str
) -> None:
    devices = ("cpu", "gpu:0", "gpu:1")
    if expected:
        assert device_for(device, on_gpu, devices) == expected
        return
    with pytest.raises(
        Unprocessable,
        match=(
            f"the engine was built for {'a GPU' if on_gpu else 'a CPU'} and does not run on device"
            f" '{device}'; devices that fit: {'gpu:0, gpu:1' if on_gpu else 'cpu'}"
        ),
    ):
        device_for(device, on_gpu, devices)


def test_a_host_without_a_gpu_says_so() -> None:
    with pytest.raises(
        Unprocessable,
        match=(
            "this server has no device for an engine that was built for a GPU; devices that fit:"
            " none"
        ),
    ):
        device_for(None, on_gpu=True, names=("cpu",))


H100, H200 = GpuKind("NVIDIA H100", "9.0"), GpuKind("NVIDIA H200", "9.0")
L4, SILENT = GpuKind("NVIDIA L4", "8.9"), GpuKind("unknown", None)
KINDS = {"gpu:0": H200, "gpu:1": L4, "gpu:2": H200, "gpu:3": H100, "gpu:4": SILENT}
NAMES = ("cpu", *KINDS)


def built_for(kind: GpuKind, capability: str | None = None) -> Engine:
    """An engine for the GPU of this host, or with `capability` for all that have it."""
    recipe = Recipe(
        backend="tensorrt_rtx" if capability else "tensorrt",
        precision=Precision.FP16,
        compute_capability=capability,
    )
    device = f"GPU of compute capability {capability}" if capability else kind.name
    target = Target(
        backend=recipe.backend,
        version="10.6.0",
        device=device,
        compute_capability=capability or kind.compute_capability,
    )
    return engine(recipe, 1, Path()).model_copy(update={"target": target})


@pytest.mark.parametrize(
    ("of", "expected", "left_out"),
    [
        (built_for(H200), ("gpu:0", "gpu:2"), ("gpu:1 is NVIDIA L4, compute capability 8.9", "3")),
        (built_for(L4), ("gpu:1",), ("gpu:0 is NVIDIA H200", "gpu:3 is NVIDIA H100")),
        (built_for(L4, "8.9+"), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"), ("gpu:4 is unknown",)),
        (built_for(L4, "9.0"), ("gpu:0", "gpu:2", "gpu:3"), ("gpu:1 is NVIDIA L4",)),
    ],
)
def test_all_are_the_gpus_of_the_kind_that_the_engine_was_built_for(
    of: Engine, expected: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    devices, note = all_devices_for(of, NAMES, KINDS)
    assert devices == expected
    assert note.startswith("`all` leaves out, as the engine was built for ")
    assert all(each in note for each in left_out)
    assert not any(f"{device} is" in note for device in devices)


def test_where_all_gpus_are_alike_there_is_no_note() -> None:
    kinds = {"gpu:0": H200, "gpu:1": H200}
    assert all_devices_for(built_for(H200), ("cpu", *kinds), kinds) == (("gpu:0", "gpu:1"), "")


def test_a_host_without_such_a_gpu_says_which_it_has() -> None:
    with pytest.raises(Unprocessable, match=r"no such GPU \(gpu:0 is NVIDIA L4, compute"):
        all_devices_for(built_for(H200), ("cpu", "gpu:0"), {"gpu:0": L4})
    with pytest.raises(
        Unprocessable, match=r"built for NVIDIA H200, compute capability 9\.0, .*it has no GPU"
    ):
        all_devices_for(built_for(H200), ("cpu",), {})
