"""The Dockerfiles as far as they go without a base: every line is an instruction, and what pip is
asked for can be had together.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU, GPU = (ROOT / "docker" / f"Dockerfile.{name}" for name in ("cpu", "gpu"))
LITSERVE = ROOT / "benchmarks" / "serving" / "Dockerfile.litserve"
FILES = pytest.mark.parametrize("file", [CPU, GPU, LITSERVE], ids=lambda file: file.name)
KNOWN = {
    "ARG",
    "FROM",
    "WORKDIR",
    "ENV",
    "COPY",
    "RUN",
    "USER",
    "VOLUME",
    "EXPOSE",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}
READ_BY = {
    "bin/pip": ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"),
    "apt-get": ("APT_MIRROR", "PIP_CERT"),
}  # where there is a mirror
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each with its argument, continued lines joined."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for instruction in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, argument = instruction.partition(" ")
        yield name, argument.strip()


def complaints(text: str) -> list[str]:
    """What no builder would take, or what would name nothing."""
    problems, stages, known = [], [], {"PATH"}
    for name, argument in instructions(text):
        if name not in KNOWN:
            problems.append(f"no instruction: {name}")
        if name == "FROM":
            base, _, stage = argument.partition(" AS ")
            if base not in ("${BASE}", "scratch") and base not in stages:
                problems.append(f"no such stage: {base}")
            known = {
                "PATH"
                # as buildah has it; Docker hands on the arguments of the stage that this one is
                # built from
            }
            stages.append(stage)
        elif name in ("ARG", "ENV"):
            known |= {part.partition("=")[0] for part in shlex.split(argument)}
        elif name == "RUN":
            problems += run_complaints(argument, known)
        elif (
            name == "COPY"
            and (source := re.match(r"--from=(\S+)", argument))
            and source[1] not in stages
        ):
            problems.append(f"no such stage: {source[1]}")
        elif name in ("ENTRYPOINT", "CMD", "HEALTHCHECK"):
            command = argument.partition("CMD ")[2] if name == "HEALTHCHECK" else argument
            if not all(isinstance(part, str) for part in json.loads(command)):
                problems.append(f"no list of words: {command}")
    return problems


def run_complaints(argument: str, known: set[str]) -> list[str]:
    script = re.sub(r"^(--mount=\S+\s+)*", "", argument)
    checked = subprocess.run(
        ["sh", "-n", "-c", script], capture_output=True, text=True, check=False
    )
    own = set(re.findall(r"(?:^|&& )(\w+)=", script))
    silently = {name for tool, names in READ_BY.items() if f"{tool} " in script for name in names}
    lost = sorted((set(re.findall(r"\$\{(\w+)", script)) | silently) - known - own)
    return ([f"no shell: {checked.stderr}"] if checked.returncode else []) + [
        f"declared nowhere: {name}" for name in lost
    ]


@FILES
def test_every_line_is_an_instruction_that_names_what_is_there(file: Path) -> None:
    assert complaints(file.read_text()) == []


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("WORKDIR /src", "WORKDIRS /src", "no instruction: WORKDIRS"),
        ("--from=build /opt", "--from=built /opt", "no such stage: built"),
        ("ARG TENSORRT=", "ARG TENSORT=", "declared nowhere: TENSORRT"),
        ("; fi", "; if", "no shell: "),
        (
            "AS build-full\nARG PIP_INDEX_URL=\n",
            "AS build-full\n",
            "declared nowhere: PIP_INDEX_URL",
        ),
    ],
)
def test_a_slip_would_be_found(right: str, wrong: str, message: str) -> None:
    text = GPU.read_text() if right in GPU.read_text() else CPU.read_text()
    assert right in text
    assert any(each.startswith(message) for each in complaints(text.replace(right, wrong, 1)))


def asked_of_pip(file: Path) -> list[str]:
    """Requirements of the file's one `pip install`, with the defaults of its arguments."""
    defaults = dict(
        part.partition("=")[::2]
        for name, argument in instructions(file.read_text())
        if name == "ARG"
        for part in shlex.split(argument)
    )
    (line,) = (
        argument
        for name, argument in instructions(file.read_text())
        if name == "RUN" and " install " in argument and "pip" in argument
    )
    (words,) = re.findall(r"pip --python \S+ install (.*?) &&", line)
    packages = shlex.split(re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], words))
    assert packages[0] == "--quiet"
    return packages[1:]


@pytest.mark.parametrize("file", [CPU, GPU], ids=["cpu", "gpu"])
def test_constraints_hold_where_packages_are_installed_and_where_they_are_built(file: Path) -> None:
    variables = dict(
        part.partition("=")[::2]
        for name, argument in instructions(file.read_text())
        if name == "ENV"
        for part in shlex.split(argument)
    )
    assert (
        variables["PIP_CONSTRAINT"] == variables["PIP_BUILD_CONSTRAINT"] == "/src/constraints.txt"
    )
    assert "setuptools==" in CONSTRAINTS


@pytest.mark.skipif(shutil.which("uv") is None, reason="no uv, which resolves for another Python")
def test_what_the_gpu_image_installs_can_be_had_together() -> None:
    """On the Python of its base, at the versions of constraints.txt. TensorRT's own libraries are
    in NVIDIA's index, which is not asked here.
    """
    text, requirements = GPU.read_text(), asked_of_pip(GPU)
    assert re.search(r"^ARG BASE=\S+ubuntu24\.04$", text, re.MULTILINE), (
        "another Ubuntu has another Python than 3.12: say so below"
    )
    base = (
        "--python-version",
        "3.12",
        "--python-platform",
        "x86_64-manylinux_2_39",
        "--constraint",
        "constraints.txt",
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("NVIDIA_")
    }
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", *base, "-"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    versions = {line for line in result.stdout.splitlines() if "==" in line}
    assert {re.sub("==.*", "", line) for line in versions} >= {
        "torch",
        "torchvision",
        "nvidia-modelopt",
        "cuda-python",
        "onnxruntime",
        "tensorrt-cu12",
    }
    pinned = {re.sub("==.*", "", line) for line in CONSTRAINTS.splitlines()}
    assert {line for line in versions if re.sub("==.*", "", line) in pinned} <= {
        *CONSTRAINTS.splitlines()
    }
    assert {line for line in versions if re.sub("==.*", "", line) not in pinned} == {
        requirements[-1]
    }


def test_a_named_context_takes_the_place_of_tensorrts_libraries() -> None:
    text = GPU.read_text()
    assert "\nFROM scratch AS tensorrt\n" in text  # empty, where no context is named
    assert "--mount=type=bind,from=tensorrt,target=/tensorrt " in text
    script = (ROOT / "docker" / "fetch_tensorrt.sh").read_text()
    version = re.search(r"^ARG TENSORRT=\S+==(\d+\.\d+)\.", text, re.MULTILINE)
    assert version is not None
    assert f"\nversion={version[1]}-" in script


def test_tensorrt_asks_pip_for_its_libraries_and_pip_knows_where_they_are() -> None:
    """Its package would run the pip of the environment otherwise, which has none; NVIDIA's index
    has the libraries.
    """
    stage = GPU.read_text().split(" AS build\n")[1].partition("\nFROM ")[0]
    assert "venv --without-pip /opt/crucible" in stage
    assert "NVIDIA_TENSORRT_DISABLE_INTERNAL_PIP=1" in stage
    assert "ARG PIP_EXTRA_INDEX_URL=https://pypi.nvidia.com\n" in stage
