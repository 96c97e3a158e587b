"""Run one stage: look in the store, else run a child process.

Also records the list of steps and emits events.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from pipeline.core.artifacts import Target
from pipeline.core.progress import CandidateFigures, Progress, silent
from pipeline.errors import ChildStopped
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.execution.content import text_of_content
from pipeline.execution.durations import History
from pipeline.execution.stage_event import StageEvent, StageState
from pipeline.execution.store import Key, Store
from pipeline.measurement.clock import monotonic
from pipeline.results.report import Step

A = TypeVar("A", bound=BaseModel)


Emit = Callable[[StageEvent], None]


class Run(Protocol):
    """Runs a stage's function. A test double can plant a fault or count reads."""

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: object,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Name, version and tools of a stage."""

    name: str
    version: int  # raised when a change of the code changes the result
    tools: tuple[str, ...] = ()  # distributions whose versions are part of the key
    writes_files: bool = True  # the function takes `out`, the folder for its files
    needs_quiet_device: bool = False  # it measures: other work on the device would falsify it
    # False if a transient failure spoiled the value: the next run makes it again
    is_cacheable: Callable[[Any], bool] = lambda value: True


def no_figures(value: object) -> tuple[CandidateFigures, ...]:
    """Return no figures: the artifact of most stages has none."""
    return ()


@dataclass(frozen=True)
class StageCall(Generic[A]):
    """One call of a stage's function, and the cache key that follows from its fields."""

    stage: Stage
    kind: type[A]  # of the artifact
    work: partial[A]  # the function with its arguments, without `out` and `progress`
    depends_on: tuple[object, ...] = ()  # inputs of the artifact besides the arguments
    subject: str = ""  # shown after the stage's name
    target: Target | None = None  # where the artifact is valid; None: everywhere
    # what the artifact says of candidates; reported when the stage has finished, or is reused
    figures: Callable[[A], Iterable[CandidateFigures]] = no_figures

    @property
    def key(self) -> Key:
        """The cache key: equal for calls that make equal artifacts. It ignores the subject."""
        arguments = (*self.work.args, *self.depends_on)
        return Key(
            stage=self.stage.name,
            version=self.stage.version,
            inputs=tuple(text_of_content(argument) for argument in arguments),
            tools={tool: installed(tool) for tool in self.stage.tools},
            target=self.target,
        )


@dataclass(slots=True)
class Runner:
    """Connects stages with the store, child processes and events."""

    store: Store
    emit: Emit = lambda event: None
    run: Run = call_in_child
    # entered for the time in which a stage that needs a quiet device runs
    quiet_device: Callable[[], AbstractContextManager[None]] = nullcontext
    steps: list[Step] = field(default_factory=list)
    plan: str = ""  # name of the plan, for estimates from its own past runs
    workers: int = 1  # stages that may run in parallel, each in a child
    stage_timeout_s: float | None = None  # of each stage's child

    def branch(self) -> Runner:
        """Return a runner for one of several threads, with its own list of steps."""
        return replace(self, steps=[])

    def take_over(self, branch: Runner) -> None:
        """Add the steps of a branch.

        If two steps have the same artifact, the one that made it is listed.
        """
        indices = {step.digest: index for index, step in enumerate(self.steps)}
        for step in branch.steps:
            index = indices.get(step.digest)
            if index is None:
                self.steps.append(step)
            elif self.steps[index].reused:
                self.steps[index] = step

    def stage(self, call: StageCall[A]) -> A:
        """Return the artifact of a call: from the store, or made in a child process."""
        stage, subject, key = call.stage, call.subject, call.key
        log = self.store.root / "logs" / f"{stage.name}-{key.digest[:12]}.log"

        def emit(state: Any, **details: Any) -> None:
            self.emit(StageEvent(stage.name, subject, state=state, **details))

        def make(out: Path) -> A:
            estimate_s = self.history.estimate(stage.name, subject, self.plan)
            emit("started", estimate_s=estimate_s)
            arguments = [*call.work.args]
            if stage.writes_files:
                arguments.append(out)
            with self._device(stage):
                value: A = self.run(
                    call.work.func,
                    *arguments,
                    name=subject or stage.name,
                    log=log,
                    progress=self._progress(stage.name, subject, estimate_s),
                    limit=self._limit(stage.name, subject),
                )
            return value

        try:
            stored = self.store.get(key, call.kind, make, stage.is_cacheable)
        except BaseException as error:
            emit(_end_of(error), text=_first_line(error))
            raise
        if any(step.digest == stored.digest for step in self.steps):
            return stored.value
        step = Step(
            stage=stage.name,
            subject=subject,
            seconds=stored.provenance.seconds,
            reused=stored.reused,
            created=stored.provenance.created,
            digest=stored.digest,
        )
        self.steps.append(step)
        if not stored.reused:
            device = call.target.device if call.target else ""
            self.history.add(stage.name, subject, step.seconds, self.plan, device)
        for figures in call.figures(stored.value):
            self.report(stage, figures, subject)
        emit("reused" if stored.reused else "finished", seconds=step.seconds)
        return stored.value

    def report(self, stage: Stage, figures: CandidateFigures, subject: str = "") -> None:
        """Emit the figures of a candidate as progress of a stage."""
        self.emit(StageEvent(stage.name, subject, state="progress", figures=figures))

    def anew(
        self, stage: Stage, subject: str, function: Callable[..., Any], *arguments: object
    ) -> Any:
        """Run `function(*arguments, progress)` in a child process without caching.

        The call is reported as this stage.
        """
        name = stage.name

        def emit(state: Any, **details: Any) -> None:
            self.emit(StageEvent(name, subject, state=state, **details))

        emit("started", estimate_s=self.history.estimate(name, subject, self.plan))
        begin, created = monotonic(), dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        try:
            with self._device(stage):
                value = self.run(
                    function,
                    *arguments,
                    name=name,
                    progress=self.progress(name, subject),
                    limit=self._limit(name, subject),
                )
        except BaseException as error:
            emit(_end_of(error), text=_first_line(error))
            raise
        step = Step(
            stage=name,
            subject=subject,
            seconds=monotonic() - begin,
            reused=False,
            created=created,
            digest="",
        )
        self.steps.append(step)
        self.history.add(name, subject, step.seconds, self.plan)
        emit("finished", seconds=step.seconds)
        return value

    def _device(self, stage: Stage) -> AbstractContextManager[None]:
        return self.quiet_device() if stage.needs_quiet_device else nullcontext()

    def _limit(self, stage: str, subject: str) -> TimeLimit | None:
        if self.stage_timeout_s is None:
            return None
        work = f"the stage '{stage}' of '{subject}'" if subject else f"the stage '{stage}'"
        return TimeLimit(
            self.stage_timeout_s,
            work,
            "raise `stage_timeout_s` in the plan, or send a model that takes less time: a loop in"
            " its graph may run too often",
        )

    @property
    def history(self) -> History:
        """Past durations of this store's stages."""
        return History(self.store.root)

    def progress(self, stage: str, subject: str = "") -> Progress:
        """Return a Progress that emits events of this stage."""
        return self._progress(stage, subject, self.history.estimate(stage, subject, self.plan))

    def _progress(self, stage: str, subject: str, estimate_s: float | None) -> Progress:
        begin = monotonic()

        def progress(
            fraction: float | None, text: str, figures: CandidateFigures | None = None
        ) -> None:
            self.emit(
                StageEvent(
                    stage,
                    subject,
                    fraction,
                    text,
                    elapsed_s=monotonic() - begin,
                    estimate_s=estimate_s,
                    state="progress",
                    figures=figures,
                )
            )

        return progress


def _end_of(error: BaseException) -> StageState:
    """Return how a stage has ended: `cancelled` if it was only interrupted."""
    is_failure = isinstance(error, Exception) and not isinstance(error, ChildStopped)
    return "failed" if is_failure else "cancelled"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] if isinstance(error, Exception) else "interrupted"


def installed(distribution: str) -> str:
    """Return the version of a package, or `absent`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
