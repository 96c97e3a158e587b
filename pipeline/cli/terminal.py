"""What people see in a terminal: progress of stages on stderr, tables on stdout. Quiet and plain
where there is no terminal.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
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
from rich.table import Table
from rich.text import Text

from pipeline.benchmark.batch_sweep import Sweep, tail_name
from pipeline.compiler.decision import level_s
from pipeline.core import KeptNode, Refusal
from pipeline.execution.stage_runner import StageEvent
from pipeline.formatting import shape_text
from pipeline.measurement.measure import Clock, Interval, monotonic
from pipeline.report.performance_summary import (
    Summary,
    bound_text,
    gpu_lines,
    limit_cells,
    peaks_text,
    ratio_text,
    summary_lines,
    summary_rows,
)
from pipeline.report.tables import ablation_outcome
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import forced_share, percent_text, time_by_precision
from pipeline.results.report import (
    Ablation,
    BenchmarkReport,
    Benchmarks,
    Candidate,
    LatencyRow,
    Report,
    ValidationReport,
)

PLAIN_WIDTH = 130
LIFE_S = 30.0  # how often a long stage says that it is alive where there are no bars
WORTH_SAYING_S = 3.0  # a shorter estimate is over before it is read
LEAST_SHARE = 0.1  # of the time, for a precision to be shown
VERDICT_STYLE = {
    "accepted": "bold green",
    "keep": "bold cyan",
    "unproven": "bold yellow",
    "rejected": "bold red",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with exit code 1, which is said of errors."""
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; wide enough for a table of candidates where there is
    none.
    """
    found = _Console(stderr=stderr, emoji=False)  # `metric:a:b` is a name
    return (
        found
        if found.is_terminal or "COLUMNS" in os.environ
        else _Console(stderr=stderr, emoji=False, width=PLAIN_WIDTH)
    )


class StageProgress:
    """Shows stages as they run: bars with elapsed and expected time on a terminal; elsewhere one
    line per finished stage.

    There, a stage that takes long also says every `every_s` that it is alive, even while its
    library is silent.
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
        self._running: dict[
            str, tuple[float, StageEvent]
        ] = {}  # by name: when it started, and its last event
        self._lock = threading.RLock()  # stages may run side by side
        self._left = threading.Event()

    def __enter__(self) -> StageProgress:
        if self._live:
            self._bars.start()
        elif not self._quiet:
            threading.Thread(target=self._live_on, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        if self._live:
            self._bars.stop()

    def __call__(self, event: StageEvent) -> None:
        """Take one event of the runner."""
        with self._lock:
            self._take(event)

    def _take(self, event: StageEvent) -> None:
        name = _name(event)
        if event.state in ("started", "progress"):
            self._running[name] = (self._clock() - event.elapsed_s, event)
        if self._live and event.state in ("started", "progress", "waiting"):
            self._update(name, event)
        if event.state in ("finished", "reused", "failed"):
            self._running.pop(name, None)
            self._clear(name)
            if not self._quiet:
                self._console.print(_line(name, event), highlight=False)
        elif event.state == "waiting":
            self._console.print(f"[yellow]{escape(event.text)}", highlight=False)

    def say_alive(self) -> None:
        """One line of each stage that has run for long."""
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

    def _live_on(self) -> None:
        last_s = 0.0
        while not self._left.wait(min(1.0, self._every_s)):
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
    """How long a stage will go on, by how long it took before."""

    def render(self, task: Task) -> Text:
        return Text(expectation(task.elapsed or 0.0, task.fields["estimate_s"]), style="dim")


def expectation(elapsed_s: float, estimate_s: float | None) -> str:
    """`about 40 s left`, or `usually 68 s` of a stage that takes longer this time; empty where
    nothing is known, or it takes no time.
    """
    if estimate_s is None or estimate_s < WORTH_SAYING_S:
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
    return f"  [red]failed[/]            {name}"


def print_compiled(console: Console, report: Report, html_file: Path) -> None:
    """What `crucible compile` ends with: its candidates, what held each, the verdict, and where the
    whole report is.
    """
    console.print(candidate_table(report))
    for line in stopped_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    print_limits(console, first_rows(report))
    if report.ablation and report.ablation.rows:
        console.print(ablation_table(report.ablation))
    for line in verdict_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"report: {html_file}", highlight=False, soft_wrap=True, markup=False)


def verdict_lines(report: Report) -> list[str]:
    """The verdict with its reasons and next steps, for a rich console."""
    style = VERDICT_STYLE[report.verdict]
    lines = [
        f"[{style}]{report.verdict.upper()}[/]"
        + (f"  {escape(report.title_of(report.winner))}" if report.winner else "")
    ]
    lines += [f"  {escape(reason)}" for reason in report.reasons]
    best = report.benchmark_delivered
    if best and (bound := best.rows[0].bound):
        lines.append(f"  {escape(bound_text(bound))}")
    if report.nearest_miss and report.nearest_miss != report.winner:
        lines.append(f"  nearest miss: {escape(report.title_of(report.nearest_miss))}")
    lines += [
        f"  rescue of {escape(rescue.label)}: {escape(rescue.conclusion)}"
        for rescue in report.rescues
    ]
    warnings = dict.fromkeys(
        note.text for _, note in report.every_note() if note.level == "warning"
    )
    lines += [f"  [yellow]warning:[/] {escape(text)}" for text in warnings]
    return lines + [f"  next: {escape(step)}" for step in report.next_steps]


def stopped_lines(report: Report) -> list[str]:
    """Which engines ran in few processes, and why, for a rich console."""
    measured = (report.baseline, *report.baselines, *(each.benchmark for each in report.candidates))
    return [
        f"  {escape(report.title_of(each.label))}: {escape(each.stopped)}"
        for each in measured
        if each and each.stopped
    ]


def candidate_table(report: Report) -> Table:
    """Candidates against the baseline, fastest first."""
    table = Table(title=f"{report.name}: candidates", title_justify="left")
    for heading in ("candidate", "state", "drop", "cosine"):
        table.add_column(
            heading,
            justify="left" if heading in ("candidate", "state") else "right",
            no_wrap=heading == "candidate",
        )
    sizes = report.baseline.rows[0].sizes if report.baseline and report.baseline.rows else {}
    at = ", ".join(f"{name} {size}" for name, size in sizes.items())
    table.add_column(f"median ({at})" if at else "median", justify="right")
    table.add_column("times baseline (95 %)", justify="right")
    if any(candidate.layers for candidate in report.candidates):
        table.add_column("really ran")
    for baseline in (report.baseline, *report.baselines):
        if baseline is not None:
            row = baseline.rows[0]
            style = "bold" if baseline.label == report.winner else None
            table.add_row(
                escape(baseline.label),
                "baseline",
                "",
                "",
                median_text(row),
                ratio_text(row, baseline.stopped),
                style=style,
            )
    for candidate in sorted(report.candidates, key=level_s):
        table.add_row(
            *_candidate_cells(candidate), style="bold" if candidate.label == report.winner else None
        )
    return table


def ablation_table(found: Ablation) -> Table:
    """Each switch of the placement reversed."""
    table = Table(title=f"switches reversed: {escape(found.label)}", title_justify="left")
    for heading in ("switch", "drop", "change", "times before (95 %)", "outcome"):
        table.add_column(heading, justify="left" if heading in ("switch", "outcome") else "right")
    for row in found.rows:
        drop, change = (
            "" if value is None else f"{value:+.4f}" for value in (row.drop, row.drop_change)
        )
        table.add_row(
            f"{row.switch} {'on' if row.after else 'off'}",
            drop,
            change,
            interval_text(row.ratio),
            escape(ablation_outcome(row)),
        )
    return table


def ran_text(table: LayerTable, kept: Sequence[KeptNode] = ()) -> str:
    """`int8 43 %, fp16 11 %`: the precisions that take a good part of the time; what moves data is
    in the report.

    Where the conversion left nodes in fp32, what they take is told too: `fp16 90 %, nodes in fp32
    4.0 %`.
    """
    shares = [
        (name, share)
        for name, share in time_by_precision(table).items()
        if name != "none" and share >= LEAST_SHARE
    ]
    texts = [
        f"{'not known' if name == 'unknown' else name} {percent_text(share)}"
        for name, share in shares
    ]
    return ", ".join(
        [*texts, *([f"nodes in fp32 {percent_text(forced_share(table, kept))}"] if kept else [])]
    )


def _candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    report, benchmark = candidate.selection, candidate.benchmark
    drop = f"{report.metric.drop:+.4f}" if report and report.metric else ""
    cosine = (
        f"{min((o.cosine for o in report.outputs), default=float('nan')):.5f}"
        if report and report.outputs
        else ""
    )
    row = benchmark.rows[0] if benchmark and benchmark.rows else None
    known = candidate.state in ("measured", "failed accuracy")
    state = (
        candidate.state
        if known
        else escape(f"{candidate.state}: {candidate.reason.splitlines()[0][:60]}")
    )
    ran = (ran_text(candidate.layers, candidate.kept_fp32),) if candidate.layers else ()
    ratio = ratio_text(row, benchmark.stopped if benchmark else "")
    return escape(candidate.title), state, drop, cosine, median_text(row), ratio, *ran


def benchmark_table(reports: list[BenchmarkReport]) -> Table:
    """Every row of every engine: median and percentiles that the number of samples allows."""
    table = Table()
    for heading in (
        "engine",
        "sizes",
        "median",
        "p90",
        "p99",
        "samples/s",
        "times baseline (95 %)",
    ):
        table.add_column(
            heading,
            justify="left" if heading in ("engine", "sizes") else "right",
            no_wrap=heading == "engine",
        )
    for report in reports:
        for row in report.rows:
            sizes = ", ".join(f"{name} {size}" for name, size in row.sizes.items())
            tail = [
                (
                    "-"
                    if (value := row.end_to_end.percentile_or_absent(percent)) is None
                    else duration(value)
                )
                for percent in (90, 99)
            ]
            table.add_row(
                escape(report.label),
                sizes,
                median_text(row),
                *tail,
                f"{row.throughput_per_s:,.0f}",
                ratio_text(row, report.stopped),
            )
    return table


def print_limits(console: Console, rows: Sequence[tuple[str, LatencyRow]]) -> None:
    """The table of limits; where nothing binds any row that is known, as before a CPU's peaks were
    measured, its rates and one line.
    """
    bounds = [row.bound for _, row in rows if row.bound]
    if not bounds:
        return
    known = any(bound.kind != "unknown" for bound in bounds)
    console.print(limits_table(rows, known))
    if not known:
        console.print(
            f"what binds each row is not known: {escape(bounds[0].next_step)}",
            highlight=False,
            soft_wrap=True,
        )


def print_latency(console: Console, report: Report) -> None:
    """The latencies of a report: of the baselines and of all candidates that were measured."""
    found = (
        report.baseline,
        *report.baselines,
        *(candidate.benchmark for candidate in report.candidates),
    )
    measured = [
        each.model_copy(update={"label": report.title_of(each.label)})
        for each in found
        if each is not None
    ]
    console.print(benchmark_table(measured))
    print_limits(console, [(each.label, row) for each in measured for row in each.rows])


def limits_table(rows: Iterable[tuple[str, LatencyRow]], known: bool = True) -> Table:
    """What binds each row, by the label of its engine; only the rates where that is not known."""
    headings = (
        "engine",
        "sizes",
        "GFLOP/s",
        "GB/s",
        *(("arithmetic", "memory", "bound by", "next") if known else ()),
    )
    table = Table(
        title="what binds each row" if known else "of the source graph", title_justify="left"
    )
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in ("GFLOP/s", "GB/s", "arithmetic", "memory") else "left",
            no_wrap=heading == "engine",
        )
    for label, row in rows:
        *figures, _, step = limit_cells(row)
        table.add_row(
            *(escape(label), shape_text(row.sizes), *figures, escape(step))[: len(headings)]
        )
    return table


def first_rows(report: Report) -> list[tuple[str, LatencyRow]]:
    """Every measured engine at the first shape, baselines first."""
    candidates = (candidate.benchmark for candidate in sorted(report.candidates, key=level_s))
    return [
        (report.title_of(found.label), found.rows[0])
        for found in (report.baseline, *report.baselines, *candidates)
        if found
    ]


def summary_table(found: Summary) -> Table:
    """The times of every region of one row."""
    table = Table(title=f"{escape(found.label)} at {shape_text(found.sizes)}", title_justify="left")
    for heading in ("", "min", "max", "mean", "median", "p90", "p95", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for cells in summary_rows(found):
        table.add_row(*cells)
    return table


def summary_notes(found: Summary, row: LatencyRow, run: Benchmarks) -> list[str]:
    """What stands under the table of times, for a rich console: sums, what binds the row, the GPU,
    warnings.
    """
    lines = [
        escape(line)
        for line in (
            *summary_lines(found),
            *([bound_text(row.bound)] if row.bound else []),
            *map(peaks_text, run.peaks),
        )
    ]
    lines += [escape(line) for line in gpu_lines(run.gpu_use)]
    return lines + [f"[yellow]warning:[/] {escape(text)}" for text in found.warnings]


def sweep_table(sweep: Sweep) -> Table:
    """Every batch of a sweep, the best in bold."""
    others = ", ".join(f"{name} {size}" for name, size in sweep.others.items())
    table = Table(
        title=f"{escape(sweep.label)}{f' at {others}' if others else ''}", title_justify="left"
    )
    tails = () if sweep.percentile == 50 else (tail_name(sweep),)
    for heading in (sweep.symbol, "median", *tails, "samples/s", "bound by"):
        table.add_column(heading, justify="left" if heading == "bound by" else "right")
    for point in sweep.points:
        tail = [duration(point.tail_s)] * len(tails)
        bound = point.bound.kind if point.bound else ""
        cells = (
            str(point.batch),
            duration(point.median_s),
            *tail,
            f"{point.samples_per_s:,.0f}",
            bound,
        )
        table.add_row(*cells, style="bold" if point.batch == sweep.best else None)
    return table


def validation_lines(report: ValidationReport) -> list[str]:
    """One engine's accuracy on one set, for a rich console."""
    lines = [
        f"{escape(output.output)}: max {output.max_abs:.3g}, mean {output.mean_abs:.3g}, cosine"
        f" {output.cosine:.6f}, SNR {output.snr_db:.1f} dB"
        for output in report.outputs
    ]
    if (metric := report.metric) is not None:
        interval = f"{metric.interval.low:+.4f} to {metric.interval.high:+.4f}"
        lines.append(
            f"{escape(metric.name)}: {metric.candidate:.4f}, reference {metric.reference:.4f}, drop"
            f" {metric.drop:+.4f} (95 % {interval})"
        )
    on = f"on {report.samples} {report.role} samples"
    if report.sizes:
        profiles = 1 + max(check.profile for check in report.sizes)
        on += f", and at {len(report.sizes)} other sizes: " + escape(
            "; ".join(check.in_words(profiles) for check in report.sizes)
        )
    return [
        *lines,
        (
            f"[bold green]passed[/] {on}"
            if report.passed
            else f"[bold red]failed[/] {on}: " + escape("; ".join(report.failures))
        ),
    ]


def refusal_table(refusals: tuple[Refusal, ...]) -> Table:
    """Every node that a backend refuses."""
    rows = [
        (refusal.node, refusal.operator, str(refusal.opset), refusal.reason, refusal.remedy)
        for refusal in refusals
    ]
    return plain_table(("node", "operator", "opset", "reason", "remedy"), rows)


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Texts in columns."""
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def median_text(row: LatencyRow | None) -> str:
    return (
        duration(row.end_to_end.median_s) + ("" if row.end_to_end.stable else " ~") if row else ""
    )


def interval_text(ratio: Interval | None) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""


def duration(seconds: float) -> str:
    """A time in the unit that people read it in."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.2f} s"
