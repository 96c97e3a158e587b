"""`crucible record` as a user meets it: the script stays as it is, and the plan compiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.shapes import DimRange
from pipeline.plan.files import load_plan
from tests.builders.cli import ONE_PROCESS, Result, crucible, crucible_here, environment

NETS = """
import torch
from torch import nn
from layers import scaled

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, classes)

    def forward(self, image, factor=1.0):
        return {"logits": self.head(scaled(self.conv(image), factor).relu().mean((2, 3)))}
"""
SCRIPT = """
import os, sys
import torch
from nets import Net

torch.manual_seed(0)
net, loss, total = Net(4).eval(), torch.nn.CrossEntropyLoss().eval(), 0.0
with torch.no_grad():
    for number in range(150):
        image = torch.randn(1 + number % 3, 1, 8, 10 if number % 2 else 12)
        logits = net(image, factor=2.0)["logits"]
        total += loss(logits, logits.argmax(1)).item()
print(sys.argv[1:], __name__, total, "CRUCIBLE_RECORD" in os.environ)
"""
OWN_CLASS = """
import sys
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.cumsum(0)  # rows depend on each other

net = Net().eval()
for number in range(40):
    net(torch.randn(2 + number % 3, 4))
if "wait" in sys.argv:
    print("ready", flush=True)
    while True:
        pass
raise ValueError("the script's own error")
"""


def recorded(folder: Path, *arguments: str) -> Result:
    return crucible("record", *arguments, cwd=folder)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "layers.py").write_text("def scaled(x, factor): return x * factor\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "own_class.py").write_text(OWN_CLASS)
    return tmp_path


@pytest.mark.slow
def test_a_script_is_recorded_and_its_plan_compiles(project: Path) -> None:
    alone = subprocess.run(
        [sys.executable, "script.py", "a", "--b"], cwd=project, capture_output=True, text=True
    )
    result = recorded(project, "--out", "out", "--", sys.executable, "script.py", "a", "--b")
    assert (result.code, result.out) == (0, alone.stdout), result.err
    assert "nets.Net" in result.err
    assert "CrossEntropyLoss" in result.err
    plan = load_plan(project / "out" / "plan.yaml")
    assert plan.model.entrypoint == "recorded_module:build"
    assert [(spec.name, spec.shape) for spec in plan.model.inputs] == [
        ("image", ("batch", 1, 8, "width"))
    ]
    assert plan.profiles[0].dims == {
        "batch": DimRange(min=1, opt=3, max=3),
        "width": DimRange(min=10, opt=12, max=12),
    }
    for name in ("nets.py", "layers.py", "script.py"):  # the recording stands on its own
        (project / name).unlink()
    compiled = crucible(
        "compile",
        project / "out" / "plan.yaml",
        "--set=candidates=[{backend: onnxruntime, precision: fp32}]",
        f"--set=benchmark={ONE_PROCESS}",
        "--out",
        project / "compiled",
    )
    assert compiled.code == 0, compiled.err
    assert compiled.summary["winner"] == "onnxruntime fp32"


def test_a_script_that_raises_keeps_its_calls_and_its_exit_code(project: Path) -> None:
    result = recorded(project, "--", sys.executable, "own_class.py")
    assert result.code == 1
    assert "ValueError: the script's own error" in result.err
    plan = load_plan(project / "crucible-recordings" / "own_class" / "plan.yaml")
    assert plan.model.path is not None  # the class is the script's
    assert plan.model.path.name == "model.pt2"
    assert plan.model.inputs[0].shape == ("x_0", 4)  # no batch
    assert "because the script itself defines Net" in result.err
    again = recorded(project, "--", sys.executable, "own_class.py")
    assert again.code == 1
    assert "replaces nothing" in again.err


def test_ctrl_c_ends_the_script_and_keeps_its_calls(project: Path) -> None:
    command = ["record", "--out", "out", "--", sys.executable, "own_class.py", "wait"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", *command],
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, err
    assert (project / "out" / "plan.yaml").is_file()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('no torch')", "called no nn.Module"),
        ("import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))", "1 in training mode"),
        ("import torch; torch.nn.ReLU().eval()(torch.ones(1, 2))", "at least 3 different samples"),
        ("import os; os._exit(0)", "before the module was stored"),
    ],
)
def test_what_cannot_be_recorded_is_said_and_leaves_nothing(
    tmp_path: Path, code: str, expected: str
) -> None:
    result = recorded(tmp_path, "--out", "out", "--", sys.executable, "-c", code)
    assert (result.code, list(tmp_path.iterdir())) == (1, [])
    assert expected in result.err


def test_calls_of_one_size_are_noted(tmp_path: Path) -> None:
    code = "import torch; net = torch.nn.ReLU().eval(); [net(torch.randn(2, 3)) for _ in range(9)]"
    result = recorded(tmp_path, "--", sys.executable, "-c", code)
    assert result.code == 0, result.err
    assert "note: all calls had the same sizes" in result.err


def test_a_missing_script_is_the_interpreters_own_error(tmp_path: Path) -> None:
    result = recorded(tmp_path, "--", sys.executable, "gone.py")
    assert result.code == 2
    assert "can't open file" in result.err


def test_an_unknown_class_gets_the_names_of_those_called(project: Path) -> None:
    result = recorded(project, "--module", "nets.Nett", "--", sys.executable, "script.py")
    assert result.code == 1
    assert "give --module one of the classes that it called: nets.Net" in result.err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("ls", "-l"), "expected a Python command, got 'ls -l'"),
        (("script.py", "--fast"), "expected a Python command, got 'script.py --fast'"),
        (("/gone/python", "script.py"), "no program '/gone/python'"),
        (("python", "-u", "-sE", "script.py"), "with Python's option -sE"),
    ],
)
def test_a_command_that_is_no_python_is_refused(
    tmp_path: Path, command: tuple[str, ...], expected: str
) -> None:
    result = crucible_here("record", *command, cwd=tmp_path)
    assert (result.code, list(tmp_path.iterdir())) == (1, [])
    assert expected in result.err
