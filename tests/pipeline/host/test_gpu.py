"""NVML is stood in for by a double of pynvml, libcuda by an object with its functions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pipeline.core.recipe import Precision
from pipeline.host.gpu import (
    FLOPS_PER_SM_AND_CLOCK,
    MEMORY_BUS_BITS,
    SM_COUNT,
    Gpu,
    Gpus,
    find_gpus,
    open_nvml,
    peaks,
    with_hardware,
)
from tests.builders.nvml import Device, Nvml, NVMLError, NVMLError_LibraryNotFound

UUID = "GPU-6d5a129b-187e-efb0-e32e-d25fcfd009f4"
H200_DEVICE = Device("NVIDIA H200", UUID, (9, 0), 143771 * 2**20, 1980, 3201)
GB10_DEVICE = Device(
    b"NVIDIA GB10", b"GPU-0b5ab7f4-aaaa-bbbb-cccc-000000000001", (12, 1), None, 3003, None
)  # bytes, as old versions of pynvml return
H200 = Gpu(
    name="NVIDIA H200",
    uuid=UUID,
    compute_capability="9.0",
    driver="580.159",
    memory_bytes=143771 * 2**20,
    sm_clock_mhz=1980,
    memory_clock_mhz=3201,
)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def both() -> Nvml:
    return Nvml(H200_DEVICE, GB10_DEVICE, driver="580.159")


def test_each_device_is_a_gpu() -> None:
    nvml = both()
    gpus = find_gpus(nvml)
    assert gpus.reason == ""
    assert gpus.devices[0] == H200
    assert gpus.devices[1].name == "NVIDIA GB10"
    assert gpus.devices[1].memory_bytes == 0
    assert gpus.devices[1].memory_clock_mhz is None
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (Nvml(failure=NVMLError("Driver Not Loaded")), "NVML failed: Driver Not Loaded"),
        (Nvml(failure=NVMLError_LibraryNotFound()), "libnvidia-ml.so.1"),
        (Nvml(), "NVML lists no GPU"),
    ],
)
def test_no_gpu_has_a_reason(nvml: Nvml, reason: str) -> None:
    gpus = find_gpus(nvml)
    assert gpus.devices == ()
    assert reason in gpus.reason


@pytest.mark.parametrize(
    ("variable", "capabilities"),
    [
        ("", []),
        ("-1", []),
        ("0", ["9.0"]),
        ("1,0", ["12.1", "9.0"]),
        ("1, 7, 0", ["12.1"]),
        ("GPU-6d5a", ["9.0"]),
        ("MIG-0d5a", ["9.0", "12.1"]),
    ],
)
def test_only_visible_gpus_may_be_used(
    monkeypatch: pytest.MonkeyPatch, variable: str, capabilities: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    gpus = find_gpus(both())
    assert [gpu.compute_capability for gpu in gpus.devices] == capabilities
    hidden = f"no GPU may be used: CUDA_VISIBLE_DEVICES='{variable}' hides NVIDIA H200, NVIDIA GB10"
    assert gpus.reason == ("" if capabilities else hidden)


class OneUnreadable(Nvml):
    """The first GPU counts, but may not be opened: as of another container."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        if index == 0:
            raise NVMLError("Insufficient Permissions")
        return super().nvmlDeviceGetHandleByIndex(index)


def test_a_gpu_that_may_not_be_opened_is_left_out() -> None:
    nvml = OneUnreadable(H200_DEVICE, GB10_DEVICE)
    assert [gpu.name for gpu in find_gpus(nvml).devices] == ["NVIDIA GB10"]
    assert "lists no GPU" in find_gpus(OneUnreadable(H200_DEVICE)).reason


def test_a_device_is_found_by_number_and_by_uuid() -> None:
    with open_nvml(both()) as opened:
        for name in ("0", UUID):
            device = opened.device(name)
            assert device is not None
            assert device.name() == "NVIDIA H200"
        assert opened.device("GPU-of-another-host") is None


def test_pynvml_is_not_imported_before_it_is_asked() -> None:
    script = "import sys, pipeline.host.gpu; print('pynvml' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "False"


def test_pynvml_has_every_name_that_is_asked_for() -> None:
    import pynvml

    names = {name for name in vars(Nvml) if name.startswith(("nvml", "NVML"))}
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []


class Cuda:
    """libcuda as an H200 answers it; `status`: what cuInit returns."""

    def __init__(self, status: int = 0, refused: int = -1) -> None:
        self.status, self.refused = status, refused

    def cuInit(self, flags: int) -> int:  # noqa: N802  the library's own names
        return self.status

    def cuDeviceGetCount(self, out: Any) -> int:  # noqa: N802
        out._obj.value = 1
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:  # noqa: N802
        out._obj.value = ordinal
        return 0

    def cuDeviceGetUuid(self, out: Any, device: int) -> int:  # noqa: N802
        out._obj[:] = bytes.fromhex(UUID.removeprefix("GPU-").replace("-", ""))
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:  # noqa: N802
        out._obj.value = {SM_COUNT: 132, MEMORY_BUS_BITS: 6016}[attribute]
        return 1 if attribute == self.refused else 0


def test_the_driver_tells_what_a_gpu_is_made_of() -> None:
    other = H200.model_copy(update={"uuid": "GPU-of-another-container"})
    first, second = with_hardware(Gpus(devices=(H200, other)), Cuda()).devices
    assert (first.sm_count, first.memory_bus_bits) == (132, 6016)
    assert second == other


def test_what_the_driver_does_not_tell_stays_unknown() -> None:
    gpus = Gpus(devices=(H200,))
    assert with_hardware(gpus, Cuda(status=999)) == gpus
    (partly,) = with_hardware(gpus, Cuda(refused=MEMORY_BUS_BITS)).devices
    assert (partly.sm_count, partly.memory_bus_bits) == (132, None)
    assert with_hardware(Gpus(reason="none")) == Gpus(reason="none")


def test_attribute_numbers_are_those_of_cuda() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert int(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) == SM_COUNT
    assert (
        int(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
        == MEMORY_BUS_BITS
    )


def gpu(name: str, capability: str, sms: int, mhz: int, memory_mhz: int, bits: int) -> Gpu:
    return Gpu(
        name=name,
        compute_capability=capability,
        driver="580",
        memory_bytes=0,
        sm_clock_mhz=mhz,
        memory_clock_mhz=memory_mhz,
        sm_count=sms,
        memory_bus_bits=bits,
    )


@pytest.mark.parametrize(
    ("device", "tera", "giga_bytes"),  # as NVIDIA's whitepapers and data sheets state them
    [
        (gpu("Tesla V100-SXM2-16GB", "7.0", 80, 1530, 877, 4096), {"fp32": 15.7, "fp16": 125}, 900),
        (gpu("Tesla T4", "7.5", 40, 1590, 5001, 256), {"fp32": 8.1, "fp16": 65, "int8": 130}, 320),
        (
            gpu("NVIDIA A100-SXM4-40GB", "8.0", 108, 1410, 1215, 5120),
            {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624},
            1555,
        ),
        (
            gpu("NVIDIA GeForce RTX 3090", "8.6", 82, 1695, 9751, 384),
            {"fp32": 35.6, "tf32": 35.6, "fp16": 142, "bf16": 71, "int8": 284},
            936,
        ),
        (
            gpu("NVIDIA A40", "8.6", 84, 1740, 7251, 384),
            {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7, "int8": 299.3},
            696,
        ),
        (
            gpu("NVIDIA GeForce RTX 4090", "8.9", 128, 2520, 10501, 384),
            {"fp32": 82.6, "tf32": 82.6, "fp16": 330.3, "bf16": 165.2, "int8": 660.6, "fp8": 660.6},
            1008,
        ),
        (
            gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 1830, 2619, 5120),
            {"tf32": 494.7, "fp16": 989.4, "int8": 1978.9, "fp8": 1978.9},
            3352,
        ),
        (
            gpu("NVIDIA B200", "10.0", 148, 1860, 3996, 8192),
            {"tf32": 1125, "fp16": 2250, "int8": 4500, "fp8": 4500},
            8000,
        ),
        (
            gpu("NVIDIA GeForce RTX 5090", "12.0", 170, 2407, 14001, 512),
            {"fp32": 104.8, "tf32": 104.8, "fp16": 419, "bf16": 209.5, "int8": 838, "fp8": 838},
            1792,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)
def test_peaks_are_those_of_the_data_sheets(
    device: Gpu, tera: dict[str, float], giga_bytes: float
) -> None:
    limits = peaks(device)
    assert {name: limits.flops_per_s[Precision(name)] / 1e12 for name in tera} == pytest.approx(
        tera, rel=0.01
    )
    assert limits.bytes_per_s is not None
    assert limits.bytes_per_s / 1e9 == pytest.approx(giga_bytes, rel=0.025)


def test_peaks_of_the_h200_at_its_highest_clocks() -> None:
    (gpu,) = with_hardware(Gpus(devices=(H200,)), Cuda()).devices
    limits = peaks(gpu)
    assert limits.bytes_per_s == pytest.approx(4.81e12, rel=0.001)  # data sheet: 4.8 TB/s
    assert limits.flops_per_s[Precision.FP16] == pytest.approx(1070e12, rel=0.001)


def test_what_is_not_known_is_left_out() -> None:
    assert peaks(H200).flops_per_s == {}
    assert peaks(H200).bytes_per_s is None
    assert peaks(gpu("NVIDIA Thor", "10.1", 20, 1000, 1000, 256)).flops_per_s == {}
    assert Precision.BF16 not in FLOPS_PER_SM_AND_CLOCK["7.5"]
    assert Precision.FP8 not in FLOPS_PER_SM_AND_CLOCK["8.6"]


def test_without_a_driver_an_error_has_no_nvml_error_as_its_context() -> None:
    nvml = Nvml(failure=NVMLError("Driver Not Loaded"))
    with pytest.raises(ValueError, match="of the caller") as error, open_nvml(nvml):
        raise ValueError("of the caller")
    assert error.value.__context__ is None
    assert nvml.open == 0
