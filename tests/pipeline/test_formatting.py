"""Numbers, sizes and dates as people read them."""

from __future__ import annotations

import pytest

from pipeline.formatting import bytes_text, date, flops_text, number_text, time_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.12e-4, "412 us"),
        (5.214e-3, "5.21 ms"),
        (0.0999951, "100 ms"),
        (0.99996, "1.00 s"),
        (12.34, "12.3 s"),
        (7e-7, "0.70 us"),
        (150, "2.5 min"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_sizes_counts_and_dates() -> None:
    assert [bytes_text(count) for count in (0, 999, 1000, 999_900, 2_130_000, 16_400_000_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "2.13 MB",
        "16.4 GB",
    ]
    assert [flops_text(count) for count in (0, 999, 1e3, 2.13e6, 16.4e9, 4.2e12, 1.5e15)] == [
        "0 FLOP",
        "999 FLOP",
        "1.00 kFLOP",
        "2.13 MFLOP",
        "16.4 GFLOP",
        "4.20 TFLOP",
        "1,500 TFLOP",
    ]
    assert [number_text(value) for value in (0.5, 74.6, 1234.5)] == ["0.50", "74.6", "1,234"]
    assert date("2026-03-02T10:11:40+00:00") == "2026-03-02 10:11 UTC"
