"""The wrappers of CUDA: on a double, and what needs no GPU of the real library."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.backends import cuda
from pipeline.errors import DataError, HostError, InternalError
from tests.pipeline.backends.cuda_double import CudaDouble, Error


@pytest.fixture
def rt() -> CudaDouble:
    return CudaDouble()


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ((Error.cudaSuccess,), None),
        ((Error.cudaSuccess, 7), 7),
        ((Error.cudaSuccess, 7, 8), (7, 8)),
    ],
)
def test_results_are_unpacked(rt: CudaDouble, result: tuple[object, ...], value: object) -> None:
    assert cuda.check(rt, result) == value


@pytest.mark.parametrize(
    ("error", "code", "message", "next_step"),
    [
        (2, "host.out_of_device_memory", "the GPU is out of memory", "nvidia-smi"),
        (
            35,
            "host.cuda",
            "CUDA reports cudaErrorInsufficientDriver: CUDA driver version is insufficient",
            "crucible doctor",
        ),
        (
            700,
            "host.cuda",
            "CUDA reports cudaErrorIllegalAddress: an illegal memory access",
            "start it again",
        ),
    ],
)
def test_error_codes_of_the_real_library(
    error: int, code: str, message: str, next_step: str
) -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    with pytest.raises(HostError) as failure:
        cuda.check(real, (real.cudaError_t(error), None))
    assert failure.value.code == code
    assert failure.value.message.startswith(message)
    assert next_step in failure.value.next_step


def test_out_of_memory_names_requested_and_free_memory(rt: CudaDouble) -> None:
    buffer = cuda.DeviceBuffer(rt, 64 << 20)
    with pytest.raises(cuda.OutOfDeviceMemory) as error:
        buffer.reserve(rt.total + 1)
    assert (
        error.value.message
        == "the GPU is out of memory: requested 256.0 MiB, 256.0 MiB of 256.0 MiB are free"
    )
    assert (buffer.pointer, buffer.size) == (0, 0)
    buffer.reserve(100)
    assert buffer.size == cuda.MIN_BYTES
    with pytest.raises(HostError, match=r"cannot lock 256\.0 MiB"):
        cuda.PinnedBuffer(rt, rt.total + 1)


def test_buffers_grow_and_are_freed_once(rt: CudaDouble) -> None:
    for buffer, blocks in (
        (cuda.DeviceBuffer(rt, 0), rt.device),
        (cuda.PinnedBuffer(rt, 0), rt.pinned),
    ):
        first = buffer.pointer
        buffer.reserve(200)
        assert buffer.pointer == first != 0  # large enough
        buffer.reserve(5000)
        assert list(blocks) == [buffer.pointer]
        buffer.close()
        buffer.close()
        assert (blocks, buffer.pointer) == ({}, 0)


def test_what_is_dropped_is_freed(rt: CudaDouble) -> None:
    items = [cuda.DeviceBuffer(rt, 10), cuda.PinnedBuffer(rt, 10), cuda.Stream(rt), cuda.Event(rt)]
    assert (len(rt.device), len(rt.pinned), len(rt.streams), len(rt.events)) == (1, 1, 1, 1)
    items.clear()
    assert (len(rt.device), len(rt.pinned), len(rt.streams), len(rt.events)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), "float32"), ((0, 3), "int64"), ((2, 3), "bool"), ((5,), "float16")]
)
def test_arrays_lie_in_page_locked_memory(
    rt: CudaDouble, shape: tuple[int, ...], dtype: str
) -> None:
    buffer = cuda.PinnedBuffer(rt, 64)
    array = buffer.array(shape, np.dtype(dtype))
    assert (array.shape, array.dtype.name) == (shape, dtype)
    array[...] = 1
    assert (
        np.asarray(buffer)[: array.nbytes].tobytes()
        == array.tobytes()
        == np.ones(shape, dtype).tobytes()
    )


def test_copies_wait_on_their_stream(rt: CudaDouble) -> None:
    stream, host, device = cuda.Stream(rt), cuda.PinnedBuffer(rt, 64), cuda.DeviceBuffer(rt, 64)
    back = cuda.PinnedBuffer(rt, 64)
    np.asarray(host)[:64] = np.arange(64)
    stream.copy(
        [
            (device.pointer, host.pointer, 64, stream.to_device),
            (back.pointer, device.pointer, 64, stream.to_host),
        ]
    )
    assert np.asarray(back)[1] != 1
    stream.synchronize()
    np.testing.assert_array_equal(np.asarray(back)[:64], np.arange(64))


def test_a_timer_outlives_its_stream(rt: CudaDouble) -> None:
    stream = cuda.Stream(rt)
    timer = cuda.EventTimer(stream)
    timer.start()
    timer.stop()
    stream.close()
    stream.close()
    assert 0 <= timer.elapsed_s() < 60
    with pytest.raises(InternalError, match="closed"):
        timer.start()
    timer.close()
    assert rt.events == []


def test_a_capture_runs_nothing_and_its_graph_runs_all(rt: CudaDouble) -> None:
    stream = cuda.Stream(rt)
    calls: list[int] = []
    graph = cuda.capture(stream, lambda: rt.stream_at(stream.pointer).put(lambda: calls.append(1)))
    stream.synchronize()
    assert calls == []
    graph.launch()
    graph.launch()
    stream.synchronize()
    assert calls == [1, 1]
    graph.close()
    graph.close()
    assert rt.graphs == []


def test_a_capture_that_fails_leaves_the_stream_as_it_was(rt: CudaDouble) -> None:
    stream = cuda.Stream(rt)

    def fail() -> None:
        raise HostError("this cannot be captured")

    with pytest.raises(HostError, match="cannot be captured"):
        cuda.capture(stream, fail)
    assert (rt.stream_at(stream.pointer).captured, rt.graphs) == (None, [])
    assert cuda.capture(stream, lambda: None)


@pytest.mark.parametrize(
    ("shape", "strides", "is_contiguous"),
    [
        ((2, 3), None, True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 3), (6, 2), False),
        ((2, 1, 3), (3, 99, 1), True),
        ((1, 3), (0, 1), True),
        ((0, 3), (7, 7), True),
        ((), (), True),
    ],
)
def test_contiguous(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, is_contiguous: bool
) -> None:
    assert cuda.is_contiguous(shape, strides) is is_contiguous


class OnGpu:
    """An array that says it is on a GPU, and cannot be shared."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: object) -> object:
        raise BufferError("it requires a gradient")


def test_arrays_elsewhere_than_on_a_gpu_are_left_to_others(rt: CudaDouble) -> None:
    stream = cuda.Stream(rt)

    class OnHost(OnGpu):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    for value in (np.ones(2), [1.0], OnHost(), None):
        assert cuda.device_array("x", value, stream, 0) is None


def test_an_array_that_cannot_be_shared_is_refused_by_name(rt: CudaDouble) -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(
        DataError, match="input 'x' is a OnGpu that cannot be shared: it requires a gradient"
    ):
        cuda.device_array("x", OnGpu(), cuda.Stream(rt), 0)
