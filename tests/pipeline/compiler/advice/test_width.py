"""The reason of a wide interval: other work on the host, the time, or the engines themselves."""

from __future__ import annotations

import pytest

from pipeline.compiler.advice.width import why_wide
from pipeline.measurement.clock import Samples


def samples(processes: int, spread: float = 0.0, waiting: float = 0.0) -> Samples:
    """Return one time of each process; every second one is slower by `spread`."""
    values = tuple(1e-3 * (1 + spread * (index % 2)) for index in range(processes))
    ones = (1,) * processes
    return Samples(values_s=values, blocks=ones, processes=ones, waiting=(waiting,) * processes)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (samples(8, waiting=0.5), "8 of 8 processes waited for a CPU: measure on a quiet host"),
        (samples(8), "over after 8 processes of each engine: raise benchmark.budget_s, which is 5"),
        (samples(16, 0.3), "16 processes of each engine differ by up to 1.30 times"),
    ],
)
def test_the_reason_names_what_limits_the_interval(found: Samples, reason: str) -> None:
    assert reason in why_wide(samples(len(found.values_s)), found, 16, 5.0)
