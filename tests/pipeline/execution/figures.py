"""Figures of candidates, as stages report them while a plan is compiled."""

from __future__ import annotations

from pipeline.core.progress import AccuracyFigures, CandidateFigures, LatencyFigures
from pipeline.core.recipe import Precision


def accuracy(drop: float = 0.01, measure: str = "top1", passed: bool = True) -> AccuracyFigures:
    return AccuracyFigures(measure, drop, drop - 0.005, drop + 0.005, passed)


def latency(median_s: float = 0.002, is_eliminated: bool = False) -> LatencyFigures:
    return LatencyFigures(median_s, 0.9 * median_s, 1.2 * median_s, "batch 8", is_eliminated)


def candidate(
    label: str,
    accuracy: AccuracyFigures | None = None,
    latency: LatencyFigures | None = None,
    is_baseline: bool = False,
) -> CandidateFigures:
    return CandidateFigures(label, Precision.INT8, is_baseline, accuracy, latency)
