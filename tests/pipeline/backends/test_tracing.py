"""Another clock is moved to the host's, and layers without starts follow each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.tracing import clock_offset, nest_spans, shift_window, spans_in_order
from pipeline.errors import InternalError
from pipeline.results.timeline import Span, Window

TIMES = st.floats(0, 1e4)


def test_each_run_limits_the_offset_on_both_sides() -> None:
    inner = [Window(1.0, 2.0), Window(11.0, 12.5)]
    outer = [Window(100.9, 102.3), Window(110.8, 112.7)]
    offset_s, error_s = clock_offset(inner, outer)  # from 99.9 and 99.8, to 100.3 and 100.2
    assert (offset_s, error_s) == pytest.approx((100.05, 0.15))


def test_a_clock_that_drifts_has_the_gap_as_its_error() -> None:
    offset_s, error_s = clock_offset(
        [Window(0, 1), Window(10, 11)], [Window(5.0, 6.0), Window(15.4, 16.4)]
    )
    assert (offset_s, error_s) == pytest.approx((5.2, 0.2))


@pytest.mark.parametrize("inner", [[], [Window(0, 1)] * 2])
def test_runs_that_were_not_all_recorded_are_no_timeline(inner: list[Window]) -> None:
    with pytest.raises(InternalError, match=f"expected 1 recorded runs, got {len(inner)}"):
        clock_offset(inner, [Window(0, 1)])


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1), TIMES)
def test_whatever_the_clocks_do_an_event_stays_in_its_call(
    runs: list[tuple[float, float, float]], offset_s: float
) -> None:
    for start_s, seconds, own_s in runs:
        call = Window(start_s, start_s + seconds)
        window = shift_window(Window(own_s, own_s + seconds), offset_s, call)
        assert call.start_s <= window.start_s <= window.end_s <= call.end_s


def test_layers_without_starts_follow_each_other() -> None:
    spans = list(spans_in_order([("a", 1.0), ("b", 2.0)], Window(10.0, 20.0)))
    assert [(span.name, span.window) for span in spans] == [
        ("a", Window(10.0, 11.0)),
        ("b", Window(11.0, 13.0)),
    ]


def test_layers_longer_than_their_call_are_shortened_in_proportion() -> None:
    spans = list(spans_in_order([("a", 4.0), ("b", 12.0)], Window(10.0, 14.0)))
    assert [span.window for span in spans] == [Window(10.0, 11.0), Window(11.0, 14.0)]
    assert [span.detail["reported_us"] for span in spans] == [4e6, 12e6]


def test_without_layers_or_with_empty_ones_there_is_no_division_by_zero() -> None:
    assert list(spans_in_order([], Window(0, 1))) == []
    (span,) = spans_in_order([("a", 0.0)], Window(0, 1))
    assert span.window == Window(0, 0)


def test_an_end_that_rounding_moved_is_cut_off() -> None:
    loop, body = Span("layers", "loop", Window(0, 10)), Span("layers", "body", Window(4, 10.5))
    after = Span("layers", "after", Window(10, 11))
    assert [(span.name, span.window.end_s) for span in nest_spans([after, body, loop])] == [
        ("loop", 10),
        ("body", 10),
        ("after", 11),
    ]
