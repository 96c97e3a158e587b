"""Run TensorRT engines: weights once per engine, a stream and memory per session, a CUDA graph per
shape.

    bind          copies host arrays to page-locked memory, and begins to upload large ones; keeps a
                  reference to page-locked arrays and to arrays on the GPU
    upload        copies to the device, to fixed addresses, since graphs are captured on them
    execute       first run of a shape: plain; second run: on a context of its own, then captured
                  as a graph; from the third run on: one launch of the graph
    download      copies to page-locked memory
    synchronize   waits for the stream
    fetch         returns arrays that the caller owns

A graph belongs to one context and one shape. Sessions share nothing but the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.backends import cuda
from pipeline.backends.cuda import (
    WORTH_ASKING,
    Copy,
    CudaError,
    DeviceArray,
    DeviceOutput,
    EventTimer,
    Graph,
    Stream,
)
from pipeline.backends.feed_checks import (
    FeedCheck,
    closed,
    nothing_to_fetch,
    unreadable,
)
from pipeline.backends.host_copies import LARGE, address_of, copy_memory, copy_of
from pipeline.backends.tensorrt.memory import Memory, Opened, Shape, Slot, run_error, tensors_of
from pipeline.backends.tensorrt.messages import logger_of, messages_of
from pipeline.backends.tensorrt.parser import load_plugins
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Tensors, TensorSpec, nearest_profile, sizes_from_shapes
from pipeline.errors import (
    BackendUnavailable,
    DataError,
    HostError,
    InternalError,
    PlanError,
    UnsupportedError,
)
from pipeline.results.gpu_cost import GpuCost

ALLOW_HOST_CODE = "CRUCIBLE_ALLOW_HOST_CODE"
# Shapes that a session remembers. Each captured shape holds a context with a little memory.
GRAPHS = 8
PLUGINS = "plugins"  # beside the engine file
SMALL_WEIGHTS = "one more copy of the engine fits into memory that CUDA already holds"
Key = TypeVar("Key")
Value = TypeVar("Value")
Results = Sequence[tuple[str, NDArray[Any]]]
"""Outputs by name, in page-locked memory."""


def load_engine(
    trt: Any, engine: Engine, logger: Any, device: str = "", rt: Any = None
) -> TrtLoaded:
    """Load an engine on a GPU; the device "" is cuda:0.

    StoreError for a file that TensorRT cannot read, OutOfDeviceMemory if the weights do not fit.
    """
    _refuse_host_code(engine)
    ordinal = ordinal_of(device)
    rt = rt or cuda.runtime()
    cuda.use_device(rt, ordinal)
    cuda_engine, data = _deserialized(trt, engine, logger, rt)
    opened = Opened(trt, rt, engine, cuda_engine, ordinal)
    tensors_of(opened)
    # With one changed byte in its weights an engine loads without an error and computes nonsense.
    if hashlib.sha256(data).hexdigest() != engine.digest:
        raise unreadable(engine, "its sha256 is not that of the engine that was built")
    return TrtLoaded(opened)


def _deserialized(trt: Any, engine: Engine, logger: Any, rt: Any) -> tuple[Any, bytes]:
    """Return the trt.ICudaEngine in a file, with its weights on the GPU, and the file's content."""
    messages_of(trt).clear()
    trt.init_libnvinfer_plugins(logger, "")  # TensorRT's own plugins
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = engine.recipe.version_compatible
    try:
        load_plugins(
            trt, runtime.get_plugin_registry(), sorted((engine.root / PLUGINS).glob("*.so"))
        )
        data = engine.path.read_bytes()
        cuda_engine = runtime.deserialize_cuda_engine(data)
    except PlanError as error:
        raise unreadable(engine, error.message) from error
    except OSError as error:
        raise unreadable(engine, str(error)) from error
    if cuda_engine is None:
        fault = run_error(rt, messages_of(trt), "says")
        raise unreadable(engine, fault.message) if isinstance(fault, CudaError) else fault
    return cuda_engine, data


def _bytes_of_a_copy(opened: Opened) -> int:
    """Load an engine once more, and return by how much the GPU's free memory shrinks."""
    before, _ = cuda.free_and_total_bytes(opened.rt)
    copy, _ = _deserialized(opened.trt, opened.engine, logger_of(opened.trt), opened.rt)
    after, _ = cuda.free_and_total_bytes(opened.rt)
    del copy
    return before - after


def _refuse_host_code(engine: Engine) -> None:
    """Raise BackendUnavailable for a version-compatible engine, unless the user trusts its file."""
    if engine.recipe.version_compatible and os.environ.get(ALLOW_HOST_CODE) != "1":
        message = (
            f"the engine '{engine.path}' is version-compatible: it brings its own TensorRT runtime,"
            " and loading it runs code of that file"
        )
        raise BackendUnavailable(
            message, f"set {ALLOW_HOST_CODE}=1 if you trust where the file comes from"
        )


def ordinal_of(device: str) -> int:
    """Return the number in "cuda:1"; 0 for "". UnsupportedError for any other name."""
    match = re.fullmatch(r"(cuda:(\d+))?", device)
    if match is None:
        raise UnsupportedError(
            f"tensorrt runs on an NVIDIA GPU, not on '{device}'",
            "leave the device out, or name it as cuda:0, cuda:1, ...",
        )
    return int(match[2] or 0)


class TrtLoaded:
    """One engine on the GPU. Its sessions share the weights."""

    def __init__(self, opened: Opened) -> None:
        self._opened: Opened | None = opened
        self._sessions: list[TrtSession] = []

    @property
    def cuda_engine(self) -> Any:
        """The trt.ICudaEngine."""
        return (self._opened or closed()).cuda_engine

    def session(self, profile: int | None = None, graphs: bool = True) -> TrtSession:
        """Open a session that accepts the shapes of all profiles.

        Shapes that `profile` holds run in it. Other shapes, and all with None, run in the profile
        that is tuned nearest to them. OutOfDeviceMemory if there is no room; then nothing stays
        allocated.
        """
        opened = self._opened or closed()
        count = max(1, len(opened.engine.profiles))
        if profile is not None and not 0 <= profile < count:
            raise UnsupportedError(
                f"expected a profile from 0 to {count - 1}, got {profile}",
                "`crucible inspect` shows an engine's profiles",
            )
        cuda.use_device(opened.rt, opened.ordinal)
        session = TrtSession(opened, profile, graphs)
        with opened.lock:
            open_sessions = [other for other in self._sessions if other.is_open]
            self._sessions = [*open_sessions, session]
        return session

    def close(self) -> None:
        """Close the sessions that are still open, then free the weights."""
        for session in self._sessions:
            session.close()
        self._sessions, self._opened = [], None


class Recent(Generic[Key, Value]):
    """A cache of the most recently used values, at most `limit`. The others are evicted."""

    def __init__(self, limit: int, evict: Callable[[Value], None]) -> None:
        self._limit, self._evict = limit, evict
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        self._values[key] = value
        if len(self._values) > self._limit:
            self._evict(self._values.popitem(last=False)[1])

    def values(self) -> Sequence[Value]:
        return tuple(self._values.values())

    def clear(self) -> None:
        while self._values:
            self._evict(self._values.popitem()[1])


@dataclass(slots=True)
class Bound:
    """The state of one shape, computed once."""

    key: tuple[object, ...]
    profile: int
    shapes: Mapping[str, Shape]  # by input name
    values: Mapping[str, NDArray[Any]]  # of inputs that TensorRT reads on the CPU
    outputs: Sequence[Shape]  # -1 where only a run determines the size
    targets: Sequence[tuple[str, NDArray[Any]]] = ()  # page-locked arrays for the feeds
    uploads: Sequence[Copy] = ()
    has_large: bool = False  # an input of WORTH_ASKING bytes or more
    downloads: Sequence[Copy] = ()
    results: Results = ()
    has_run: bool = False
    context: Any = None  # of the graph
    graph: Graph | None = None

    def close(self) -> None:
        if self.graph:
            self.graph.close()
        self.graph = self.context = None


class TrtSession:
    """One stream with its memory. With `graphs=False` no run is captured as a graph."""

    def __init__(self, opened: Opened, profile: int | None, graphs: bool) -> None:
        self.inputs: tuple[TensorSpec, ...] = opened.engine.inputs
        self.outputs: tuple[TensorSpec, ...] = opened.engine.outputs
        self._opened: Opened | None = opened
        self._preferred, self._capturing, self._refusal = profile, graphs, ""
        self._check = FeedCheck(opened.engine.inputs, opened.engine.profiles)
        self._names = tuple(spec.name for spec in opened.engine.inputs)
        self._known: Recent[tuple[object, ...], Bound] = Recent(GRAPHS, Bound.close)
        self._bound: Bound | None = None
        self._placed: Bound | None = None  # its shapes and values are set on the plain context
        self._uploads: Sequence[Copy] = ()
        self._unsent: Sequence[Copy] = ()  # what the next upload has to copy
        self._borrowed: Sequence[NDArray[Any]] = ()  # page-locked feeds
        self._results: Results = ()
        self._on_gpu: Mapping[str, DeviceArray] = {}
        self._in_flight = self._executed = self._downloaded = False
        self._stream = Stream(opened.rt)
        try:
            self._memory = Memory(opened, self._stream)
        except BaseException:
            self._stream.close()
            raise

    # -- one run -----------------------------------------------------------------

    def bind(self, feeds: Tensors) -> None:
        """Set the inputs of the next run.

        Host arrays are copied at once. Large arrays in page-locked memory, such as those of
        `backends.input_buffer`, are read by each `upload`, and must not change before its run is
        finished. Arrays on the GPU (DLPack, __cuda_array_interface__) are read by each `upload`,
        after the work that their own stream has enqueued so far.
        """
        opened = self._opened or closed()
        if self._in_flight:
            self.synchronize()  # the page-locked memory is in use
        opened.rt.cudaSetDevice(opened.ordinal)  # of this thread: a new thread starts on GPU 0
        on_gpu = self._device_arrays(feeds, opened.ordinal)
        arrays = feeds
        if on_gpu:
            arrays = {**feeds, **{name: array.like for name, array in on_gpu.items()}}
        self._check(arrays)
        bound = self._find(opened, arrays)
        if on_gpu or bound.has_large:
            self._take(opened, bound, arrays, on_gpu)
        else:
            for name, target in bound.targets:
                np.copyto(target, arrays[name])
            self._uploads = self._unsent = bound.uploads
            self._borrowed = ()
        self._on_gpu = on_gpu
        self._executed = self._downloaded = False

    def upload(self) -> None:
        self._require_bound()
        self._in_flight = True
        copies, self._unsent = self._unsent, self._uploads
        self._stream.copy(copies)

    def execute(self) -> None:
        """Run the engine. NaN in an output is no error.

        OutOfDeviceMemory, or CudaError with TensorRT's message.
        """
        bound = self._require_bound()
        self._in_flight = True
        if bound.graph is not None:
            bound.graph.launch()
        elif bound.has_run and self._capturing and not self.graph_refusal:
            self._run_and_capture(bound)
        else:
            self._memory.enqueue(self._plain_context(bound))
            bound.has_run = True
        self._executed = True

    def enqueue(self) -> None:
        """Run without a graph, as a profiler of layers requires."""
        bound = self._require_bound()
        self._in_flight = True
        self._memory.enqueue(self._plain_context(bound))
        self._executed = True

    def download(self) -> None:
        bound = self._require_bound()
        if not self._executed:
            nothing_to_fetch()
        self._in_flight = self._downloaded = True
        self._results, downloads = bound.results, bound.downloads
        if self._memory.sized_by_values:
            self._results, downloads = self._downloads(self._memory.measured(bound.outputs))
        self._stream.copy(downloads)

    def synchronize(self) -> None:
        self._require_open()
        self._stream.synchronize()
        self._in_flight = False

    def fetch(self) -> Tensors:
        return {name: copy_of(array) for name, array in self.lent_outputs().items()}

    def lent_outputs(self) -> Tensors:
        """Return the outputs in page-locked memory. The next run overwrites them."""
        self._require_open()
        if not self._downloaded:
            nothing_to_fetch()
        if self._in_flight:
            self.synchronize()
        return dict(self._results)

    def device_outputs(self) -> dict[str, DeviceOutput]:
        """Wait for the run, and return its outputs where they lie on the GPU, without a download.

        The next `execute` overwrites them. UnsupportedError for bfloat16, which
        __cuda_array_interface__ cannot name.
        """
        bound = self._require_bound()
        if not self._executed:
            nothing_to_fetch()
        self.synchronize()
        memory, ordinal = self._memory, (self._opened or closed()).ordinal
        shapes = memory.measured(bound.outputs) if memory.sized_by_values else bound.outputs
        for slot in memory.outputs:
            if slot.dtype.kind == "V":
                raise UnsupportedError(
                    f"output '{slot.name}' is bfloat16, which cannot be shared on the GPU",
                    "use `run`, or let the model end with a cast to float32",
                )
        return {
            slot.name: DeviceOutput(slot.device.pointer, shape, slot.dtype, ordinal)
            for slot, shape in zip(memory.outputs, shapes, strict=True)
        }

    def timer(self) -> EventTimer:
        """Return a timer of device events on this session's stream."""
        self._require_open()
        return EventTimer(self._stream)

    def gpu_memory(self) -> GpuCost:
        """Return the weights, and the activations at the largest shapes of all profiles.

        The weights are the GPU memory that one more copy of the engine takes: TensorRT itself tells
        their size only in engines for weight streaming. Other processes on the GPU must neither
        allocate nor free memory meanwhile.
        """
        opened, activations = self._opened or closed(), self._memory.activation_bytes
        try:
            weights = _bytes_of_a_copy(opened)
        except HostError as error:
            return GpuCost(activation_bytes=activations, missing={"weights": error.message})
        if weights <= 0:
            return GpuCost(activation_bytes=activations, missing={"weights": SMALL_WEIGHTS})
        return GpuCost(weights_bytes=weights, activation_bytes=activations)

    @property
    def context(self) -> Any:
        """The trt.IExecutionContext of plain runs, with the shapes of the last bind."""
        return self._plain_context(self._require_bound())

    @property
    def graphs(self) -> int:
        """The number of captured shapes."""
        return sum(bound.graph is not None for bound in self._known.values())

    @property
    def graph_refusal(self) -> str:
        """Why this engine cannot be captured and runs without graphs; "" if no reason is known."""
        return self._refusal or self._memory.graph_refusal

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        if self._opened is None:
            return
        self._opened = self._bound = self._placed = None
        with contextlib.suppress(HostError):  # an error of a run without synchronize
            self._stream.synchronize()
        self._uploads = self._unsent = self._results = self._borrowed = ()
        self._on_gpu = {}
        # graphs before their contexts, contexts before the memory they point to
        self._known.clear()
        self._memory.close()
        self._stream.close()

    # -- binding -----------------------------------------------------------------

    def _require_open(self) -> None:
        if self._opened is None:
            closed()

    def _require_bound(self) -> Bound:
        if self._bound is None:
            self._require_open()
            raise InternalError(
                "nothing is bound to this session", "call bind before the other steps of a run"
            )
        return self._bound

    def _device_arrays(self, feeds: Tensors, ordinal: int) -> dict[str, DeviceArray]:
        on_gpu: dict[str, DeviceArray] = {}
        for name, value in feeds.items():
            if type(value) is np.ndarray:
                continue
            array = cuda.device_array(name, value, self._stream, ordinal)
            if array:
                on_gpu[name] = array
        for host_input in self._memory.host_inputs:
            if host_input.name in on_gpu:
                raise DataError(
                    f"input '{host_input.name}' lies on the GPU, and TensorRT reads its values on"
                    " the CPU",
                    "give it as a numpy array",
                )
        return on_gpu

    def _find(self, opened: Opened, arrays: Tensors) -> Bound:
        key: tuple[object, ...] = tuple([arrays[name].shape for name in self._names])
        if self._memory.host_inputs:
            key += tuple(arrays[entry.name].tobytes() for entry in self._memory.host_inputs)
        if self._bound is None or self._bound.key != key:
            self._bound = self._known.get(key) or self._add(opened, key, arrays)
        return self._bound

    def _add(self, opened: Opened, key: tuple[object, ...], arrays: Tensors) -> Bound:
        """Compute the state of a shape that is new or was evicted."""
        memory = self._memory
        shapes = {name: arrays[name].shape for name in self._names}
        values = {entry.name: arrays[entry.name].copy() for entry in memory.host_inputs}
        profile = self._profile_of(opened.engine, shapes, values)
        self._bound = self._placed = None  # if anything below fails, the last run is invalid
        self._executed = self._downloaded = False
        outputs = memory.place(memory.contexts[profile], shapes, values)
        if memory.is_short_of(outputs):
            self._known.clear()
            memory.grow(outputs)
        bound = Bound(key, profile, shapes, values, outputs)
        bound.targets = tuple(
            (slot.name, slot.host.array(shapes[slot.name], slot.dtype)) for slot in memory.inputs
        )
        sizes = [(slot, slot.bytes_of(shapes[slot.name])) for slot in memory.inputs]
        bound.uploads = tuple(
            (slot.device.pointer, slot.host.pointer, size, self._stream.to_device)
            for slot, size in sizes
            if size
        )
        bound.has_large = any(size >= WORTH_ASKING for _, size in sizes)
        if not memory.sized_by_values:
            bound.results, bound.downloads = self._downloads(outputs)
        self._known.put(key, bound)
        self._placed = bound
        return bound

    def _profile_of(
        self, engine: Engine, shapes: Mapping[str, Shape], values: Mapping[str, NDArray[Any]]
    ) -> int:
        """Return the preferred profile if it holds the shapes, else the one tuned nearest."""
        sizes = sizes_from_shapes(engine.inputs, shapes)
        if len(self._memory.contexts) == 1 or isinstance(sizes, str):
            return 0
        numbers = {name: array.ravel().tolist() for name, array in values.items()}
        preferred = self._preferred
        if preferred is not None and engine.profiles[preferred].holds(sizes, numbers):
            return preferred
        nearest = nearest_profile(engine.profiles, sizes, numbers)
        assert nearest is not None  # FeedCheck made sure of it
        return nearest

    def _take(
        self,
        opened: Opened,
        bound: Bound,
        arrays: Tensors,
        on_gpu: Mapping[str, DeviceArray],
    ) -> None:
        """Take each array in the way that suits where it lies."""
        uploads: list[Copy] = []
        unsent: list[Copy] = []
        borrowed: list[NDArray[Any]] = []
        for slot, (name, target) in zip(self._memory.inputs, bound.targets, strict=True):
            array, size = arrays[name], target.nbytes
            source, kind, is_sent = slot.host.pointer, self._stream.to_device, False
            if name in on_gpu:
                source, kind = on_gpu[name].pointer, self._stream.on_device
            elif size >= WORTH_ASKING and cuda.is_page_locked(opened.rt, array):
                source = address_of(array)
                borrowed.append(array)
            elif size >= LARGE and array.flags.c_contiguous:
                self._copy_and_send(opened, slot, array)
                is_sent = True
            else:
                np.copyto(target, array)
            if size:
                uploads.append((slot.device.pointer, source, size, kind))
                unsent += () if is_sent else uploads[-1:]
        self._uploads, self._unsent, self._borrowed = uploads, unsent, borrowed

    def _copy_and_send(self, opened: Opened, slot: Slot, array: NDArray[Any]) -> None:
        """Copy a large array by several threads; each chunk travels while others are copied."""
        rt, stream = opened.rt, self._stream
        host, device, source = slot.host.pointer, slot.device.pointer, address_of(array)

        def send(offset: int, size: int) -> None:
            rt.cudaSetDevice(opened.ordinal)  # otherwise a new thread opens a context on GPU 0
            stream.copy(((device + offset, host + offset, size, stream.to_device),))

        self._in_flight = True
        copy_memory(host, source, array.nbytes, send)

    def _downloads(self, shapes: Sequence[Shape]) -> tuple[Results, Sequence[Copy]]:
        """Return page-locked arrays for outputs of these shapes, and the copies to them."""
        slots = list(zip(self._memory.outputs, shapes, strict=True))
        results = tuple((slot.name, slot.host.array(shape, slot.dtype)) for slot, shape in slots)
        sizes = [(slot, slot.bytes_of(shape)) for slot, shape in slots]
        return results, tuple(
            (slot.host.pointer, slot.device.pointer, size, self._stream.to_host)
            for slot, size in sizes
            if size
        )

    # -- plain runs and graphs ---------------------------------------------------

    def _plain_context(self, bound: Bound) -> Any:
        context = self._memory.contexts[bound.profile]
        if self._placed is not bound:
            self._placed = None
            self._memory.place(context, bound.shapes, bound.values)
            self._placed = bound
        return context

    def _run_and_capture(self, bound: Bound) -> None:
        """Run on a new context, which TensorRT prepares during this run, and then capture the run.

        If either fails, `graph_refusal` gives the reason and later runs use no graph.
        """
        memory = self._memory
        try:
            context = memory.new_context(bound.profile)
            memory.place(context, bound.shapes, bound.values)
        except HostError as error:  # no memory for one more
            self._refusal = error.message
            memory.enqueue(self._plain_context(bound))
            return
        memory.enqueue(context)
        try:
            bound.graph = cuda.capture(self._stream, partial(memory.enqueue, context))
        except HostError as error:
            self._refusal = error.message
        else:
            bound.context = context
