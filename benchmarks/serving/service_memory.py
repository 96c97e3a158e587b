"""Memory of the service: the server at rest and after an upload, and all processes of a job, for a
small model and a large one.

Proportional set sizes, in which pages that processes share count once, summed over the process
tree, looked at ten times a second. Of a job everything is counted that a plan without candidates
runs here: every backend of this host, one after another.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import Row, publish, takes_no_arguments
from service.client import Client, Upload
from service.jobs.state import FINAL
from service.sandbox.process_tree import of_jobs

WIDTHS = (256, 2048)  # of the two models: 1.6 MB and 101 MB
LAYERS = 6
LOOK_S = 0.1
MAX_GROWTH_MB = 30.0
PLAN = "profiles: [{batch: [1, 8, 16]}]\nbenchmark: {duration_s: 0.3}\n"


def main(words: Sequence[str]) -> None:
    takes_no_arguments("service_memory", __doc__, words)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline.cli", "serve", "--port", "0", "--home", folder]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            try:
                rows = measure(server, Path(folder))
            finally:
                server.terminate()
    rest, after = rows[0]["memory_mb"], rows[-1]["memory_mb"]
    assert isinstance(rest, float)
    assert isinstance(after, float)
    target = (
        f"two uploads and two jobs leave the server at most {MAX_GROWTH_MB:.0f} MB larger (got"
        f" {after - rest:.1f})"
    )
    publish("service_memory", rows, {target: after - rest <= MAX_GROWTH_MB})


def measure(server: subprocess.Popen[str], folder: Path) -> list[Row]:
    assert server.stdout is not None
    (url,) = re.findall(r"http://\S+", server.stdout.readline())
    process = psutil.Process(server.pid)
    with Client(url) as client:
        while not ready(url):
            time.sleep(LOOK_S)
        rows: list[Row] = [
            {
                "what": "server at rest",
                "model_mb": None,
                "memory_mb": memory_mb([process]),
                "threads": process.num_threads(),
            }
        ]
        for width in WIDTHS:
            model = folder / f"mlp{width}.onnx"
            write_mlp(model, width)
            job, peak_mb = client.submit(Upload(model, PLAN)), 0.0
            while (state := client.job(job.id).state) not in FINAL:
                peak_mb = max(peak_mb, memory_mb(of_jobs([job.id])))
                time.sleep(LOOK_S)
            assert state == "succeeded", client.job(job.id)
            rows.append(
                {
                    "what": "all processes of a job, peak",
                    "model_mb": model.stat().st_size / 1e6,
                    "memory_mb": peak_mb,
                    "threads": None,
                }
            )
        rows.append(
            {
                "what": "server afterwards",
                "model_mb": None,
                "memory_mb": memory_mb([process]),
                "threads": process.num_threads(),
            }
        )
    return rows


def ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz").status_code == 200


def memory_mb(processes: Iterable[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended meanwhile
            continue
    return total / 1e6


def write_mlp(path: Path, width: int) -> None:
    """Square layers with Relu between them."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(
            random.normal(0, width**-0.5, (width, width)).astype(np.float32), f"w{layer}"
        )
        for layer in range(LAYERS)
    ]
    nodes, last = [], "x"
    for layer in range(LAYERS):
        nodes += [
            helper.make_node("MatMul", [last, f"w{layer}"], [f"h{layer}"]),
            helper.make_node("Relu", [f"h{layer}"], [f"r{layer}"]),
        ]
        last = f"r{layer}"
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name in ("x", last)
    )
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
