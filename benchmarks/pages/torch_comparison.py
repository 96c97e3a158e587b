"""PyTorch's fastest engine of each row of results/gpu_models.json beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.rows import SURGERY, Row, setting_of
from benchmarks.pages.gpu_model_rows import (
    Document,
    row_from_heading,
    rows_at_once,
    special_overrides,
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One engine of a row: medians in ms."""

    way: str
    wall_ms: float
    gpu_ms: float
    mode: str = ""  # of torch.compile

    @property
    def label(self) -> str:
        way = self.way.removesuffix(SURGERY)  # it is the default
        return f"{way}, {self.mode}" if self.mode else way


@dataclass(frozen=True, slots=True)
class Comparison:
    """PyTorch's fastest engine of a row and ours, all by their end-to-end time."""

    heading: str
    row: Row
    torch: Timed
    usual: tuple[Timed, ...]  # ours by default settings, the fastest first
    special: tuple[Timed, ...]  # ours by other settings, the fastest first
    overrides: tuple[str, ...]
    modes: tuple[str, ...]  # of torch.compile that were measured
    cores: int | None
    at_once: bool  # another row ran at the same time

    @property
    def fp16(self) -> Timed | None:
        return next((each for each in self.usual if each.way.startswith("fp16")), None)

    @property
    def gain(self) -> Timed | None:
        """Ours by other settings, if that is faster than by default ones."""
        best = next(iter(self.special), None)
        return best if best and best.wall_ms < self.usual[0].wall_ms else None

    @property
    def setting(self) -> str:
        """What a plan has to say for the gain."""
        ways = [each.way for each in (*self.usual, *self.special)]
        return setting_of(self.gain.way, ways) if self.gain else ""

    @property
    def slower(self) -> bool:
        return self.torch.wall_ms < self.usual[0].wall_ms

    @property
    def autotuned(self) -> bool:
        return "max-autotune" in self.modes


def comparisons(document: Document) -> list[Comparison]:
    """One for each model and shape: of several rows the one that is nearest to the default
    settings.
    """
    best: dict[str, Comparison] = {}
    at_once = rows_at_once(document)
    for heading, row in document["rows"].items():
        each = _comparison(heading, row, bool(at_once.get(heading)))
        if each is None:
            continue
        other = best.get(each.row.name)
        if other is None or len(each.overrides) < len(other.overrides):
            best[each.row.name] = each
    return list(best.values())


def _comparison(heading: str, row: Mapping[str, Any], at_once: bool) -> Comparison | None:
    """None where PyTorch was not measured in fp16, or where ours was not: fp32 beside fp16 would
    flatter us.
    """
    model, torch, ours = row_from_heading(heading), _timed(row, "torch "), _timed(row, "ours ")
    ways = [each.way for each in ours]
    usual = tuple(each for each in ours if not setting_of(each.way, ways))
    if model is None or not usual or not any("fp16" in each.way for each in torch):
        return None
    return Comparison(
        heading,
        model,
        torch[0],
        usual,
        tuple(each for each in ours if setting_of(each.way, ways)),
        special_overrides(row),
        tuple(entry["mode"] for entry in row["entries"].values() if "mode" in entry),
        (row.get("environment") or {}).get("cores"),
        at_once,
    )


def _timed(row: Mapping[str, Any], prefix: str) -> list[Timed]:
    """The measured engines whose names begin so, the fastest end to end first."""
    timed = [
        Timed(
            name.removeprefix(prefix),
            entry["wall_median_ms"],
            entry["device_median_ms"],
            entry.get("mode", ""),
        )
        for name, entry in row.get("entries", {}).items()
        if name.startswith(prefix) and "wall_median_ms" in entry
    ]
    return sorted(timed, key=lambda each: each.wall_ms)
