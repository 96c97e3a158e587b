"""The memory a TensorRT session runs in: inputs and outputs under TensorRT's names, activations,
and the contexts that point to them.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends import cuda
from pipeline.backends.cuda import CudaError, DeviceBuffer, PinnedBuffer, Stream
from pipeline.backends.feed_checks import unreadable
from pipeline.backends.tensorrt.messages import messages_of
from pipeline.backends.tensorrt.parser import sentence
from pipeline.core import Engine, Profile, TensorSpec, dtype_of
from pipeline.errors import CrucibleError, DataError, InternalError, UnsupportedError

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""Ours by TensorRT's name."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine in memory."""

    trt: Any
    rt: Any  # cuda.bindings.runtime
    engine: Engine
    cuda_engine: Any  # trt.ICudaEngine
    ordinal: int  # of the GPU it lies on
    lock: threading.Lock = field(
        default_factory=threading.Lock
    )  # for making contexts and sessions: TensorRT does not say that threads may


Named = tuple[TensorSpec, str]
"""An input or output, and TensorRT's name of it."""


def tensors_of(opened: Opened) -> tuple[tuple[Named, ...], tuple[Named, ...]]:
    """Inputs and outputs under TensorRT's names. StoreError if the file holds the engine of another
    model.

    An input that is an output too is renamed by the parser, and one that nothing reads may be left
    out.
    """
    engine, cuda_engine = opened.engine, opened.cuda_engine
    found = [cuda_engine.get_tensor_name(index) for index in range(cuda_engine.num_io_tensors)]
    taken = {tensor for tensor in found if cuda_engine.get_tensor_mode(tensor).name == "INPUT"}
    candidates = (
        (spec, tensor)
        for spec in engine.inputs
        for tensor in [spec.name if spec.name in taken else f"__{spec.name}"]
    )
    inputs = tuple((spec, tensor) for spec, tensor in candidates if tensor in taken)
    outputs = tuple((spec, spec.name) for spec in engine.outputs)
    is_ours = {*taken} == {tensor for _, tensor in inputs} and {*found} - taken == {
        tensor for _, tensor in outputs
    }
    if not is_ours or cuda_engine.num_optimization_profiles > max(1, len(engine.profiles)):
        expected = ", ".join(spec.name for spec in (*engine.inputs, *engine.outputs))
        raise unreadable(
            engine,
            f"it is the engine of another model: expected inputs and outputs {expected}, found"
            f" {', '.join(found)}",
        )
    for spec, tensor in (*inputs, *outputs):
        dtype = cuda_engine.get_tensor_dtype(tensor).name
        if DTYPES.get(dtype) != spec.dtype:
            raise unreadable(
                engine,
                f"it is the engine of another model: expected '{spec.name}' as {spec.dtype}, found"
                f" {dtype}",
            )
    return inputs, outputs


def run_error(rt: Any, messages: MutableSequence[tuple[str, str]], what: str) -> CrucibleError:
    """The exception for the errors that TensorRT has told, which are then cleared. `what` is what
    it could not do.
    """
    texts = [text for severity, text in messages if severity != "WARNING"]
    messages.clear()
    for text in texts:
        if re.search(r"out ?of ?memory", text, re.IGNORECASE):
            wanted = re.search(r"[Rr]equested size was (\d+)", text)
            return cuda.out_of_memory(rt, int(wanted[1]) if wanted else None)
    rt.cudaGetLastError()
    said = "; ".join(dict.fromkeys(map(sentence, texts))) or "it does not say why"
    return CudaError(
        f"TensorRT {what}: {said}",
        "check the values of the inputs; if they are right, compile the model again",
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """One input or output: where it lies on the device, and where it is copied from or to on the
    host.
    """

    name: str
    tensor: str  # TensorRT's name
    dtype: np.dtype[Any]
    device: DeviceBuffer
    host: PinnedBuffer

    def bytes_of(self, shape: Shape) -> int:
        return self.dtype.itemsize * math.prod(shape)

    def reserve(self, shape: Shape) -> None:
        self.device.reserve(self.bytes_of(shape))
        self.host.reserve(self.bytes_of(shape))

    def close(self) -> None:
        self.device.close()
        self.host.close()


@dataclass(frozen=True, slots=True)
class HostInput:
    """An input that TensorRT reads on the CPU, because its values decide a shape."""

    name: str
    tensor: str
    array: NDArray[Any]  # stays where it is


def slots_of(opened: Opened) -> tuple[tuple[Slot, ...], tuple[Slot, ...], tuple[HostInput, ...]]:
    """Inputs, outputs, and inputs that TensorRT reads on the CPU; nothing is allocated on the GPU
    yet.
    """
    inputs, outputs = tensors_of(opened)
    on_host = {
        tensor
        for _, tensor in (*inputs, *outputs)
        if opened.cuda_engine.get_tensor_location(tensor).name == "HOST"
    }
    if refused := sorted(on_host & {tensor for _, tensor in outputs}):
        raise UnsupportedError(
            f"output '{refused[0]}' is made on the CPU by TensorRT",
            "compile this model for onnxruntime",
        )

    def slot(spec: TensorSpec, tensor: str) -> Slot:
        return Slot(
            spec.name,
            tensor,
            dtype_of(spec.dtype),
            DeviceBuffer(opened.rt),
            PinnedBuffer(opened.rt),
        )

    return (
        tuple(slot(spec, tensor) for spec, tensor in inputs if tensor not in on_host),
        tuple(slot(spec, tensor) for spec, tensor in outputs),
        tuple(
            HostInput(spec.name, tensor, np.zeros(spec.resolve({}), dtype_of(spec.dtype)))
            for spec, tensor in inputs
            if tensor in on_host
        ),
    )


@cache
def allocator_type(trt: Any) -> Any:
    """TensorRT asks for memory in each run of an engine whose outputs are sized by values, and then
    says how large they became.
    """

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self, buffer: DeviceBuffer) -> None:
            super().__init__()
            self.buffer = buffer
            self.shape: Shape = ()
            self.error: CrucibleError | None = None

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            try:
                self.buffer.reserve(size)
            except (
                CrucibleError
            ) as error:  # C++ calls: an exception would be lost here, and 0 makes the run fail
                self.error = error
            return self.buffer.pointer

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

    return Allocator


class Memory:
    """Buffers at fixed addresses, and contexts of one engine that take turns on one stream, so that
    they share their activation memory.
    """

    def __init__(self, opened: Opened, stream: Stream) -> None:
        self.inputs, self.outputs, self.host_inputs = slots_of(opened)
        self.contexts: list[Any] = []  # one per profile
        self._trt, self._rt, self._cuda_engine, self._stream = (
            opened.trt,
            opened.rt,
            opened.cuda_engine,
            stream,
        )
        self._lock = opened.lock
        self._allocators: dict[
            str, Any
        ] = {}  # by TensorRT's name, of outputs that are sized by values
        self._activations = DeviceBuffer(opened.rt)
        try:
            self._activations.reserve(
                opened.cuda_engine.device_memory_size_v2
            )  # the largest of all profiles
            self.contexts.extend(
                self._bare_context(index)
                for index in range(opened.cuda_engine.num_optimization_profiles)
            )
            self._reserve_largest(opened.engine)
        except BaseException:
            self.close()
            raise

    @property
    def sized_by_values(self) -> bool:
        """Whether only a run tells how large an output is."""
        return bool(self._allocators)

    @property
    def graph_refusal(self) -> str:
        """Why a run cannot be captured, as far as that is known before trying."""
        if self._allocators:
            return (
                f"the size of output '{next(iter(self._allocators))}' depends on values and is"
                " known only after a run"
            )
        if self.host_inputs:
            return (
                f"TensorRT reads the values of input '{self.host_inputs[0].name}' on the CPU in"
                " every run, and a graph would repeat the first"
            )
        return ""

    def new_context(self, profile: int) -> Any:
        """A trt.IExecutionContext on this memory. OutOfDeviceMemory if its own part does not
        fit.
        """
        context = self._bare_context(profile)
        self._set_addresses(context)
        return context

    def place(
        self, context: Any, shapes: Mapping[str, Shape], values: Mapping[str, NDArray[Any]]
    ) -> tuple[Shape, ...]:
        """Set the shapes of the inputs, and values that TensorRT reads on the CPU: the shapes of
        the outputs, -1 where only a run can tell.

        DataError in TensorRT's words if it refuses them.
        """
        for each in self.host_inputs:
            if each.name in values:
                np.copyto(each.array, values[each.name].reshape(each.array.shape))
            context.set_tensor_address(each.tensor, each.array.ctypes.data)
        for slot in self.inputs:
            if not context.set_input_shape(slot.tensor, shapes[slot.name]):
                raise self._refused(shapes)
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise self._refused(shapes) from error
        if missing:
            raise InternalError(
                f"TensorRT lacks a shape or an address of {', '.join(missing)}",
                "compile the model again",
            )
        found = tuple(tuple(context.get_tensor_shape(slot.tensor)) for slot in self.outputs)
        for slot, shape in zip(self.outputs, found, strict=True):
            if -1 in shape and slot.tensor not in self._allocators:
                self._allocators[slot.tensor] = allocator_type(self._trt)(slot.device)
                self._set_all_addresses()
        return found

    def enqueue(self, context: Any) -> None:
        """Put a run on the stream. OutOfDeviceMemory, or CudaError in TensorRT's words."""
        if not context.execute_async_v3(self._stream.pointer):
            for allocator in self._allocators.values():
                error, allocator.error = allocator.error, None
                if error:
                    messages_of(
                        self._trt
                    ).clear()  # TensorRT's own of the same, which the next error would repeat
                    raise error
            raise self._error("cannot run the engine")

    def measured(self, outputs: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of the outputs after a run, with host memory for them."""
        shapes = []
        for slot, shape in zip(self.outputs, outputs, strict=True):
            allocator = self._allocators.get(slot.tensor)
            shapes.append(allocator.shape if allocator else shape)
            if slot.bytes_of(shapes[-1]) > slot.host.size:
                self._stream.synchronize()  # an earlier download may still write to it
                slot.host.reserve(slot.bytes_of(shapes[-1]))
        return tuple(shapes)

    def is_short_of(self, outputs: Sequence[Shape]) -> bool:
        """Whether an output is larger at this shape than at the largest of its profile, which is
        rare, or its memory was lost to a failure.
        """
        sizes = [
            (slot, slot.bytes_of(shape))
            for slot, shape in zip(self.outputs, outputs, strict=True)
            if -1 not in shape
        ]
        return any(size > min(slot.device.size, slot.host.size) for slot, size in sizes)

    def grow(self, outputs: Sequence[Shape]) -> None:
        """Make room. Addresses change: nothing may be in flight, and what was captured is void."""
        for slot, shape in zip(self.outputs, outputs, strict=True):
            if -1 not in shape:
                slot.reserve(shape)
        self._set_all_addresses()

    def close(self) -> None:
        self.contexts.clear()
        self._allocators.clear()
        for slot in (*self.inputs, *self.outputs):
            slot.close()
        self._activations.close()
        self._cuda_engine = (
            None  # else a closed session that someone still holds would keep the weights
        )

    def _reserve_largest(self, engine: Engine) -> None:
        for index, context in enumerate(self.contexts):
            profile = engine.profiles[index] if engine.profiles else Profile()
            sizes = profile.sizes("max")
            shapes = {spec.name: spec.resolve(sizes) for spec in engine.inputs}
            values = {name: np.array(numbers) for name, numbers in profile.values_at("max").items()}
            for slot in self.inputs:
                slot.reserve(shapes[slot.name])
            try:
                outputs: Sequence[Shape] = self.place(context, shapes, values)
            except (
                DataError
            ):  # the largest values do not fit the largest shapes: memory grows when it is needed
                outputs = ((),) * len(self.outputs)
            for slot, shape in zip(self.outputs, outputs, strict=True):
                slot.reserve(shape if -1 not in shape else ())
        self._set_all_addresses()

    def _bare_context(self, profile: int) -> Any:
        with self._lock:
            context = self._cuda_engine.create_execution_context(
                self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
            )
        if context is None:
            raise self._error("cannot make an execution context")
        if not context.set_optimization_profile_async(profile, self._stream.pointer):
            raise self._error(f"cannot take profile {profile}")
        context.set_device_memory(self._activations.pointer, self._activations.size)
        return context

    def _set_all_addresses(self) -> None:
        for context in self.contexts:
            self._set_addresses(context)

    def _set_addresses(self, context: Any) -> None:
        for slot in (*self.inputs, *self.outputs):
            if allocator := self._allocators.get(slot.tensor):
                context.set_output_allocator(slot.tensor, allocator)
            elif slot.device.pointer:  # not while the first sizes are worked out
                context.set_tensor_address(slot.tensor, slot.device.pointer)

    def _error(self, what: str) -> CrucibleError:
        return run_error(self._rt, messages_of(self._trt), what)

    def _refused(self, shapes: Mapping[str, Shape]) -> CrucibleError:
        error = self._error(
            f"refuses {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"
        )
        return (
            DataError(error.message, "give shapes and values that fit together")
            if isinstance(error, CudaError)
            else error
        )
