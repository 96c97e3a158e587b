"""How fast a GPU reads its memory: the roof of decoding."""

from __future__ import annotations

import torch

from pipeline.measurement.clock import monotonic

BUFFER_BYTES = 4 << 30  # no cache of a GPU holds it
READS = 3


def gpu_buffer() -> torch.Tensor:
    """Return a buffer on the GPU, of half the free memory at most."""
    free, _ = torch.cuda.mem_get_info()
    return torch.ones(min(BUFFER_BYTES, free // 2) // 4, device="cuda")


def read_rate(buffer: torch.Tensor) -> float:
    """Return the fastest rate of reading a buffer, by a sum and by a maximum, bytes per second."""
    found = list[float]()
    for reduce in (torch.sum, torch.amax):
        reduce(buffer)
        for _ in range(READS):
            found.append(buffer.numel() * buffer.element_size() / seconds_of(reduce, buffer))
    return max(found)


def read_rates(buffer: torch.Tensor, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Return the rates of the whole buffer, and of a part of each size in bytes."""
    parts = [buffer, *(buffer[: max(size // buffer.element_size(), 1)] for size in sizes)]
    return tuple(map(read_rate, parts))


def seconds_of(work: object, buffer: torch.Tensor) -> float:
    assert callable(work)
    if buffer.device.type != "cuda":
        begin = monotonic()
        work(buffer)
        return monotonic() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work(buffer)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
