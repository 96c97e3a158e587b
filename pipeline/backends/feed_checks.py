"""Checks shared by the backends: feeds against specs and profiles, the library and the host before
use.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Target
from pipeline.core.recipe import Recipe
from pipeline.core.shapes import Profile, Tensors, TensorSpec, dtype_of, sizes_from_shapes
from pipeline.errors import (
    BackendUnavailable,
    DataError,
    InternalError,
    StoreError,
    UnsupportedError,
)

SHOW_INTERFACE = "`crucible inspect` shows what an engine takes"


def installed_version(distribution: str, install: str) -> str:
    """Return the version of a package without importing it.

    BackendUnavailable, with the command that installs it, if it is missing.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailable(
            f"the package `{distribution}` is not installed", install
        ) from None


def refuse_foreign(engine: Engine, host: Target) -> None:
    """Raise BackendUnavailable, which names both hosts, unless this host can run the engine."""
    reasons = engine.target.accepts(host)
    if reasons:
        message = (
            f"this engine was built for {_description(engine.target)} and cannot run on"
            f" {_description(host)}: {'; '.join(reasons)}"
        )
        raise BackendUnavailable(
            message, "compile the model again on this host, or load the engine where it was built"
        )


def _description(target: Target) -> str:
    return f"{target.backend} {target.version} on {target.device}"


def refuse_device(engine: Engine, device: str) -> None:
    """Raise UnsupportedError unless the device is the CPU."""
    if device not in ("", "cpu"):
        raise UnsupportedError(
            f"{engine.target.backend} runs on the CPU, not on '{device}'", "leave the device out"
        )


def unreadable(engine: Engine, reason: str) -> StoreError:
    """Return the error for engine files that the library cannot open."""
    return StoreError(
        f"the engine '{engine.path}' cannot be opened: {reason}",
        "its files are damaged: compile the model again",
    )


def nothing_to_fetch() -> NoReturn:
    """Raise the error for a fetch before a run."""
    raise InternalError(
        "nothing to fetch: this session has not run since bind",
        "call bind, upload, execute, download, synchronize, then fetch",
    )


def engine_digest(model: OnnxModel, recipe: Recipe, options: BuildOptions, target: Target) -> str:
    """Return the SHA-256 of all that determines an engine.

    For backends that build the same engine from the same inputs.
    """
    parts = (
        model.digest,
        recipe.model_dump_json(),
        options.model_dump_json(),
        target.model_dump_json(),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class FeedCheck:
    """Check feeds against the specs and the profiles.

    Feeds like the last accepted ones pass at once: a fixed shape costs about a microsecond.
    """

    def __init__(self, inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]) -> None:
        self._inputs, self._profiles = inputs, profiles
        self._dtypes = {spec.name: dtype_of(spec.dtype) for spec in inputs}
        self._value_inputs = tuple(
            dict.fromkeys(
                name for profile in profiles for name in profile.values if name in self._dtypes
            )
        )
        self._accepted: Sequence[object] = ()

    def __call__(self, feeds: Tensors) -> None:
        """Raise DataError unless names, dtypes, shapes and values fit the specs and one profile.

        The message gives the expected and the actual interface.
        """
        signature: list[object] = [
            (name, type(array), getattr(array, "dtype", None), getattr(array, "shape", None))
            for name, array in feeds.items()
        ]
        # a few numbers, each of which may decide a shape
        if self._value_inputs:
            signature += [
                getattr(feeds.get(name), "tobytes", bytes)() for name in self._value_inputs
            ]
        if signature != self._accepted or not signature:
            self._check(feeds)
            self._accepted = signature

    def _check(self, feeds: Tensors) -> None:
        if set(feeds) != set(self._dtypes):
            raise DataError(
                f"expected inputs {_listed(self._dtypes)}, got {_listed(feeds)}", SHOW_INTERFACE
            )
        for name, dtype in self._dtypes.items():
            array = feeds[name]
            if not isinstance(array, np.ndarray):
                raise DataError(
                    f"input '{name}' is a {type(array).__name__}, expected a numpy array",
                    "convert it with numpy.asarray",
                )
            if array.dtype != dtype:
                raise DataError(
                    f"input '{name}' has dtype {array.dtype}, expected {dtype}",
                    f"convert it with .astype('{dtype}')",
                )
        sizes = sizes_from_shapes(self._inputs, {name: feeds[name].shape for name in self._dtypes})
        if isinstance(sizes, str):
            raise DataError(sizes, SHOW_INTERFACE)
        values = {name: feeds[name].ravel().tolist() for name in self._value_inputs}
        if self._profiles and not any(profile.holds(sizes, values) for profile in self._profiles):
            actual = [*sizes.items(), *values.items()]
            got = ", ".join(f"{name} = {number}" for name, number in actual)
            message = (
                f"no profile of this engine holds {got}; it was built for"
                f" {'; or '.join(map(Profile.in_words, self._profiles))}"
            )
            raise DataError(
                message,
                "give shapes and values inside one profile, or compile again with a profile that"
                " holds them",
            )


def input_array(
    inputs: tuple[TensorSpec, ...],
    name: str,
    shape: tuple[int, ...],
    allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] = np.empty,
) -> NDArray[Any]:
    """Allocate an array for an input. DataError if there is no such input of this shape."""
    spec = next((spec for spec in inputs if spec.name == name), None)
    if spec is None:
        names = _listed(spec.name for spec in inputs)
        raise DataError(f"there is no input '{name}', expected one of {names}", SHOW_INTERFACE)
    sizes = sizes_from_shapes((spec,), {name: shape})
    if isinstance(sizes, str):
        raise DataError(sizes, SHOW_INTERFACE)
    if min(shape, default=0) < 0:
        raise DataError(f"input '{name}' cannot have the shape {shape}", SHOW_INTERFACE)
    return allocate(shape, dtype_of(spec.dtype))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def closed(*arguments: object) -> NoReturn:
    """Raise the error for a call on a closed session or engine, in the place of its methods."""
    raise InternalError("this session or engine is closed", "load the engine again")
