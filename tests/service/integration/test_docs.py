"""docs/service.md holds: its commands run from top to bottom, and its tables are complete."""

import gzip
import json
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.app import create_app
from service.client import events_of_stream
from service.settings import Settings
from tests.builders.cli import environment, write_task
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import serving, until

ROOT = Path(__file__).parents[3]
PAGE, INFERENCE = ((ROOT / "docs" / name).read_text() for name in ("service.md", "inference.md"))
URL = "http://127.0.0.1:8000"
SHELL = f"""
curl() {{ command curl --fail-with-body --silent --show-error "$@"; }}
crucible() {{ {sys.executable} -m pipeline.cli "$@"; }}
python3() {{ {sys.executable} "$@"; }}
set -euo pipefail
"""
MARK = "@@@@ "


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    return [
        line.removeprefix("$ ")
        for block in blocks
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


def is_server(command: str) -> bool:
    return "crucible serve" in command


@contextmanager
def served(command: str, home: Path, **variables: str) -> Iterator[str]:
    """A server as the page starts it, on a port that is free; its address once it takes jobs."""
    *settings, _, _ = command.replace("$PWD", str(home.parent)).split()
    more = {
        "CRUCIBLE_HOME": str(home),
        "CRUCIBLE_SERVICE_PORT": "0",
        **variables,
        **dict(word.split("=") for word in settings),
    }
    home.mkdir()
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "serve"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(more),
        )
    with process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+:(\d+)", process.stdout.readline())
            assert match, (home / "server.log").read_text()
            url = f"http://127.0.0.1:{match[1]}"
            until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def test_every_endpoint_has_a_command(tmp_path: Path) -> None:
    requests = [line for line in commands(PAGE + INFERENCE) if line.startswith("curl ")]
    described = create_app(Settings(home=tmp_path)).openapi()["paths"]
    paths = [(method, path) for path, methods in described.items() for method in methods] + [
        ("get", "/docs"),
        ("get", "/openapi.json"),
    ]
    for method, path in paths:
        place = (
            re.escape(URL)
            + re.sub(r"\\\{\w+\\\}", r"(\\$\\w+|photos)", re.escape(path))
            + r"(?=[\s?\"']|$)"
        )
        matches = [
            line for line in requests if re.search(place, line) and method_of(line) == method
        ]
        assert matches, f"no command for {method.upper()} {path}"


def method_of(command: str) -> str:
    if named := re.search(r"-X (\w+)", command):
        return named[1].lower()
    return "post" if re.search(r" (-F|-d|--data-binary) ", command) else "get"


def test_every_setting_is_listed_in_order() -> None:
    table = PAGE.split("## Settings")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(Settings.model_fields)


def test_the_page_lists_every_metric_and_no_other(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`crucible_[^|]*)\|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    with serving(tmp_path) as server:
        families = re.findall(
            r"^# TYPE (crucible_\w+) ", httpx.get(f"{server.url}/metrics").text, re.MULTILINE
        )
    of_gpus = {
        name for name in listed if name.startswith("crucible_device_")
    }  # those are there where a GPU is
    assert {name for name in families if not name.endswith("_created")} | of_gpus == listed


def test_the_readme_shows_commands_of_this_page() -> None:
    """But for the key, names, and what is sent beside the model: those of this page are run below,
    and the README's own by `make image-test`.
    """

    def bare(command: str) -> str:
        command = re.sub(
            r"\$(other|model)|photos",
            lambda match: {"$other": "$job"}.get(match[0], "digits"),
            command,
        )
        sent = (
            r"-F ('plan=[^']*'|(plan|calibration|selection|validation)=\S+)"
            r"|--(plan|calibration|selection|validation) \S+|--profile \S+"
        )
        return re.sub(rf" (-H @auth|--override|{sent})", "", command)

    section = (ROOT / "README.md").read_text().split("## As a service")[1].split("\n## ")[0]
    shown = commands(section)
    assert len(shown) > 5
    assert {*map(bare, shown)} <= {*map(bare, commands(PAGE + INFERENCE))}


def overridden(line: str) -> str:
    """The command, for a task whose engines are measured in one process: nobody can tell which is
    faster, so the verdict is `unproven`.
    """
    line = line.replace(
        '{\\"report\\": \\"$job\\"}', '{\\"report\\": \\"$job\\", \\"override\\": true}'
    )
    return line.replace(
        "crucible promote $model $other", "crucible promote $model $other --override"
    )


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    candidates = [{"backend": "onnxruntime", "precision": "fp32"}]
    plan = write_task(tmp_path / "plans", candidates=candidates)
    plan.rename(plan.with_name("digits.yaml"))
    write_task(tmp_path, candidates=candidates)
    (tmp_path / "plan.yaml").write_text(
        re.sub(r"(?m)^(data|model):\n(  .*\n)+", "", (tmp_path / "plan.yaml").read_text())
    )
    first, second = (line for line in commands(PAGE) if is_server(line))
    variables = {
        "CRUCIBLE_SERVICE_KEYS_REQUIRED": "true",
        "CRUCIBLE_SERVICE_CONFIGS": str(tmp_path / "plans"),
    }
    with ExitStack() as stack:
        url = stack.enter_context(served(first, tmp_path / "home", **variables))
        lines = [line for line in commands(PAGE) if not is_server(line)]
        script = SHELL + "".join(
            f"echo '{MARK}{number}'\n{overridden(line)}\necho\n"
            for number, line in enumerate(lines)
        )
        env = environment({"CRUCIBLE_HOME": str(tmp_path / "home")})
        result = subprocess.run(
            ["bash", "-c", script.replace(URL, url)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        outputs = dict(
            zip(
                lines,
                (text.partition("\n")[2] for text in result.stdout.split(MARK)[1:]),
                strict=False,
            )
        )
        assert result.returncode == 0, (list(outputs.items())[-1:], result.stderr)

        (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        key = (tmp_path / "auth").read_text().split()[-1]
        ran = subprocess.run(
            [sys.executable, "-c", example.replace(URL, url)],
            cwd=tmp_path,
            env={**env, "CRUCIBLE_KEY": key},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.stdout.splitlines()[-1] == "unproven", ran.stderr
    check(outputs, tmp_path)

    key = (tmp_path / "admin.key").read_text().strip()
    with served(second, tmp_path / "container") as url:
        assert httpx.get(f"{url}/jobs").status_code == 401
        assert httpx.get(f"{url}/jobs", headers={"Authorization": f"Bearer {key}"}).json() == {
            "jobs": [],
            "next": None,
        }


def test_the_commands_of_inference_run(tmp_path: Path) -> None:
    """Against the double, in which `photos` gives the mean of each channel."""
    from PIL import Image

    Image.new("RGB", (31, 17), (255, 0, 128)).save(tmp_path / "photo.jpg")
    (tmp_path / "auth").write_text("X-None: none")
    with serving_models(tmp_path / "home", models="photos") as server:
        lines = commands(INFERENCE)
        script = SHELL + "".join(
            f"echo '{MARK}{number}'\n{overridden(line)}\necho\n"
            for number, line in enumerate(lines)
        )
        env = environment({"CRUCIBLE_URL": server.url})
        result = subprocess.run(
            ["bash", "-c", script.replace(URL, server.url)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        outputs = dict(
            zip(
                lines,
                (text.partition("\n")[2] for text in result.stdout.split(MARK)[1:]),
                strict=False,
            )
        )
        assert result.returncode == 0, (list(outputs.items())[-1:], result.stderr)
        examples = re.findall(r"```python\n(.*?)```", INFERENCE, re.DOTALL)
        for example, pattern in zip(
            examples, (r"\(2, 3\)\n\{", r"\(2, 3\) [\d.]+\n"), strict=True
        ):  # HTTP, gRPC
            here = example.replace(
                URL.removeprefix("http://"), server.url.removeprefix("http://")
            ).replace("127.0.0.1:8001", server.rpc)
            ran = subprocess.run(
                [sys.executable, "-c", here],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert re.match(pattern, ran.stdout), ran.stderr
    x = np.load(tmp_path / "x.npy")
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), x.mean((2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(
        np.fromfile(tmp_path / "y.bin", np.float32), np.load(tmp_path / "y.npy").ravel()
    )
    np.testing.assert_allclose(np.load(tmp_path / "scores.npz")["scores"], [[2, -2, 0]], atol=0.05)
    answers = [
        json.loads(text)["outputs"]["scores"]
        for line, text in outputs.items()
        if "x.json" in line and "curl" in line
    ]
    np.testing.assert_allclose(answers, [np.load(tmp_path / "y.npy")], rtol=1e-6)


SSE = {"Content-Type": "text/event-stream"}


def check(outputs: dict[str, str], folder: Path) -> None:
    """What the commands said is what the page says of them."""

    def outputs_of(part: str) -> list[str]:
        return [text for line, text in outputs.items() if part in line]

    events, rest, cancelled = (
        list(events_of_stream(httpx.Response(200, headers=SSE, text=text)))
        for text in outputs_of("/events")
    )
    assert [event.kind for event in (events[0], events[-1], cancelled[-1])] == [
        "queued",
        "succeeded",
        "cancelled",
    ]
    assert rest == [event for event in events if event.seq > 3]
    assert '"attempt":0' in outputs_of("$second/retry")[0]
    assert '"onnxruntime fp32"' in outputs_of("/latency")[0]
    assert '"top1"' in outputs_of("/accuracy")[0]
    assert outputs_of("text/markdown")[0].startswith("# tiny")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((folder / "report.json").read_text())["winner"] == "onnxruntime fp32"
    assert json.loads(gzip.decompress((folder / "samples.json.gz").read_bytes()))
    with tarfile.open(folder / "engine.tar") as engine:
        assert "engine/engine.json" in engine.getnames()
    assert all(
        "UNPROVEN" in text
        for line, text in outputs.items()
        if "crucible wait" in line or line.endswith("--wait")
    )
    batch = json.loads(outputs_of("$model/promote -d")[0])["current"]["batch"]
    assert (batch["proved"], batch["reason"]) == (True, "")
    assert (
        "version 2 (onnxruntime fp32) is current, version 2 answers on cpu"
        in outputs_of("crucible promote $model")[0]
    )
    assert '"version":1,"device":"cpu"' in outputs_of("$model/rollback")[0]
    assert "version 1 was the first" in outputs_of("crucible rollback")[0]
    assert "(current)" in outputs_of("crucible models $model")[0]
    assert "digits version 1 on cpu" in outputs_of("crucible infer x.npy")[0]
    assert "requests: 1, runs: 1" in outputs_of("crucible shapes")[0]
    assert all("it takes more requests" in text for text in outputs_of("recompile"))
    assert "is unloaded" in outputs_of("crucible unload")[0]
    (benchmark,) = outputs_of("crucible benchmark $model")
    assert all(
        word in benchmark
        for word in ("times baseline", "UNPROVEN", '"measures":{"model":"digits","version":1}')
    )
    assert "# TYPE crucible_jobs gauge" in outputs_of("/metrics")[0]
