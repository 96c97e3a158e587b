"""What tests on a real GPU share: its memory as everybody sees it, a process that takes that
memory, and a model that builds for long.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends import cuda
from pipeline.core import DimRange, OnnxModel, Profile
from pipeline.execution.child_process import Channel, Child
from pipeline.host.gpu import find_gpus
from pipeline.onnx_graph.files import onnx_model
from pipeline.results.gpu_cost import GpuCost

MIB = 2**20
SLACK_BYTES = 64 * MIB  # the driver's own, which comes and goes
POLL_S = 0.1
HOLDER_S = 120.0  # until a process holds the memory
WITHIN_S = 120.0  # for what takes a second on a quiet host
LAYERS = 40  # convolutions, each of another shape: every one is timed on its own


def used_bytes() -> int:
    """Memory of the GPU that tests use, in use by all processes."""
    query = [
        "nvidia-smi",
        "-i",
        find_gpus().devices[0].uuid,
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]
    return (
        int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
        * MIB
    )


def wait_for(reached: int, above: bool, limit_s: float = WITHIN_S) -> float:
    """Seconds until the memory in use is above, or at most, `reached`; AssertionError after
    `limit_s`.
    """
    start = time.monotonic()
    while ((now := used_bytes()) > reached) != above:
        assert time.monotonic() - start < limit_s, (
            f"{now / MIB:.0f} MiB in use after {limit_s} s, expected"
            f" {'over' if above else 'at most'} {reached / MIB:.0f}"
        )
        time.sleep(POLL_S)
    return time.monotonic() - start


def hold_memory(channel: Channel, leave_bytes: int) -> None:
    """Runs in a child: take all of the GPU's memory but `leave_bytes`, say how much is left, and
    hold it until the parent speaks or ends.
    """
    rt = cuda.runtime()
    cuda.use_device(rt, 0)
    free, _ = cuda.free_and_total_bytes(rt)
    cuda.check(rt, rt.cudaMalloc(free - leave_bytes))
    channel.send(cuda.free_and_total_bytes(rt)[0])
    channel.receive()


@contextlib.contextmanager
def full_gpu(leave_bytes: int) -> Iterator[None]:
    """Another process holds the GPU's memory; afterwards it is back."""
    before = used_bytes()
    with Child(hold_memory, leave_bytes, name="memory holder") as holder:
        holder.receive(HOLDER_S)
        yield
    wait_for(before + SLACK_BYTES, above=False)


def slow_model(folder: Path) -> tuple[OnnxModel, Profile]:
    """x [batch, 3, 64, 64] fp32 through convolutions of growing width -> y [batch, channels, 64,
    64]; weights are random.
    """
    random = np.random.default_rng(0)
    widths = [3, *(64 + 3 * layer for layer in range(LAYERS))]
    nodes, weights = [], []
    for layer, (before, after) in enumerate(itertools.pairwise(widths)):
        weight = random.normal(0, (9 * before) ** -0.5, (after, before, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(
            helper.make_node(
                "Conv",
                [f"x{layer}", f"w{layer}"],
                [f"c{layer}"],
                name=f"conv{layer}",
                pads=[1, 1, 1, 1],
            )
        )
        nodes.append(
            helper.make_node("Relu", [f"c{layer}"], [f"x{layer + 1}"], name=f"relu{layer}")
        )
    inputs = [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", 3, 64, 64])]
    outputs = [
        helper.make_tensor_value_info(
            f"x{LAYERS}", TensorProto.FLOAT, ["batch", widths[-1], 64, 64]
        )
    ]
    graph = helper.make_graph(nodes, "slow", inputs, outputs, weights)
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        folder / "model.onnx",
    )
    return onnx_model(folder, "model.onnx"), Profile(dims={"batch": DimRange(min=1, opt=8, max=16)})


def check_cost(cost: GpuCost, weights_known: bool = True) -> None:
    """AssertionError unless all figures are known, but the weights where they cannot be."""
    assert cost.missing.keys() == (set() if weights_known else {"weights"}), cost
    assert cost.activation_bytes is not None
    assert cost.peak_bytes is not None
    assert cost.energy_per_1000_requests_j is not None
    assert cost.activation_bytes > 0
    assert (cost.weights_bytes or 0) > 0 or not weights_known
    assert cost.peak_bytes >= (cost.weights_bytes or 0) + cost.activation_bytes
    assert cost.energy_per_1000_requests_j > 0
