"""This machine's own peaks: matrix products per precision and copies, beside the known rates where
there are any.

A roofline is only as good as its roof. Data sheets state clocks that a virtual CPU does not keep
and that a GPU keeps only as long as power allows; so the roof is measured, and compared. The CPU's
peaks are those of `crucible doctor --measure`, and are kept as it keeps them. On a GPU torch runs
the products (torch is fine for a ceiling): cuBLAS, the best of a few sizes, timed by events.

    python -m benchmarks peak [--gpu] [--into DIR]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.common import RESULTS, Row, argument_parser, publish
from pipeline.benchmark.cpu_peaks import (
    busy_text,
    load_peaks,
    measure_copy,
    measure_peaks,
    save_peaks,
)
from pipeline.core.recipe import Precision
from pipeline.host.environment import usable_cores
from pipeline.host.gpu import Gpu, Peaks, find_gpus, peaks, with_hardware

GPU_SIZES = (4096, 8192)
GPU_PRECISIONS = (
    Precision.FP32,
    Precision.TF32,
    Precision.FP16,
    Precision.BF16,
    Precision.INT8,
    Precision.FP8,
)
COPY_BYTES = 2**30
REPEATS = 10  # calls between two events: a launch takes microseconds, and counts for nothing here
BLOCKS = 5


def main(words: Sequence[str]) -> None:
    parser = argument_parser("peak", __doc__)
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where peak.json goes"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="the first GPU instead of the CPU, into peak_gpu.json"
    )
    arguments = parser.parse_args(words)
    if arguments.gpu:
        gpus = with_hardware(find_gpus())
        if not gpus.devices:
            sys.exit(f"no GPU to measure: {gpus.reason}")
        rows = list(gpu_rows(gpus.devices[0]))
        known = [float(row["of_known"] or 0) for row in rows if row["of_known"] is not None]
        publish(
            "peak_gpu",
            rows,
            {"no rate is over 1.05 of what is known": max(known) <= 1.05} if known else {},
            arguments.into,
        )
    else:
        busy = busy_text(os.getloadavg()[0], usable_cores())
        publish(
            "peak",
            list(cpu_rows()),
            {"the host was quiet, or these are no peaks": not busy},
            arguments.into,
        )


def row_of(device: str, what: str, unit: str, value: float, known: float | None = None) -> Row:
    """One measured rate, in units of 1e9, beside the known one."""
    share = value / known if known else None
    return {
        "device": device,
        "what": what,
        "value": value / 1e9,
        "unit": unit,
        "known": known / 1e9 if known else None,
        "of_known": share,
    }


# -- the CPU -----------------------------------------------------------------


def cpu_rows() -> Iterator[Row]:
    """Products and copies with all cores, then a copy with one."""
    found = measure_peaks()
    save_peaks(found)
    assert load_peaks() == found
    for precision, rate in found.flops_per_s.items():
        yield row_of(found.device, f"GEMM {precision}", "GFLOP/s", rate)
    yield row_of(found.device, "copy, read and written", "GB/s", found.bytes_per_s or 0.0)
    if usable_cores() > 1:
        yield row_of(found.device, "copy by one thread", "GB/s", measure_copy(1))


# -- a GPU -------------------------------------------------------------------


def gpu_rows(gpu: Gpu) -> Iterator[Row]:
    """Products in every precision that torch multiplies here, then copies on the device, to it and
    from it.
    """
    known = peaks(gpu)
    for precision in GPU_PRECISIONS:
        rates = [rate for size in GPU_SIZES if (rate := product_rate(precision, size)) is not None]
        if rates:
            yield row_of(
                gpu.name,
                f"GEMM {precision}",
                "GFLOP/s",
                max(rates),
                known.flops_per_s.get(precision),
            )
    yield from gpu_copies(gpu, known)


def product_rate(precision: Precision, size: int) -> float | None:
    """FLOP/s of one square product; None where torch or the GPU has no such product."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = precision is Precision.TF32
    try:
        multiply = product(precision, size)
        multiply()
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        print(f"no {precision} product of {size}: {str(error).partition(chr(10))[0]}")
        return None
    return 2 * size**3 / best_s(multiply)


def product(precision: Precision, size: int) -> Callable[[], object]:
    """A product of two random matrices in this precision."""
    import torch

    dtypes = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    if precision is Precision.INT8:
        left, right = ((10 * matrix).to(torch.int8) for matrix in (a, b.t().contiguous()))
        return lambda: torch._int_mm(left, right.t())
    if precision is Precision.FP8:
        one, eight = torch.ones((), device="cuda"), torch.float8_e4m3fn
        first, second = (
            a.to(eight),
            b.t().contiguous().to(eight).t(),
        )  # the second lies by columns, as cuBLASLt wants it
        return lambda: torch._scaled_mm(
            first, second, scale_a=one, scale_b=one, out_dtype=torch.float16, use_fast_accum=True
        )
    left, right = (matrix.to(dtypes.get(precision, torch.float32)) for matrix in (a, b))
    return lambda: left @ right


def gpu_copies(gpu: Gpu, known: Peaks) -> Iterator[Row]:
    import torch

    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    other, host = (
        torch.empty_like(device),
        torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True),
    )
    copies = (
        ("copy on the device, read and written", other, device, 2),
        ("copy to the device", device, host, 1),
        ("copy to the host", host, device, 1),
    )
    for what, target, source, times in copies:
        copy = partial(target.copy_, source, non_blocking=True)
        rate = times * COPY_BYTES / best_s(copy)
        yield row_of(gpu.name, what, "GB/s", rate, known.bytes_per_s if times == 2 else None)


def best_s(run: Callable[[], object]) -> float:
    """Seconds per call, in the fastest of a few blocks of calls."""
    import torch

    found: list[float] = []
    for _ in range(BLOCKS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3 / REPEATS)
    return min(found)
