"""The runner: one stage through store, child and events."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.core.artifacts import Artifact, Target
from pipeline.core.progress import CandidateFigures, Progress
from pipeline.errors import ChildDied, ChildStopped, DataError
from pipeline.execution.stage_event import StageEvent
from pipeline.execution.stage_runner import Runner, Stage, StageCall, installed
from pipeline.execution.store import Store
from pipeline.results.report import Step
from tests.pipeline.execution.figures import candidate


class Number(Artifact):
    value: int
    pid: int


def double(number: int, out: Path, progress: Progress) -> Number:
    progress(0.5, "half")
    (out / "number").write_text(str(2 * number))
    return Number(root=out, file="number", value=2 * number, pid=os.getpid())


def refuse(progress: Progress) -> Number:
    raise DataError("expected more, got less", "send more")


DOUBLE = Stage("double", 1, ("numpy",))
COUNT = Stage("count", 1)
REFUSE = StageCall(Stage("refuse", 1, writes_files=False), Number, partial(refuse))


def call(number: int = 21, subject: str = "", **changes: object) -> StageCall[Number]:
    """What doubles a number."""
    made = StageCall(DOUBLE, Number, partial(double, number))
    return replace(made, subject=subject, **changes)  # type: ignore[arg-type]


def test_what_an_artifact_says_of_candidates_comes_before_the_end_of_its_stage(
    tmp_path: Path,
) -> None:
    def figures(number: Number) -> list[CandidateFigures]:
        return [candidate(f"{name} {number.value}") for name in ("first", "second")]

    events: list[StageEvent] = []
    made = call(21, "x", figures=figures)
    assert made.key == call(21, "x").key, "figures change no artifact"
    for _ in range(2):
        Runner(Store(tmp_path), events.append).stage(made)
    shown = [
        (event.state, event.figures.label if event.figures else "")
        for event in events
        if event.text != "half"
    ]
    reported = [("progress", "first 42"), ("progress", "second 42")]
    assert shown == [("started", ""), *reported, ("finished", ""), *reported, ("reused", "")]
    assert {event.subject for event in events} == {"x"}


def test_a_stage_runs_in_a_child_once_and_is_then_reused(tmp_path: Path) -> None:
    events: list[StageEvent] = []
    runner = Runner(Store(tmp_path), events.append)
    first = runner.stage(call(21, "x"))
    again = Runner(Store(tmp_path), events.append).stage(call(21, "x"))
    assert first == again
    assert first.value == 42
    assert first.pid != os.getpid()
    assert [(event.state, event.fraction) for event in events] == [
        ("started", None),
        ("progress", 0.5),
        ("finished", None),
        ("reused", None),
    ]
    assert [(step.stage, step.subject, step.reused) for step in runner.steps] == [
        ("double", "x", False)
    ]


def test_a_finished_stage_leaves_its_time_and_the_next_run_an_estimate(tmp_path: Path) -> None:
    events: list[StageEvent] = []
    runner = Runner(Store(tmp_path), events.append, plan="tiny")
    target = Target(backend="numpy", version="2", device="abacus")
    runner.stage(call(21, "x", target=target))
    runner.stage(call(22, "x"))
    Runner(Store(tmp_path), events.append).stage(call(21, "x", target=target))
    entries = runner.history.entries()
    assert [(entry.plan, entry.stage, entry.subject, entry.device) for entry in entries] == [
        ("tiny", "double", "x", "abacus"),
        ("tiny", "double", "x", ""),
    ]
    assert [event.state for event in events] == [
        "started",
        "progress",
        "finished",
        "started",
        "progress",
        "finished",
        "reused",
    ]
    assert {event.estimate_s for event in events[:2]} == {None}
    assert {event.estimate_s for event in events[3:5]} == {entries[0].seconds}
    assert min(events[1].elapsed_s, events[2].seconds) > 0


def test_a_stage_that_fails_leaves_no_time(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path))
    with pytest.raises(DataError):
        runner.stage(REFUSE)
    assert runner.history.entries() == ()


def test_the_same_stage_twice_in_one_run_is_one_step(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path))
    runner.stage(call())
    runner.stage(call())
    assert len(runner.steps) == 1


TARGET = Target(backend="numpy", version="2", device="abacus")
CHANGES = {
    "an argument": call(22),
    "what it depends on": call(depends_on=("the user's code",)),
    "the target": call(target=TARGET),
    "the version": call(stage=replace(DOUBLE, version=2)),
    "the tools": call(stage=replace(DOUBLE, tools=("onnx",))),
    "the stage": call(stage=replace(DOUBLE, name="twice")),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_another_call_makes_it_again(tmp_path: Path, changed: StageCall[Number]) -> None:
    runner = Runner(Store(tmp_path))
    runner.stage(call())
    runner.stage(changed)
    assert [step.reused for step in runner.steps] == [False, False]


def test_a_failure_is_told_and_not_kept(tmp_path: Path) -> None:
    events: list[StageEvent] = []
    runner = Runner(Store(tmp_path), events.append)
    with pytest.raises(DataError):
        runner.stage(REFUSE)
    assert events[-1].state == "failed"
    assert runner.steps == []
    assert not (tmp_path / "artifacts" / "refuse").exists()


def test_a_stage_over_its_time_is_stopped_and_the_key_of_the_plan_named(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path), stage_timeout_s=0.01)
    for run, work in (
        (partial(runner.stage, call(21, "x")), "the stage 'double' of 'x'"),
        (partial(runner.anew, COUNT, "", count, 21), "the stage 'count'"),
    ):
        with pytest.raises(ChildDied) as error:
            run()
        assert error.value.message == f"{work} took longer than its limit of 0.01 s and was stopped"
        assert "raise `stage_timeout_s` in the plan" in error.value.next_step
    assert runner.steps == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), ChildStopped("stopped")])
def test_an_interrupted_stage_is_cancelled(tmp_path: Path, error: BaseException) -> None:
    events: list[StageEvent] = []

    def interrupt(*arguments: object, **options: object) -> None:
        raise error

    runner = Runner(Store(tmp_path), events.append, run=interrupt)
    for run in (partial(runner.stage, call()), partial(runner.anew, COUNT, "", count, 21)):
        with pytest.raises(type(error)):
            run()
    assert [event.state for event in events] == ["started", "cancelled"] * 2


def test_a_double_can_run_the_stages(tmp_path: Path) -> None:
    names: list[str] = []

    def run(function: object, *arguments: object, name: str, **others: object) -> Number:
        names.append(name)
        out = arguments[-1]
        assert isinstance(out, Path)
        return double(1, out, lambda fraction, text, figures=None: None)

    assert Runner(Store(tmp_path), run=run).stage(call()).value == 2
    assert names == ["double"]


def step(digest: str, reused: bool) -> Step:
    return Step(
        stage="double",
        subject="x",
        seconds=1.0,
        reused=reused,
        created="2026-05-05T00:00:00+00:00",
        digest=digest,
    )


def test_a_branch_has_steps_of_its_own_until_they_are_taken_over(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path), plan="tiny", workers=2)
    runner.stage(call(21, "before"))
    first, second = runner.branch(), runner.branch()
    assert (first.steps, first.store, first.plan) == ([], runner.store, "tiny")
    second.stage(call(22, "second"))
    first.stage(call(23, "first"))
    assert [step.subject for step in runner.steps] == ["before"]
    runner.take_over(first)
    runner.take_over(second)
    assert [step.subject for step in runner.steps] == ["before", "first", "second"]


def test_of_two_branches_with_one_artifact_the_step_that_made_it_counts(tmp_path: Path) -> None:
    """The other branch has waited for it, and found it in the store."""
    runner = Runner(Store(tmp_path))
    for steps in (
        [step("a", reused=True), step("b", reused=False)],
        [step("a", reused=False), step("b", reused=True)],
    ):
        branch = runner.branch()
        branch.steps += steps
        runner.take_over(branch)
    assert [(step.digest, step.reused) for step in runner.steps] == [("a", False), ("b", False)]


def test_the_version_of_a_missing_package_is_absent() -> None:
    assert installed("no-such-package") == "absent"
    assert installed("numpy")[0].isdigit()


def test_what_is_run_anew_is_told_as_a_stage_and_never_reused(tmp_path: Path) -> None:
    events: list[StageEvent] = []
    runner = Runner(Store(tmp_path), events.append, plan="tiny")
    assert [runner.anew(COUNT, "x", count, 21) for _ in range(2)] == [22, 22]
    assert [event.state for event in events] == ["started", "progress", "finished"] * 2
    assert [event.estimate_s is None for event in events[::3]] == [True, False]
    assert {(step.stage, step.subject, step.reused, step.digest) for step in runner.steps} == {
        ("count", "x", False, "")
    }
    assert [(entry.plan, entry.stage, entry.subject) for entry in runner.history.entries()] == [
        ("tiny", "count", "x")
    ] * 2
    with pytest.raises(DataError, match="expected more"):
        runner.anew(REFUSE.stage, "", refuse)
    assert (events[-1].state, events[-1].text) == ("failed", "expected more, got less")
    assert len(runner.steps) == 2


def test_only_a_stage_that_needs_a_quiet_device_runs_on_one(tmp_path: Path) -> None:
    order: list[str] = []

    @contextmanager
    def quiet_device() -> Iterator[None]:
        order.append("quiet")
        yield
        order.append("free")

    def emit(event: StageEvent) -> None:
        if event.state != "progress":  # repeated on a busy host
            order.append(f"{event.stage} {event.state}")

    runner = Runner(Store(tmp_path), emit, quiet_device=quiet_device)
    measuring = replace(DOUBLE, name="measure", needs_quiet_device=True)
    runner.stage(call(21))
    assert "quiet" not in order
    order.clear()
    for each in (runner, runner.branch()):  # the second finds it in the store
        each.stage(call(21, stage=measuring))
    assert order == [
        "measure started",
        "quiet",
        "free",
        "measure finished",
        "measure reused",
    ]
    order.clear()
    runner.anew(replace(COUNT, needs_quiet_device=True), "", count, 21)
    assert order == ["count started", "quiet", "free", "count finished"]


def count(number: int, progress: Progress) -> int:
    progress(0.5, "half")
    return number + 1
