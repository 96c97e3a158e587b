"""NVML is stood in for by a double of pynvml."""

from __future__ import annotations

from pipeline.host.gpu_monitor import Span, watching
from tests.builders.nvml import Device, Nvml, NVMLError

UUID = "GPU-6d5a129b"


def h200(milliwatts: int | None = 312_500) -> Device:
    return Device("H200", UUID, sm_clock=1980, memory_clock=3201, milliwatts=milliwatts)


def test_the_gpu_is_looked_at_from_start_to_end() -> None:
    nvml = Nvml(h200())
    with watching(UUID, nvml, every_s=60) as watch:
        pass
    use = watch.use([9, 7, 9])
    assert use is not None
    assert use.samples == 2
    assert use.sm_clock_mhz == Span(least=1980, median=1980, most=1980)
    assert use.memory_clock_mhz == Span(least=3201, median=3201, most=3201)
    assert use.power_w == Span(least=312.5, median=312.5, most=312.5)
    assert use.temperature_c == Span(least=41, median=41.5, most=42)
    assert use.busy_percent == Span(least=87, median=87, most=87)
    assert use.other_processes == (7, 9)
    assert nvml.open == 0
    assert type(use).model_validate_json(use.model_dump_json()) == use


def test_what_nvml_does_not_tell_is_left_out() -> None:
    with watching(UUID, Nvml(h200(milliwatts=None)), every_s=60) as watch:
        pass
    use = watch.use()
    assert use is not None
    assert use.power_w is None


def test_without_that_gpu_nothing_is_seen() -> None:
    nvml = Nvml(Device("H200", "another"))
    without_driver = Nvml(failure=NVMLError("Driver Not Loaded"))
    for uuid, library in ((UUID, nvml), ("", None), (UUID, without_driver)):
        with watching(uuid, library, every_s=60) as watch:
            pass
        assert watch.use() is None
    assert nvml.open == 0, "closed although nothing was found"
