"""NVML is stood in for by a double of pynvml."""

from __future__ import annotations

from functools import partial

from pipeline.host.gpu import open_nvml
from pipeline.host.gpu_monitor import (
    MIN_ENERGY_S,
    EnergyReading,
    MeanPower,
    Span,
    mean_power,
    reading_energy,
    watching,
)
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


def readings(*values: tuple[float, float]) -> list[EnergyReading]:
    return [EnergyReading(at_s, energy_j) for at_s, energy_j in values]


def test_power_is_taken_between_the_steps_of_the_counter() -> None:
    """The counter stands still between its steps; what came before the first is not counted."""
    found = readings((0.0, 10), (0.1, 90), (0.2, 90), (0.3, 150), (0.6, 240), (0.7, 240))
    assert mean_power(found) == MeanPower(watts=300.0, window_s=0.5)


def test_too_few_steps_give_no_power() -> None:
    still = readings((0.0, 10), (0.5, 10), (1.0, 10))
    one_step = readings((0.0, 10), (0.5, 160), (1.0, 160))
    close = readings((0.0, 10), (0.1, 40), (0.05 + MIN_ENERGY_S, 70))
    assert [mean_power(found) for found in ([], still, one_step, close)] == [None] * 4


def test_the_counter_of_energy_is_read_from_start_to_end() -> None:
    counts = {}
    for watts in (250, None):
        with open_nvml(Nvml(Device("H200", UUID, watts=watts))) as opened:
            (device,) = opened.devices()
            times = iter([0.0, 1.0])
            with reading_energy(device, partial(next, times), 60) as found:
                pass
        counts[watts] = [reading.at_s for reading in found]
    assert counts == {250: [0.0, 1.0], None: []}
