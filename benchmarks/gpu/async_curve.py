"""Time per call without synchronisation against the number of calls, beside the truth; and what
synchronising by accident costs.

A launch returns as soon as it is queued, so a clock that waits for nothing measures the queueing,
until the launch queue is full (about 1,000 kernels): then each call waits for room, and the figure
nears the truth.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.host import gpu_state
from pipeline.core.progress import Progress, silent
from pipeline.execution.child_process import call_in_child
from pipeline.measurement.clock import monotonic

CALLS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
REPEATS = 5
SHAPE = (1, 3, 1920, 1080)


def async_curve() -> dict[str, Any]:
    """ResNet-18 in PyTorch eager, fp32, on one large image, in a child of its own."""
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = call_in_child(measure, name="async_curve")
    return {
        "created": created,
        "model": "resnet18",
        "shape": list(SHAPE),
        **found,
        "targets": [],
        "gpu": gpu_state(),
    }


def measure(progress: Progress = silent) -> dict[str, Any]:
    import torch

    from benchmarks.gpu.nets import resnet18

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    net, image = resnet18().eval().cuda(), torch.randn(SHAPE, device="cuda")
    with torch.inference_mode():
        for _ in range(20):
            net(image)
        torch.cuda.synchronize()
        curve = [point(lambda: net(image), torch.cuda.synchronize, calls) for calls in CALLS]
        truth = min(each["synchronised_ms"] for each in curve)
        ends = {
            "nothing": lambda out: None,
            ".item() of the sum": lambda out: out.sum().item(),
            ".cpu()": lambda out: out.cpu(),
        }
        waits = {
            name: waiting_ms(net, image, end, torch.cuda.synchronize) for name, end in ends.items()
        }
    return {
        "entries": {"curve": curve, "truth_ms": truth, "per_call_ms_ending_with": waits},
        "events_ms": events_ms(net, image),
    }


def point(
    run: Any, synchronize: Any, calls: int, clock: Callable[[], float] = monotonic
) -> dict[str, Any]:
    """The median over REPEATS of (time until the last call returned) and (until its work was done),
    per call.
    """
    queued, done = [], []
    for _ in range(REPEATS):
        synchronize()
        begin = clock()
        for _ in range(calls):
            run()
        queued.append(clock() - begin)
        synchronize()
        done.append(clock() - begin)
    middle = REPEATS // 2
    return {
        "calls": calls,
        "unsynchronised_ms": sorted(queued)[middle] / calls * 1e3,
        "synchronised_ms": sorted(done)[middle] / calls * 1e3,
    }


def waiting_ms(net: Any, image: Any, end: Any, synchronize: Any, calls: int = 50) -> float:
    """Per call, where every call ends in the same way and the loop is synchronised once at
    its end.
    """
    found = point(lambda: end(net(image)), synchronize, calls)
    return float(found["synchronised_ms"])


def events_ms(net: Any, image: Any, calls: int = 50) -> float:
    """The median of CUDA events around single calls."""
    import torch

    times = []
    with torch.inference_mode():
        for _ in range(calls):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            net(image)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return float(sorted(times)[calls // 2])
