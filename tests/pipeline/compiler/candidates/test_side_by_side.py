"""Candidates that are prepared side by side: nothing is lost, and nothing goes on after an end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.backends import BACKENDS
from pipeline.compiler.baselines import build_reference
from pipeline.compiler.candidates.host_recipes import recipes_of
from pipeline.compiler.candidates.side_by_side import (
    MAX_SIDE_BY_SIDE_BYTES,
    may_overlap,
    prepare_all,
)
from pipeline.compiler.candidates.stages import reference_outputs
from pipeline.compiler.context import CompileContext, open_context
from pipeline.compiler.graph import export_model
from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import (
    ChildDied,
    ChildKilled,
    DiskFull,
    InternalError,
    LoadCrashed,
    ModelError,
)
from pipeline.execution import fork_server
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.execution.stage_event import StageEvent
from pipeline.execution.stage_runner import Emit, Run, Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from pipeline.results.candidates import Candidate
from pipeline.stages.build import build
from pipeline.stages.validate import ReferenceOutputs
from tests.builders.cli import write_model, write_task
from tests.builders.halves import Halves, run_here
from tests.pipeline.backends.onnxruntime.onnxruntime_double import pretend_gpu

WITHIN_S = 60.0  # for what takes a second on a quiet host
ONNXRUNTIME = "onnxruntime fp32"
CANDIDATES = (
    {"backend": "onnxruntime", "precision": "fp32"},
    {"backend": "onnxruntime", "precision": "int8", "method": "minmax"},
    {"backend": "onnxruntime", "precision": "int8", "method": "minmax", "activation": "int8"},
)
"""The two in int8 share a calibration."""


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that run in this process, so that no stage needs a child."""
    monkeypatch.setitem(BACKENDS, "onnxruntime", Halves("onnxruntime"))


class Line:
    """Stages that run here, but for what `before` does with the name of each before it runs.

    One at a time: stages are made for a process of their own, and change what threads share.
    """

    def __init__(self, before: Callable[[Callable[..., Any], str], None]) -> None:
        self.before = before
        self.threads: set[threading.Thread] = set()
        self.process = threading.Lock()

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        self.threads.add(threading.current_thread())
        self.before(function, name)
        with self.process:
            return run_here(function, *arguments, name=name, log=log, progress=progress)


def prepared(
    folder: Path,
    run: Run,
    workers: int,
    recipes: tuple[Recipe, ...] = (),
    emit: Emit = lambda event: None,
    **changes: object,
) -> tuple[list[Candidate], CompileContext, list[InternalError]]:
    """Every candidate of a small task, the context whose runner has the steps, and our bugs."""
    context, model, expected = opened(folder, **changes)
    runner = Runner(Store(folder / "home"), emit, run=run, workers=workers)
    context = replace(context, runner=runner)
    outcomes = prepare_all(context, model, recipes or recipes_of(context)[0], expected)
    bugs = [outcome.bug for outcome in outcomes if outcome.bug]
    return [outcome.candidate for outcome in outcomes], context, bugs


def opened(folder: Path, **changes: object) -> tuple[CompileContext, OnnxModel, ReferenceOutputs]:
    """What candidates are prepared from."""
    plan = load_plan(write_task(folder, **{"candidates": [*CANDIDATES], **changes}))
    context = open_context(plan, Runner(Store(folder / "home"), run=run_here))
    exported = export_model(context)
    expected = reference_outputs(
        context, build_reference(context, exported), context.data.selection
    )
    return context, exported, expected


def steps_of(context: CompileContext) -> list[tuple[str, str, bool]]:
    return [(step.stage, step.subject, step.reused) for step in context.runner.steps]


def labels_of(candidates: list[Candidate]) -> list[str]:
    return [candidate.label for candidate in candidates]


def test_candidates_and_steps_stay_in_the_order_of_the_plan(tmp_path: Path) -> None:
    """The first candidate is built last here."""
    last_is_checked = threading.Event()
    alone, alone_context, _ = prepared(tmp_path / "alone", run_here, workers=1)
    last = alone[-1].label

    def wait_for_the_last(function: Callable[..., Any], name: str) -> None:
        if function is build and name == ONNXRUNTIME:
            assert last_is_checked.wait(WITHIN_S)
        if name == f"{last} on selection":
            last_is_checked.set()

    candidates, context, bugs = prepared(tmp_path / "several", Line(wait_for_the_last), workers=3)
    assert last_is_checked.is_set()
    assert labels_of(candidates) == labels_of(alone)
    assert {candidate.state for candidate in candidates} == {"measured"}
    assert bugs == []
    assert steps_of(context) == steps_of(alone_context)
    assert [stage for stage, _, _ in steps_of(context)].count("calibrate") == 1, "both share it"


@pytest.mark.parametrize("workers", [1, 3])
def test_one_that_fails_loses_no_other_and_a_bug_of_ours_is_handed_on(
    tmp_path: Path,
    workers: int,
) -> None:
    labels = [recipe.label for recipe in recipes_of(opened(tmp_path / "labels")[0])[0]]
    faults = {labels[0]: ModelError("no such kernel"), labels[1]: InternalError("a slip")}

    def fail(function: Callable[..., Any], name: str) -> None:
        if function is build and name in faults:
            raise faults[name]

    candidates, context, bugs = prepared(tmp_path / "task", Line(fail), workers)
    assert [candidate.state for candidate in candidates] == ["failed", "failed", "measured"]
    assert candidates[0].reason == "no such kernel"
    assert candidates[1].reason == "a bug in Crucible, please report it: a slip"
    assert bugs == [faults[labels[1]]]
    assert {subject for _, subject, _ in steps_of(context)} >= {
        labels[2],
        f"{labels[2]} on selection",
    }


# -- an end that no candidate survives ---------------------------------------


class Hanging(Line):
    """Builds hang in a child, but for the second candidate's, which brings the end of all.

    With `again` each starts another child after its death, as a thread does that is between two
    stages when the end comes. A third candidate may have begun by then, or not.
    """

    def __init__(self, second: str, end: Callable[[], None], again: bool) -> None:
        super().__init__(self.hang_or_end)
        self.second, self.end, self.again = second, end, again
        self.deaths: dict[str, list[ChildDied]] = {}
        self.hangs = threading.Event()

    def hang_or_end(self, function: Callable[..., Any], name: str) -> None:
        if function is not build:
            return
        if name == self.second:
            assert self.hangs.wait(WITHIN_S)
            self.end()
            return
        deaths = self.deaths.setdefault(name, [])
        for _ in range(1 + self.again):
            try:
                call_in_child(hang, name="hangs", progress=self.tell)
            except ChildDied as error:
                deaths.append(error)
        raise deaths[-1]

    def tell(self, fraction: float | None, text: str, figures: object = None) -> None:
        if text == "hangs":
            self.hangs.set()


def hang(progress: Progress) -> None:
    progress(None, "hangs")
    time.sleep(WITHIN_S)


def fill_the_disk() -> None:
    raise DiskFull("no space is left")


def interrupt() -> None:
    """Send what Ctrl-C sends; the stage itself goes on."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("again", [False, True], ids=["in a stage", "between two"])
def test_a_full_disk_stops_every_child_and_comes_out(tmp_path: Path, again: bool) -> None:
    assert ended(tmp_path, fill_the_disk, again) == ("DiskFull", 1 + again, 0)


@pytest.mark.parametrize("again", [False, True], ids=["in a stage", "between two"])
def test_ctrl_c_stops_every_child_and_comes_out(tmp_path: Path, again: bool) -> None:
    """In a process of its own: libraries that other tests have loaded may handle signals too."""
    outcome = call_in_child(
        interrupted,
        tmp_path,
        again,
        name="interrupted",
        limit=TimeLimit(2 * WITHIN_S),
    )
    assert outcome == ("KeyboardInterrupt", 1 + again, 0)


def interrupted(folder: Path, again: bool, progress: Progress) -> tuple[str, int, int]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    BACKENDS["onnxruntime"] = Halves("onnxruntime")
    return ended(folder, interrupt, again)


def ended(folder: Path, end: Callable[[], None], again: bool) -> tuple[str, int, int]:
    """What came out, how many children of the first candidate died, and how many still live."""
    (first, second, _) = (recipe.label for recipe in recipes_of(opened(folder / "labels")[0])[0])
    line = Hanging(second, end, again)
    states: list[tuple[str, str]] = []

    def emit(event: StageEvent) -> None:
        states.append((event.subject, event.state))

    with pytest.raises((DiskFull, KeyboardInterrupt)) as raised:
        prepared(folder / "task", line, workers=2, emit=emit)
    assert (first, "cancelled") in states
    assert (first, "failed") not in states
    return raised.type.__name__, len(line.deaths[first]), len(living_children())


def living_children() -> list[psutil.Process]:
    """Those but the server that forks them: it goes on if a child was just about to start."""
    server = fork_server._server
    children = psutil.Process().children(recursive=True)
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and (server is None or child.pid != server.pid)
    ]


# -- one after another -------------------------------------------------------


def do_nothing(function: Callable[..., Any], name: str) -> None: ...


def test_beside_a_gpu_candidates_are_prepared_one_after_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line(do_nothing)
    here, beside_gpu = tmp_path / "here", tmp_path / "gpu"
    prepared(here, line, workers=3)
    assert threading.current_thread() not in line.threads
    recipes, _ = recipes_of(opened(here)[0])
    pretend_gpu(tmp_path / "bin", monkeypatch)
    line = Line(do_nothing)
    candidates, _, _ = prepared(beside_gpu, line, 3, recipes)
    assert len(candidates) == len(recipes)
    assert line.threads == {threading.current_thread()}


def test_one_worker_prepares_one_after_another(tmp_path: Path) -> None:
    line = Line(do_nothing)
    prepared(tmp_path, line, workers=1)
    assert line.threads == {threading.current_thread()}


@pytest.mark.parametrize(
    ("backends", "more_bytes", "overlaps"),
    [
        (("onnxruntime", "openvino"), 0, True),
        (("onnxruntime", "openvino"), 1, False),
        (("onnxruntime", "tensorrt"), 0, False),
        (("torch",), 0, False),
    ],
)
def test_only_small_models_overlap_and_only_on_backends_of_the_cpu(
    tmp_path: Path,
    backends: tuple[str, ...],
    more_bytes: int,
    overlaps: bool,
) -> None:
    """The weights count, which may lie in a file of their own."""
    write_model(tmp_path / "model.onnx")
    model = onnx_model(tmp_path, "model.onnx")
    rest = MAX_SIDE_BY_SIDE_BYTES - (tmp_path / "model.onnx").stat().st_size
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(rest + more_bytes)
    recipes = [Recipe(backend=name, precision=Precision.FP32) for name in backends]
    assert may_overlap(model, recipes, has_gpu=False) is overlaps


# -- packages that crash -----------------------------------------------------

PROGRAMS = (("aoti", Precision.FP32), ("aoti", Precision.BF16), ("exported", Precision.FP32))


def programs() -> tuple[Recipe, ...]:
    common = {"backend": "torch", "realised_in": "runtime"}
    recipes = ({**common, "form": form, "precision": precision} for form, precision in PROGRAMS)
    return tuple(map(Recipe.model_validate, recipes))


def test_after_a_crash_no_other_precision_of_that_form_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BACKENDS, "torch", Halves("torch"))
    built: list[str] = []

    def crash(function: Callable[..., Any], name: str) -> None:
        if function is build:
            built.append(name)
        if function is build and name == "torch aoti fp32":
            raise LoadCrashed("the package crashed", "take another form")

    candidates, context, bugs = prepared(tmp_path, Line(crash), 1, programs())
    assert [(candidate.label, candidate.state) for candidate in candidates] == [
        ("torch aoti fp32", "failed"),
        ("torch aoti bf16", "refused"),
        ("torch exported fp32", "measured"),
    ]
    assert candidates[0].reason == "the package crashed"
    assert (
        "torch aoti fp32, which is built in the same way, crashed on this host"
        in candidates[1].reason
    )
    assert built == ["torch aoti fp32", "torch exported fp32"]
    assert context.crashed == {"aoti": "torch aoti fp32"}
    assert bugs == []


def test_a_child_that_ends_otherwise_says_nothing_of_other_precisions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BACKENDS, "torch", Halves("torch"))

    def die(function: Callable[..., Any], name: str) -> None:
        if function is build and name == "torch aoti fp32":
            raise ChildKilled("out of memory", "give it more memory")

    candidates, context, _ = prepared(tmp_path, Line(die), 1, programs())
    assert [candidate.state for candidate in candidates] == ["failed", "measured", "measured"]
    assert context.crashed == {}


def crash_at_load(progress: Progress) -> None:
    raise LoadCrashed("the package crashed", "take another form")


def test_a_crash_at_load_is_told_apart_by_its_type_across_processes() -> None:
    with pytest.raises(LoadCrashed, match="the package crashed") as error:
        call_in_child(crash_at_load, name="crash")
    assert error.value.next_step == "take another form"
    assert not error.value.may_pass
