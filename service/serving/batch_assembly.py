"""Several requests as one batch: the shapes of the joined inputs, their rows side by side, and each
request's own rows of the outputs.

One copy in and one copy out: `fill` writes where the worker reads, `cut` copies out of what the
worker wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.core import Tensors, TensorSpec, dtype_of
from pipeline.errors import InternalError
from service.serving.batching import Kind
from service.serving.request_shapes import MAX_KNOWN, Axes, Fit
from service.serving.shared_memory import ALIGNMENT

Array = NDArray[np.generic]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a batch."""

    inputs: Tensors
    fit: Fit


@dataclass(frozen=True, slots=True)
class Joined:
    """A batch before it runs."""

    parts: Sequence[Part]
    size: int  # rows, with padding
    shapes: tuple[Shape, ...]  # of the inputs, in the engine's order
    lengths: tuple[int, ...]  # along the padded symbols
    values: int  # of the inputs, without padding
    whole: bool  # one request as it is: nothing is to be cut


class Rows:
    """How requests for one engine are joined, and cut apart."""

    def __init__(
        self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], axes: Axes
    ) -> None:
        self._inputs, self._outputs, self._axes = inputs, outputs, axes
        self.output_bytes = lru_cache(MAX_KNOWN)(self._output_bytes)  # by the shapes of the inputs
        self._sizes = [
            (spec, dtype_of(spec.dtype).itemsize, frozenset(spec.symbols)) for spec in outputs
        ]
        self._padded = {spec.name: _padded_axes(spec, axes) for spec in (*inputs, *outputs)}

    def join(self, kind: Kind, parts: Sequence[Part], size: int) -> Joined:
        """What runs: one request as it is, or several with `size` rows, each as long as the longest
        or as the kind says.
        """
        if not kind.sizes:
            arrays = [parts[0].inputs[spec.name] for spec in self._inputs]
            return Joined(
                parts,
                size,
                tuple(array.shape for array in arrays),
                parts[0].fit.lengths,
                sum(array.size for array in arrays),
                True,
            )
        lengths = kind.lengths or tuple(
            max(each) for each in zip(*(part.fit.lengths for part in parts), strict=True)
        )
        shapes, values = [], 0
        for spec in self._inputs:
            shape, axis = list(parts[0].inputs[spec.name].shape), self._axes.batch.get(spec.name)
            values += (
                parts[0].inputs[spec.name].size
                if axis is None
                else sum(part.inputs[spec.name].size for part in parts)
            )
            if axis is not None:
                shape[axis] = size
            for place, number in self._padded[spec.name]:
                shape[place] = lengths[number]
            shapes.append(tuple(shape))
        fit = parts[0].fit
        return Joined(
            parts,
            size,
            tuple(shapes),
            lengths,
            values,
            len(parts) == 1 and (fit.rows, fit.lengths) == (size, lengths),
        )

    def _output_bytes(self, shapes: tuple[Shape, ...]) -> int:
        """Room for the outputs, as far as the sizes of the inputs tell theirs."""
        pairs = zip(self._inputs, shapes, strict=True)
        sizes = {
            dim: size
            for spec, shape in pairs
            for dim, size in zip(spec.shape, shape, strict=True)
            if isinstance(dim, str)
        }
        known = [
            (spec, itemsize) for spec, itemsize, symbols in self._sizes if symbols <= sizes.keys()
        ]
        return sum(
            ALIGNMENT + math.prod(spec.resolve(sizes)) * itemsize for spec, itemsize in known
        )

    def fill(self, joined: Joined, targets: Sequence[Array]) -> None:
        """Write all rows; below them zeros, as in the proof that rows do not see each other."""
        for spec, target in zip(self._inputs, targets, strict=True):
            arrays = [part.inputs[spec.name] for part in joined.parts]
            axis = self._axes.batch.get(spec.name)
            if (
                arrays[0].shape == target.shape
            ):  # nothing to join, or not batched: the same in each request
                np.copyto(target, arrays[0])
            elif axis is not None:
                self._write(spec, arrays, joined, target, axis)
            else:
                self._write_shared(spec, arrays[0], target)

    def cut(
        self, joined: Joined, outputs: Sequence[Array], wanted: Sequence[frozenset[str] | None]
    ) -> list[dict[str, Array]]:
        """Each request's own arrays of the outputs that it wants (None: all; empty: none).
        InternalError for an output without its rows.
        """
        found: list[dict[str, Array]] = [{} for _ in joined.parts]
        for spec, array in zip(self._outputs, outputs, strict=True):
            axis = None if joined.whole else self._axes.batch.get(spec.name)
            if axis is not None and (axis >= array.ndim or array.shape[axis] != joined.size):
                message = (
                    f"output '{spec.name}' has shape {array.shape}, expected {joined.size} rows"
                    f" along axis {axis}"
                )
                raise InternalError(message, "deploy the model without batching")
            at = 0
            for part, wants, mine in zip(joined.parts, wanted, found, strict=True):
                if wants is None or spec.name in wants:
                    mine[spec.name] = (
                        array if axis is None else array[self._place(spec, part.fit, axis, at)]
                    ).copy()
                at += part.fit.rows
        return found

    def _write(
        self, spec: TensorSpec, arrays: Sequence[Array], joined: Joined, target: Array, axis: int
    ) -> None:
        for place, number in self._padded[spec.name]:
            if any(part.fit.lengths[number] != joined.lengths[number] for part in joined.parts):
                target[...] = self._axes.values[spec.name, place]
        at = 0
        for part, array in zip(joined.parts, arrays, strict=True):
            target[self._place(spec, part.fit, axis, at)] = array
            at += part.fit.rows
        if at < joined.size:
            target[(*(slice(None),) * axis, slice(at, None))] = 0

    def _write_shared(self, spec: TensorSpec, array: Array, target: Array) -> None:
        """Write an input without a batch axis: the same in each request, padded as the others are.

        All of `target` is written, for it holds what an earlier request sent.
        """
        padded = {place for place, _ in self._padded[spec.name]}
        fits = array.ndim == target.ndim
        for place, (have, room) in enumerate(zip(array.shape, target.shape, strict=False)):
            fits = fits and (have == room or (place in padded and have < room))
        if not fits:
            message = f"input '{spec.name}' has shape {array.shape}, and its place {target.shape}"
            raise InternalError(message, "deploy the model without batching")
        for place in padded:
            target[...] = self._axes.values[spec.name, place]
        target[tuple(slice(0, size) for size in array.shape)] = array

    def _place(self, spec: TensorSpec, fit: Fit, axis: int, at: int) -> tuple[slice, ...]:
        """Where a request's own values lie."""
        place = [slice(None)] * len(spec.shape)
        place[axis] = slice(at, at + fit.rows)
        for padded, number in self._padded[spec.name]:
            place[padded] = slice(0, fit.lengths[number])
        return tuple(place)


def _padded_axes(spec: TensorSpec, axes: Axes) -> tuple[tuple[int, int], ...]:
    """Axes of a tensor that are padded, with the number of their symbol."""
    return tuple(
        (place, axes.padded.index(dim))
        for place, dim in enumerate(spec.shape)
        if dim in axes.padded
    )
