"""A real server with two models on one GPU: ResNet-50, compiled by one POST, and a small
classifier; and what tests ask of them.

`Site.device` and the plans decide where they run; nothing below knows more of the GPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.core import Engine, Tensors
from pipeline.execution.child_process import call_in_child
from pipeline.report.bundle import load_engine
from service.client import KINDS, Client, Event, Inference, RemoteError, Upload
from service.registry.models import DeploymentOptions
from service.storage.database import Database
from tests.builders.cli import write_model
from tests.service.integration.test_docs import served

Array = NDArray[Any]
RESNET, SMALL = "resnet50", "small"
ROWS = 8  # of the largest batch
COMPUTE_DECIMALS_MS = 0.001  # of Server-Timing

SMALL_PLAN = """\
name: small
profiles: [{{batch: [1, 4, 8]}}]
candidates: [{{{candidate}}}]
tensorrt: {{optimization_level: 1}}
benchmark: {{duration_s: 0.2, sizes: [{{batch: 1}}]}}
"""
RESNET_PLAN = """\
name: resnet50
architecture: {architecture}
inputs: [{{name: image, dtype: float32, shape: [batch, 3, 224, 224]}}]
outputs: [logits]
profiles: [{{batch: [1, 4, 8]}}]
candidates: [{{{candidate}}}]
tensorrt: {{optimization_level: 1}}
benchmark: {{duration_s: 0.5, sizes: [{{batch: 1}}, {{batch: 8}}]}}
"""


@dataclass(frozen=True)
class Kind:
    """Where a site runs its models, and on what."""

    device: str = "gpu:0"
    candidate: str = "backend: tensorrt, precision: fp16"
    architecture: str = "resnet50"


@dataclass(frozen=True)
class Site:
    """A running server whose models are promoted; tests load them."""

    kind: Kind
    url: str
    rpc: str
    folder: Path
    jobs: dict[str, str] = field(default_factory=dict)  # by model
    events: dict[str, tuple[Event, ...]] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, kind: Kind) -> Iterator[Site]:
        """Both models compiled and promoted, none loaded."""
        port = _free_port()
        with served("crucible serve", folder / "home", CRUCIBLE_SERVICE_GRPC_PORT=str(port)) as url:
            site = cls(kind, url, f"127.0.0.1:{port}", folder)
            weights = weights_of(kind.architecture, folder / "weights.safetensors")
            site.compile(
                RESNET,
                weights,
                RESNET_PLAN.format(candidate=kind.candidate, architecture=kind.architecture),
            )
            write_model(folder / "model.onnx")
            site.compile(SMALL, folder / "model.onnx", SMALL_PLAN.format(candidate=kind.candidate))
            yield site

    def compile(self, name: str, model: Path, plan: str) -> None:
        with self.client() as client:
            job = client.submit(Upload(model, plan))
            self.jobs[name], self.events[name] = job.id, tuple(client.events(job.id))
            log = (self.folder / "home" / "server.log").read_text()
            assert self.events[name][-1].kind == "succeeded", (client.job(job.id), log)
            client.promote(name, job.id, override=True)  # without data they are unproven

    def client(self) -> Client:
        return Client(self.url)

    @contextlib.contextmanager
    def loaded(self, *models: str, **options: Any) -> Iterator[None]:
        """These models are deployed, and gone afterwards."""
        with self.client() as client, contextlib.ExitStack() as stack:
            for model in models:
                client.load(model, DeploymentOptions(**options))
                stack.callback(client.unload, model)
            yield

    def delivered(self, model: str) -> Path:
        """The folder that `crucible download` fills."""
        out = self.folder / "out" / model
        if not out.exists():
            with self.client() as client:
                client.download(self.jobs[model], out)
        return out

    @cached_property
    def direct(self) -> Direct:
        return Direct(load_engine(self.delivered(RESNET)))

    def forget_memory(self) -> None:
        """What versions held when they were loaded."""
        with (
            closing(Database(self.folder / "home" / "crucible.db")) as database,
            database.write() as rows,
        ):
            rows.exec_driver_sql("UPDATE versions SET memory_bytes = NULL")

    def figures(self) -> str:
        return httpx.get(f"{self.url}/metrics").text

    def workers(self, model: str, device: str = "") -> list[psutil.Process]:
        """The processes that hold a model's engine now, on all devices or on this one."""
        events = [
            json.loads(line)
            for line in (self.folder / "home" / "server.log").read_text().splitlines()
            if line.startswith("{")
        ]
        ready = [
            event
            for event in events
            if event.get("event") == "worker.ready" and event["worker"].startswith(f"{model}-")
        ]
        newest = ready[-1]["worker"].rpartition("-")[0]  # the name ends with the instance's number
        guardians = {
            event["worker"]: psutil.Process(event["pid"])
            for event in ready
            if event["worker"].rpartition("-")[0] == newest and device in ("", event["device"])
        }
        family = [
            child for guardian in guardians.values() for child in guardian.children(recursive=True)
        ]
        return [process for process in family if "service.serving.worker" in process.cmdline()]


@dataclass(frozen=True)
class Direct:
    """Sessions on an engine without any server, each in a child of its own."""

    engine: Engine

    def answers(self, batches: Sequence[Array], graphs: bool = True) -> list[Array]:
        """What a session gives for each; with CUDA graphs as far as the backend has them, or by
        plain runs.
        """
        answers: list[Array] = call_in_child(
            direct_answers, self.engine, list(batches), graphs, name="direct session"
        )
        return answers


def direct_answers(
    engine: Engine, batches: list[Array], graphs: bool, progress: object = None
) -> list[Array]:
    """Runs in a child: each batch thrice, the first two of which capture a graph; the last
    answers.
    """
    (source,), (target,) = engine.inputs, engine.outputs
    with closing(backends.load(engine)) as loaded:
        plain: dict[str, Any] = (
            {} if graphs or engine.target.backend != "tensorrt" else {"graphs": False}
        )
        with closing(loaded.session(**plain)) as session:

            def last(feeds: Tensors) -> Array:
                return [run_session(session, feeds)[target.name] for _ in range(3)][-1].copy()

            return [last({source.name: batch}) for batch in batches]


def images(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 1, (rows, 3, 224, 224)).astype(np.float32)


def ask(client: Client, model: str, x: Array) -> Inference:
    """An answer over HTTP, asked with a .npy file."""
    body = io.BytesIO()
    np.save(body, x)
    return client.infer(body.getvalue(), KINDS[".npy"], model)


def only_output(answer: Inference) -> Array:
    (output,) = answer.outputs.values()
    return np.asarray(output)


@dataclass(frozen=True)
class Call:
    """What became of one request: its answer, or the status of its refusal."""

    number: int  # of what was asked
    answer: Inference | None
    status: int = 200


def ask_all(
    site: Site, model: str, inputs: Sequence[Array], calls: int, clients: int
) -> list[Call]:
    """So many calls by so many clients at once, which go through `inputs` in turn."""

    def one(client_number: int) -> list[Call]:
        results = []
        with site.client() as client:
            for call in range(client_number, calls, clients):
                number = call % len(inputs)
                try:
                    results.append(Call(number, ask(client, model, inputs[number])))
                except RemoteError as error:
                    results.append(Call(number, None, error.status))
        return results

    with ThreadPoolExecutor(clients) as pool:
        return [result for each in pool.map(one, range(clients)) for result in each]


def assert_agree(got: Array, expected: Array, tolerance: float) -> None:
    """Within `tolerance` of the largest value that was expected, which is none of its noise: as
    batches are proved.
    """
    assert got.shape == expected.shape
    assert np.isfinite(expected).all()
    largest = float(np.abs(expected).max())
    assert largest > 0
    assert float(np.abs(got.astype(np.float64) - expected).max()) <= tolerance * largest


def padding_ratio(site: Site, model: str) -> float:
    (ratio,) = re.findall(
        rf'crucible_inference_padding_ratio{{[^}}]*model="{model}"[^}}]*}} (\S+)', site.figures()
    )
    return float(ratio)


def weights_of(architecture: str, file: Path) -> Path:
    """Random, for what is proven here is the way and not the answers."""
    import torchvision
    from safetensors.torch import save_file

    save_file(dict(getattr(torchvision.models, architecture)(weights=None).state_dict()), file)
    return file


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
