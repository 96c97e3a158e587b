"""Assembly of several requests into one batch: the input shapes, the rows side by side, and each
request's own rows of the outputs.

There is one copy in and one copy out: `fill` writes to the memory that the worker reads, `cut`
copies from the memory that the worker wrote. The copy in of a tensor in a region of
shared memory is made by the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.core.shapes import TensorSpec, dtype_of
from pipeline.errors import InternalError
from service.regions import Inputs, RegionTensor
from service.registry.traffic import SymbolSizes
from service.serving.batching import Kind, Place
from service.serving.request_shapes import MAX_KNOWN, Axes, MatchedShapes
from service.serving.shared_memory import ALIGNMENT

Array = NDArray[np.generic]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One request of a batch."""

    inputs: Inputs
    shapes: MatchedShapes
    place: Place

    @property
    def end_row(self) -> int:
        return self.place.row + self.shapes.rows


@dataclass(frozen=True, slots=True)
class JoinedBatch:
    """A batch before it runs."""

    parts: Sequence[BatchPart]
    size: int  # rows, with padding
    shapes: tuple[Shape, ...]  # of the inputs, in the engine's order
    sent_shapes: tuple[Shape, ...]  # of those that clients send
    lengths: tuple[int, ...]  # along the padded symbols
    sizes: SymbolSizes  # of all symbols, without padding
    values: int  # of the inputs that clients send, without padding
    is_single: bool  # one request without padding: its outputs are not cut


class BatchAssembler:
    """Join requests for one engine, and cut the outputs apart."""

    def __init__(
        self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], axes: Axes
    ) -> None:
        self._inputs, self._outputs, self._axes = inputs, outputs, axes
        self.output_bytes = lru_cache(MAX_KNOWN)(self._output_bytes)  # by the input shapes
        self._sizes = [
            (spec, dtype_of(spec.dtype).itemsize, frozenset(spec.symbols)) for spec in outputs
        ]
        self._batch_symbols = [
            dim
            for spec in inputs
            if (axis := axes.batch.get(spec.name)) is not None
            and isinstance(dim := spec.shape[axis], str)
        ]
        self._made = axes.packing.made if axes.packing else ()
        self._padded = {spec.name: _padded_axes(spec, axes) for spec in (*inputs, *outputs)}

    def join(self, kind: Kind, parts: Sequence[BatchPart], size: int) -> JoinedBatch:
        """Describe the batch: one request unchanged, or several requests with `size` rows.

        The padded axes have the lengths of `kind`, or those of the longest request.
        """
        if not kind.sizes:
            return self._single(parts, size)
        lengths = kind.lengths or tuple(max(kind.shortest, each) for each in _longest(parts))
        first = parts[0]
        shapes = []
        for spec in self._inputs:
            axis = self._axes.batch.get(spec.name)
            shape = list(first.inputs[spec.name].shape)
            if axis is not None:
                shape[axis] = size
            for padded_axis, symbol_index in self._padded[spec.name]:
                shape[padded_axis] = lengths[symbol_index]
            shapes.append(tuple(shape))
        is_single = len(parts) == 1 and (first.shapes.rows, first.shapes.lengths) == (size, lengths)
        sizes = self._sizes_of(parts)
        sent = self._sent(shapes)
        return JoinedBatch(
            parts, size, tuple(shapes), sent, lengths, sizes, self._values(parts), is_single
        )

    def _values(self, parts: Sequence[BatchPart]) -> int:
        """Count the values that clients sent. An input without a batch axis counts once."""
        values = 0
        for spec in self._inputs:
            if spec.name not in self._made:
                owners = parts if self._axes.batch.get(spec.name) is not None else parts[:1]
                values += sum(part.inputs[spec.name].size for part in owners)
        return values

    def _sent(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of the inputs that clients send."""
        pairs = zip(self._inputs, shapes, strict=True)
        return tuple(shape for spec, shape in pairs if spec.name not in self._made)

    def _sizes_of(self, parts: Sequence[BatchPart]) -> SymbolSizes:
        """The sizes of all symbols without padding: the rows together, and the longest lengths."""
        first = parts[0].shapes
        if len(parts) == 1:
            return first.sizes
        rows = max(part.end_row for part in parts)
        lengths = dict(zip(self._axes.padded, _longest(parts), strict=True))
        sizes = dict(first.sizes) | dict.fromkeys(self._batch_symbols, rows) | lengths
        return tuple(sorted(sizes.items()))

    def _single(self, parts: Sequence[BatchPart], size: int) -> JoinedBatch:
        """Describe a batch of one request, unchanged."""
        arrays = [parts[0].inputs[spec.name] for spec in self._inputs]
        shapes = tuple(array.shape for array in arrays)
        first, values = parts[0].shapes, self._values(parts)
        sent = self._sent(shapes)
        return JoinedBatch(parts, size, shapes, sent, first.lengths, first.sizes, values, True)

    def _output_bytes(self, shapes: tuple[Shape, ...]) -> int:
        """Count the bytes of the outputs whose sizes follow from the sizes of the inputs."""
        sizes: dict[str, int] = {}
        for spec, shape in zip(self._inputs, shapes, strict=True):
            for dim, size in zip(spec.shape, shape, strict=True):
                if isinstance(dim, str):
                    sizes[dim] = size
        known = [
            (spec, itemsize) for spec, itemsize, symbols in self._sizes if symbols <= sizes.keys()
        ]
        return sum(
            ALIGNMENT + math.prod(spec.resolve(sizes)) * itemsize for spec, itemsize in known
        )

    def unchanged(self, batch: JoinedBatch) -> Sequence[Array | RegionTensor]:
        """The inputs of a batch that is one request without padding; empty for others."""
        if not batch.is_single:
            return ()
        return [batch.parts[0].inputs[spec.name] for spec in self._inputs]

    def fill(self, batch: JoinedBatch, targets: Sequence[Array]) -> None:
        """Write all rows, and zeros below them.

        The proof that rows do not affect each other uses zeros, too.
        """
        for spec, target in zip(self._inputs, targets, strict=True):
            arrays = [part.inputs[spec.name] for part in batch.parts]
            axis = self._axes.batch.get(spec.name)
            # One request, or an input without a batch axis: it is the same in each request.
            if arrays[0].shape == target.shape:
                _copy(arrays[0], target)
            elif axis is not None:
                self._write(spec, arrays, batch, target, axis)
            else:
                self._write_shared(spec, arrays[0], target)

    def cut(
        self,
        batch: JoinedBatch,
        outputs: Sequence[Array],
        selections: Sequence[frozenset[str] | None],
    ) -> list[dict[str, Array]]:
        """Copy each request's own rows of the outputs that it selects (None: all; empty: none).

        InternalError for an output that does not have the rows of the batch.
        """
        results: list[dict[str, Array]] = [{} for _ in batch.parts]
        for spec, array in zip(self._outputs, outputs, strict=True):
            axis = None if batch.is_single else self._axes.batch.get(spec.name)
            if axis is not None and (axis >= array.ndim or array.shape[axis] != batch.size):
                message = (
                    f"output '{spec.name}' has shape {array.shape}, expected {batch.size} rows"
                    f" along axis {axis}"
                )
                raise InternalError(message, "deploy the model without batching")
            for part, selection, result in zip(batch.parts, selections, results, strict=True):
                if selection is None or spec.name in selection:
                    own = array
                    if axis is not None:
                        own = array[self._slices(spec, part, axis)]
                    result[spec.name] = own.copy()
        return results

    def _write(
        self,
        spec: TensorSpec,
        arrays: Sequence[Array | RegionTensor],
        batch: JoinedBatch,
        target: Array,
        axis: int,
    ) -> None:
        """Write an input of all requests along its batch axis."""
        for padded_axis, index in self._padded[spec.name]:
            if any(part.shapes.lengths[index] != batch.lengths[index] for part in batch.parts):
                target[...] = self._axes.values[spec.name, padded_axis]
        for part, array in zip(batch.parts, arrays, strict=True):
            _copy(array, target[self._slices(spec, part, axis)])
        row = max(part.end_row for part in batch.parts)
        if row < batch.size:
            before_axis = (slice(None),) * axis
            target[(*before_axis, slice(row, None))] = 0
        if self._axes.packed and self._axes.packing and spec.name == self._axes.packing.mask:
            _unmask_rest(batch, target)

    def _write_shared(self, spec: TensorSpec, array: Array | RegionTensor, target: Array) -> None:
        """Write an input without a batch axis: it is the same in each request, and padded.

        All of `target` is written, because it still holds the values of an earlier request.
        """
        padded = {axis for axis, _ in self._padded[spec.name]}
        fits = len(array.shape) == target.ndim
        for axis, (size, room) in enumerate(zip(array.shape, target.shape, strict=False)):
            fits = fits and (size == room or (axis in padded and size < room))
        if not fits:
            message = (
                f"input '{spec.name}' has shape {array.shape}, its buffer has shape {target.shape}"
            )
            raise InternalError(message, "deploy the model without batching")
        for axis in padded:
            target[...] = self._axes.values[spec.name, axis]
        _copy(array, target[tuple(slice(0, size) for size in array.shape)])

    def _slices(self, spec: TensorSpec, part: BatchPart, axis: int) -> tuple[slice, ...]:
        """The index of one request's own values in a tensor of the batch."""
        slices = [slice(None)] * len(spec.shape)
        slices[axis] = slice(part.place.row, part.end_row)
        start = part.place.start
        for padded_axis, symbol_index in self._padded[spec.name]:
            slices[padded_axis] = slice(start, start + part.shapes.lengths[symbol_index])
        return tuple(slices)


def _copy(tensor: Array | RegionTensor, target: Array) -> None:
    if isinstance(tensor, RegionTensor):
        tensor.read_into(target)
    else:
        np.copyto(target, tensor)


def _longest(parts: Sequence[BatchPart]) -> tuple[int, ...]:
    """The largest length of any request, or of a row that it shares, along each padded symbol."""
    ends = ([part.place.start + length for length in part.shapes.lengths] for part in parts)
    return tuple(max(lengths) for lengths in zip(*ends, strict=True))


def _unmask_rest(batch: JoinedBatch, target: Array) -> None:
    """Let the tokens after the last sequence of a row see each other, as a sequence of their own.

    A token that sees none would have no finite attention.
    """
    ends = [0] * batch.size
    for part in batch.parts:
        for row in range(part.place.row, part.end_row):
            ends[row] = max(ends[row], part.place.start + part.shapes.lengths[0])
    for row, end in enumerate(ends):
        target[row, ..., end:, end:] = 1


def _padded_axes(spec: TensorSpec, axes: Axes) -> tuple[tuple[int, int], ...]:
    """The padded axes of a tensor, each with the index of its symbol in `axes.padded`."""
    return tuple(
        (axis, axes.padded.index(dim)) for axis, dim in enumerate(spec.shape) if dim in axes.padded
    )
