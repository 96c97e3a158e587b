"""Crucible as one more server: `crucible serve`, with a model compiled, promoted and loaded over
its HTTP API.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.common import ROOT
from benchmarks.serving.processes import clean_environment, free_port, running, wait_until
from pipeline.execution.child_process import IMPORT_PATH
from service.client import Client, Upload
from service.jobs.state import FINAL
from service.registry.models import DeploymentOptions
from service.storage.layout import Folders

MODEL = "model"
JOB_S = 600.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """A running `crucible serve`."""

    process: psutil.Process
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def own_environment() -> dict[str, str]:
    """That of `crucible serve`: this checkout, then what this process itself imports from, which on
    a GPU host is no environment of Python's.
    """
    return clean_environment(PYTHONPATH=os.pathsep.join((str(ROOT), IMPORT_PATH)))


@contextlib.contextmanager
def serving(home: Path, http_processes: int = 1) -> Iterator[Served]:
    """A server on this home that is ready, with all that was deployed in it."""
    port, log = free_port(), home.with_suffix(".log")
    command = [sys.executable, "-m", "pipeline.cli", "serve", f"--home={home}", f"--port={port}"]
    variables = {
        "CRUCIBLE_SERVICE_GRPC_PORT": "0",  # any: the next after `port` may be taken
        "CRUCIBLE_SERVICE_HTTP_PROCESSES": str(http_processes),
    }
    with running(command, log, {**own_environment(), **variables}) as process:
        wait_until(lambda: is_ready(port), process, log)
        yield Served(process, port, log)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5.0).is_success
    except httpx.TransportError:
        return False


def deploy(
    client: Client,
    model: Path,
    plan: Mapping[str, object],
    options: DeploymentOptions | None = None,
) -> str:
    """Compile a model, promote it and load it; the job's id."""
    job = submitted(client, model, plan)
    state = finished(client, job)
    if state != "succeeded":
        raise RuntimeError(
            f"the job that compiles {model.name} is {state}: {client.job(job).failure}"
        )
    client.promote(MODEL, job, override=True)  # without data nothing is proved
    client.load(MODEL, options)
    return job


def submitted(client: Client, model: Path, plan: Mapping[str, object]) -> str:
    """The id of a job that compiles this model."""
    file = model.with_suffix(".plan.json")
    file.write_text(json.dumps(plan), encoding="utf-8")
    return client.submit(Upload(model, file)).id


def finished(client: Client, job: str) -> str:
    """The state that a job comes to."""
    until = time.monotonic() + JOB_S
    while (state := client.job(job).state) not in FINAL:
        if time.monotonic() > until:
            raise TimeoutError(f"job {job} is {state} after {JOB_S:g} s")
        time.sleep(LOOK_S)
    return state


def plan_of(name: str, most_rows: int, backend: str = "onnxruntime") -> dict[str, object]:
    """fp32, by default in ONNX Runtime, which is what the peers run: serving is compared, not
    engines.
    """
    return {
        "name": name,
        "profiles": [{"batch": [1, most_rows // 2, most_rows]}],
        "candidates": [{"backend": backend, "precision": "fp32"}],
        **(
            {"tensorrt": {"optimization_level": 1}} if backend == "tensorrt" else {}
        ),  # builds sooner; server and Session run the same engine
        "benchmark": {"sizes": [{"batch": 1}], "duration_s": 0.5},
    }


def engine_folder(home: Path, job: str) -> Path:
    """The engine that a job delivered."""
    return Folders(home).report(job) / "engine"
