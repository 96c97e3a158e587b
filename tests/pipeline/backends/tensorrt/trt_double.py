"""A TensorRT without a GPU, on the double of CUDA: engines compute in numpy, on the addresses that
sessions give.

It answers as 10.6 did on an H200: a run that cannot be captured returns False, and
cudaStreamEndCapture then answers 901.
"""

# ruff: noqa: N802 - TensorRT's own names

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.pipeline.backends.cuda_double import CudaDouble, Work, is_inside

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Program:
    """What an engine of the double computes, and how it was built. -1: dynamic."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype in TensorRT's words, shape
    outputs: Mapping[str, str]
    run: Callable[[Arrays], Arrays]
    shapes: Callable[
        [Mapping[str, tuple[int, ...]], Arrays], Mapping[str, tuple[int, ...]]
    ]  # -1: only `run` can tell
    host_inputs: tuple[str, ...] = ()
    host_outputs: tuple[str, ...] = ()
    profiles: int = 1
    weights_bytes: int = 1 << 20
    activation_bytes: int = 1 << 16
    capture_error: str = ""
    run_error: str = ""
    shape_error: str = ""  # of 13 rows


class Named:
    """A member of one of TensorRT's enums."""

    def __init__(self, name: str) -> None:
        self.name = name


class LoggerDouble:
    INTERNAL_ERROR, ERROR, WARNING, INFO = (
        Named(name) for name in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")
    )

    def __init__(self, severity: Named | None = None) -> None:
        pass

    def log(self, severity: Named, text: str) -> None:
        pass


class AllocatorDouble:
    def __init__(self) -> None:
        pass


class TensorRTDouble:
    """Stands for the module `tensorrt`; engine files hold the name of a program."""

    ILogger = Logger = LoggerDouble
    IOutputAllocator = AllocatorDouble

    class ExecutionContextAllocationStrategy:
        USER_MANAGED = Named("USER_MANAGED")

    def __init__(self, cuda: CudaDouble, programs: Mapping[str, Program]) -> None:
        self.cuda, self.programs = cuda, programs
        self.loaded_libraries: list[str] = []
        self.contexts = 0  # alive

    def nptype(self, dtype: Named) -> type[np.generic]:
        return NUMPY[dtype.name]

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> bool:
        return True

    def Runtime(self, logger: Any) -> RuntimeDouble:
        return RuntimeDouble(self, logger)


class RuntimeDouble:
    def __init__(self, trt: TensorRTDouble, logger: Any) -> None:
        self.trt, self.logger = trt, logger
        self.engine_host_code_allowed = False

    def get_plugin_registry(self) -> RuntimeDouble:
        return self

    def load_library(self, path: str) -> None:
        self.trt.loaded_libraries.append(path)

    def deserialize_cuda_engine(self, data: bytes) -> EngineDouble | None:
        program = self.trt.programs.get(data.decode(errors="replace"))
        if program is None:
            text = (
                "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization"
                " assertion plan->header.size == blobSize failed.)"
            )
            self.logger.log(LoggerDouble.ERROR, text)
            return None
        error, weights = self.trt.cuda.cudaMalloc(program.weights_bytes)
        if error:
            text = (
                "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (Requested size was"
                f" {program.weights_bytes} bytes.)"
            )
            self.logger.log(LoggerDouble.ERROR, text)
            return None
        return EngineDouble(self, program, weights)


class EngineDouble:
    def __init__(self, runtime: RuntimeDouble, program: Program, weights: int) -> None:
        self.runtime, self.program, self.weights = runtime, program, weights
        self.names = [*program.inputs, *program.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), program.profiles
        self.device_memory_size_v2 = program.activation_bytes

    def __del__(self) -> None:
        self.runtime.trt.cuda.cudaFree(self.weights)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Named:
        return Named("INPUT" if name in self.program.inputs else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> Named:
        return Named(
            self.program.inputs[name][0]
            if name in self.program.inputs
            else self.program.outputs[name]
        )

    def get_tensor_location(self, name: str) -> Named:
        return Named(
            "HOST" if name in (*self.program.host_inputs, *self.program.host_outputs) else "DEVICE"
        )

    def create_execution_context(self, strategy: Named | None = None) -> ContextDouble | None:
        assert strategy is None or strategy.name == "USER_MANAGED"
        error, persistent = self.runtime.trt.cuda.cudaMalloc(4096)
        if error:
            self.runtime.logger.log(
                LoggerDouble.ERROR,
                "ICudaEngine::createExecutionContext: Error Code 2: OutOfMemory (no further"
                " information)",
            )
            return None
        context = ContextDouble(self, persistent)
        if strategy is None:  # TensorRT's own memory, and the first profile
            context.memory = (
                self.runtime.trt.cuda.cudaMalloc(self.program.activation_bytes)[1],
                self.program.activation_bytes,
            )
            context.profile = 0
        return context


NUMPY: dict[str, type[np.generic]] = {
    "FLOAT": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


class ContextDouble:
    def __init__(self, engine: EngineDouble, persistent: int) -> None:
        self.engine, self.persistent = engine, persistent
        self.trt, self.program = engine.runtime.trt, engine.program
        self.trt.contexts += 1
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.allocators: dict[str, Any] = {}
        self.memory = (0, 0)
        self.profile = -1

    def __del__(self) -> None:
        self.trt.contexts -= 1
        self.trt.cuda.cudaFree(self.persistent)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_device_memory(self, pointer: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.memory = (pointer, size)

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        assert pointer
        self.addresses[name] = pointer
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile >= 0
        if self.program.shape_error and shape[:1] == (13,):
            return self._fail(self.program.shape_error)
        self.shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        missing = [
            name
            for name in self.program.inputs
            if name not in self.shapes and name not in self.program.host_inputs
        ]
        if missing:
            return missing
        try:
            self.outputs = dict(self.program.shapes(self.shapes, self._host_values()))
        except ValueError as error:
            self._fail(f"IExecutionContext::inferShapes: Error Code 7: Internal Error ({error})")
            raise RuntimeError("shape inference failed") from error
        return []

    def _host_values(self) -> Arrays:
        return {
            name: self._array(name, self.program.inputs[name][1], copy=True)
            for name in self.program.host_inputs
        }

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        return self.outputs[name]

    def _array(self, name: str, shape: tuple[int, ...], copy: bool = False) -> np.ndarray:
        dtype = NUMPY[self.engine.get_tensor_dtype(name).name]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self.program.host_inputs:
            assert is_inside(self.trt.cuda.device, self.addresses[name], size)
        array: np.ndarray[Any, Any] = (
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.addresses[name]))
            .view(dtype)
            .reshape(shape)
        )
        return array.copy() if copy else array

    def _fail(self, text: str) -> bool:
        self.engine.runtime.logger.log(LoggerDouble.ERROR, text)
        return False

    def execute_async_v3(self, pointer: int) -> bool:
        stream = self.trt.cuda.stream_at(pointer)
        program = self.program
        if program.run_error:
            return self._fail(program.run_error)
        if stream.captured is not None and (self.allocators or program.capture_error):
            stream.is_invalid = True
            return self._fail(
                "IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime"
                f" ({program.capture_error})"
            )
        shapes, addresses, host = dict(self.shapes), dict(self.addresses), self._host_values()
        alive = weakref.ref(self)

        def work() -> None:
            context = alive()
            assert context is not None, "a graph or a run outlived its context"
            assert addresses == context.addresses, (
                "addresses changed after the run was enqueued or captured"
            )
            assert is_inside(context.trt.cuda.device, *context.memory)
            ctypes.memset(context.memory[0], 0xCD, program.activation_bytes)
            for name, array in program.run(
                {name: context._array(name, shape) for name, shape in shapes.items()} | host
            ).items():
                if allocator := context.allocators.get(name):
                    context._allocate(allocator, name, array)
                context._array(name, array.shape)[...] = array

        if not self.allocators:
            stream.put(work)
            return True
        self.trt.cuda.cudaStreamSynchronize(
            stream
        )  # how large outputs are is known before this returns
        return self._run_now(work)

    def _run_now(self, work: Work) -> bool:
        try:
            work()
        except MemoryError:
            return self._fail(
                "IExecutionContext::enqueueV3: Error Code 2: OutOfMemory (Requested size was 512"
                " bytes.)"
            )
        return True

    def _allocate(self, allocator: Any, name: str, array: np.ndarray) -> None:
        self.addresses[name] = allocator.reallocate_output_async(
            name, self.addresses.get(name, 0), array.nbytes, 512, 0
        )
        if not self.addresses[name]:
            raise MemoryError
        allocator.notify_shape(name, array.shape)
