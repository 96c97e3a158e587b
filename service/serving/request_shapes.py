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

from pipeline.core import DimRange, Engine, Profile, Tensors, dtype_of, sizes_from_shapes
from pipeline.serving_inputs import BatchSpec
from service.errors import Unprocessable
from service.serving.batching import MOST_CAPTURED, Kind, Sizes, captured_sizes

CAPTURING = frozenset({"tensorrt", "tensorrt_rtx"})


def captures(engine: Engine) -> bool:
    """Whether an engine keeps a CUDA graph per shape.

    Only few shapes are run then, and all others are padded to them.
    """
    by_torch = engine.recipe.mode is not None and engine.target.compute_capability is not None
    return engine.target.backend in CAPTURING or by_torch


MOST_KNOWN = 1024  # fits that are remembered
SEE_METADATA = "GET /models tells what the model takes"


@dataclass(frozen=True, slots=True)
class Fit:
    """What batching needs to know of one request."""

    rows: int
    kind: Kind
    sizes: tuple[tuple[str, int], ...]  # of the symbols
    lengths: tuple[int, ...] = ()  # along the padded symbols


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
        values = {(each.input, each.axis): each.value for each in batch.padding}
        where: dict[str, list[bool]] = {}
        for spec in engine.inputs:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and axis != batch.axes.get(spec.name):
                    where.setdefault(dim, []).append((spec.name, axis) in values)
        return cls(
            batch.axes, tuple(symbol for symbol, declared in where.items() if all(declared)), values
        )


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
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
                self._kinds.clear()
            known = self._known[key] = self._new(inputs)
        return known

    def warm_sizes(self) -> tuple[dict[str, int], ...]:
        """Sizes of the symbols to run before the first request: of every batch that is captured,
        else the ends and the usual size of each profile.
        """
        found: list[dict[str, int]] = []
        for number, profile in enumerate(self._profiles):
            points = [profile.sizes(point) for point in ("min", "opt", "max")]
            usual, symbols = (
                points[1],
                [symbol for symbol in self._batch_symbols() if symbol in profile.dims],
            )
            captured = self._sizes(number, profile).captured
            for each in (
                [usual | dict.fromkeys(symbols, size) for size in captured]
                if captured and symbols
                else points
            ):
                if each not in found and all(each.values()):
                    found.append(each)
        return tuple(found)

    def _new(self, inputs: Tensors) -> Fit:
        for name, dtype in self._dtypes.items():
            if inputs[name].dtype != dtype:
                said = f"input '{name}' has dtype {inputs[name].dtype}, expected {dtype}"
                raise Unprocessable(
                    said,
                    "convert it before it is sent: answers of another dtype would be another"
                    " model's",
                )
        shapes = {name: inputs[name].shape for name in self._names}
        joined = self._joined(shapes)
        sizes = sizes_from_shapes(self._engine.inputs, shapes)
        if isinstance(sizes, str):
            raise Unprocessable(sizes, SEE_METADATA)
        values = {
            name: inputs[name].ravel().tolist()
            for profile in self._profiles
            for name in profile.values
            if name in shapes
        }
        found = tuple(sorted(sizes.items()))
        fit = self._batched(joined, sizes, values, inputs) if joined else None
        if fit is not None:
            return fit
        if not any(profile.holds(sizes, values) for profile in self._profiles):
            got = ", ".join(f"{name} = {each}" for name, each in (*sizes.items(), *values.items()))
            said = (
                f"no profile of this model holds {got}; it takes"
                f" {'; or '.join(map(Profile.in_words, self._profiles))}"
            )
            raise Unprocessable(
                said,
                "send shapes inside one profile, or compile the model with a profile that holds"
                " them",
            )
        return Fit(max(joined, 1), Kind(), found)

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
        lengths = tuple(sizes[symbol] for symbol in self.axes.padded)
        buckets = tuple(self._bucket(symbol, sizes[symbol]) for symbol in self.axes.padded)
        others = {
            symbol: size for symbol, size in sizes.items() if symbol not in self._batch_symbols()
        } | dict(zip(self.axes.padded, buckets, strict=True))
        held = [
            self._sizes(n, profile)
            for n, profile in enumerate(self._profiles)
            if profile.holds(others, values)
        ]
        held = [each for each in held if rows <= each.high]
        if not held:
            return None
        key = (
            tuple(sorted(others.items())),
            tuple(_content(inputs[name]) for name in self._by_content),
            tuple(each.profile for each in held),
        )
        kind = self._kinds.setdefault(key, Kind(tuple(held), buckets if self._captures else ()))
        return Fit(rows, kind, tuple(sorted(sizes.items())), lengths)

    def _batch_symbols(self) -> frozenset[str]:
        found = {
            spec.shape[axis]
            for spec in self._engine.inputs
            if (axis := self.axes.batch.get(spec.name)) is not None
        }
        return frozenset(dim for dim in found if isinstance(dim, str))

    def _sizes(self, number: int, profile: Profile) -> Sizes:
        """What a profile takes along the batch axis."""
        fixed = [
            spec.shape[axis]
            for spec in self._engine.inputs
            if (axis := self.axes.batch.get(spec.name)) is not None
        ]
        ranges = [DimRange(min=dim, opt=dim, max=dim) for dim in fixed if isinstance(dim, int)]
        ranges += [
            profile.dims[symbol] for symbol in self._batch_symbols() if symbol in profile.dims
        ]
        low, high = (
            max((each.min for each in ranges), default=1),
            min((each.max for each in ranges), default=self.maximum),
        )
        if not self._captures:
            return Sizes(number, low, high)
        usual = max((each.opt for each in ranges), default=low)
        most = max(1, MOST_CAPTURED // len(self._profiles))
        return Sizes(
            number, low, high, captured_sizes(low, usual, max(low, min(high, self.maximum)), most)
        )

    def _bucket(self, symbol: str, size: int) -> int:
        """The next power of two within the profiles: few lengths are run, and short inputs do not
        wait for long ones.
        """
        dims = [profile.dims[symbol] for profile in self._profiles if symbol in profile.dims]
        high = max((dim.max for dim in dims if dim.min <= size <= dim.max), default=size)
        return min(1 << max(size - 1, 0).bit_length(), high)


def _content(array: NDArray[np.generic]) -> bytes:
    """What tells one value from another, and is not large."""
    data = array.tobytes()
    return data if len(data) <= 64 else hashlib.sha256(data).digest()


def _listed(names: Mapping[str, NDArray[np.generic]] | tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
