"""Texts for readers: times, sizes, rates, intervals, shapes and dates. Also parses ranges."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.errors import PlanError
from pipeline.measurement.statistics import Interval


def time_text(seconds: float) -> str:
    """Return three digits and the unit: 412 us, 5.21 ms, 12.3 s."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale * 0.9995:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def bytes_text(count: int) -> str:
    """Decimal units: 512 B, 2.1 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def flops_text(count: float) -> str:
    """Decimal units: 512 FLOP, 2.10 MFLOP."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{_three_digits(count) if unit else round(count)} {unit}FLOP"
        count /= 1000
    return f"{number_text(count)} TFLOP"


def number_text(value: float) -> str:
    """Three digits, thousands marked."""
    return f"{value:,.0f}" if value >= 100 else _three_digits(value)


def _three_digits(value: float) -> str:
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def interval(value: Interval, digits: int) -> str:
    """An estimate with its 95 % interval: 2.31 [2.25, 2.38]."""
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def shape_text(sizes: dict[str, int]) -> str:
    """`batch 8, sequence 128`."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "its fixed shape"


def date(iso: str) -> str:
    """2026-01-31 12:00 UTC, from ISO 8601."""
    return f"{iso[:10]} {iso[11:16]} UTC" if len(iso) >= 16 else iso


def profiles_text(ranges: Iterable[str]) -> str:
    """Convert ranges of the command line, `batch=1:8:64`, to a plan's `profiles` as YAML text.

    PlanError for another form.
    """
    entries = []
    for text in ranges:
        name, equals, sizes = text.partition("=")
        numbers = sizes.split(":")
        are_sizes = len(numbers) in (1, 3) and all(number.isdigit() for number in numbers)
        if not equals or not are_sizes:
            raise PlanError(
                f"expected --profile DIM=MIN:OPT:MAX, got '{text}'",
                "for example --profile batch=1:8:64",
            )
        triple = numbers if len(numbers) == 3 else numbers * 3
        entries.append(f"{name}: [{', '.join(triple)}]")
    return f"[{{{', '.join(entries)}}}]"


STATE_LABELS = {"mislabelled": "wrong precision"}
"""States whose value, which programs read, says less than the label that people read."""


def state_label(state: str) -> str:
    """A candidate's state as reports and tables show it."""
    return STATE_LABELS.get(state, state)
