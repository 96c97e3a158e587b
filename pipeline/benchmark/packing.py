"""Prove that sequences in one row, behind a block-diagonal mask, have the answers of each alone.

    call_in_child(prove_packing, engine, packing, samples, name="packing")     -> PackingProof

The sequences are the beginnings of real samples. The engine runs several of them in one row, as
the server packs them, and then each alone. The tolerance is that of the proof of batches, by
precision. It is narrower than the limits of the gate, which the engine alone has passed: a small
leak between sequences stays within those. Indices of `postprocess` are proved by the values beside
them, as in that proof.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.benchmark.batch_invariance import TOLERANCE, relative_error
from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Profile, Tensors, dtype_of
from pipeline.postprocess import indices_with_values
from pipeline.results.report import PackingProof
from pipeline.serving_inputs import Packing, client_inputs, with_made_inputs

SHARES = ((2, 4, 8), (3, 3, 3), (1,))
"""Sequences of each row: their lengths are that of the row divided by these numbers."""

SAMPLES = sum(map(len, SHARES))


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence at its place in a row. `feeds` are all inputs of the engine, with one row."""

    feeds: Tensors
    start: int
    length: int


def prove_packing(
    engine: Engine, packing: Packing, samples: Sequence[Tensors], progress: Progress = silent
) -> PackingProof:
    """Load the engine and compare packed sequences with each alone, in a child process.

    `samples`: feeds of the engine; the first row of each is used. Raises the errors of loading and
    running.
    """
    tokens = [profile.dims[packing.axis].max for profile in engine.profiles]
    index = tokens.index(max(tokens))
    layout = _Layout(engine, packing, engine.profiles[index])
    rows = layout.rows(samples)
    tolerance, worst, failures = TOLERANCE[engine.recipe.precision], 0.0, []
    with (
        contextlib.closing(backends.load(engine)) as loaded,
        contextlib.closing(loaded.session(index)) as session,
    ):
        packed = run_session(session, layout.feeds(rows, max(tokens)))
        for number, row in enumerate(rows):
            progress(number / len(rows), f"row {number + 1} of {len(rows)}")
            for sequence in row:
                alone = run_session(session, layout.feeds_alone(sequence))
                error, output = layout.largest_error(packed, number, alone, sequence)
                worst = max(worst, error)
                if not error <= tolerance:
                    failures.append(
                        f"a sequence of {sequence.length} tokens, from token {sequence.start} of a"
                        f" row of {max(tokens)}, differs from the same sequence alone in output"
                        f" '{output}' by {error:.2g} of its largest value, at most {tolerance:g}"
                        " is allowed: sequences in one row influence each other"
                    )
    return PackingProof(
        sequences=sum(map(len, rows)),
        rows=len(rows),
        largest_error=worst if np.isfinite(worst) else None,
        reason=failures[0] if failures else "",
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows of sequences for one profile of an engine."""

    engine: Engine
    packing: Packing
    profile: Profile

    @property
    def batch_symbol(self) -> str:
        return str(self.engine.inputs[0].shape[0])

    def rows(self, samples: Sequence[Tensors]) -> list[list[_Sequence]]:
        """Return rows of sequences, as many as the profile takes in one batch."""
        batch = self.profile.dims[self.batch_symbol]
        room = self.profile.dims[self.packing.axis].max
        count = min(max(len(SHARES), batch.min), batch.max)
        rows, taken = [], 0
        for number in range(count):
            row: list[_Sequence] = []
            start = 0
            for share in SHARES[number % len(SHARES)]:
                sequence = self._cut(samples[taken % len(samples)], start, max(1, room // share))
                taken += 1
                if start + sequence.length <= room:
                    row.append(sequence)
                    start += sequence.length
            rows.append(row)
        return rows

    def _cut(self, sample: Tensors, start: int, most: int) -> _Sequence:
        """Return the first tokens of a sample, at most `most`, as a sequence."""
        feeds, length = {}, 0
        for spec in client_inputs(self.engine.inputs, self.packing):
            axis = spec.shape.index(self.packing.axis)
            length = min(most, sample[spec.name].shape[axis])
            feeds[spec.name] = sample[spec.name][:1].take(range(length), axis)
        return _Sequence(with_made_inputs(feeds, self.engine.inputs, self.packing), start, length)

    def feeds_alone(self, sequence: _Sequence) -> Tensors:
        """Return the feeds of one sequence in the smallest batch that the profile takes."""
        first = _Sequence(sequence.feeds, 0, sequence.length)
        length = max(sequence.length, self.profile.dims[self.packing.axis].min)
        smallest = max(1, self.profile.dims[self.batch_symbol].min)
        return self.feeds([[first]] * smallest, length)

    def feeds(self, rows: Sequence[Sequence[_Sequence]], length: int) -> Tensors:
        """Return rows of `length` tokens. The rest of each row is a sequence of zeros."""
        chosen = {self.packing.axis: length, self.batch_symbol: len(rows)}
        sizes = self.profile.sizes("opt") | chosen
        feeds: dict[str, NDArray[np.generic]] = {}
        for spec in self.engine.inputs:
            array = np.zeros(spec.resolve(sizes), dtype_of(spec.dtype))
            feeds[spec.name] = array
            for number, row in enumerate(rows):
                for sequence in row:
                    place = [slice(None)] * array.ndim
                    place[0] = slice(number, number + 1)
                    for axis, dim in enumerate(spec.shape):
                        if dim == self.packing.axis:
                            place[axis] = slice(sequence.start, sequence.start + sequence.length)
                    array[tuple(place)] = sequence.feeds[spec.name]
                if spec.name == self.packing.mask:
                    end = row[-1].start + row[-1].length
                    array[number, ..., end:, end:] = 1
        return feeds

    def largest_error(
        self, packed: Tensors, number: int, alone: Tensors, sequence: _Sequence
    ) -> tuple[float, str]:
        """Return the largest error of a sequence in row `number`, and the output that has it."""
        errors = []
        by_values = indices_with_values(self.engine.outputs)
        for spec in self.engine.outputs:
            if spec.name in by_values:
                continue
            axis = spec.shape.index(self.packing.axis)
            tokens = np.arange(sequence.length)
            own = packed[spec.name][number : number + 1].take(tokens + sequence.start, axis)
            expected = alone[spec.name][:1].take(tokens, axis)
            values = np.abs(expected.astype(np.float64))
            scale = float(np.max(values, where=np.isfinite(values), initial=0.0))
            errors.append((relative_error(own, expected, scale), spec.name))
        return max(errors)
