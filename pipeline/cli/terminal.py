"""Reports on a terminal. Without a terminal, the output is plain text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from pipeline.benchmark.batch_sweep import Sweep, tail_name
from pipeline.compiler.speed import level_s
from pipeline.core.artifacts import KeptNode, Refusal
from pipeline.formatting import shape_text, state_label
from pipeline.llm.gate import percent_text as perplexity_text
from pipeline.llm.results import LanguageReport
from pipeline.report.accuracy_sections import ablation_outcome
from pipeline.report.latency_sections import throughput_section
from pipeline.report.performance_summary import (
    TARGET_HEADINGS,
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
    target_cells,
)
from pipeline.report.run_sections import module_lines
from pipeline.report.sections import cosine_text
from pipeline.report.tables import Column, Table, left, right
from pipeline.results.accuracy import ValidationReport
from pipeline.results.benchmarks import BenchmarkReport, Benchmarks, LatencyRow
from pipeline.results.candidates import Ablation, Candidate
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import forced_share, percent_text, time_by_precision
from pipeline.results.report import Report
from pipeline.results.targets import TargetResult

if TYPE_CHECKING:
    from pipeline.llm.remeasure.scores import ScoresAgain

PLAIN_WIDTH = 130
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


def print_text(console: Console, text: str, markup: bool = True) -> None:
    """Print text as it is: no numbers are coloured, and lines are not broken."""
    console.print(text, highlight=False, soft_wrap=True, markup=markup)


# -- reports -----------------------------------------------------------------


def print_compiled(console: Console, report: Report, html_file: Path) -> None:
    """Print the result of `crucible compile`.

    It consists of the candidates, their bottlenecks, the verdict and the path of the full report.
    """
    console.print(candidate_table(report))
    for line in stopped_lines(report):
        print_text(console, line)
    best_points, *_ = throughput_section(report).tables or (None,)
    if best_points:
        console.print(rich_table(best_points))
    print_limits(console, first_rows(report))
    if report.ablation and report.ablation.rows:
        console.print(ablation_table(report.ablation))
    for line in verdict_lines(report):
        print_text(console, line)
    print_text(console, f"report: {html_file}", markup=False)


def print_language_model(
    console: Console,
    report: LanguageReport,
    tables: Sequence[Table],
    failures: Sequence[str],
    place: str,
) -> None:
    """Print the result of `crucible compile` of a language model. `place`: of its report."""
    for table in tables:
        console.print(rich_table(table))
    for text in failures if report.verdict != "rejected" else ():  # else they are the reasons
        print_text(console, f"  {escape(text)}")
    style = VERDICT_STYLE[report.verdict]
    console.print(f"[{style}]{report.verdict.upper()}[/]  {escape(report.headline)}")
    for text in report.reasons:
        print_text(console, f"  {escape(text)}")
    for text in report.next_steps:
        print_text(console, f"  next: {escape(text)}")
    print_text(console, f"report: {place}", markup=False)


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
    lines += [f"  module: {escape(text)}" for text in module_lines(report)]
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
        print_text(
            console,
            f"the bottlenecks are unknown: {escape(bounds[0].why)}; {escape(bounds[0].next_step)}",
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
        if (worst := metric.worst_class) is not None:
            lines.append(
                f"  worst of {metric.judged_classes} classes: {escape(worst.name)},"
                f" {worst.candidate:.4f}, reference {worst.reference:.4f}, drop {worst.drop:+.4f}"
            )
    on = f"on {report.samples} {report.role} samples"
    if report.sizes:
        profiles = 1 + max(check.profile for check in report.sizes)
        checks = "; ".join(check.in_words(profiles) for check in report.sizes)
        on += f", and at {len(report.sizes)} other sizes: {escape(checks)}"
    if report.passed:
        return [*lines, f"[bold green]passed[/] {on}"]
    return [*lines, f"[bold red]failed[/] {on}: {escape('; '.join(report.failures))}"]


def language_score_lines(again: ScoresAgain) -> list[str]:
    """Return the scores of a language model on its texts, for a rich console."""
    judged = again.judged
    kl, agreement = judged.divergence, judged.agreement
    on = f"on {again.texts} validation texts, {judged.tokens:,} tokens"
    passed = f"[bold green]passed[/] {on}"
    if judged.failures:
        passed = f"[bold red]failed[/] {on}: {escape('; '.join(judged.failures))}"
    return [
        f"{escape(again.label)}: perplexity {again.perplexity:.4f}, reference"
        f" {again.reference_perplexity:.4f}, change {perplexity_text(judged.perplexity_increase)};"
        f" read one by one {perplexity_text(judged.cached_perplexity_increase)}",
        f"divergence {kl.value:.4f} nats per token ({kl.low:.4f} to {kl.high:.4f}), likeliest token"
        f" the same for {agreement.value:.1%} ({agreement.low:.1%} to {agreement.high:.1%})",
        f"{judged.greedy_equal:.0%} of greedy tokens before the first that differs; as served and"
        f" as scored differ by {judged.path_difference:.4f} nats in the mean",
        passed,
    ]


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


def target_table(results: Iterable[TargetResult]) -> RichTable:
    """Return a table of the targets of a plan, side by side."""
    return plain_table(TARGET_HEADINGS, map(target_cells, results))


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
    if state not in ("measured", "failed accuracy") and candidate.reason:
        first_line = candidate.reason.partition("\n")[0]
        state += f": {textwrap.shorten(first_line, REASON_WIDTH, placeholder=' ...')}"
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
