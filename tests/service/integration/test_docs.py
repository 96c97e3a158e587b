"""The pages about the service hold: their commands run from top to bottom."""

import gzip
import json
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.app import create_app
from service.client.events import events_of_stream
from service.settings import Settings
from tests.builders.cli import environment, write_task
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import until

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "tutorials" / "serve-it.md").read_text()
HOW_TOS = {file.stem: file.read_text() for file in sorted((DOCS / "howto").glob("*.md"))}
WITH_KEYS = (
    "tls-and-keys",
    "submit-and-follow-jobs",
    "promote-and-load",
    "limits-and-quotas",
    "monitoring",
    "backup-upgrade",
    "export-to-triton",
)
"""How-to pages whose commands run on one server, in this order, after the tutorial."""
INFERENCE = HOW_TOS["infer-over-http-and-grpc"] + HOW_TOS["shared-memory"]
MARKED = re.compile(r"<!-- not run here: ([^>]+?) -->\n(```console\n.*?```)", re.DOTALL)
"""Commands that are not run, with the reason."""
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


def container_commands() -> tuple[list[str], list[str]]:
    """What the page of containers runs before and after `docker run`."""
    lines = commands(MARKED.sub("", HOW_TOS["containers"]))
    start = next(number for number, line in enumerate(lines) if line.startswith("(umask"))
    return lines[:start], lines[start:]


def is_server(command: str) -> bool:
    return "crucible serve" in command


def served(command: str, home: Path, **variables: str) -> AbstractContextManager[str]:
    """A server as a page starts it, on a port that is free; its address once it takes jobs."""
    return served_by(None, command, home, **variables)


@contextmanager
def served_by(user: int | None, command: str, home: Path, **variables: str) -> Iterator[str]:
    """Like `served`, by a process of this user and group, in no other group."""
    *settings, _, _ = command.replace("$PWD", str(home.parent)).split()
    more = {
        "CRUCIBLE_HOME": str(home),
        "CRUCIBLE_SERVICE_PORT": "0",
        **variables,
        **dict(word.split("=") for word in settings),
    }
    home.mkdir(exist_ok=True)
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "serve"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(more),
            user=user,
            group=user,
            extra_groups=None if user is None else [],
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
    requests = [line for line in commands("".join(HOW_TOS.values())) if line.startswith("curl ")]
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


def test_the_readme_shows_commands_of_these_pages() -> None:
    """Those that reach the service, and those of Docker; models, keys and data may be others."""

    def bare(command: str) -> str:
        named = re.sub(r"\$(other|model)|digits|photos", "demo", command)
        data = r"-F ('plan=[^']*'|(plan|calibration|selection|validation)=\S+)"
        return re.sub(rf" (-H @(operator\.)?auth|--override|{data})", "", named).replace(
            ', \\"override\\": true', ""
        )

    ours = ("curl", "docker", "crucible serve", "crucible promote", "crucible load")
    shown = [line for line in commands((ROOT / "README.md").read_text()) if line.startswith(ours)]
    assert shown
    assert {*map(bare, shown)} <= {*map(bare, commands(TUTORIAL + "".join(HOW_TOS.values())))}


def overridden(line: str) -> str:
    """The command, for a task whose engines are measured in one process: nobody can tell which is
    faster, so the verdict is `unproven`.
    """
    line = line.replace(
        '{\\"report\\": \\"$job\\"}', '{\\"report\\": \\"$job\\", \\"override\\": true}'
    )
    return re.sub(r"^crucible promote .*", r"\g<0> --override", line)


def write_tutorial(folder: Path) -> None:
    """The two files that the tutorial gives, with the shortest measurement."""
    for language, name in (("python", "make_model.py"), ("yaml", "plan.yaml")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)
        (folder / name).write_text(text)
    plan = folder / "plan.yaml"
    assert "budget_s: 10}" in plan.read_text()
    plan.write_text(plan.read_text().replace("budget_s: 10}", "budget_s: 0.01}"))


def write_named_plan(folder: Path) -> None:
    """The plan `demo` in the server's folder of plans: another job than the tutorial's."""
    plan = write_task(
        folder, name="demo", candidates=[{"backend": "onnxruntime", "precision": "fp32"}]
    )
    plan.rename(folder / "demo.yaml")


def outputs_of(lines: list[str], folder: Path, url: str, **variables: str) -> dict[str, str]:
    """What each command said; they run in one shell, and all succeed."""
    script = SHELL + "".join(
        f"echo '{MARK}{number}'\n{overridden(line)}\necho\n" for number, line in enumerate(lines)
    )
    result = subprocess.run(
        ["bash", "-c", script.replace(URL, url)],
        cwd=folder,
        env=environment({"CRUCIBLE_URL": url, **variables}),
        capture_output=True,
        text=True,
        check=False,
    )
    texts = [text.partition("\n")[2] for text in result.stdout.split(MARK)[1:]]
    assert result.returncode == 0, (lines[len(texts) - 1], texts[-1:], result.stderr)
    return dict(zip(lines, texts, strict=True))


@pytest.mark.slow
def test_the_commands_of_the_tutorial_and_the_how_to_pages_run(tmp_path: Path) -> None:
    """The tutorial without keys, then the pages beside a server that wants them, and a container's
    server last.
    """
    write_tutorial(tmp_path)
    home = {"CRUCIBLE_HOME": str(tmp_path / "home")}
    (start,) = filter(is_server, commands(TUTORIAL))
    with served(start, tmp_path / "home") as url:
        lines = [line for line in commands(TUTORIAL) if not is_server(line)]
        check_tutorial(outputs_of(lines, tmp_path, url))

    write_named_plan(tmp_path / "plans")
    settings = {
        "CRUCIBLE_SERVICE_KEYS_REQUIRED": "true",
        "CRUCIBLE_SERVICE_CONFIGS": str(tmp_path / "plans"),
    }
    outputs = dict[str, dict[str, str]]()
    with served("crucible serve", tmp_path / "home", **settings) as url:
        for name in WITH_KEYS:
            page = MARKED.sub("", HOW_TOS[name])
            lines = [line for line in commands(page) if not is_server(line)]
            file = tmp_path / "keys" / "laptop.key"
            key = {"CRUCIBLE_KEY": file.read_text().strip()} if file.exists() else {}
            outputs[name] = outputs_of(lines, tmp_path, url, **home, **key)
        check_client(tmp_path, url, file.read_text().strip())
    check_jobs(outputs["submit-and-follow-jobs"], tmp_path)
    check_models(outputs["promote-and-load"])
    check_operation(outputs, tmp_path)

    (start,) = filter(is_server, commands(HOW_TOS["tls-and-keys"]))
    before, after = container_commands()
    outputs_of(before, tmp_path, URL)
    with served(start, tmp_path / "container") as url:
        assert httpx.get(f"{url}/jobs").status_code == 401
        listed = outputs_of([*after, "crucible jobs --json"], tmp_path, url)["crucible jobs --json"]
        assert json.loads(listed)["jobs"] == []


def test_the_commands_of_inference_run(tmp_path: Path) -> None:
    """Against the double, in which `photos` gives the mean of each channel."""
    from PIL import Image

    Image.new("RGB", (31, 17), (255, 0, 128)).save(tmp_path / "photo.jpg")
    (tmp_path / "auth").write_text("X-None: none")
    with serving_models(tmp_path / "home", models="photos", shared_memory=True) as server:
        outputs = outputs_of(commands(INFERENCE), tmp_path, server.url)
        examples = re.findall(r"```python\n(.*?)```", INFERENCE, re.DOTALL)
        for example, pattern in zip(
            examples, (r"\(2, 3\)\n\{", r"\(2, 3\) [\d.]+\n", r"\(2, 3\)\n$"), strict=True
        ):  # HTTP, gRPC, shared memory
            here = example.replace(
                URL.removeprefix("http://"), server.url.removeprefix("http://")
            ).replace("127.0.0.1:8001", server.rpc)
            ran = subprocess.run(
                [sys.executable, "-c", here],
                cwd=tmp_path,
                env=environment(),
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


def find(outputs: dict[str, str], part: str) -> list[str]:
    return [text for line, text in outputs.items() if part in line]


def check_tutorial(outputs: dict[str, str]) -> None:
    """What the commands said is what the page says of them."""
    assert "UNPROVEN" in find(outputs, "--wait")[0]
    assert "version 1 answers on cpu" in find(outputs, "crucible load")[0]
    assert "demo version 1 on cpu" in find(outputs, "crucible infer")[0]
    (answer,) = find(outputs, "/models/demo/infer")
    assert np.shape(json.loads(answer)["outputs"]["y"]) == (2, 8)
    assert find(outputs, "8000/metrics")[0].strip().endswith(" 2.0")


def check_client(folder: Path, url: str, key: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", HOW_TOS["submit-and-follow-jobs"], re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-c", example.replace(URL, url)],
        cwd=folder,
        env=environment({"CRUCIBLE_KEY": key}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.splitlines()[-1] == "unproven", ran.stderr


def check_jobs(outputs: dict[str, str], folder: Path) -> None:
    events, rest, cancelled = (
        list(events_of_stream(httpx.Response(200, headers=SSE, text=text)))
        for text in find(outputs, "/events")
    )
    assert [event.kind for event in (events[0], events[-1], cancelled[-1])] == [
        "queued",
        "succeeded",
        "cancelled",
    ]
    assert rest == [event for event in events if event.seq > 3]
    assert '"attempt":0' in find(outputs, "$second/retry")[0]
    assert '"onnxruntime fp32"' in find(outputs, "/latency")[0]
    assert '"top1"' in find(outputs, "/accuracy")[0]
    assert find(outputs, "text/markdown")[0].startswith("# demo")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((folder / "report.json").read_text())["winner"]
    assert json.loads(gzip.decompress((folder / "samples.json.gz").read_bytes()))
    with tarfile.open(folder / "engine.tar") as engine:
        assert "engine/engine.json" in engine.getnames()
    assert (folder / "engine-and-reports" / "report.json").is_file()
    waited = [*find(outputs, "crucible wait"), *find(outputs, "--wait")]
    assert ["UNPROVEN" in text for text in waited] == [True] * 2


def check_models(outputs: dict[str, str]) -> None:
    batch = json.loads(find(outputs, "$model/promote -d")[0])["current"]["batch"]
    assert (batch["proved"], batch["reason"]) == (True, "")
    promoted = find(outputs, "crucible promote $model")[0]
    assert "is current, version 2 answers on cpu" in promoted
    assert "demo version 2 on cpu" in find(outputs, "crucible infer x.npy")[0]
    assert '"version":1,"device":"cpu"' in find(outputs, "$model/rollback")[0]
    assert "version 1 was the first" in find(outputs, "crucible rollback")[0]
    assert "(current)" in find(outputs, "crucible models $model")[0]
    (benchmark,) = find(outputs, "crucible benchmark $model")
    assert all(
        word in benchmark
        for word in ("times baseline", "UNPROVEN", '"measures":{"model":"demo","version":1}')
    )
    assert "requests: " in find(outputs, "crucible shapes")[0]
    texts = find(outputs, "recompile")
    assert ["it takes more requests" in text for text in texts] == [True, False, True]
    assert "version 1 of 'demo', built by job" in texts[1]
    assert "is unloaded" in find(outputs, "crucible unload")[0]
    assert "it is not loaded any more" in find(outputs, "-X DELETE")[-1]


def check_operation(outputs: dict[str, dict[str, str]], folder: Path) -> None:
    assert "max_queued" in find(outputs["limits-and-quotas"], "crucible limits")[0]
    assert "# TYPE crucible_jobs gauge" in find(outputs["monitoring"], "8000/metrics")[0]
    assert "key.revoked" in find(outputs["monitoring"], "crucible audit --action")[0]
    (config,) = find(outputs["export-to-triton"], "cat triton-models")
    assert 'backend: "onnxruntime"' in config
    assert "max_batch_size: 64" in config
    assert all(
        (folder / "triton-models" / name / "1" / "model.onnx").is_file()
        for name in ("demo", "other")
    )
