"""Match the inputs of a request to an engine, and decide which requests may share its batch.

    shapes = ShapeMatcher(engine, batch, max_batch).match(inputs)

A mismatch is Unprocessable, with the expected and the actual inputs. A match is remembered by the
dtypes and shapes: further requests of the same kind cost about a microsecond.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Dim, DimRange, Profile, dtype_of, sizes_from_shapes
from pipeline.serving_inputs import BatchSpec, Packing, client_inputs
from service.errors import Unprocessable
from service.regions import Inputs, RegionTensor, array_of
from service.serving.batching import MAX_CAPTURED, Kind, Sizes, captured_sizes

CAPTURING = frozenset({"tensorrt", "tensorrt_rtx"})


def captures(engine: Engine) -> bool:
    """Return True if an engine keeps a CUDA graph per shape.

    Such an engine runs few shapes. All other shapes are padded to them.
    """
    by_torch = engine.recipe.mode is not None and engine.target.compute_capability is not None
    return engine.target.backend in CAPTURING or by_torch


MAX_KNOWN = 1024  # matches that are remembered
SEE_METADATA = "GET /models shows the inputs that the model takes"


@dataclass(frozen=True, slots=True)
class MatchedShapes:
    """The properties of one request that batching needs."""

    rows: int
    kind: Kind
    sizes: tuple[tuple[str, int], ...]  # of the symbols
    lengths: tuple[int, ...] = ()  # along the padded symbols


@dataclass(frozen=True, slots=True)
class PaddedShapes:
    """The shapes of one request without its rows."""

    lengths: tuple[int, ...]  # along the padded symbols, before padding
    buckets: tuple[int, ...]  # along the padded symbols, after padding
    sizes: Mapping[str, int]  # of all symbols except those of the batch, after padding


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes along which requests are joined and padded."""

    batch: Mapping[str, int | None]  # by input and output; empty: requests run alone
    padded: tuple[str, ...]  # symbols whose sizes may differ within a batch
    values: Mapping[tuple[str, int], float]  # the padding value of an input along an axis
    packing: Packing | None = None  # its axis is padded only if requests may share a row

    @classmethod
    def of(cls, engine: Engine, batch: BatchSpec) -> Axes:
        """Return the axes of a proved batch; without a proof there are none.

        A symbol is padded only if every input that has it declares the padding.
        """
        if not batch.proved or not any(
            batch.axes.get(spec.name) is not None for spec in engine.inputs
        ):
            return cls({}, (), {}, batch.packing)
        values = {(padding.input, padding.axis): padding.value for padding in batch.padding}
        if batch.packing and batch.packs:
            values = {
                (spec.name, axis): 0.0
                for spec in engine.inputs
                for axis, dim in enumerate(spec.shape)
                if dim == batch.packing.axis
            }
        declarations: dict[str, list[bool]] = {}
        for spec in engine.inputs:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and axis != batch.axes.get(spec.name):
                    declarations.setdefault(dim, []).append((spec.name, axis) in values)
        padded = tuple(symbol for symbol, declared in declarations.items() if all(declared))
        return cls(batch.axes, padded, values, batch.packing)

    @property
    def packed(self) -> str | None:
        """The symbol along which requests share rows; None: each has rows of its own."""
        return self.packing.axis if self.packing and self.packing.axis in self.padded else None


class ShapeMatcher:
    """Match requests to the profiles of one engine."""

    def __init__(self, engine: Engine, batch: BatchSpec, max_batch: int | None = None) -> None:
        self.axes = Axes.of(engine, batch)
        sent = client_inputs(engine.inputs, batch.packing)
        engine = self._engine = engine.model_copy(update={"inputs": sent})
        self.maximum = min(batch.maximum, max_batch or batch.maximum) if self.axes.batch else 1
        self._profiles = engine.profiles or (Profile(),)
        self._captures = captures(engine)
        self._names = tuple(spec.name for spec in engine.inputs)
        self._dtypes = {spec.name: dtype_of(spec.dtype) for spec in engine.inputs}
        valued = {name for profile in self._profiles for name in profile.values}
        shared = {
            name for name in self._names if self.axes.batch and self.axes.batch.get(name) is None
        }
        # Requests that differ in these inputs do not run together.
        self._by_content = tuple(name for name in self._names if name in valued | shared)
        self._known: dict[object, MatchedShapes] = {}
        self._kinds: dict[object, Kind] = {}
        self._padded_ranges: dict[Dim, list[DimRange]] = {
            symbol: [each.dims[symbol] for each in self._profiles if symbol in each.dims]
            for symbol in self.axes.padded
        }

    def settled(self, inputs: Inputs) -> Inputs:
        """Read the inputs in regions whose values decide how a request runs: their client could
        change these values after the match.
        """
        deciding = {
            name: tensor.read()
            for name in self._by_content
            if isinstance(tensor := inputs.get(name), RegionTensor)
        }
        return {**inputs, **deciding} if deciding else inputs

    def match(self, inputs: Inputs) -> MatchedShapes:
        """Match the names, dtypes, shapes and deciding values of the inputs to a profile.

        Unprocessable if no profile takes them.
        """
        try:
            arrays = [inputs[name] for name in self._names]
        except KeyError:
            arrays = []
        if len(arrays) != len(self._names) or len(inputs) != len(self._names):
            message = f"expected inputs {_listed(self._names)}, got {_listed(inputs)}"
            if packing := self.axes.packing:
                message += (
                    f"; the server makes {_listed(packing.made)} itself, so send each sequence in"
                    " its own length, without padding"
                )
            raise Unprocessable(message, SEE_METADATA)
        key: tuple[object, ...] = tuple([(array.dtype, array.shape) for array in arrays])
        if self._by_content:
            key += tuple([_content(array_of(inputs[name])) for name in self._by_content])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
                self._kinds.clear()
            known = self._known[key] = self._new(inputs)
        return known

    def values_at_max(self, shapes: Sequence[tuple[int, ...]], rows: int) -> int:
        """The number of input values if the padded axes of these shapes had their largest length.

        That is the largest length of all profiles. `rows` counts the rows of the requests: where
        some share a row of the engine, each would have one of its own.
        """
        total = 0
        for spec, shape in zip(self._engine.inputs, shapes, strict=True):
            sizes = list(shape)
            for axis, dim in enumerate(spec.shape):
                if axis == self.axes.batch.get(spec.name):
                    sizes[axis] = max(sizes[axis], rows)
                elif ranges := self._padded_ranges.get(dim):
                    sizes[axis] = max(each.max for each in ranges)
            total += math.prod(sizes)
        return total

    def warm_sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes of the symbols to run before the first request.

        These are all captured batch sizes, or else both ends and the usual size of each profile.
        """
        warm: list[dict[str, int]] = []
        for number, profile in enumerate(self._profiles):
            for sizes in self._warm_sizes_of(number, profile):
                if sizes not in warm and all(sizes.values()):
                    warm.append(sizes)
        return tuple(warm)

    def _warm_sizes_of(self, number: int, profile: Profile) -> list[dict[str, int]]:
        captured = self._sizes(number, profile).captured
        symbols = [symbol for symbol in self._batch_symbols() if symbol in profile.dims]
        if captured and symbols:
            usual = profile.sizes("opt")
            return [usual | dict.fromkeys(symbols, size) for size in captured]
        return [profile.sizes("min"), profile.sizes("opt"), profile.sizes("max")]

    def _new(self, inputs: Inputs) -> MatchedShapes:
        """Match a request of a new kind."""
        for name, dtype in self._dtypes.items():
            if inputs[name].dtype != dtype:
                raise Unprocessable(
                    f"input '{name}' has dtype {inputs[name].dtype}, expected {dtype}",
                    "convert it before you send it: the server does not change dtypes, because"
                    " that would change the results",
                )
        shapes = {name: inputs[name].shape for name in self._names}
        rows = self._rows(shapes)
        sizes = sizes_from_shapes(self._engine.inputs, shapes)
        if isinstance(sizes, str):
            raise Unprocessable(sizes, SEE_METADATA)
        values = self._deciding_values(inputs)
        batched = self._batched(rows, sizes, values, inputs) if rows else None
        if batched is not None:
            return batched
        if not any(profile.holds(sizes, values) for profile in self._profiles):
            numbers = (*sizes.items(), *values.items())
            got = ", ".join(f"{name} = {number}" for name, number in numbers)
            known = "; or ".join(map(Profile.in_words, self._profiles))
            raise Unprocessable(
                f"no profile of this model holds {got}; it takes {known}",
                "send shapes inside one profile, or compile the model with a profile that holds"
                " them",
            )
        return MatchedShapes(max(rows, 1), Kind(), tuple(sorted(sizes.items())))

    def _deciding_values(self, inputs: Inputs) -> dict[str, list[int]]:
        """The values of the inputs whose values decide a shape."""
        values: dict[str, list[int]] = {}
        for profile in self._profiles:
            for name in profile.values:
                if name in self._dtypes:
                    values[name] = array_of(inputs[name]).ravel().tolist()
        return values

    def _rows(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The rows of a request; 0 if it has none, or if it must run alone."""
        rows = set()
        for name, axis in self.axes.batch.items():
            if axis is not None and name in shapes and axis < len(shapes[name]):
                rows.add(shapes[name][axis])
        if len(rows) > 1:
            raise Unprocessable(
                f"the inputs have {', '.join(map(str, sorted(rows)))} rows, expected the same"
                " number in each input",
                SEE_METADATA,
            )
        return rows.pop() if rows else 0

    def _batched(
        self, rows: int, sizes: Mapping[str, int], values: Mapping[str, list[int]], inputs: Inputs
    ) -> MatchedShapes | None:
        """Match a request to the profiles that batch it; None if no profile takes its shapes."""
        shapes = self._padded_shapes(sizes)
        batches = []
        for number, profile in enumerate(self._profiles):
            if profile.holds(shapes.sizes, values):
                batch_sizes = self._sizes(number, profile)
                if rows <= batch_sizes.high:
                    batches.append(batch_sizes)
        if not batches:
            return None
        kind = self._kind(shapes, tuple(batches), inputs)
        return MatchedShapes(rows, kind, tuple(sorted(sizes.items())), shapes.lengths)

    def _padded_shapes(self, sizes: Mapping[str, int]) -> PaddedShapes:
        """The shapes of a request without its rows, padded to their buckets."""
        lengths = tuple(sizes[symbol] for symbol in self.axes.padded)
        buckets = tuple(
            self._room(symbol, sizes[symbol])
            if symbol == self.axes.packed
            else self._bucket(symbol, sizes[symbol])
            for symbol in self.axes.padded
        )
        batch_symbols = self._batch_symbols()
        padded = {symbol: size for symbol, size in sizes.items() if symbol not in batch_symbols}
        padded.update(zip(self.axes.padded, buckets, strict=True))
        return PaddedShapes(lengths, buckets, padded)

    def _kind(self, shapes: PaddedShapes, batches: tuple[Sizes, ...], inputs: Inputs) -> Kind:
        """Return the kind that all requests with these shapes, profiles and contents share."""
        key = (
            tuple(sorted(shapes.sizes.items())),
            tuple(_content(array_of(inputs[name])) for name in self._by_content),
            tuple(sizes.profile for sizes in batches),
        )
        if key not in self._kinds:
            lengths = shapes.buckets if self._captures else ()
            room = shortest = 0
            if packed := self.axes.packed:
                room = shapes.sizes[packed]
                shortest = max(self._profiles[each.profile].dims[packed].min for each in batches)
            self._kinds[key] = Kind(batches, lengths, room, shortest)
        return self._kinds[key]

    def _room(self, symbol: str, size: int) -> int:
        """The tokens that a shared row holds: the largest number of any profile.

        A sequence that is empty or longer keeps its size, which no profile holds.
        """
        most = max(each.dims[symbol].max for each in self._profiles if symbol in each.dims)
        return most if 0 < size <= most else size

    def _batch_dims(self) -> list[Dim]:
        """The dimensions of the inputs along the batch axis."""
        dims = []
        for spec in self._engine.inputs:
            axis = self.axes.batch.get(spec.name)
            if axis is not None:
                dims.append(spec.shape[axis])
        return dims

    def _batch_symbols(self) -> frozenset[str]:
        return frozenset(dim for dim in self._batch_dims() if isinstance(dim, str))

    def _batch_ranges(self, profile: Profile) -> list[DimRange]:
        """The range of sizes of each input along the batch axis."""
        ranges = []
        for dim in self._batch_dims():
            if isinstance(dim, int):
                ranges.append(DimRange(min=dim, opt=dim, max=dim))
            elif dim in profile.dims:
                ranges.append(profile.dims[dim])
        return ranges

    def _sizes(self, number: int, profile: Profile) -> Sizes:
        """The batch sizes that a profile takes: the common range of all inputs."""
        ranges = self._batch_ranges(profile)
        low = max((dim.min for dim in ranges), default=1)
        high = min((dim.max for dim in ranges), default=self.maximum)
        if not self._captures:
            return Sizes(number, low, high)
        usual = max((dim.opt for dim in ranges), default=low)
        largest = max(low, min(high, self.maximum))
        count = max(1, MAX_CAPTURED // len(self._profiles))
        return Sizes(number, low, high, captured_sizes(low, usual, largest, count))

    def _bucket(self, symbol: str, size: int) -> int:
        """The length to which a size is padded.

        It is the next opt or max of a profile, or the next power of two if that is nearer. So short
        inputs do not wait for long ones, and lengths land where the engine is tuned.
        """
        ranges = [dim for dim in self._padded_ranges[symbol] if dim.min <= size <= dim.max]
        next_power = 1 << max(size - 1, 0).bit_length()
        tuned = [bound for dim in ranges for bound in (dim.opt, dim.max) if bound >= size]
        return min(next_power, *tuned) if tuned else size


def _content(array: NDArray[np.generic]) -> bytes:
    """Identify a value by at most 64 bytes: the value itself, or its hash."""
    data = array.tobytes()
    return data if len(data) <= 64 else hashlib.sha256(data).digest()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
