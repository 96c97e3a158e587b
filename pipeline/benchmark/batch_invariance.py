"""Prove that the rows of a batch do not influence each other, so that requests can share a batch.

    call_in_child(prove_batch, engine, padding, name="batch proof")     -> BatchSpec

The symbols that may count rows come from the engine's shapes. Then the engine runs, for every
profile, with the opt size of all other symbols:

    full        a full batch
    padded      its first half, filled up with zeros
    loud        its first half beside rows that are 64 times as large, or beside pixels of 0 and
                255, which would change a scale computed over the batch
    alone       single rows, in the smallest batch

A row must have the same outputs in all four, within a tolerance by precision, because kernels
differ between batch sizes. Indices of `postprocess` are proved by the values beside them, since
almost equal values may change places. The samples are generated; they may miss an effect of rare
values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline import backends
from pipeline.backends.base import Loaded, Session, run_session
from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.postprocess import indices_with_values
from pipeline.serving_inputs import BatchSpec, Padding

TOLERANCE = {
    Precision.FP32: 1e-3,
    Precision.TF32: 5e-3,
    Precision.FP16: 1e-2,
    Precision.BF16: 4e-2,
    Precision.INT8: 4e-2,
    Precision.INT4: 1e-2,
    Precision.FP8: 1e-1,
}
"""Largest difference, as a share of an output's largest value.

Kernels of different shapes round differently. In int8 that can move a value by one step of 1/127.
"""

LOUD = 64  # keeps standard normal samples far below the largest fp16
GREYS = 8  # pixels are drawn around the middle: loud ones differ from it by so many times as much
MAX_ROWS_PADDED = 4  # rows of unequal size in one padded batch

Array = NDArray[np.generic]
Feeds = dict[str, Array]
Axes = Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Rows:
    """A symbol that may count rows, and its axis in each input and output."""

    symbol: str
    axes: Axes


class _Refuted(Exception):
    """Rows influence each other. The message says how."""


def rows_of_specs(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> tuple[Rows, ...]:
    """Return the symbols that may count rows: inputs and outputs share them, once in each.

    A symbol that is the first axis of most inputs and outputs comes first.
    """
    specs = (*inputs, *outputs)
    candidates = []
    for symbol in dict.fromkeys(symbol for spec in inputs for symbol in spec.symbols):
        shared = any(symbol in spec.symbols for spec in outputs)
        if shared and all(spec.shape.count(symbol) <= 1 for spec in specs):
            candidates.append(Rows(symbol, {spec.name: _axis(spec, symbol) for spec in specs}))
    return tuple(sorted(candidates, key=lambda rows: -list(rows.axes.values()).count(0)))


def prove_batch(
    engine: Engine, padding: tuple[Padding, ...], progress: Progress = silent
) -> BatchSpec:
    """Load the engine and prove one of its symbols, in a child process.

    Raises the errors of loading and running.
    """
    candidates = rows_of_specs(engine.inputs, engine.outputs)
    if not candidates:
        names = [spec.name for spec in (*engine.inputs, *engine.outputs)]
        return BatchSpec(
            axes=dict.fromkeys(names),
            reason="inputs and outputs share no symbolic axis that could count rows",
        )
    with contextlib.closing(backends.load(engine)) as loaded:
        refuted = []
        for number, rows in enumerate(candidates):
            progress(number / len(candidates), rows.symbol)
            spec = _proved(engine, loaded, rows, padding)
            if spec.proved:
                return spec
            refuted.append(spec)
    return refuted[0]


def _proved(engine: Engine, loaded: Loaded, rows: Rows, padding: tuple[Padding, ...]) -> BatchSpec:
    """Return the result of the proof for one symbol."""
    trial = _Trial(engine, rows)
    maximum = max(profile.dims[rows.symbol].max for profile in engine.profiles)
    try:
        _at_every_profile(engine, loaded, trial.check_rows)
    except _Refuted as error:
        return BatchSpec(axes=rows.axes, reason=f"'{rows.symbol}' cannot count rows: {error}")
    if maximum == 1:
        return BatchSpec(axes=rows.axes, reason="the profiles hold one row only")
    reason = ""
    try:
        trial.check_declared(padding)
        _at_every_profile(
            engine, loaded, lambda session, profile: trial.check_padding(session, profile, padding)
        )
    except _Refuted as error:
        padding, reason = (), f"padding is off: {error}"
    return BatchSpec(
        axes=rows.axes,
        maximum=maximum,
        padding=padding,
        proved=True,
        reason=reason,
        largest_error=trial.largest_error,
    )


def _at_every_profile(
    engine: Engine, loaded: Loaded, check: Callable[[Session, Profile], None]
) -> None:
    for index, profile in enumerate(engine.profiles):
        with contextlib.closing(loaded.session(index)) as session:
            check(session, profile)


def _axis(spec: TensorSpec, symbol: str) -> int | None:
    return spec.shape.index(symbol) if symbol in spec.shape else None


# -- trying ------------------------------------------------------------------


@dataclass(slots=True)
class _Trial:
    """The proof of one symbol on one engine, with the largest error so far."""

    engine: Engine
    rows: Rows
    largest_error: float = 0.0

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.engine.recipe.precision]

    def check_rows(self, session: Session, profile: Profile) -> None:
        """Run rows in batches of every size in the profile; _Refuted if their outputs change."""
        dim = profile.dims[self.rows.symbol]
        smallest, size = max(1, dim.min), dim.max
        if size == 1:
            return
        half = size // 2
        feeds = _feeds(self.engine.inputs, profile, self.rows, size)
        others = _feeds(self.engine.inputs, profile, self.rows, size, seed=1)
        full = self._run(session, feeds, size)
        largest = {name: _largest(name, array) for name, array in full.items()}
        padded = self._run(session, self._filled(feeds, half, size), size)
        loud = self._run(session, self._loud(feeds, others, half), size)
        for row in range(half):
            case = f"row {row} in a full batch of {size} and in one that is half padding"
            self._agree(case, full, padded, row, row, largest)
            case = f"row {row} beside usual and beside large rows"
            self._agree(case, full, loud, row, row, largest)
        if smallest < size:
            for row in sorted({0, half, size - 1}):
                single = self._filled(self._cut(feeds, row, row + 1), 1, smallest)
                alone = self._run(session, single, smallest)
                case = f"row {row} in a full batch of {size} and alone"
                self._agree(case, full, alone, row, 0, largest)

    def check_declared(self, padding: Sequence[Padding]) -> None:
        """Raise _Refuted if the plan's padding does not cover every axis of the same size."""
        specs = {spec.name: spec for spec in self.engine.inputs}
        declared = {(pad.input, pad.axis) for pad in padding}
        for name, axis in declared:
            dim = specs[name].shape[axis]
            if isinstance(dim, int):
                raise _Refuted(f"axis {axis} of '{name}' is always {dim}")
            if dim == self.rows.symbol:
                raise _Refuted(f"axis {axis} of '{name}' is the one that counts rows")
            for other in self.engine.inputs:
                for other_axis, size in enumerate(other.shape):
                    if size == dim and (other.name, other_axis) not in declared:
                        raise _Refuted(
                            f"axis {other_axis} of '{other.name}' has the size of axis {axis} of"
                            f" '{name}', and no padding is declared for it"
                        )

    def check_padding(self, session: Session, profile: Profile, padding: Sequence[Padding]) -> None:
        """Compare rows of unequal size in one padded batch and alone; _Refuted if they differ."""
        specs = {spec.name: spec for spec in self.engine.inputs}
        for symbol in dict.fromkeys(str(specs[pad.input].shape[pad.axis]) for pad in padding):
            dim, count = profile.dims[symbol], profile.dims[self.rows.symbol]
            if dim.min == dim.max:
                continue
            smallest, rows = max(1, count.min), max(count.min, min(MAX_ROWS_PADDED, count.max))
            steps = np.linspace(max(1, dim.min), dim.max, rows + 1)[:rows]
            sizes = [int(size) for size in steps]
            alone = [
                _feeds(specs.values(), profile, self.rows, smallest, row, sizes={symbol: size})
                for row, size in enumerate(sizes)
            ]
            first_rows = [self._cut(feeds, 0, 1) for feeds in alone]
            together = self._joined(
                [_extended(feeds, specs, symbol, dim.max, padding) for feeds in first_rows]
            )
            outputs = self._run(session, together, rows)
            for row, size in enumerate(sizes):
                case = f"row {row} alone with '{symbol}' = {size} and padded to {dim.max}"
                expected = self._run(session, alone[row], smallest)
                largest = {name: _largest(name, array) for name, array in expected.items()}
                self._agree(case, expected, self._shortened(outputs, symbol, size), 0, row, largest)

    def _run(self, session: Session, feeds: Tensors, rows: int) -> Tensors:
        outputs = run_session(session, feeds)
        for name, array in outputs.items():
            axis = self.rows.axes[name]
            if axis is not None and array.shape[axis] != rows:
                raise _Refuted(
                    f"output '{name}' has {array.shape[axis]} rows for a batch of {rows}"
                )
        return outputs

    def _agree(
        self,
        case: str,
        left: Tensors,
        right: Tensors,
        left_row: int,
        right_row: int,
        largest: Mapping[str, float],
    ) -> None:
        """Raise _Refuted if a row of the outputs `left` differs from one of `right`."""
        by_values = indices_with_values(self.engine.outputs)
        for name in left:
            axis = self.rows.axes[name]
            a, b = left[name], right[name]
            if axis is not None:
                a, b = np.take(a, left_row, axis), np.take(b, right_row, axis)
            if a.shape != b.shape:
                raise _Refuted(f"{case} give output '{name}' of shapes {a.shape} and {b.shape}")
            if name in by_values:
                continue
            error = relative_error(a, b, largest[name])
            if not error <= self.tolerance:
                message = (
                    f"{case} differ in output '{name}' by {error:.2g} of its largest value, at most"
                    f" {self.tolerance:g} is allowed"
                )
                raise _Refuted(f"{message}: rows influence each other")
            self.largest_error = max(error, self.largest_error)

    # -- feeds of other rows -----------------------------------------------------

    def _cut(self, feeds: Tensors, start: int, end: int | None) -> Feeds:
        return _sliced(feeds, self.rows.axes, slice(start, end))

    def _filled(self, feeds: Tensors, count: int, rows: int) -> Feeds:
        """Return the first `count` rows, filled up with zeros to `rows` rows."""
        zeros = {name: np.zeros_like(array) for name, array in self._cut(feeds, 0, 1).items()}
        return self._joined([self._cut(feeds, 0, count), *[zeros] * (rows - count)])

    def _loud(self, feeds: Tensors, others: Tensors, count: int) -> Feeds:
        """Return the first `count` rows, followed by rows of `others` with large values."""
        rest = self._cut(others, count, None)
        large = {name: _loudest(array) for name, array in rest.items()}
        return self._joined([self._cut(feeds, 0, count), large])

    def _joined(self, parts: Sequence[Tensors]) -> Feeds:
        """Concatenate rows. An array without rows is that of the first part."""
        joined: Feeds = {}
        for name, array in parts[0].items():
            axis = self.rows.axes[name]
            if axis is not None:
                array = np.concatenate([part[name] for part in parts], axis)
            joined[name] = np.array(array, order="C")
        return joined

    def _shortened(self, outputs: Tensors, symbol: str, size: int) -> Feeds:
        """Return outputs without the padding of a symbol."""
        axes = {spec.name: _axis(spec, symbol) for spec in self.engine.outputs}
        return _sliced(outputs, axes, slice(0, size))


# -- samples -----------------------------------------------------------------


def _feeds(
    specs: Iterable[TensorSpec],
    profile: Profile,
    rows: Rows,
    count: int,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> Feeds:
    """Generate rows. Inputs without rows do not depend on the seed."""
    chosen = profile.sizes("opt") | {rows.symbol: count} | dict(sizes or {})
    values = profile.values_at("opt")
    feeds = {}
    for number, spec in enumerate(specs):
        own = number + 1000 * seed if rows.axes[spec.name] is not None else number
        drawn = draw_feeds((spec,), chosen, own, values, seen=True)[spec.name]
        feeds[spec.name] = _greys(drawn) if drawn.dtype == np.uint8 else drawn
    return feeds


def _greys(pixels: Array) -> Array:
    return np.asarray(128 + (np.asarray(pixels, np.int16) - 128) // GREYS).astype(np.uint8)


def _loudest(array: Array) -> Array:
    """Return large values in the place of floats and of grey pixels."""
    if array.dtype == np.uint8:
        return np.where(np.asarray(array, np.int16) < 128, 0, 255).astype(np.uint8)
    return np.multiply(array, LOUD, dtype=array.dtype) if _is_float(array) else array


def _extended(
    feeds: Tensors,
    specs: Mapping[str, TensorSpec],
    symbol: str,
    size: int,
    padding: Sequence[Padding],
) -> Feeds:
    """Pad feeds to `size` along every axis of a symbol."""
    extended = dict(feeds)
    for pad in padding:
        if specs[pad.input].shape[pad.axis] == symbol:
            array = extended[pad.input]
            widths = [(0, 0)] * array.ndim
            widths[pad.axis] = (0, size - array.shape[pad.axis])
            value = np.asarray(pad.value).astype(array.dtype)
            extended[pad.input] = np.pad(array, widths, constant_values=value)
    return extended


def _sliced(arrays: Tensors, axes: Axes, cut: slice) -> Feeds:
    """Slice each array along its axis. An array without an axis stays as it is."""
    result: Feeds = {}
    for name, array in arrays.items():
        axis = axes[name]
        result[name] = array if axis is None else array[(slice(None),) * axis + (cut,)]
    return result


def _is_float(array: Array) -> bool:
    return array.dtype.kind not in "iub"


# -- errors ------------------------------------------------------------------


def _largest(name: str, array: Array) -> float:
    """Return the largest finite magnitude; _Refuted if there is no finite value."""
    values = np.abs(array.astype(np.float64))
    finite = np.isfinite(values)
    if array.size and not finite.any():
        raise _Refuted(
            f"output '{name}' has no finite value for generated samples, so nothing can be compared"
        )
    return float(np.max(values, where=finite, initial=0.0))


def relative_error(a: Array, b: Array, scale: float) -> float:
    """Return the largest difference, relative to `scale`.

    It is infinite if a value is infinite or NaN on one side only.
    """
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(left - right))
    worst = np.inf if np.isnan(differences).any() else float(differences.max(initial=0.0))
    return worst / scale if worst and scale else worst
