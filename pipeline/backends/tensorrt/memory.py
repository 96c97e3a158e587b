"""The memory of a TensorRT session: inputs, outputs and activations, and the execution contexts
that point to them.
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
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Profile, TensorSpec, dtype_of
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
"""Our dtype names by TensorRT's names."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine in memory."""

    trt: Any
    rt: Any  # cuda.bindings.runtime
    engine: Engine
    cuda_engine: Any  # trt.ICudaEngine
    ordinal: int  # of its GPU
    # For creating contexts and sessions: TensorRT does not document it as thread-safe.
    lock: threading.Lock = field(default_factory=threading.Lock)


Named = tuple[TensorSpec, str]
"""An input or output, and its name in TensorRT."""


def tensors_of(opened: Opened) -> tuple[tuple[Named, ...], tuple[Named, ...]]:
    """Return the inputs and the outputs with their names in TensorRT.

    The parser renames an input that is an output too, and may leave out an input that nothing
    reads. StoreError if the file holds the engine of another model.
    """
    engine, cuda_engine = opened.engine, opened.cuda_engine
    names = [cuda_engine.get_tensor_name(index) for index in range(cuda_engine.num_io_tensors)]
    input_names = {name for name in names if cuda_engine.get_tensor_mode(name).name == "INPUT"}
    inputs: tuple[Named, ...] = ()
    for spec in engine.inputs:
        name = spec.name if spec.name in input_names else f"__{spec.name}"
        if name in input_names:
            inputs += ((spec, name),)
    outputs = tuple((spec, spec.name) for spec in engine.outputs)
    same_inputs = input_names == {name for _, name in inputs}
    same_outputs = {*names} - input_names == {name for _, name in outputs}
    has_more_profiles = cuda_engine.num_optimization_profiles > max(1, len(engine.profiles))
    if not same_inputs or not same_outputs or has_more_profiles:
        expected = ", ".join(spec.name for spec in (*engine.inputs, *engine.outputs))
        raise unreadable(
            engine,
            f"it is the engine of another model: expected inputs and outputs {expected}, found"
            f" {', '.join(names)}",
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


def run_error(rt: Any, messages: MutableSequence[tuple[str, str]], action: str) -> CrucibleError:
    """Return the exception for TensorRT's error messages, and clear them.

    `action` follows "TensorRT" in the message, for example "cannot run the engine".
    """
    texts = [text for severity, text in messages if severity != "WARNING"]
    messages.clear()
    for text in texts:
        if re.search(r"out ?of ?memory", text, re.IGNORECASE):
            size = re.search(r"[Rr]equested size was (\d+)", text)
            return cuda.out_of_memory(rt, int(size[1]) if size else None)
    rt.cudaGetLastError()
    reason = "; ".join(dict.fromkeys(map(sentence, texts))) or "it does not say why"
    return CudaError(
        f"TensorRT {action}: {reason}",
        "check the values of the inputs; if they are right, compile the model again",
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """One input or output: its memory on the device, and on the host for copies."""

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
    """An input that TensorRT reads on the CPU, since its values decide a shape."""

    name: str
    tensor: str
    array: NDArray[Any]  # at a fixed address


def slots_of(opened: Opened) -> tuple[tuple[Slot, ...], tuple[Slot, ...], tuple[HostInput, ...]]:
    """Return the inputs, the outputs, and the inputs that TensorRT reads on the CPU.

    Allocates nothing on the GPU yet. UnsupportedError for an output on the CPU.
    """
    inputs, outputs = tensors_of(opened)
    on_host = {
        tensor
        for _, tensor in (*inputs, *outputs)
        if opened.cuda_engine.get_tensor_location(tensor).name == "HOST"
    }
    refused = sorted(on_host & {tensor for _, tensor in outputs})
    if refused:
        raise UnsupportedError(
            f"TensorRT computes output '{refused[0]}' on the CPU",
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
    """Return the class of allocators for outputs whose size depends on values.

    TensorRT requests their memory in each run, and then reports their shapes.
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
            # The caller is C++: an exception would be lost, and the pointer 0 makes the run fail.
            except CrucibleError as error:
                self.error = error
            return self.buffer.pointer

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

    return Allocator


class Memory:
    """Buffers at fixed addresses, and the contexts of one engine on one stream.

    The contexts take turns, so that they share their activation memory.
    """

    def __init__(self, opened: Opened, stream: Stream) -> None:
        self.inputs, self.outputs, self.host_inputs = slots_of(opened)
        self.contexts: list[Any] = []  # one per profile
        self._trt, self._rt = opened.trt, opened.rt
        self._cuda_engine, self._stream = opened.cuda_engine, stream
        self._lock = opened.lock
        # of outputs that are sized by values, by TensorRT's name
        self._allocators: dict[str, Any] = {}
        self._activations = DeviceBuffer(opened.rt)
        try:
            # the largest of all profiles
            self._activations.reserve(opened.cuda_engine.device_memory_size_v2)
            self.contexts.extend(
                self._bare_context(index)
                for index in range(opened.cuda_engine.num_optimization_profiles)
            )
            self._reserve_largest(opened.engine)
        except BaseException:
            self.close()
            raise

    @property
    def activation_bytes(self) -> int:
        """The working memory that all contexts share."""
        return self._activations.size

    @property
    def sized_by_values(self) -> bool:
        """True if the size of an output is known only after a run."""
        return bool(self._allocators)

    @property
    def graph_refusal(self) -> str:
        """Why a run cannot be captured, as far as that is known before an attempt; or ""."""
        if self._allocators:
            output = next(iter(self._allocators))
            return f"the size of output '{output}' depends on values and is known only after a run"
        if self.host_inputs:
            return (
                f"TensorRT reads the values of input '{self.host_inputs[0].name}' on the CPU in"
                " every run, and a graph would repeat the first"
            )
        return ""

    def new_context(self, profile: int) -> Any:
        """Create a trt.IExecutionContext on this memory.

        OutOfDeviceMemory if there is no room for the context's own memory.
        """
        context = self._bare_context(profile)
        self._set_addresses(context)
        return context

    def place(
        self, context: Any, shapes: Mapping[str, Shape], values: Mapping[str, NDArray[Any]]
    ) -> tuple[Shape, ...]:
        """Set the input shapes and the values that TensorRT reads on the CPU.

        Return the shapes of the outputs, with -1 where only a run determines the size. DataError
        with TensorRT's message if it refuses them.
        """
        for host_input in self.host_inputs:
            array = host_input.array
            if host_input.name in values:
                np.copyto(array, values[host_input.name].reshape(array.shape))
            context.set_tensor_address(host_input.tensor, array.ctypes.data)
        for slot in self.inputs:
            if not context.set_input_shape(slot.tensor, shapes[slot.name]):
                raise self._shape_error(shapes)
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise self._shape_error(shapes) from error
        if missing:
            raise InternalError(
                f"TensorRT lacks a shape or an address of {', '.join(missing)}",
                "compile the model again",
            )
        outputs = tuple(tuple(context.get_tensor_shape(slot.tensor)) for slot in self.outputs)
        for slot, shape in zip(self.outputs, outputs, strict=True):
            if -1 in shape and slot.tensor not in self._allocators:
                self._allocators[slot.tensor] = allocator_type(self._trt)(slot.device)
                self._set_all_addresses()
        return outputs

    def enqueue(self, context: Any) -> None:
        """Put a run on the stream. OutOfDeviceMemory, or CudaError with TensorRT's message."""
        if not context.execute_async_v3(self._stream.pointer):
            for allocator in self._allocators.values():
                error, allocator.error = allocator.error, None
                if error:
                    # TensorRT's messages on the same failure; the next error would repeat them
                    messages_of(self._trt).clear()
                    raise error
            raise self._error("cannot run the engine")

    def measured(self, outputs: Sequence[Shape]) -> tuple[Shape, ...]:
        """Return the shapes of the outputs after a run, and reserve host memory for them."""
        shapes = []
        for slot, shape in zip(self.outputs, outputs, strict=True):
            allocator = self._allocators.get(slot.tensor)
            shapes.append(allocator.shape if allocator else shape)
            if slot.bytes_of(shapes[-1]) > slot.host.size:
                self._stream.synchronize()  # an earlier download may still write to it
                slot.host.reserve(slot.bytes_of(shapes[-1]))
        return tuple(shapes)

    def is_short_of(self, outputs: Sequence[Shape]) -> bool:
        """Return True if the memory of an output is too small for its shape.

        That is rare: the output is larger than at the largest shape of the profile, or its memory
        was lost in a failure.
        """
        for slot, shape in zip(self.outputs, outputs, strict=True):
            if -1 in shape:
                continue
            if slot.bytes_of(shape) > min(slot.device.size, slot.host.size):
                return True
        return False

    def grow(self, outputs: Sequence[Shape]) -> None:
        """Reserve memory for these shapes.

        Addresses change: nothing may be in flight, and captured graphs become invalid.
        """
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
        # A closed session that is still referenced must not keep the weights.
        self._cuda_engine = None

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
            # The largest values do not fit the largest shapes: memory grows on demand.
            except DataError:
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
            raise self._error("cannot create an execution context")
        if not context.set_optimization_profile_async(profile, self._stream.pointer):
            raise self._error(f"cannot take profile {profile}")
        context.set_device_memory(self._activations.pointer, self._activations.size)
        return context

    def _set_all_addresses(self) -> None:
        for context in self.contexts:
            self._set_addresses(context)

    def _set_addresses(self, context: Any) -> None:
        for slot in (*self.inputs, *self.outputs):
            allocator = self._allocators.get(slot.tensor)
            if allocator:
                context.set_output_allocator(slot.tensor, allocator)
            elif slot.device.pointer:  # 0 until the first sizes are known
                context.set_tensor_address(slot.tensor, slot.device.pointer)

    def _error(self, action: str) -> CrucibleError:
        return run_error(self._rt, messages_of(self._trt), action)

    def _shape_error(self, shapes: Mapping[str, Shape]) -> CrucibleError:
        texts = [f"{name} {shape}" for name, shape in shapes.items()]
        error = self._error(f"refuses {', '.join(texts)}")
        if not isinstance(error, CudaError):
            return error
        return DataError(error.message, "give shapes and values that fit together")
