"""What in a module's code keeps it from running fast: calls that wait, and graph breaks."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.backends.pytorch.findings import examine_module
from pipeline.backends.pytorch.graph_breaks import count_graphs
from pipeline.backends.pytorch.waits import find_waits, short_path, sync_warnings
from pipeline.core.artifacts import ModelSource
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import ModelError
from pipeline.execution.child_process import call_in_child
from pipeline.plan.source import digest_of_source
from pipeline.results.module_findings import ModuleFindings, Wait

X = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
PROFILE = Profile.model_validate({"dims": {"batch": [1, 8, 64]}})
dynamo = pytest.mark.filterwarnings("default")  # torch's own deprecations, by version


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those marked gpu, which run in children."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_module(folder: Path, *lines: str) -> ModelSource:
    """A module whose forward has these lines, the first in line 8 of its file."""
    name = f"net_{abs(hash((folder, lines)))}"
    head = """\
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(4))

            def forward(self, x):
    """
    body = "".join(f"        {line}\n" for line in lines)
    text = textwrap.dedent(head) + body + "def build():\n    return Net()\n"
    (folder / f"{name}.py").write_text(text)
    source = ModelSource(entrypoint=f"{name}:build", python_path=folder, inputs=(X,))
    return source.model_copy(update={"digest": digest_of_source(source)})


def file_of(source: ModelSource) -> str:
    assert source.entrypoint is not None
    return source.entrypoint.partition(":")[0] + ".py"


def examined(source: ModelSource, compiles: bool = False) -> ModuleFindings:
    return examine_module(source, (X,), (PROFILE,), compiles, silent)


@pytest.mark.parametrize(
    ("expression", "call"),
    [
        ("y.sum().item()", ".item()"),
        ("len(y[0].tolist())", ".tolist()"),
        ("float(y.sum())", "float(tensor)"),
        ("int(y.sum())", "int(tensor)"),
        ("1 if y.sum() > 0 else 2", "bool(tensor)"),
        ("1 if not y.any() else 2", "bool(tensor)"),
        ("y.cpu().shape[0]", ".cpu()"),
        ("y.to('cpu').shape[0]", ".to('cpu')"),
        ("y.to(device='cpu').shape[0]", ".to('cpu')"),
        ("y.numpy().size", ".numpy()"),
        ("y.nonzero().shape[0]", "nonzero"),
        ("torch.nonzero(y).shape[0]", "nonzero"),
        ("y[y > 0].shape[0]", "a mask as an index"),
        ("y[:, torch.tensor([True] * 4)].shape[0]", "a mask as an index"),
        ("torch.where(y > 0)[0].shape[0]", "torch.where(condition)"),
        ("len('ab'[torch.tensor(1):])", "a tensor as an index"),
        ("len(str(y))", "the text of a tensor"),
    ],
)
def test_a_call_that_waits_is_named_with_file_and_line(
    tmp_path: Path, expression: str, call: str
) -> None:
    source = write_module(tmp_path, "y = x * self.weight", f"n = {expression}", "return y * n")
    (wait,) = examined(source).waits
    assert wait == Wait(call=call, where=f"{file_of(source)}:9", count=1)


@pytest.mark.parametrize(
    "expression",
    [
        "y.shape[0]",
        "y[0, 1:]",
        "y[torch.tensor([0])]",
        "torch.where(y > 0, y, -y)",
        "y.to(torch.float64)",
        "y.to(x.device)",
        "y.argmax(-1)",
        "torch.cat([y, y]).view(-1)",
        "1 if y.dim() == 2 else 2",
    ],
)
def test_what_needs_no_value_of_a_tensor_does_not_wait(tmp_path: Path, expression: str) -> None:
    source = write_module(tmp_path, "y = x * self.weight", f"n = {expression}", "return y")
    assert examined(source).waits == ()


def test_calls_in_a_loop_are_counted_and_places_are_in_their_order(tmp_path: Path) -> None:
    source = write_module(
        tmp_path,
        "n = 0.0",
        "for row in range(3):",
        "    n += x[0, row].item()",
        "return x * n if x.sum() > 0 else x",
    )
    file = file_of(source)
    assert examined(source).waits == (
        Wait(call=".item()", where=f"{file}:10", count=3),
        Wait(call="bool(tensor)", where=f"{file}:11", count=1),
    )


def test_a_helper_of_the_user_is_named_and_not_the_line_that_calls_it(tmp_path: Path) -> None:
    (tmp_path / "waiting_helper.py").write_text("def largest(x):\n    return x.max().item()\n")
    source = write_module(tmp_path, "from waiting_helper import largest", "return x * largest(x)")
    assert examined(source).waits == (Wait(call=".item()", where="waiting_helper.py:2", count=1),)


def test_a_wait_inside_of_torch_has_the_line_that_calls_torch(tmp_path: Path) -> None:
    source = write_module(
        tmp_path,
        "if not hasattr(self, 'norm'):",
        "    self.norm = torch.nn.Identity()",
        "    self.norm.register_forward_hook(lambda m, i, o: o * o.sum().item())",
        "return self.norm(x)",
    )
    (wait,) = examined(source).waits
    assert (wait.call, wait.where) == (".item()", f"{file_of(source)}:10"), "the hook's own line"


def test_without_any_code_of_the_user_there_is_no_place() -> None:
    (wait,) = find_waits(lambda: torch.nn.Identity()(torch.ones(1)).item(), None)
    assert wait.call == ".item()"
    assert wait.where.startswith("test_findings.py:"), "the test is the user here"
    (own,) = find_waits(torch.ones(1).item, None)
    assert own == Wait(call=".item()", where="", count=1)


def test_what_waits_inside_of_torch_has_the_name_of_the_function() -> None:
    """By a double of CUDA's debug mode, which warns in the second function."""
    warned: list[bool] = []

    @contextmanager
    def syncs() -> Iterator[list[str]]:
        with sync_warnings() as found:
            yield found
            if len(warned) == 1:
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("another matter", stacklevel=1)
        warned.append(bool(found))

    x = torch.ones(2)
    (wait,) = find_waits(lambda: torch.tanh(torch.relu(torch.sin(x))), None, syncs)
    assert warned == [False, True, False]
    assert (wait.call, wait.count) == ("relu", 1)
    assert wait.where.startswith("test_findings.py:")


def test_paths_are_short(tmp_path: Path) -> None:
    assert short_path(tmp_path / "a" / "net.py", tmp_path) == "a/net.py"
    package = Path("/somewhere/lib/site-packages/timm/models/vit.py")
    assert short_path(package, tmp_path) == "timm/models/vit.py"
    assert short_path(package, None) == "timm/models/vit.py"
    assert short_path(Path("/elsewhere/net.py"), tmp_path) == "net.py"


@dynamo
def test_a_module_of_one_graph_has_no_break_and_is_compiled_again_for_other_sizes(
    tmp_path: Path,
) -> None:
    source = write_module(tmp_path, "return torch.relu(x * self.weight)")
    graphs = examined(source, compiles=True).graphs
    assert graphs is not None
    assert (graphs.graphs, graphs.breaks, graphs.first_break, graphs.where) == (1, 0, "", "")
    assert graphs.sizes == 3
    assert graphs.recompiles == 2, "for batch 1, and for all other sizes"


@dynamo
def test_a_graph_break_has_its_reason_and_its_line(tmp_path: Path) -> None:
    source = write_module(tmp_path, "y = x * self.weight", "n = y.sum().item()", "return y * n")
    found = examined(source, compiles=True)
    assert found.graphs is not None
    assert (found.graphs.graphs, found.graphs.breaks) == (2, 1)
    assert "item" in found.graphs.first_break
    assert "\n" not in found.graphs.first_break
    assert found.graphs.where == f"{file_of(source)}:9"
    assert [wait.call for wait in found.waits] == [".item()"]


@dynamo
def test_without_other_sizes_nothing_is_compiled_again() -> None:
    args = [(torch.ones(2, 4),)] * 3
    graphs = count_graphs(torch.nn.Linear(4, 4).eval(), args, None)
    assert (graphs.graphs, graphs.breaks, graphs.recompiles, graphs.sizes) == (1, 0, 0, 3)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=dynamo)])
def test_a_module_that_fails_is_a_model_error(tmp_path: Path, compiles: bool) -> None:
    source = write_module(tmp_path, "raise RuntimeError('no such luck')")
    with pytest.raises(ModelError, match="no such luck"):
        examined(source, compiles)


def test_the_module_computes_the_same_while_it_is_watched() -> None:
    seen: list[object] = []

    def call() -> None:
        seen.append(torch.arange(4.0).sum().item())
        seen.append(torch.arange(3).tolist())
        seen.append(bool(torch.ones(1)))

    assert len(find_waits(call, None)) == 3
    assert seen == [6.0, [0, 1, 2], True]


def waits_on_gpu(source: ModelSource, progress: Progress) -> ModuleFindings:
    return examine_module(source, (X,), (PROFILE,), False, progress)


@pytest.mark.gpu
def test_on_a_gpu_waits_inside_of_torch_are_found_too(tmp_path: Path) -> None:
    source = write_module(
        tmp_path,
        "y = x * self.weight",
        "n = y.sum().item()",
        "rows = torch.repeat_interleave(y, torch.ones(4, dtype=torch.long, device=y.device), 1)",
        "return rows * n",
    )
    found = call_in_child(waits_on_gpu, source, name="waits")
    file = file_of(source)
    places = {(wait.call, wait.where) for wait in found.waits}
    assert (".item()", f"{file}:9") in places
    assert any(where == f"{file}:10" for _, where in places), places
    assert not any(where == f"{file}:8" for _, where in places), "a product does not wait"
