"""Calibrate: find the range of each activation on real samples.

The stage makes one pass over the set. Each run of the model updates the signed bounds of every
tensor, counts the values in bins, and is then dropped. ONNX Runtime's entropy and percentile
searches choose the range from the bins.

ONNX Runtime's own calibrators keep every activation of all samples, or append bins as larger values
come, so their result depends on the order of the batches. Here the bins span a power of two. When a
larger value comes, pairs of bins merge exactly. So the counts do not depend on the order of the
values. For a very large tensor, every n-th value is binned; the bounds include all values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import CalibrationTable, Note, OnnxModel, TensorRange
from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CalibrationMethod
from pipeline.data.batch import Batch
from pipeline.data.samples import CalibrationSet, SampleSet
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
"""Bins over twice the power of two above the largest magnitude.

A search sees 512 to 1024 of them and takes 0.1 to 0.2 s per tensor. ONNX Runtime's default of 128
leaves the entropy search a single candidate.
"""

LEVELS = 128  # of a quantised tensor in the entropy search: ONNX Runtime's default
SHOWN_BINS = 64  # of the histogram in the table
BINNED_PER_RUN = 131_072  # values of a tensor in bins per run; of a larger tensor, every n-th value
BLOCK = 65_536  # values binned at a time, so that the work stays in the CPU's cache
MIN_LIMIT = 2.0**-64  # smaller values count as zero in the bins
FLOAT32_MAX = float(np.finfo(np.float32).max)
ADVISED_SAMPLES = 500
MIN_SAMPLES = 100

COVER_SAMPLES = 64
"""Samples of the selection set, spread over it, on which the ranges are checked."""

MAX_OUTSIDE = 0.1
"""Maximum share of a tensor's values beyond those of the calibration.

For data of the same kind, 2 in the number of samples are expected.
"""

MIN_REACHED = 1 / 8
"""Minimum share of an int8 range that values reach: below it, 3 of the 8 bits are never used."""

NOT_COVERED = "the calibration set's ranges do not fit the selection set"

Counts = NDArray[np.int64]


def calibrate(
    model: OnnxModel,
    samples: CalibrationSet,
    method: CalibrationMethod,
    options: CalibrationConfig,
    out: Path,
    progress: Progress = silent,
) -> CalibrationTable:
    """Return the ranges of all float activations, and write them to out/table.json.

    `options.samples` is rounded up to whole batches. Raises DataError.
    """
    progress(0.0, "loading")
    probe = open_probe(model)
    used, tallies = _collect(probe, samples, options, progress)
    ranges: dict[str, TensorRange] = {}
    for done, (name, tally) in enumerate(tallies.items()):
        progress(0.7 + 0.3 * done / len(tallies), f"{method} range of '{name}'")
        ranges[name] = _range(tally, method, options.percentile)
    table = CalibrationTable(
        root=out,
        file="table.json",
        method=method,
        set_digest=samples.digest,
        samples=used,
        ranges=dict(sorted(with_aliases(probe, ranges).items())),
        notes=_notes(used, {name: tally.bounds for name, tally in tallies.items()}),
    )
    table.path.write_text(_readable(table), encoding="utf-8")
    return table


@dataclass(slots=True)
class Tally:
    """Values of one tensor: bounds of all, and counts in BINS equal bins over [-limit, limit)."""

    bounds: Bounds = NOTHING
    limit: float = MIN_LIMIT  # a power of two
    counts: Counts = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: NDArray[np.float32]) -> None:
        bounds = bounds_of(values)
        self.bounds = merge(self.bounds, bounds)
        while self.limit <= bounds.largest:
            self._double()
        flat = values.reshape(-1)
        step = flat.size // BINNED_PER_RUN | 1  # odd: rows and channels have even sizes
        flat = flat[::step]
        if bounds.nonfinite:
            flat = flat[np.isfinite(flat)]
        self.counts += bin_counts(flat, self.limit)

    def _double(self) -> None:
        merged = np.zeros(BINS, np.int64)
        merged[BINS // 4 : -BINS // 4] = self.counts.reshape(-1, 2).sum(axis=1)
        self.limit, self.counts = self.limit * 2, merged

    def histogram(self) -> tuple[Counts, NDArray[np.float32]]:
        """Return the bins with values, equally many on both sides of zero, and their edges."""
        width = 2 * self.limit / BINS
        half = min(int(self.bounds.largest / width) + 1, BINS // 2)
        edges = np.clip(np.arange(-half, half + 1) * width, -FLOAT32_MAX, FLOAT32_MAX)
        return self.counts[BINS // 2 - half : BINS // 2 + half], edges.astype(np.float32)


def bin_counts(values: NDArray[np.float32], limit: float) -> Counts:
    """Return the counts of np.histogram(values, BINS, (-limit, limit)), three times as fast.

    They are exact, because the limit is a power of two above all values.
    """
    scale = np.float32(BINS / 2 / limit)
    counts = np.zeros(BINS, np.int64)
    for start in range(0, values.size, BLOCK):
        indices = values[start : start + BLOCK] * scale
        np.floor(indices, out=indices)
        counts += np.bincount(indices.astype(np.intp) + BINS // 2, minlength=BINS)
    return counts


def _collect(
    probe: Probe, samples: CalibrationSet, options: CalibrationConfig, progress: Progress
) -> tuple[int, dict[str, Tally]]:
    """Run the samples. Return the number of samples and the tally of each tensor."""
    first = next(iter(samples.batches(1)), None)
    if first is None:
        raise DataError(
            "the calibration set has no samples", f"give about {ADVISED_SAMPLES} real samples"
        )
    size = min(options.batch, rows_per_run(probe, first.feeds, first.samples))
    goal = min(options.samples or samples.samples, samples.samples)
    used = 0
    tallies: dict[str, Tally] = defaultdict(Tally)
    for batch in samples.batches(size):
        if used >= goal:
            break
        for name, values in probe.run(batch.feeds).items():
            tallies[name].add(values)
        used += batch.samples
        progress(0.7 * min(used / goal, 1.0), f"{used} of {goal} samples")
    return used, dict(tallies)


def _range(tally: Tally, method: CalibrationMethod, percentile: float) -> TensorRange:
    bounds = tally.bounds
    low, high = bounds.minimum, bounds.maximum
    all_zero = bounds.largest < tally.limit / 2  # in the bins, which have a smallest limit
    if method is not CalibrationMethod.MINMAX and not all_zero:
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
    """Let ONNX Runtime choose a range for these counts, inside the signed bounds."""
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
        text = (
            f"{used} calibration samples are few: ranges may miss real values; about"
            f" {ADVISED_SAMPLES} is advised"
        )
        notes.append(Note(stage="calibrate", text=text))
    elif used < ADVISED_SAMPLES:
        text = f"{used} calibration samples; about {ADVISED_SAMPLES} is advised"
        notes.append(Note(stage="calibrate", text=text, level="info"))
    nonfinite = {name: bound.nonfinite for name, bound in bounds.items() if bound.nonfinite}
    if nonfinite:
        shown = ", ".join(f"'{name}'" for name in list(nonfinite)[:3])
        if len(nonfinite) > 3:
            shown += ", ..."
        text = (
            f"{sum(nonfinite.values())} NaN or infinite values in {len(nonfinite)} tensors"
            f" ({shown}) are left out of their ranges"
        )
        notes.append(Note(stage="calibrate", text=text))
    return tuple(notes)


def _readable(table: CalibrationTable) -> str:
    """Format a table as JSON with one line per tensor."""
    head = {
        "method": table.method,
        "set_digest": table.set_digest,
        "samples": table.samples,
        "notes": [note.text for note in table.notes],
    }
    lines = [
        f"  {json.dumps(name)}: {range_.model_dump_json()}" for name, range_ in table.ranges.items()
    ]
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    return opening + ',\n "ranges": {\n' + ",\n".join(lines) + "\n }\n}\n"


# -- do the ranges hold for other samples? -----------------------------------


class Coverage(Frozen):
    """Result of a check of the ranges on another set. `failure` is empty if they fit."""

    samples: int
    failure: str = ""


@dataclass(slots=True)
class Reach:
    """Values of one tensor on another set."""

    bounds: Bounds = NOTHING
    outside: int = 0  # number of values beyond those of the calibration

    def add(self, values: NDArray[np.float32], known: TensorRange) -> None:
        self.bounds = merge(self.bounds, bounds_of(values))
        if self.bounds.minimum < known.minimum or self.bounds.maximum > known.maximum:
            beyond = (values < known.minimum) | (values > known.maximum)
            self.outside += int(np.count_nonzero(np.isfinite(values) & beyond))

    @property
    def share_outside(self) -> float:
        return self.outside / max(self.bounds.count - self.bounds.nonfinite, 1)


def cover(
    model: OnnxModel, table: CalibrationTable, samples: SampleSet, progress: Progress = silent
) -> Coverage:
    """Check the ranges of a calibration table on some samples of another set."""
    probe = open_probe(model)
    reaches: dict[str, Reach] = defaultdict(Reach)
    goal = min(samples.samples, COVER_SAMPLES)
    checked = 0
    for batch in _spread(probe, samples):
        for name, values in probe.run(batch.feeds).items():
            if name in table.ranges and values.size:
                reaches[name].add(values, table.ranges[name])
        checked += batch.samples
        progress(min(checked / goal, 1.0), f"{checked} samples checked")
    return Coverage(samples=checked, failure=_misfit(table, reaches))


def _spread(probe: Probe, samples: SampleSet) -> Iterator[Batch]:
    """Yield batches of about COVER_SAMPLES samples, at even distances: a set may be sorted."""
    first = next(iter(samples.batches(1)))
    size = min(COVER_SAMPLES // 8, rows_per_run(probe, first.feeds, first.samples))
    due = 0.0
    for batch in samples.batches(size):
        if batch.first >= due:
            due += batch.samples * max(samples.samples / COVER_SAMPLES, 1.0)
            yield batch


def _misfit(table: CalibrationTable, reaches: dict[str, Reach]) -> str:
    """Describe the tensor that fits worst, with the number of those that do not fit."""
    shares = {name: reach.share_outside for name, reach in reaches.items()}
    outside = {name: share for name, share in shares.items() if share > MAX_OUTSIDE}
    if outside:
        name = max(outside, key=lambda name: outside[name])
        known, bounds = table.ranges[name], reaches[name].bounds
        here = (
            f"{outside[name]:.0%} of '{name}' lies outside {known.minimum:.4g} to"
            f" {known.maximum:.4g}, all that calibration saw"
        )
        return (
            f"{NOT_COVERED}: {here} (here {bounds.minimum:.4g} to {bounds.maximum:.4g}); so in"
            f" {len(outside)} of {len(reaches)} tensors"
        )
    ranges = {}
    reached = {}
    for name, reach in reaches.items():
        ranges[name] = max(abs(table.ranges[name].low), abs(table.ranges[name].high))
        if reach.bounds.largest < MIN_REACHED * ranges[name]:
            reached[name] = reach.bounds.largest / ranges[name]
    if not reached:
        return ""
    name = min(reached, key=lambda name: reached[name])
    here = (
        f"'{name}' reaches {reaches[name].bounds.largest:.4g} of {ranges[name]:.4g}, which leaves"
        " most of the 8 bits unused"
    )
    return f"{NOT_COVERED}: {here}; so in {len(reached)} of {len(reaches)} tensors"
