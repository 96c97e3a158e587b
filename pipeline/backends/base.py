"""The protocols of backends, loaded engines and sessions.

A module with the names of `Backend` is a backend. There is no base class to inherit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.results.gpu_cost import GpuCost
from pipeline.results.layer_table import LayerTable

if TYPE_CHECKING:
    from pipeline.backends.cuda import DeviceOutput


class Timer(Protocol):
    """A timer on the session's own clock: device events on a GPU, the monotonic clock on a CPU."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def elapsed_s(self) -> float:
        """Return the seconds between start and stop. Waits for the device if necessary."""
        ...


class Session(Protocol):
    """One execution context of a loaded engine.

    Order of calls: bind, upload, execute, download, synchronize, fetch.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def bind(self, feeds: Tensors) -> None:
        """Set the inputs of the next run.

        DataError unless names, dtypes and shapes are those of the engine's interface.
        """
        ...

    def upload(self) -> None: ...
    def execute(self) -> None: ...
    def download(self) -> None: ...
    def synchronize(self) -> None: ...
    def fetch(self) -> Tensors:
        """Return the outputs of the last run. The caller owns the arrays."""
        ...

    def timer(self) -> Timer: ...
    def close(self) -> None: ...


@runtime_checkable
class GpuSession(Protocol):
    """A session on a GPU that knows its memory there."""

    def gpu_memory(self) -> GpuCost:
        """Return the bytes of weights and activations. May load the weights once more."""
        ...


@runtime_checkable
class SharesOutputs(Protocol):
    """A session that can leave its outputs on the GPU."""

    def device_outputs(self) -> Mapping[str, DeviceOutput]:
        """Wait for the run, and return its outputs. The next `execute` overwrites them."""
        ...


@runtime_checkable
class LendsOutputs(Protocol):
    """A session whose outputs can be read where they are in host memory."""

    def lent_outputs(self) -> Tensors:
        """Return the outputs of the last run without a copy. The next run overwrites them."""
        ...


def run_session(session: Session, feeds: Tensors) -> Tensors:
    """Run a session once, from host arrays to host arrays. The run is finished on return."""
    session.bind(feeds)
    session.upload()
    session.execute()
    session.download()
    session.synchronize()
    return session.fetch()


class Loaded(Protocol):
    """One engine in memory. Its sessions share the weights."""

    def session(self, profile: int | None = None) -> Session:
        """Open a session.

        Shapes that `profile` holds run in it; all other shapes run in the profile that is tuned
        nearest to them.
        """
        ...

    def close(self) -> None: ...


def no_layers(engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable | None:
    """Return None, for a backend that cannot list layers yet: `layers = no_layers`."""
    return None


class Backend(Protocol):
    """A way to turn an ONNX graph into something that runs."""

    PRECISIONS: frozenset[Precision]
    DISTRIBUTIONS: tuple[str, ...]
    """Packages that determine an engine: their versions are part of its cache key."""

    def probe(self) -> Target:
        """Return this host as a target. Avoids importing the heavy library where possible.

        BackendUnavailable if the backend cannot be used here.
        """
        ...

    def check_recipe(self, recipe: Recipe, target: Target) -> None:
        """Raise UnsupportedError for a recipe that this backend cannot run on `target`.

        That includes a precision that it accepts but computes in another. Checked before any build.
        """
        ...

    def unsupported(
        self, model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
    ) -> tuple[Refusal, ...]:
        """Return every node that this backend cannot run, before any build.

        `plugins` are libraries with TensorRT plugins.
        """
        ...

    def build(
        self, model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress
    ) -> Engine: ...

    def layers(self, engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable | None:
        """Return every kernel of the engine with its precision and its time on these feeds.

        None where this backend gives no evidence.
        """
        ...

    def load(self, engine: Engine, device: str = "") -> Loaded:
        """Load the weights into memory.

        BackendUnavailable, which names both hosts, if `engine.target` does not accept this one.
        """
        ...
