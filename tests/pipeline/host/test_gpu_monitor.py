"""NVML is stood in for by an object with its functions, which write their answers as it does."""

from __future__ import annotations

from typing import Any

from pipeline.host.gpu_monitor import CORE_TEMPERATURE, MEMORY_CLOCK, SM_CLOCK, Span, watching

UUID = "GPU-6d5a129b"


class Nvml:
    """A GPU that gets warmer at every look; `power` is what it answers to the question for it."""

    def __init__(self, power: int = 0, known: str = UUID) -> None:
        self.power, self.known, self.degrees, self.open = power, known, 40, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802  as in nvml.h
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 7
        return 0 if uuid.decode() == self.known else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int, answer: Any) -> int:  # noqa: N802
        assert handle.value == 7
        answer._obj.value = {SM_CLOCK: 1980, MEMORY_CLOCK: 3201}[clock]
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, answer: Any) -> int:  # noqa: N802
        assert sensor == CORE_TEMPERATURE
        self.degrees += 1
        answer._obj.value = self.degrees
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, answer: Any) -> int:  # noqa: N802
        answer._obj.value = 312_500
        return self.power

    def nvmlDeviceGetUtilizationRates(self, handle: Any, answer: Any) -> int:  # noqa: N802
        answer._obj.gpu, answer._obj.memory = 87, 12
        return 0


def test_the_gpu_is_looked_at_from_start_to_end() -> None:
    nvml = Nvml()
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
    with watching(UUID, Nvml(power=3), every_s=60) as watch:
        pass
    use = watch.use()
    assert use is not None
    assert use.power_w is None


def test_without_that_gpu_nothing_is_seen() -> None:
    nvml = Nvml(known="another")
    for uuid, library in ((UUID, nvml), ("", None)):
        with watching(uuid, library, every_s=60) as watch:
            pass
        assert watch.use() is None
    assert nvml.open == 0, "closed although nothing was found"
