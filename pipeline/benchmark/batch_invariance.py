"""Prove that the rows of a batch do not influence each other, so that requests can share a batch.

    call_in_child(prove_batch, engine, padding, name="batch proof")     -> BatchSpec

The symbols that may count rows come from the engine's shapes. Then the engine runs, for every
profile, with the opt size of all other symbols:

    full        a full batch
    padded      its first half, filled up with zeros
    loud        its first half beside rows that are 64 times as large, which would change a scale
                computed over the batch
    alone       single rows, in the smallest batch

A row must have the same outputs in all four, within a tolerance by precision, because kernels
differ between batch sizes. The samples are generated; they may miss an effect of rare values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline import backends
from pipeline.backends.base import Loaded, Session, run_session
from pipeline.core import Engine, Precision, Profile, Progress, Tensors, TensorSpec, silent
from pipeline.onnx_graph.feeds import draw_feeds
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
        least, most = max(1, dim.min), dim.max
        if most == 1:
            return
        kept = most // 2
        feeds = _feeds(self.engine.inputs, profile, self.rows, most)
        whole = self._run(session, feeds, most)
        largest = {name: _largest(name, array) for name, array in whole.items()}
        padded = self._run(session, self._filled(feeds, kept, most), most)
        loud = self._run(
            session,
            self._loud(feeds, _feeds(self.engine.inputs, profile, self.rows, most, seed=1), kept),
            most,
        )
        for row in range(kept):
            self._agree(
                f"row {row} in a full batch of {most} and in one that is half padding",
                whole,
                padded,
                row,
                row,
                largest,
            )
            self._agree(
                f"row {row} beside usual and beside large rows", whole, loud, row, row, largest
            )
        if least < most:
            for row in sorted({0, kept, most - 1}):
                alone = self._run(
                    session, self._filled(self._cut(feeds, row, row + 1), 1, least), least
                )
                self._agree(
                    f"row {row} in a full batch of {most} and alone", whole, alone, row, 0, largest
                )

    def check_declared(self, padding: Sequence[Padding]) -> None:
        """Raise _Refuted if the plan's padding does not cover every axis of the same size."""
        specs = {spec.name: spec for spec in self.engine.inputs}
        declared = {(each.input, each.axis) for each in padding}
        for name, axis in declared:
            dim = specs[name].shape[axis]
            if not isinstance(dim, str) or dim == self.rows.symbol:
                raise _Refuted(
                    f"axis {axis} of '{name}' is"
                    f" {f'always {dim}' if isinstance(dim, int) else 'the one that counts rows'}"
                )
            for other in self.engine.inputs:
                left = [
                    at
                    for at, size in enumerate(other.shape)
                    if size == dim and (other.name, at) not in declared
                ]
                if left:
                    raise _Refuted(
                        f"axis {left[0]} of '{other.name}' has the size of axis {axis} of '{name}',"
                        " and no padding is declared for it"
                    )

    def check_padding(self, session: Session, profile: Profile, padding: Sequence[Padding]) -> None:
        """Compare rows of unequal size in one padded batch and alone; _Refuted if they differ."""
        specs = {spec.name: spec for spec in self.engine.inputs}
        for symbol in dict.fromkeys(str(specs[each.input].shape[each.axis]) for each in padding):
            dim, count = profile.dims[symbol], profile.dims[self.rows.symbol]
            least, most = max(1, count.min), max(count.min, min(MAX_ROWS_PADDED, count.max))
            if dim.min < dim.max:
                sizes = [
                    int(size) for size in np.linspace(max(1, dim.min), dim.max, most + 1)[:most]
                ]
                alone = [
                    _feeds(
                        specs.values(), profile, self.rows, least, seed=row, sizes={symbol: size}
                    )
                    for row, size in enumerate(sizes)
                ]
                first = [self._cut(feeds, 0, 1) for feeds in alone]
                together = self._joined(
                    [_extended(feeds, specs, symbol, dim.max, padding) for feeds in first]
                )
                got = self._run(session, together, most)
                for row, size in enumerate(sizes):
                    what = f"row {row} alone with '{symbol}' = {size} and padded to {dim.max}"
                    expected = self._run(session, alone[row], least)
                    largest = {name: _largest(name, array) for name, array in expected.items()}
                    self._agree(what, expected, self._shortened(got, symbol, size), 0, row, largest)

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
        what: str,
        left: Tensors,
        right: Tensors,
        row: int,
        other: int,
        largest: Mapping[str, float],
    ) -> None:
        for name, array in left.items():
            axis = self.rows.axes[name]
            ours, theirs = (
                (array, right[name])
                if axis is None
                else (np.take(array, row, axis), np.take(right[name], other, axis))
            )
            if ours.shape != theirs.shape:
                raise _Refuted(
                    f"{what} give output '{name}' of shapes {ours.shape} and {theirs.shape}"
                )
            error = _error(ours, theirs, largest[name])
            if not error <= self.tolerance:
                message = (
                    f"{what} differ in output '{name}' by {error:.2g} of its largest value, at most"
                    f" {self.tolerance:g} is allowed"
                )
                raise _Refuted(f"{message}: rows influence each other")
            self.largest_error = max(error, self.largest_error)

    # -- feeds of other rows -----------------------------------------------------

    def _cut(self, feeds: Tensors, start: int, end: int | None) -> Feeds:
        cut = slice(start, end)
        return {
            name: array if (axis := self.rows.axes[name]) is None else _along(array, axis, cut)
            for name, array in feeds.items()
        }

    def _filled(self, feeds: Tensors, kept: int, rows: int) -> Feeds:
        """Return the first rows, filled up with zeros to `rows` rows."""
        zeros = {name: np.zeros_like(array) for name, array in self._cut(feeds, 0, 1).items()}
        return self._joined([self._cut(feeds, 0, kept), *[zeros] * (rows - kept)])

    def _loud(self, feeds: Tensors, others: Tensors, kept: int) -> Feeds:
        """Return the first rows, followed by rows of `others` with large floats."""
        rest = self._cut(others, kept, None)
        large = {
            name: np.multiply(array, LOUD, dtype=array.dtype) if _is_float(array) else array
            for name, array in rest.items()
        }
        return self._joined([self._cut(feeds, 0, kept), large])

    def _joined(self, parts: Sequence[Tensors]) -> Feeds:
        """Concatenate rows. An array without rows is that of the first part."""
        axes = self.rows.axes
        return {
            name: np.array(
                (
                    array
                    if (axis := axes[name]) is None
                    else np.concatenate([part[name] for part in parts], axis)
                ),
                order="C",
            )
            for name, array in parts[0].items()
        }

    def _shortened(self, outputs: Tensors, symbol: str, size: int) -> Feeds:
        """Return outputs without the padding of a symbol."""
        axes = {spec.name: _axis(spec, symbol) for spec in self.engine.outputs}
        return {
            name: array if (axis := axes[name]) is None else _along(array, axis, slice(0, size))
            for name, array in outputs.items()
        }


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
        feeds[spec.name] = draw_feeds((spec,), chosen, own, values, seen=True)[spec.name]
    return feeds


def _extended(
    feeds: Tensors,
    specs: Mapping[str, TensorSpec],
    symbol: str,
    size: int,
    padding: Sequence[Padding],
) -> Feeds:
    """Pad feeds to `size` along every axis of a symbol."""
    extended = dict(feeds)
    for each in padding:
        if specs[each.input].shape[each.axis] == symbol:
            array = extended[each.input]
            added = [
                (0, size - array.shape[each.axis] if axis == each.axis else 0)
                for axis in range(array.ndim)
            ]
            extended[each.input] = np.pad(
                array, added, constant_values=np.asarray(each.value).astype(array.dtype)
            )
    return extended


def _along(array: Array, axis: int, cut: slice) -> Array:
    return array[(slice(None),) * axis + (cut,)]


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


def _error(ours: Array, theirs: Array, scale: float) -> float:
    """Return the largest difference, relative to `scale`.

    It is infinite if a value is infinite or NaN on one side only.
    """
    left, right = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(left - right))
    worst = float(apart.max(initial=0.0)) if not np.isnan(apart).any() else np.inf
    return worst / scale if worst and scale else worst
