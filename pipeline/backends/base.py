"""What a backend is. A module with these names satisfies `Backend`; there is no base class to
inherit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pipeline.core import (
    BuildOptions,
    Engine,
    OnnxModel,
    Precision,
    Progress,
    Recipe,
    Refusal,
    Target,
    Tensors,
    TensorSpec,
)
from pipeline.results.layer_table import LayerTable


class Timer(Protocol):
    """Times a region on the session's own clock: device events on a GPU, the monotonic clock on a
    CPU.
    """

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def elapsed_s(self) -> float:
        """Seconds between start and stop; waits for the device if it must."""
        ...


class Session(Protocol):
    """One execution context of a loaded engine. Order of calls: bind, upload, execute, download,
    synchronize, fetch.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def bind(self, feeds: Tensors) -> None:
        """Take the inputs of the next run; DataError unless names, dtypes and shapes are exactly
        what the engine takes.
        """
        ...

    def upload(self) -> None: ...
    def execute(self) -> None: ...
    def download(self) -> None: ...
    def synchronize(self) -> None: ...
    def fetch(self) -> Tensors:
        """The outputs of the last run; the caller owns the arrays."""
        ...

    def timer(self) -> Timer: ...
    def close(self) -> None: ...


def run_session(session: Session, feeds: Tensors) -> Tensors:
    """One whole run, from host arrays to host arrays; finished when it returns."""
    session.bind(feeds)
    session.upload()
    session.execute()
    session.download()
    session.synchronize()
    return session.fetch()


class Loaded(Protocol):
    """One engine in memory, weights once."""

    def session(self, profile: int = 0) -> Session: ...
    def close(self) -> None: ...


def no_layers(engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable | None:
    """For a backend that does not say yet what its engines run: `layers = no_layers`."""
    return None


class Backend(Protocol):
    """A way to turn an ONNX graph into something that runs."""

    PRECISIONS: frozenset[Precision]
    DISTRIBUTIONS: tuple[str, ...]
    """Packages whose versions are part of the cache key of what this backend builds."""

    def probe(self) -> Target:
        """This host as this backend sees it, without importing the heavy library where that can be
        avoided; raises BackendUnavailable.
        """
        ...

    def check_recipe(self, recipe: Recipe, target: Target) -> None:
        """Raise UnsupportedError for what this backend lacks, or would only pretend to run, on
        `target`; known before anything is built.
        """
        ...

    def unsupported(
        self, model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
    ) -> tuple[Refusal, ...]:
        """Every node this backend cannot run, found before any build; `plugins` are libraries with
        TensorRT plugins.
        """
        ...

    def build(
        self, model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress
    ) -> Engine: ...

    def layers(self, engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable | None:
        """Every kernel of the engine, its precision and its time on these feeds; None where this
        backend gives no evidence.
        """
        ...

    def load(self, engine: Engine, device: str = "") -> Loaded:
        """Weights into memory; raises BackendUnavailable with both sides printed if `engine.target`
        does not accept this host.
        """
        ...
