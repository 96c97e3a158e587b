"""How long the way into the GPU takes: a run of an engine that does nothing, from an ordinary
array, from `input_buffer` and from the GPU, beside the bus itself and PyTorch's ways.

All take turns in one process. `bus` copies the same bytes from page-locked memory by one call of
CUDA. `/ bus` is what a run takes without the engine's own time, as a multiple of `bus`. `PyTorch`
copies an ordinary tensor to the GPU, and `PyTorch pinned` copies it to pinned memory first. The
last three columns tell what binds an ordinary array: the host's own memcpy to page-locked memory by
one thread, our copy with all its threads, and the bus right behind that copy, whose bytes still lie
in the caches of several cores.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

from benchmarks.common import Row, publish, takes_no_arguments
from benchmarks.gpu.host import tensorrt_device
from pipeline import backends
from pipeline.backends import cuda
from pipeline.backends.base import Session, run_session
from pipeline.backends.host_copies import address_of, copy_memory
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile
from pipeline.measurement.clock import (
    Samples,
    WarmUpOptions,
    measure_block,
    samples_from_blocks,
    warm_up,
)
from pipeline.onnx_graph.files import onnx_model

IMAGE = 3 * 224 * 224  # numbers of one fp32 image: 602 kB
IMAGES = (1, 4, 7, 16, 64, 256)
LARGE_MB = 4.0  # from here on a limit counts as a multiple of the bus
MOST_FROM_BUFFER, MOST_FROM_ARRAY, MOST_EXTRA_US = 1.15, 1.5, 30.0
ROUNDS, BLOCK_S = 12, 0.04
SLICE = {"start": 0, "end": 1, "axis": 1}


def main(words: Sequence[str]) -> None:
    takes_no_arguments("transfers", __doc__, words)
    tensorrt_device()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engine = idle_engine(Path(folder))
        loaded = stack.enter_context(closing(backends.load(engine)))
        session = stack.enter_context(closing(loaded.session()))
        rows = [measure(engine, session, images) for images in IMAGES]
    publish("transfers", rows, goals(rows))


def idle_engine(folder: Path) -> Engine:
    """y = the first pixel of each image: an engine that takes a few microseconds."""
    ends = {name: numpy_helper.from_array(np.array([at]), name) for name, at in SLICE.items()}
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", *SLICE], ["y"])],
        "first_pixel",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["images", IMAGE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["images", 1])],
        list(ends.values()),
    )
    model, out = folder / "model", folder / "engine"
    model.mkdir()
    out.mkdir()
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        model / "model.onnx",
    )
    profile = Profile(dims={"images": DimRange(min=1, opt=64, max=max(IMAGES))})
    return tensorrt_.build(
        onnx_model(model, "model.onnx", Precision.FP32),
        Recipe(backend="tensorrt", precision=Precision.FP32),
        BuildOptions(profiles=(profile,)),
        out,
        lambda *_: None,
    )


def measure(engine: Engine, session: Session, images: int) -> Row:
    import torch

    rt, numbers = cuda.runtime(), np.random.default_rng(images)
    array = numbers.random((images, IMAGE), dtype=np.float32)
    buffer = backends.input_buffer(engine, "x", array.shape)
    buffer[...] = array
    tensor, pinned = torch.from_numpy(array), torch.empty(array.shape, pin_memory=True)
    on_gpu = tensor.cuda()
    target = torch.empty(array.shape, device="cuda")
    stream = cuda.Stream(rt)
    copy = (target.data_ptr(), address_of(buffer), array.nbytes, stream.to_device)
    host = pinned.numpy()

    def bus() -> None:
        stream.copy((copy,))
        stream.synchronize()

    def torch_pageable() -> None:
        target.copy_(tensor)
        torch.cuda.synchronize()

    def torch_pinned() -> None:
        pinned.copy_(tensor)
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    def copied_and_sent() -> None:
        copy_memory(address_of(buffer), address_of(array), array.nbytes)
        bus()

    taken = race(
        {
            "bus": bus,
            "array": partial(run_session, session, {"x": array}),
            "buffer": partial(run_session, session, {"x": buffer}),
            "on_gpu": partial(run_session, session, {"x": on_gpu}),
            "torch_pageable": torch_pageable,
            "torch_pinned": torch_pinned,
            "memcpy": lambda: np.copyto(host, array),
            "our_copy": partial(copy_memory, address_of(host), address_of(array), array.nbytes),
            "copied_and_sent": copied_and_sent,
        }
    )
    ms = {name: samples.median_s * 1e3 for name, samples in taken.items()}
    engine_ms = device_ms(session)
    stream.close()
    return {
        "MB": array.nbytes / 1e6,
        "GB/s of the bus": array.nbytes / ms["bus"] / 1e6,
        "bus ms": ms["bus"],
        "engine ms": engine_ms,
        "array ms": ms["array"],
        "array / bus": (ms["array"] - engine_ms) / ms["bus"],
        "buffer ms": ms["buffer"],
        "buffer / bus": (ms["buffer"] - engine_ms) / ms["bus"],
        "on GPU ms": ms["on_gpu"],
        "PyTorch ms": ms["torch_pageable"],
        "PyTorch pinned ms": ms["torch_pinned"],
        "memcpy ms": ms["memcpy"],
        "our copy ms": ms["our_copy"],
        "bus after our copy ms": ms["copied_and_sent"] - ms["our_copy"],
    }


def device_ms(session: Session) -> float:
    """The engine's own time by the device's clock; the median of 51 runs."""
    timer, seconds = session.timer(), []
    for _ in range(51):
        timer.start()
        session.execute()
        timer.stop()
        session.synchronize()
        seconds.append(timer.elapsed_s())
    return float(np.median(seconds)) * 1e3


def race(contestants: Mapping[str, Callable[[], Any]]) -> dict[str, Samples]:
    """A block of each per round, in random order."""
    for run in contestants.values():
        warm_up(run, WarmUpOptions(min_s=0.05))
    order, names = random.Random(0), list(contestants)
    blocks: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in order.sample(names, len(names)):
            blocks[name].append(tuple(measure_block(contestants[name], min_s=BLOCK_S)))
    return {name: samples_from_blocks(taken, ()) for name, taken in blocks.items()}


def goals(rows: Sequence[Row]) -> dict[str, bool]:
    found = {}
    for row in rows:
        size = f"{row['MB']:.1f} MB"
        if float(row["MB"] or 0) >= LARGE_MB:
            for way, most in (("buffer", MOST_FROM_BUFFER), ("array", MOST_FROM_ARRAY)):
                got = float(row[f"{way} / bus"] or 0)
                found[f"{size} from {way}: at most {most} x the bus (got {got:.2f})"] = got <= most
        else:
            for way in ("buffer", "array"):
                extra = float(row[f"{way} ms"] or 0) - float(row["engine ms"] or 0)
                got = (extra - float(row["bus ms"] or 0)) * 1e3
                name = f"{size} from {way}: at most {MOST_EXTRA_US:g} us more (got {got:.1f})"
                found[name] = got <= MOST_EXTRA_US
    return found
