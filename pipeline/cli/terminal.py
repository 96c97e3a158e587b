"""Output to a terminal: progress of stages on stderr, tables on stdout.

Without a terminal, the output is plain text.
"""

from __future__ import annotations

import os
import textwrap
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
from rich.table import Table as RichTable
from rich.text import Text

from pipeline.benchmark.batch_sweep import Sweep, tail_name
from pipeline.compiler.speed import level_s
from pipeline.core import KeptNode, Refusal
from pipeline.execution.stage_event import StageEvent
from pipeline.formatting import shape_text, state_label
from pipeline.measurement.clock import Clock, monotonic
from pipeline.report.accuracy_sections import ablation_outcome
from pipeline.report.latency_sections import throughput_section
from pipeline.report.performance_summary import (
    Summary,
    bound_text,
    gpu_cost_line,
    gpu_lines,
    interval_text,
    limit_cells,
    peaks_text,
    ratio_text,
    summary_lines,
    summary_rows,
)
from pipeline.report.sections import cosine_text
from pipeline.report.tables import Column, Table, left, right
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
LIFE_S = 30.0  # seconds between two lines of a long stage, where there are no bars
MIN_ESTIMATE_S = 3.0  # a shorter estimate ends before anybody reads it
REASON_WIDTH = 60  # characters of a reason in the table of candidates
MIN_SHARE = 0.1  # of the time: precisions below it are not shown
VERDICT_STYLE = {
    "accepted": "bold green",
    "keep": "bold cyan",
    "unproven": "bold yellow",
    "rejected": "bold red",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError. Rich itself would end the process with exit code 1."""
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Return a console as wide as the terminal.

    Without a terminal, it is wide enough for a table of candidates.
    """
    terminal = _Console(stderr=stderr, emoji=False)  # `metric:a:b` is a name, no emoji
    if terminal.is_terminal or "COLUMNS" in os.environ:
        return terminal
    return _Console(stderr=stderr, emoji=False, width=PLAIN_WIDTH)


class StageProgress:
    """Progress of the stages.

    On a terminal, every running stage has a bar with its elapsed and expected time. Elsewhere,
    every finished stage prints one line, and a long stage prints a line every `every_s` seconds,
    even if its library reports no progress.
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


# -- reports -----------------------------------------------------------------


def print_compiled(console: Console, report: Report, html_file: Path) -> None:
    """Print the result of `crucible compile`.

    It consists of the candidates, their bottlenecks, the verdict and the path of the full report.
    """
    console.print(candidate_table(report))
    for line in stopped_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    best_points, *_ = throughput_section(report).tables or (None,)
    if best_points:
        console.print(rich_table(best_points))
    print_limits(console, first_rows(report))
    if report.ablation and report.ablation.rows:
        console.print(ablation_table(report.ablation))
    for line in verdict_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"report: {html_file}", highlight=False, soft_wrap=True, markup=False)


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict with its reasons and next steps, for a rich console."""
    style = VERDICT_STYLE[report.verdict]
    winner = f"  {escape(report.title_of(report.winner))}" if report.winner else ""
    lines = [f"[{style}]{report.verdict.upper()}[/]{winner}"]
    lines += [f"  {escape(reason)}" for reason in report.reasons]
    best = report.benchmark_delivered
    if best and (bound := best.rows[0].bound):
        lines.append(f"  {escape(bound_text(bound))}")
    if report.nearest_miss and report.nearest_miss != report.winner:
        lines.append(f"  nearest miss: {escape(report.title_of(report.nearest_miss))}")
    lines += [
        f"  fallback of {escape(rescue.label)}: {escape(rescue.conclusion)}"
        for rescue in report.rescues
    ]
    if report.profile_width:
        lines.append(f"  profile width: {escape(report.profile_width.advice)}")
    warnings = dict.fromkeys(
        note.text for _, note in report.every_note() if note.level == "warning"
    )
    lines += [f"  [yellow]warning:[/] {escape(text)}" for text in warnings]
    return lines + [f"  next: {escape(step)}" for step in report.next_steps]


def stopped_lines(report: Report) -> list[str]:
    """Return the engines whose measurement stopped early, and why, for a rich console."""
    return [
        f"  {escape(report.title_of(benchmark.label))}: {escape(benchmark.stopped)}"
        for benchmark in _benchmarks(report, report.candidates)
        if benchmark.stopped
    ]


def _benchmarks(report: Report, candidates: Iterable[Candidate]) -> list[BenchmarkReport]:
    """Return every benchmark, those of the baselines first."""
    benchmarks = [report.baseline, *report.baselines]
    benchmarks += [candidate.benchmark for candidate in candidates]
    return [benchmark for benchmark in benchmarks if benchmark is not None]


def print_limits(console: Console, rows: Sequence[tuple[str, LatencyRow]]) -> None:
    """Print the table of bottlenecks.

    If no row has a known bottleneck (a CPU without measured peaks), print the rates and one line.
    """
    bounds = [row.bound for _, row in rows if row.bound]
    if not bounds:
        return
    known = any(bound.kind != "unknown" for bound in bounds)
    console.print(limits_table(rows, known))
    if not known:
        console.print(
            f"the bottlenecks are unknown: {escape(bounds[0].why)}; {escape(bounds[0].next_step)}",
            highlight=False,
            soft_wrap=True,
        )


def print_latency(console: Console, report: Report) -> None:
    """Print the latencies of a report: baselines, then all candidates with a benchmark."""
    benchmarks = [
        benchmark.model_copy(update={"label": report.title_of(benchmark.label)})
        for benchmark in _benchmarks(report, report.candidates)
    ]
    console.print(benchmark_table(benchmarks))
    rows = [(benchmark.label, row) for benchmark in benchmarks for row in benchmark.rows]
    print_limits(console, rows)


def first_rows(report: Report) -> list[tuple[str, LatencyRow]]:
    """Return the first row of every measured engine with its title, baselines first."""
    benchmarks = _benchmarks(report, sorted(report.candidates, key=level_s))
    return [(report.title_of(benchmark.label), benchmark.rows[0]) for benchmark in benchmarks]


def summary_notes(summary: Summary, row: LatencyRow, run: Benchmarks) -> list[str]:
    """Return the lines below the table of times, for a rich console.

    They hold the sums, the bottleneck, the peaks, the use of the GPU and warnings.
    """
    lines = [*summary_lines(summary)]
    if row.bound:
        lines.append(bound_text(row.bound))
    lines += [peaks_text(peaks) for peaks in run.peaks]
    if row.gpu:
        lines.append(gpu_cost_line(row.gpu))
    lines += gpu_lines(run.gpu_use)
    warnings = [f"[yellow]warning:[/] {escape(text)}" for text in summary.warnings]
    return [escape(line) for line in lines] + warnings


def validation_lines(report: ValidationReport) -> list[str]:
    """Return the accuracy of one engine on one data set, for a rich console."""
    lines = [
        f"{escape(output.output)}: agreement {output.agreement:.4f}"
        if output.agreement is not None
        else f"{escape(output.output)}: max {output.max_abs:.3g}, mean {output.mean_abs:.3g},"
        f" cosine {output.cosine:.6f}, SNR {output.snr_db:.1f} dB"
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
        checks = "; ".join(check.in_words(profiles) for check in report.sizes)
        on += f", and at {len(report.sizes)} other sizes: {escape(checks)}"
    if report.passed:
        return [*lines, f"[bold green]passed[/] {on}"]
    return [*lines, f"[bold red]failed[/] {on}: {escape('; '.join(report.failures))}"]


# -- tables ------------------------------------------------------------------


ENGINE = Column("engine", wrap=False)
LIMIT_COLUMNS = (
    ENGINE,
    *left("sizes"),
    *right("GFLOP/s", "GB/s", "arithmetic", "memory"),
    *left("bound by", "next"),
)
RATES = 4  # columns of LIMIT_COLUMNS that need no peak


def rich_table(table: Table) -> RichTable:
    """Render a table for a rich console. Its texts contain no markup."""
    rendered = RichTable(title=escape(table.title) or None, title_justify="left")
    for column in table.columns:
        rendered.add_column(escape(column.title), justify=column.align, no_wrap=not column.wrap)
    for index, row in enumerate(table.rows):
        style = "bold" if index == table.emphasised else None
        rendered.add_row(*map(escape, row), style=style)
    return rendered


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RichTable:
    """Return a table of left-aligned texts."""
    return rich_table(Table(left(*headings), tuple(tuple(row) for row in rows)))


def refusal_table(refusals: tuple[Refusal, ...]) -> RichTable:
    """Return a table of the nodes that a backend refuses."""
    rows = [
        (refusal.node, refusal.operator, str(refusal.opset), refusal.reason, refusal.remedy)
        for refusal in refusals
    ]
    return plain_table(("node", "operator", "opset", "reason", "remedy"), rows)


def candidate_table(report: Report) -> RichTable:
    """Return a table of the candidates against the baseline, fastest first."""
    sizes = report.baseline.rows[0].sizes if report.baseline and report.baseline.rows else {}
    columns = (
        Column("candidate", wrap=False),
        *left("state"),
        *right("drop", "cosine", f"median ({shape_text(sizes)})" if sizes else "median"),
        *right("times baseline (95 %)"),
        *left("really ran"),
    )
    labels: list[str] = []
    rows: list[tuple[str, ...]] = []
    for baseline in (report.baseline, *report.baselines):
        if baseline is not None:
            labels.append(baseline.label)
            rows.append(_baseline_cells(baseline))
    for candidate in sorted(report.candidates, key=level_s):
        labels.append(candidate.label)
        rows.append(_candidate_cells(candidate))
    if not any(candidate.layers for candidate in report.candidates):
        columns = columns[:-1]
        rows = [row[:-1] for row in rows]
    emphasised = labels.index(report.winner) if report.winner in labels else None
    return rich_table(Table(columns, tuple(rows), f"{report.name}: candidates", emphasised))


def _baseline_cells(baseline: BenchmarkReport) -> tuple[str, ...]:
    row = baseline.rows[0]
    ratio = ratio_text(row, baseline.stopped)
    return baseline.label, "baseline", "", "", median_text(row), ratio, ""


def _candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    selection, benchmark = candidate.selection, candidate.benchmark
    row = benchmark.rows[0] if benchmark and benchmark.rows else None
    state = state_label(candidate.state)
    if state not in ("measured", "failed accuracy"):
        reason = textwrap.shorten(
            candidate.reason.splitlines()[0], REASON_WIDTH, placeholder=" ..."
        )
        state = f"{state}: {reason}"
    return (
        candidate.title,
        state,
        f"{selection.metric.drop:+.4f}" if selection and selection.metric else "",
        cosine_text(selection),
        median_text(row),
        ratio_text(row, benchmark.stopped if benchmark else ""),
        ran_text(candidate.layers, candidate.kept_fp32) if candidate.layers else "",
    )


def ran_text(table: LayerTable, kept_nodes: Sequence[KeptNode] = ()) -> str:
    """Return the precisions with at least MIN_SHARE of the time: `int8 43 %, fp16 11 %`.

    Layers that only move data are not included; the report shows them. If the conversion left
    nodes in fp32, their share is included: `fp16 90 %, nodes in fp32 4.0 %`.
    """
    texts = []
    for name, share in time_by_precision(table).items():
        if name != "none" and share >= MIN_SHARE:
            precision = "not known" if name == "unknown" else name
            texts.append(f"{precision} {percent_text(share)}")
    if kept_nodes:
        texts.append(f"nodes in fp32 {percent_text(forced_share(table, kept_nodes))}")
    return ", ".join(texts)


def ablation_table(ablation: Ablation) -> RichTable:
    """Return a table with each switch of the placement reversed."""
    columns = (
        *left("switch"),
        *right("drop", "change", "times before (95 %)"),
        *left("outcome"),
    )
    rows = tuple(
        (
            f"{row.switch} {'on' if row.after else 'off'}",
            "" if row.drop is None else f"{row.drop:+.4f}",
            "" if row.drop_change is None else f"{row.drop_change:+.4f}",
            interval_text(row.ratio),
            ablation_outcome(row),
        )
        for row in ablation.rows
    )
    return rich_table(Table(columns, rows, f"switches reversed: {ablation.label}"))


def benchmark_table(reports: Sequence[BenchmarkReport]) -> RichTable:
    """Return a table of every row of every engine.

    It shows the median, and the percentiles for which there are enough samples.
    """
    columns = (
        ENGINE,
        *left("sizes"),
        *right("median", "p90", "p99", "samples/s", "times baseline (95 %)"),
    )
    rows = tuple(
        (
            report.label,
            shape_text(row.sizes) if row.sizes else "",
            median_text(row),
            _tail_text(row, 90),
            _tail_text(row, 99),
            f"{row.throughput_per_s:,.0f}",
            ratio_text(row, report.stopped),
        )
        for report in reports
        for row in report.rows
    )
    return rich_table(Table(columns, rows))


def _tail_text(row: LatencyRow, percent: float) -> str:
    value = row.end_to_end.percentile_or_absent(percent)
    return "-" if value is None else duration(value)


def limits_table(rows: Iterable[tuple[str, LatencyRow]], known: bool = True) -> RichTable:
    """Return a table of each row's bottleneck, or of its rates only if none is known."""
    columns = LIMIT_COLUMNS if known else LIMIT_COLUMNS[:RATES]
    title = "bottlenecks" if known else "rates, by the FLOPs and bytes of the source graph"
    cells = tuple(_limit_cells(label, row)[: len(columns)] for label, row in rows)
    return rich_table(Table(columns, cells, title))


def _limit_cells(label: str, row: LatencyRow) -> tuple[str, ...]:
    *figures, _, next_step = limit_cells(row)
    return (label, shape_text(row.sizes), *figures, next_step)


def summary_table(summary: Summary) -> RichTable:
    """Return a table of the times of every region of one row."""
    columns = (*left(""), *right("min", "max", "mean", "median", "p90", "p95", "p99"))
    title = f"{summary.label} at {shape_text(summary.sizes)}"
    return rich_table(Table(columns, summary_rows(summary), title))


def sweep_table(sweep: Sweep) -> RichTable:
    """Return a table of the batches of a sweep, with the best batch in bold."""
    has_tail = sweep.percentile != 50
    tail = right(tail_name(sweep)) if has_tail else ()
    columns = (*right(sweep.symbol, "median"), *tail, *right("samples/s"), *left("bound by"))
    rows = []
    for point in sweep.points:
        times = [duration(point.median_s)]
        if has_tail:
            times.append(duration(point.tail_s))
        bound = point.bound.kind if point.bound else ""
        rows.append((str(point.batch), *times, f"{point.samples_per_s:,.0f}", bound))
    batches = [point.batch for point in sweep.points]
    emphasised = batches.index(sweep.best) if sweep.best in batches else None
    title = f"{sweep.label} at {shape_text(sweep.others)}" if sweep.others else sweep.label
    return rich_table(Table(columns, tuple(rows), title, emphasised))


def median_text(row: LatencyRow | None) -> str:
    if row is None:
        return ""
    median = duration(row.end_to_end.median_s)
    return median if row.end_to_end.stable else f"{median} ~"


def duration(seconds: float) -> str:
    """Format a time in us, ms or s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.2f} s"
