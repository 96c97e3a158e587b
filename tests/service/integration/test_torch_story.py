"""A PyTorch program on a real server, from its compile to answers, over a worker's death."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml

from service.storage.layout import Folders
from tests.builders.cli import ONE_PROCESS
from tests.service.builders.jobs import WITHIN_S
from tests.service.integration.test_server import Server, serving, until
from tests.service.serving.engines import processes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]
NAME = f"program-{os.getpid()}"
COMPILE_S = 480.0
X = np.arange(48, dtype=np.float32).reshape(3, 16) / 48
NETWORK = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)))

    def build():
        return Net()
"""


def write_plan(folder: Path) -> None:
    folder.mkdir()
    (folder / "net.py").write_text(textwrap.dedent(NETWORK))
    inputs = [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}]
    plan = {
        "model": {
            "entrypoint": "net:build",
            "weights_from": "random: a test",
            "inputs": inputs,
            "outputs": ["y"],
        },
        "profiles": [{"batch": [1, 4, 16]}],
        "candidates": [{"backend": "torch", "precision": "fp32", "form": "aoti"}],
        "simplify": {"enabled": False, "rewrite_attention": False},
        "benchmark": ONE_PROCESS,  # no ratio: whichever is faster, the program is chosen
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(plan))


def expected(folder: Path) -> Any:
    """What the user's module says, with the weights that the plan's seed draws."""
    import torch

    namespace: dict[str, Any] = {}
    exec((folder / "net.py").read_text(), namespace)
    torch.manual_seed(0)
    with torch.inference_mode():
        return namespace["build"]().eval()(torch.from_numpy(X)).numpy()


def compiled(web: httpx.Client) -> str:
    job = web.post("/compile", json={"config": "tiny"}).json()["id"]
    end = time.monotonic() + COMPILE_S
    while (state := web.get(f"/jobs/{job}").json())["state"] in ("queued", "running"):
        assert time.monotonic() < end, state
        time.sleep(0.2)
    assert state["state"] == "succeeded", state["failure"]
    return str(job)


def ask(web: httpx.Client) -> httpx.Response:
    return web.post(f"/models/{NAME}/infer", content=X.tobytes())


def assert_right(web: httpx.Client, want: Any) -> None:
    answer = ask(web)
    assert answer.status_code == 200, answer.text
    got = np.frombuffer(answer.content, np.float32).reshape(want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    document = web.post(f"/models/{NAME}/infer", json={"inputs": {"x": X.tolist()}}).json()
    np.testing.assert_allclose(document["outputs"]["y"], want, rtol=1e-4, atol=1e-5)


def modules_of_workers() -> set[str]:
    """Which worker modules the model's processes run."""
    lines = [psutil.Process(pid).cmdline() for pid in processes_of(f"serve-{NAME}-")]
    return {word for line in lines for word in line if word.startswith("service.serving.")}


def deployment(server: Server) -> Any:
    return httpx.get(f"{server.url}/models/{NAME}").json()["deployment"]


def test_a_program_is_compiled_promoted_loaded_and_asked(tmp_path: Path) -> None:
    configs, home = tmp_path / "configs", tmp_path / "home"
    write_plan(configs)
    home.mkdir()
    want = expected(configs)
    settings: dict[str, Any] = {"compiles": "yes", "configs": configs}
    with (
        serving(home, **settings) as server,
        httpx.Client(base_url=server.url, timeout=4 * WITHIN_S) as web,
    ):
        job = compiled(web)
        body = {"report": job, "override": True}
        promoted = web.post(f"/models/{NAME}/promote", json=body)
        assert promoted.status_code == 200, promoted.text
        version = promoted.json()["current"]
        assert (version["backend"], version["label"]) == ("torch", "torch aoti fp32")
        assert version["batch"]["proved"]
        loaded = web.put(f"/models/{NAME}/deployment", json={})
        assert loaded.status_code == 200, loaded.text
        assert modules_of_workers() == {"service.serving.torch_worker"}
        assert_right(web, want)

        os.kill(processes_of(f"serve-{NAME}-")[-1], signal.SIGKILL)
        until(lambda: ask(web).status_code == 200)
        assert_right(web, want)
        assert server.end() == 0

    with (
        serving(home, **settings) as server,
        httpx.Client(base_url=server.url, timeout=4 * WITHIN_S) as web,
    ):
        assert_right(web, want)  # it is loaded again before the server is ready
        assert modules_of_workers() == {"service.serving.torch_worker"}
        server.end()

    engine = Folders(home).version(NAME, 1) / "engine"
    (engine / "program.pt2").write_bytes(b"of somebody else")
    with serving(home, **settings) as server:
        assert deployment(server)["state"] == "failed"
        assert "damaged" in deployment(server)["reason"]
        assert processes_of(f"serve-{NAME}-") == []
