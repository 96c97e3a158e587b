"""Whether a request's inputs are what an engine takes, and with which others they may run.

    fit = Fitting(engine, batch, max_batch).fit(inputs)     Unprocessable with what was expected and
                                                            what came

What fitted once is known by its dtypes and shapes, so that all further requests of that kind cost
about a microsecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.core import Dim, DimRange, Engine, Profile, Tensors, dtype_of, sizes_from_shapes
from pipeline.serving_inputs import BatchSpec
from service.errors import Unprocessable
from service.serving.batching import MAX_CAPTURED, Kind, Sizes, captured_sizes

CAPTURING = frozenset({"tensorrt", "tensorrt_rtx"})


def captures(engine: Engine) -> bool:
    """Whether an engine keeps a CUDA graph per shape.

    Only few shapes are run then, and all others are padded to them.
    """
    by_torch = engine.recipe.mode is not None and engine.target.compute_capability is not None
    return engine.target.backend in CAPTURING or by_torch


MAX_KNOWN = 1024  # fits that are remembered
SEE_METADATA = "GET /models tells what the model takes"


@dataclass(frozen=True, slots=True)
class Fit:
    """What batching needs to know of one request."""

    rows: int
    kind: Kind
    sizes: tuple[tuple[str, int], ...]  # of the symbols
    lengths: tuple[int, ...] = ()  # along the padded symbols


@dataclass(frozen=True, slots=True)
class PaddedShapes:
    """The shapes of one request without its rows."""

    lengths: tuple[int, ...]  # along the padded symbols, as they came
    buckets: tuple[int, ...]  # along the padded symbols, as they are run
    sizes: Mapping[str, int]  # of the symbols but those of the batch, with the buckets


@dataclass(frozen=True, slots=True)
class Axes:
    """Along which axes requests are joined and padded."""

    batch: Mapping[str, int | None]  # by input and output; empty: requests run alone
    padded: tuple[str, ...]  # symbols whose sizes may differ within a batch
    values: Mapping[tuple[str, int], float]  # what fills an input along an axis

    @classmethod
    def of(cls, engine: Engine, batch: BatchSpec) -> Axes:
        """Nothing, unless the batch is proved. A symbol is padded only if the padding is declared
        wherever an input has it.
        """
        if not batch.proved or not any(
            batch.axes.get(spec.name) is not None for spec in engine.inputs
        ):
            return cls({}, (), {})
        values = {(padding.input, padding.axis): padding.value for padding in batch.padding}
        declarations: dict[str, list[bool]] = {}
        for spec in engine.inputs:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and axis != batch.axes.get(spec.name):
                    declarations.setdefault(dim, []).append((spec.name, axis) in values)
        padded = tuple(symbol for symbol, declared in declarations.items() if all(declared))
        return cls(batch.axes, padded, values)


class Fitting:
    """Checks requests for one engine."""

    def __init__(self, engine: Engine, batch: BatchSpec, max_batch: int | None = None) -> None:
        self._engine = engine
        self.axes = Axes.of(engine, batch)
        self.maximum = min(batch.maximum, max_batch or batch.maximum) if self.axes.batch else 1
        self._profiles = engine.profiles or (Profile(),)
        self._captures = captures(engine)
        self._names = tuple(spec.name for spec in engine.inputs)
        self._dtypes = {spec.name: dtype_of(spec.dtype) for spec in engine.inputs}
        valued = {name for profile in self._profiles for name in profile.values}
        shared = {
            name for name in self._names if self.axes.batch and self.axes.batch.get(name) is None
        }
        self._by_content = tuple(
            name for name in self._names if name in valued | shared
        )  # requests with other contents run apart
        self._known: dict[object, Fit] = {}
        self._kinds: dict[object, Kind] = {}

    def fit(self, inputs: Tensors) -> Fit:
        """Unprocessable unless names, dtypes, shapes and deciding values are what some profile
        takes.
        """
        try:
            arrays = [inputs[name] for name in self._names]
        except KeyError:
            arrays = []
        if len(arrays) != len(self._names) or len(inputs) != len(self._names):
            raise Unprocessable(
                f"expected inputs {_listed(self._names)}, got {_listed(inputs)}", SEE_METADATA
            )
        key: tuple[object, ...] = tuple([(array.dtype, array.shape) for array in arrays])
        if self._by_content:
            key += tuple([_content(inputs[name]) for name in self._by_content])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
                self._kinds.clear()
            known = self._known[key] = self._new(inputs)
        return known

    def warm_sizes(self) -> tuple[dict[str, int], ...]:
        """Sizes of the symbols to run before the first request: of every batch that is captured,
        else the ends and the usual size of each profile.
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

    def _new(self, inputs: Tensors) -> Fit:
        """The fit of a request of a kind that did not come before."""
        for name, dtype in self._dtypes.items():
            if inputs[name].dtype != dtype:
                raise Unprocessable(
                    f"input '{name}' has dtype {inputs[name].dtype}, expected {dtype}",
                    "convert it before it is sent: answers of another dtype would be another"
                    " model's",
                )
        shapes = {name: inputs[name].shape for name in self._names}
        rows = self._joined(shapes)
        sizes = sizes_from_shapes(self._engine.inputs, shapes)
        if isinstance(sizes, str):
            raise Unprocessable(sizes, SEE_METADATA)
        values = self._deciding_values(inputs)
        fit = self._batched(rows, sizes, values, inputs) if rows else None
        if fit is not None:
            return fit
        if not any(profile.holds(sizes, values) for profile in self._profiles):
            numbers = (*sizes.items(), *values.items())
            got = ", ".join(f"{name} = {number}" for name, number in numbers)
            known = "; or ".join(map(Profile.in_words, self._profiles))
            raise Unprocessable(
                f"no profile of this model holds {got}; it takes {known}",
                "send shapes inside one profile, or compile the model with a profile that holds"
                " them",
            )
        return Fit(max(rows, 1), Kind(), tuple(sorted(sizes.items())))

    def _deciding_values(self, inputs: Tensors) -> dict[str, list[int]]:
        """The values of the inputs whose values decide a shape."""
        values: dict[str, list[int]] = {}
        for profile in self._profiles:
            for name in profile.values:
                if name in self._dtypes:
                    values[name] = inputs[name].ravel().tolist()
        return values

    def _joined(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The rows of a request; 0 where it has none, or has to run alone."""
        rows = set()
        for name, axis in self.axes.batch.items():
            if axis is not None and name in shapes and axis < len(shapes[name]):
                rows.add(shapes[name][axis])
        if len(rows) > 1:
            raise Unprocessable(
                f"the inputs have {', '.join(map(str, sorted(rows)))} rows, expected as many in"
                " each",
                SEE_METADATA,
            )
        return rows.pop() if rows else 0

    def _batched(
        self, rows: int, sizes: Mapping[str, int], values: Mapping[str, list[int]], inputs: Tensors
    ) -> Fit | None:
        """How a request runs with others; None if no profile takes its shapes in a batch."""
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
        return Fit(rows, kind, tuple(sorted(sizes.items())), shapes.lengths)

    def _padded_shapes(self, sizes: Mapping[str, int]) -> PaddedShapes:
        """The shapes of a request without its rows, padded to their buckets."""
        lengths = tuple(sizes[symbol] for symbol in self.axes.padded)
        buckets = tuple(self._bucket(symbol, sizes[symbol]) for symbol in self.axes.padded)
        batch_symbols = self._batch_symbols()
        padded = {symbol: size for symbol, size in sizes.items() if symbol not in batch_symbols}
        padded.update(zip(self.axes.padded, buckets, strict=True))
        return PaddedShapes(lengths, buckets, padded)

    def _kind(self, shapes: PaddedShapes, batches: tuple[Sizes, ...], inputs: Tensors) -> Kind:
        """The one kind of all requests with these shapes, profiles and deciding contents."""
        key = (
            tuple(sorted(shapes.sizes.items())),
            tuple(_content(inputs[name]) for name in self._by_content),
            tuple(sizes.profile for sizes in batches),
        )
        if key not in self._kinds:
            self._kinds[key] = Kind(batches, shapes.buckets if self._captures else ())
        return self._kinds[key]

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
        """The sizes that each input may have along the batch axis."""
        ranges = []
        for dim in self._batch_dims():
            if isinstance(dim, int):
                ranges.append(DimRange(min=dim, opt=dim, max=dim))
            elif dim in profile.dims:
                ranges.append(profile.dims[dim])
        return ranges

    def _sizes(self, number: int, profile: Profile) -> Sizes:
        """The sizes of a batch that a profile takes: those that all inputs may have."""
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
        """The length to which a size is padded: the next power of two within the profiles.

        So few lengths are run, and short inputs do not wait for long ones.
        """
        dims = [profile.dims[symbol] for profile in self._profiles if symbol in profile.dims]
        limit = max((dim.max for dim in dims if dim.min <= size <= dim.max), default=size)
        next_power = 1 << max(size - 1, 0).bit_length()
        return min(next_power, limit)


def _content(array: NDArray[np.generic]) -> bytes:
    """What tells one value from another, and is not large."""
    data = array.tobytes()
    return data if len(data) <= 64 else hashlib.sha256(data).digest()


def _listed(names: Mapping[str, NDArray[np.generic]] | tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
