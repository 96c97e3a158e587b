"""Figures of candidates, joined from events. What a child invents makes no large page."""

from dataclasses import asdict

import pytest

from service.jobs.figures import MAX_CANDIDATES, joined_figures
from tests.pipeline.execution.figures import accuracy, candidate, latency


def test_accuracy_and_latency_of_a_candidate_are_joined_and_the_newest_counts() -> None:
    events = (
        candidate("int8", accuracy(0.01)),
        candidate("eager", is_baseline=True),
        candidate("int8", latency=latency(0.003)),
        candidate("eager", latency=latency(0.005)),
        candidate("int8", latency=latency(0.002, is_eliminated=True)),
    )
    assert joined_figures(map(asdict, events)) == (
        candidate("int8", accuracy(0.01), latency(0.002, is_eliminated=True)),
        candidate("eager", latency=latency(0.005), is_baseline=True),
    )


@pytest.mark.parametrize(
    "damage", [{}, {"label": 3}, {"precision": "int3"}, {"latency": {"median_s": -1}}, {"x": 1}]
)
def test_damaged_figures_are_left_out(damage: dict[str, object]) -> None:
    whole = asdict(candidate("int8", accuracy()))
    damaged = {**whole, **damage} if damage else {}
    assert joined_figures([damaged, whole]) == (candidate("int8", accuracy()),)


def test_a_child_that_invents_candidates_fills_no_page() -> None:
    invented = [asdict(candidate(str(number))) for number in range(MAX_CANDIDATES + 50)]
    again = asdict(candidate("0", accuracy()))
    found = joined_figures([*invented, again])
    assert len(found) == MAX_CANDIDATES
    assert found[0] == candidate("0", accuracy())
