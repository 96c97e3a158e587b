"""The base install: no torch, one onnxruntime, light imports, and it compiles an ONNX model."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.builders.cli import crucible, environment, write_task

ROOT = Path(__file__).parents[2]


def test_every_library_of_the_base_install_has_a_lower_bound() -> None:
    """Beside an older one, `pip install` changed nothing, and the first import failed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    without = {
        name for name, bound in bounds.items() if not any(one.operator == ">=" for one in bound)
    }
    assert without == {"opentelemetry-api"}  # fastapi has the bound
    too_old = {"fastapi": "0.142.0", "typer": "0.27.0", "httptools": "0.7.1", "onnx": "1.18.0"}
    assert not [name for name, version in too_old.items() if version in bounds[name]]
    assert all(metadata.version(name) in bound for name, bound in bounds.items())


def test_every_pinned_version_takes_the_oldest_python() -> None:
    """Without uv, `make demo` ended with a conflict on Debian's 3.11.2: a pin needed 3.11.5."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==", 1) for line in lines if "==" in line)
    installed = {name: metadata.metadata(name) for name in pins if is_installed(name)}
    assert len(installed) > len(pins) / 2
    needs = {
        name: each["Requires-Python"]
        for name, each in installed.items()
        if each["Version"] == pins[name] and each["Requires-Python"]
    }
    assert [name for name, need in needs.items() if oldest not in SpecifierSet(need)] == []


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a fresh environment that holds the base install and nothing else."""
    folder = tmp_path_factory.mktemp("venv") / "base"
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    for package in ("pipeline", "service"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    python = str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        commands = [
            [uv, "venv", "-q", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "-q", "--python", python],
        ]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "-q"],
        ]
    commands[-1] += ["--constraint", "constraints.txt", "."]
    for command in commands:
        result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    return python


@pytest.mark.slow
def test_without_torch_an_onnx_model_compiles(base_python: str, tmp_path: Path) -> None:
    missing = subprocess.run(
        [base_python, "-c", "import torch"], capture_output=True, text=True, check=False
    )
    assert "No module named 'torch'" in missing.stderr
    plan = write_task(tmp_path, candidates=[])
    result = crucible("compile", plan, cwd=tmp_path, env={"PYTHONPATH": ""}, python=base_python)
    assert result.code == 0, result.err
    assert result.summary["verdict"] == "unproven"
    assert "onnxruntime int8" in result.out
    assert "openvino" not in result.out.split("ACCEPTED")[0]
    assert (
        "reference, ONNX Runtime fp32"
        in (tmp_path / "crucible-out" / "tiny" / "report.md").read_text()
    )


@pytest.mark.slow
def test_without_torch_an_entrypoint_names_the_extra(base_python: str, tmp_path: Path) -> None:
    model = {
        "entrypoint": "net:build",
        "weights_from": "random",
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}],
    }
    plan = write_task(tmp_path, model=model)
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(16, 4)\n"
    )
    result = crucible("compile", plan, cwd=tmp_path, env={"PYTHONPATH": ""}, python=base_python)
    assert result.code == 1
    assert ".[torch]" in result.err


@pytest.mark.slow
def test_what_is_installed_says_that_it_is_typed(base_python: str, tmp_path: Path) -> None:
    """Else type checkers take everything of the client for Any."""
    (tmp_path / "uses.py").write_text(
        "from service.client import Client\n\nreveal_type(Client.job)\n"
    )
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--python-executable",
            base_python,
            "--follow-imports=silent",
            "uses.py",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment({"PYTHONPATH": ""}),
        check=False,
    )
    assert "-> service.http.schemas.JobView" in checked.stdout, checked.stdout


HELPERS = """
import asyncio, json, sys
import pipeline
from pipeline.core.frozen import Frozen
from service.grpc import descriptors
from service.offload.pool import Helpers

async def answers():
    plain, of_grpc = Helpers(1), Helpers(1, "service.grpc.offload_worker")
    try:
        body = json.dumps({"inputs": {"x": [[1.5, 2.5]]}}).encode()
        length, binary = await plain.ask("decode_json", [body], dtypes={"x": "float32"})
        print(binary[length:].hex())
        messages = descriptors.names_of("grpc_service.proto")
        request = messages["ModelInferRequest"](model_name="tiny")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        tensor.contents.fp32_contents.extend([1.5, 2.5])
        _, raw = await of_grpc.ask("raw_form", [request.SerializeToString()])
        print(messages["ModelInferRequest"].FromString(raw).raw_input_contents[0].hex())
    finally:
        await plain.close()
        await of_grpc.close()

asyncio.run(answers())
print(pipeline.__file__, descriptors.__file__)
"""


@pytest.mark.slow
def test_helper_processes_of_an_install_answer(base_python: str, tmp_path: Path) -> None:
    """They are started by the names of their modules, from an empty environment."""
    result = subprocess.run(
        [base_python, "-c", HELPERS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment({"PYTHONPATH": ""}),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    json_helper, grpc_helper, places = result.stdout.splitlines()
    assert json_helper == grpc_helper == "0000c03f00002040"  # 1.5 and 2.5 in fp32
    installed = str(Path(base_python).parents[1] / "lib")
    assert all(place.startswith(installed) for place in places.split())


@contextmanager
def served(base_python: str, home: Path) -> Iterator[tuple[str, str]]:
    """The installed `crucible serve` on free ports: its URL, and where gRPC listens."""
    command = [str(Path(base_python).parent / "crucible"), "serve", "--port", "0"]
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--home", str(home)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=home,
            env=environment({"PYTHONPATH": ""}),
        )
    with process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            match = re.fullmatch(
                r"Crucible listens on (http://\S+)\ngRPC listens on (\S+)\n", "".join(lines)
            )
            assert match, (home / "server.log").read_text()
            yield match[1], match[2]
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_an_install_serves_http_and_grpc(base_python: str, tmp_path: Path) -> None:
    with served(base_python, tmp_path) as (url, address):
        answer = httpx.get(f"{url}/healthz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        with grpc.insecure_channel(address) as channel:
            is_live: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert is_live(b"", timeout=30) == b"\x08\x01"  # ServerLiveResponse(live=True)


def test_a_command_that_needs_no_heavy_library_loads_none() -> None:
    heavy = (
        "torch onnxruntime openvino nncf tensorrt tensorrt_rtx onnxsim polygraphy onnx_graphsurgeon"
        " onnx_ir matplotlib"
    )
    code = (
        "import sys, service.cli.main, pipeline.compiler.compile; print([name for name in"
        f" '{heavy}'.split() if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "[]"
