"""Progress of stages on a terminal, or in a log."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from pipeline.core.progress import PERPLEXITY, CandidateFigures
from pipeline.execution.stage_event import StageEvent
from pipeline.measurement.clock import Clock, monotonic

LIFE_S = 30.0  # seconds between two lines of a long stage, where there are no bars
MIN_ESTIMATE_S = 3.0  # a shorter estimate ends before anybody reads it


class StageProgress:
    """Progress of the stages.

    On a terminal, every running stage has a bar with its elapsed and expected time. Elsewhere,
    every finished stage prints one line, and a long stage prints a line every `every_s` seconds,
    even if its library reports no progress. Both print the first figures of each candidate.
    """

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        every_s: float = LIFE_S,
        clock: Clock = monotonic,
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._live = console.is_terminal and not quiet
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(20),
            TimeElapsedColumn(),
            _Expected(),
            TextColumn("{task.fields[text]}"),
        )
        self._bars = Progress(*columns, console=console, transient=True, refresh_per_second=5)
        self._tasks: dict[str, TaskID] = {}  # bars of the stages that run, by name
        self._every_s, self._clock = every_s, clock
        # By name: when the stage started, and its last event.
        self._running: dict[str, tuple[float, StageEvent]] = {}
        self._shown: set[tuple[str, bool]] = set()  # candidates whose figures were printed
        self._lock = threading.RLock()  # stages may run side by side
        self._ended = threading.Event()

    def __enter__(self) -> StageProgress:
        if self._live:
            self._bars.start()
        elif not self._quiet:
            threading.Thread(target=self._report_regularly, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._live:
            self._bars.stop()

    def __call__(self, event: StageEvent) -> None:
        """Show one event of the runner."""
        with self._lock:
            self._show(event)

    def _show(self, event: StageEvent) -> None:
        name = _name(event)
        if event.figures is not None:
            self._show_figures(event.figures)
            return
        if event.state in ("started", "progress"):
            self._running[name] = (self._clock() - event.elapsed_s, event)
        if self._live and event.state in ("started", "progress", "waiting"):
            self._update(name, event)
        if event.state in ("finished", "reused", "failed", "cancelled"):
            self._running.pop(name, None)
            self._clear(name)
            if not self._quiet:
                self._console.print(_line(name, event), highlight=False)
        elif event.state == "waiting":
            self._console.print(f"[yellow]{escape(event.text)}", highlight=False)

    def _show_figures(self, figures: CandidateFigures) -> None:
        """Print what a candidate's check found, and the first runs of each race."""
        key = figures.label, figures.accuracy is not None
        if self._quiet or key in self._shown:
            return
        self._shown.add(key)
        if line := figures_line(figures):
            self._console.print(line, highlight=False)

    def say_alive(self) -> None:
        """Print one line for each stage that has run for at least `every_s` seconds."""
        with self._lock:
            running = list(self._running.values())
        for started, event in running:
            self._say_alive(self._clock() - started, event)

    def _say_alive(self, elapsed_s: float, event: StageEvent) -> None:
        if elapsed_s < self._every_s:
            return
        done = "" if event.fraction is None else f"{event.fraction:.0%}"
        parts = (done, expectation(elapsed_s, event.estimate_s), escape(event.text))
        details = ", ".join(part for part in parts if part)
        line = f"  [dim]running[/] {elapsed_s:6.1f} s  {_name(event)}"
        self._console.print(f"{line}  {details}" if details else line, highlight=False)

    def _report_regularly(self) -> None:
        last_s = 0.0
        while not self._ended.wait(min(1.0, self._every_s)):
            with self._lock:
                first_s = min((started for started, _ in self._running.values()), default=None)
            now_s = self._clock()
            if first_s is not None and now_s - max(last_s, first_s) >= self._every_s:
                last_s = now_s
                self.say_alive()

    def _update(self, name: str, event: StageEvent) -> None:
        if name not in self._tasks or event.state == "started":
            self._clear(name)
            self._tasks[name] = self._bars.add_task(
                name, total=None, text="", estimate_s=event.estimate_s
            )
        total = None if event.fraction is None else 1.0
        text = f"[dim]{escape(event.text)}"
        self._bars.update(
            self._tasks[name], total=total, completed=event.fraction or 0.0, text=text
        )

    def _clear(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))


class _Expected(ProgressColumn):
    """Remaining time of a stage, by its duration in earlier runs."""

    def render(self, task: Task) -> Text:
        return Text(expectation(task.elapsed or 0.0, task.fields["estimate_s"]), style="dim")


def expectation(elapsed_s: float, estimate_s: float | None) -> str:
    """Return `about 40 s left`, or `usually 68 s` for a stage that takes longer than usual.

    The text is empty without an estimate, and for an estimate below MIN_ESTIMATE_S.
    """
    if estimate_s is None or estimate_s < MIN_ESTIMATE_S:
        return ""
    left_s = estimate_s - elapsed_s
    return f"about {_span(left_s)} left" if left_s >= 1 else f"usually {_span(estimate_s)}"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _name(event: StageEvent) -> str:
    return f"{event.stage} [dim]{escape(event.subject)}[/dim]" if event.subject else event.stage


def _line(name: str, event: StageEvent) -> str:
    if event.state == "finished":
        return f"  [green]done[/]    {event.seconds:6.1f} s  {name}"
    if event.state == "reused":
        return f"  [cyan]reused[/]            {name}"
    if event.state == "cancelled":
        return f"  [yellow]cancelled[/]         {name}"
    return f"  [red]failed[/]            {name}"


def figures_line(figures: CandidateFigures) -> str:
    """Return one line on what was just measured of a candidate or baseline; empty: nothing was."""
    label = escape(figures.label)
    if found := figures.accuracy:
        result = "[green]passes[/]  " if found.passed else "[red]fails[/]   "
        interval = "" if found.low == found.high else f" ({found.low:.3g} to {found.high:.3g})"
        worse = "increase" if found.measure == PERPLEXITY else "loss"
        measure = f"{worse} of {escape(found.measure)}" if found.measure else "1 - cosine"
        return f"  {result}           {label}: {measure} {found.drop:.3g}{interval}"
    if timed := figures.latency:
        return f"  timing             {label}: first runs {timed.median_s * 1e3:.4g} ms"
    return ""
