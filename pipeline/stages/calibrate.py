"""Calibrate: which range each activation needs, read off real samples.

One pass over the set: each run of the model gives the signed bounds of every tensor and counts its
values into bins, and is then dropped. ONNX Runtime's own entropy and percentile searches choose the
range from the bins. Its calibrators keep every activation of all samples, or append bins as larger
values come, so that the result depends on the order of the batches. Here the bins span a power of
two: when a larger value comes, pairs of bins merge exactly, and the counts are those that all the
binned values at once would give, in any order. Of a tensor too large for that every n-th value is
binned; the bounds take them all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.accuracy.metrics import NOT_COVERED
from pipeline.core import (
    CalibrationMethod,
    CalibrationTable,
    Frozen,
    Note,
    OnnxModel,
    Progress,
    TensorRange,
    silent,
)
from pipeline.data.samples import Batch, CalibrationSet, SampleSet
from pipeline.errors import DataError
from pipeline.onnx_graph.activations import (
    NOTHING,
    Bounds,
    Probe,
    bounds_of,
    merge,
    open_probe,
    rows_per_run,
    with_aliases,
)
from pipeline.plan.schema import CalibrationConfig

BINS = 1024
"""Over twice the power of two above the largest magnitude, so that a search sees 512 to 1024 of
them, for 0.1 to 0.2 s per tensor. ONNX Runtime's default of 128 leaves the entropy search with a
single candidate.
"""

LEVELS = 128  # that the entropy search gives a quantised tensor: ONNX Runtime's default
SHOWN_BINS = 64  # of the histogram in the table
BINNED_PER_RUN = 131_072  # values of a tensor that go into bins per run: of larger ones every n-th
BLOCK = 65_536  # values binned at a time, so that the work stays in the CPU's cache
MIN_LIMIT = 2.0**-64  # smaller values count as zero in the bins
FLOAT32_MAX = float(np.finfo(np.float32).max)
ADVISED_SAMPLES = 500
MIN_SAMPLES = 100

COVER_SAMPLES = 64  # of the selection set, spread over it, that the ranges are held against
# of a tensor's values beyond all that calibration saw; of the same kind of data, 2 in the number of
# samples
MAX_OUTSIDE = 0.1
MIN_REACHED = 1 / 8  # of the range that int8 got: below, 3 of the 8 bits are never used

Counts = NDArray[np.int64]


def calibrate(
    model: OnnxModel,
    samples: CalibrationSet,
    method: CalibrationMethod,
    options: CalibrationConfig,
    out: Path,
    progress: Progress = silent,
) -> CalibrationTable:
    """Ranges of all float activations, as out/table.json too. `options.samples` is rounded up to
    whole batches. Raises DataError.
    """
    progress(0.0, "loading")
    probe = open_probe(model)
    used, seen = _collect(probe, samples, options, progress)
    ranges: dict[str, TensorRange] = {}
    for done, (name, tally) in enumerate(seen.items()):
        progress(0.7 + 0.3 * done / len(seen), f"{method} range of '{name}'")
        ranges[name] = _range(tally, method, options.percentile)
    table = CalibrationTable(
        root=out,
        file="table.json",
        method=method,
        set_digest=samples.digest,
        samples=used,
        ranges=dict(sorted(with_aliases(probe, ranges).items())),
        notes=_notes(used, {name: tally.bounds for name, tally in seen.items()}),
    )
    table.path.write_text(_readable(table), encoding="utf-8")
    return table


@dataclass(slots=True)
class Tally:
    """What was seen of one tensor so far: bounds over all values, counts in BINS equal bins over
    [-limit, limit).
    """

    bounds: Bounds = NOTHING
    limit: float = MIN_LIMIT  # a power of two
    counts: Counts = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: NDArray[np.float32]) -> None:
        bounds = bounds_of(values)
        self.bounds = merge(self.bounds, bounds)
        while self.limit <= bounds.largest:
            self._double()
        flat = values.reshape(-1)
        flat = flat[
            :: flat.size // BINNED_PER_RUN | 1
        ]  # odd: does not fall in with the even sizes of rows and channels
        self.counts += bin_counts(flat[np.isfinite(flat)] if bounds.nonfinite else flat, self.limit)

    def _double(self) -> None:
        merged = np.zeros(BINS, np.int64)
        merged[BINS // 4 : -BINS // 4] = self.counts.reshape(-1, 2).sum(axis=1)
        self.limit, self.counts = self.limit * 2, merged

    def histogram(self) -> tuple[Counts, NDArray[np.float32]]:
        """The bins that hold values, an equal number to both sides of zero, and their edges."""
        width = 2 * self.limit / BINS
        half = min(int(self.bounds.largest / width) + 1, BINS // 2)
        edges = np.clip(np.arange(-half, half + 1) * width, -FLOAT32_MAX, FLOAT32_MAX)
        return self.counts[BINS // 2 - half : BINS // 2 + half], edges.astype(np.float32)


def bin_counts(values: NDArray[np.float32], limit: float) -> Counts:
    """np.histogram(values, BINS, (-limit, limit)), three times as fast, and exact: the limit is a
    power of two above all values.
    """
    scale = np.float32(BINS / 2 / limit)
    counts = np.zeros(BINS, np.int64)
    for start in range(0, values.size, BLOCK):
        places = values[start : start + BLOCK] * scale
        np.floor(places, out=places)
        counts += np.bincount(places.astype(np.intp) + BINS // 2, minlength=BINS)
    return counts


def _collect(
    probe: Probe, samples: CalibrationSet, options: CalibrationConfig, progress: Progress
) -> tuple[int, dict[str, Tally]]:
    """Run the samples; how many were used, and what was seen of each tensor."""
    first = next(iter(samples.batches(1)), None)
    if first is None:
        raise DataError(
            "the calibration set holds no samples", f"give about {ADVISED_SAMPLES} real samples"
        )
    size = min(options.batch, rows_per_run(probe, first.feeds, first.samples))
    wanted = min(options.samples or samples.samples, samples.samples)
    used = 0
    seen: dict[str, Tally] = defaultdict(Tally)
    for batch in samples.batches(size):
        if used >= wanted:
            break
        for name, values in probe.run(batch.feeds).items():
            seen[name].add(values)
        used += batch.samples
        progress(0.7 * min(used / wanted, 1.0), f"{used} of {wanted} samples")
    return used, dict(seen)


def _range(tally: Tally, method: CalibrationMethod, percentile: float) -> TensorRange:
    bounds = tally.bounds
    low, high = bounds.minimum, bounds.maximum
    if (
        method is not CalibrationMethod.MINMAX and bounds.largest >= tally.limit / 2
    ):  # else all count as zero
        low, high = _search(tally, method, percentile)
    return TensorRange(
        minimum=bounds.minimum,
        maximum=bounds.maximum,
        low=low,
        high=high,
        histogram=tuple(int(n) for n in tally.counts.reshape(SHOWN_BINS, -1).sum(axis=1)),
        count=bounds.count,
        nonfinite=bounds.nonfinite,
    )


def _search(tally: Tally, method: CalibrationMethod, percentile: float) -> tuple[float, float]:
    """ONNX Runtime's choice of a range for these counts; it stays inside the signed bounds."""
    from onnxruntime.quantization.calibrate import HistogramCollector

    collector = HistogramCollector(
        method=str(method),
        symmetric=False,
        num_bins=BINS,
        num_quantized_bins=LEVELS,
        percentile=percentile,
        scenario="same",
    )
    counts, edges = tally.histogram()
    low, high = np.float32(tally.bounds.minimum), np.float32(tally.bounds.maximum)
    collector.histogram_dict["x"] = (counts, edges, low, high, np.float32(tally.bounds.largest))
    chosen_low, chosen_high, *_ = collector.compute_collection_result()["x"]
    return float(chosen_low), float(chosen_high)


def _notes(used: int, bounds: dict[str, Bounds]) -> tuple[Note, ...]:
    notes = []
    if used < MIN_SAMPLES:
        notes.append(
            Note(
                stage="calibrate",
                text=(
                    f"{used} calibration samples are few: ranges may miss real values; about"
                    f" {ADVISED_SAMPLES} is advised"
                ),
            )
        )
    elif used < ADVISED_SAMPLES:
        notes.append(
            Note(
                stage="calibrate",
                text=f"{used} calibration samples; about {ADVISED_SAMPLES} is advised",
                level="info",
            )
        )
    strange = [name for name, seen in bounds.items() if seen.nonfinite]
    if strange:
        values = sum(bounds[name].nonfinite for name in strange)
        shown = ", ".join(f"'{name}'" for name in strange[:3]) + (
            ", ..." if len(strange) > 3 else ""
        )
        notes.append(
            Note(
                stage="calibrate",
                text=(
                    f"{values} NaN or infinite values in {len(strange)} tensors ({shown}) are left"
                    " out of their ranges"
                ),
            )
        )
    return tuple(notes)


def _readable(table: CalibrationTable) -> str:
    """JSON with one line per tensor."""
    head = {
        "method": table.method,
        "set_digest": table.set_digest,
        "samples": table.samples,
        "notes": [note.text for note in table.notes],
    }
    lines = ",\n".join(
        f"  {json.dumps(name)}: {seen.model_dump_json()}" for name, seen in table.ranges.items()
    )
    return (
        json.dumps(head, indent=1).removesuffix("\n}") + ',\n "ranges": {\n' + lines + "\n }\n}\n"
    )


# -- do the ranges hold for other samples? -----------------------------------


class Coverage(Frozen):
    """How the ranges fit what another set reaches. `failure` is empty where they fit."""

    samples: int
    failure: str = ""


@dataclass(slots=True)
class Reach:
    """What another set reaches of one tensor."""

    bounds: Bounds = NOTHING
    outside: int = 0  # values beyond all that calibration saw

    def add(self, values: NDArray[np.float32], known: TensorRange) -> None:
        self.bounds = merge(self.bounds, bounds_of(values))
        if self.bounds.minimum < known.minimum or self.bounds.maximum > known.maximum:
            self.outside += int(
                np.count_nonzero(
                    np.isfinite(values) & ((values < known.minimum) | (values > known.maximum))
                )
            )

    @property
    def share_outside(self) -> float:
        return self.outside / max(self.bounds.count - self.bounds.nonfinite, 1)


def cover(
    model: OnnxModel, table: CalibrationTable, samples: SampleSet, progress: Progress = silent
) -> Coverage:
    """Hold the ranges of a calibration table against what some samples of another set reach."""
    probe = open_probe(model)
    seen: dict[str, Reach] = defaultdict(Reach)
    looked = 0
    for batch in _spread(probe, samples):
        for name, values in probe.run(batch.feeds).items():
            if name in table.ranges and values.size:
                seen[name].add(values, table.ranges[name])
        looked += batch.samples
        progress(
            min(looked / min(samples.samples, COVER_SAMPLES), 1.0), f"{looked} samples looked at"
        )
    return Coverage(samples=looked, failure=_misfit(table, seen))


def _spread(probe: Probe, samples: SampleSet) -> Iterator[Batch]:
    """Batches of about COVER_SAMPLES samples in all, at even distances: a set may be sorted."""
    first = next(iter(samples.batches(1)))
    size = min(COVER_SAMPLES // 8, rows_per_run(probe, first.feeds, first.samples))
    due = 0.0
    for batch in samples.batches(size):
        if batch.first >= due:
            due += batch.samples * max(samples.samples / COVER_SAMPLES, 1.0)
            yield batch


def _misfit(table: CalibrationTable, seen: dict[str, Reach]) -> str:
    """The tensor that fits worst, and how many do not fit."""
    outside = {
        name: reach.share_outside
        for name, reach in seen.items()
        if reach.share_outside > MAX_OUTSIDE
    }
    if outside:
        name = max(outside, key=lambda name: outside[name])
        known, bounds = table.ranges[name], seen[name].bounds
        here = (
            f"{outside[name]:.0%} of '{name}' lies outside {known.minimum:.4g} to"
            f" {known.maximum:.4g}, all that calibration saw"
        )
        return (
            f"{NOT_COVERED}: {here} (here {bounds.minimum:.4g} to {bounds.maximum:.4g}); so in"
            f" {len(outside)} of {len(seen)} tensors"
        )
    ranges = {name: max(abs(table.ranges[name].low), abs(table.ranges[name].high)) for name in seen}
    reached = {
        name: seen[name].bounds.largest / most
        for name, most in ranges.items()
        if seen[name].bounds.largest < MIN_REACHED * most
    }
    if not reached:
        return ""
    name = min(reached, key=lambda name: reached[name])
    here = (
        f"'{name}' reaches {seen[name].bounds.largest:.4g} of {ranges[name]:.4g}, which leaves most"
        " of the 8 bits unused"
    )
    return f"{NOT_COVERED}: {here}; so in {len(reached)} of {len(seen)} tensors"
