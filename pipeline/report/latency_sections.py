"""Sections about latency at every shape, and about what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from pipeline.formatting import bytes_text, date, interval, number_text, shape_text, time_text
from pipeline.report.entries import (
    Entry,
    entries,
    percentile_cell,
    percentile_cells,
    ratio_cell,
    shapes,
    winner_row,
)
from pipeline.report.performance_summary import gpu_lines, limit_cells, peaks_text
from pipeline.report.tables import Section, Table, left, right
from pipeline.results.advice import Advice, Attempt
from pipeline.results.benchmarks import LatencyRow, LoadCurve
from pipeline.results.gpu_cost import GpuCost
from pipeline.results.report import Report

GPU_COLUMNS = ("GPU memory", "J per 1,000 requests")

LIMIT_COLUMNS = (
    *right("GFLOP/s", "GB/s", "MFU", "of peak memory"),
    *left("bound by", "why", "next"),
)  # of the cells that `limit_cells` returns


def latency_section(report: Report) -> Section:
    percentiles = (
        "Percentiles need enough raw values: p90 needs 100, p99 needs 1,000. Upload, compute and"
        " download are medians. Drifts: the median still changed between blocks."
    )
    measured = f"Measured {date(report.benchmarked or report.created)}"
    if any(step.stage == "benchmark" and step.reused for step in report.steps):
        measured += (
            ", in an earlier run on this host with the same engines: these results come from the"
            " store"
        )
    parts = [_without_repeats(_latency_table(report, sizes), sizes) for sizes in shapes(report)]
    tables = tuple(table for table, _ in parts)
    repeats = (text for _, text in parts if text)
    paragraphs = (percentiles, f"{measured}.", *repeats, *_gpu_text(report))
    missing = _missing_gpu_figures(report)
    if missing.rows:
        tables = (*tables, missing)
    return Section("latency", "Latency", paragraphs, tables=tables)


def _rows_at(report: Report, sizes: dict[str, int]) -> list[tuple[Entry, LatencyRow]]:
    """Return the entries that were measured at one shape."""
    rows = [(entry, entry.row(sizes)) for entry in entries(report)]
    return [(entry, row) for entry, row in rows if row is not None]


def _latency_table(report: Report, sizes: dict[str, int]) -> Table:
    columns = (
        *left("#", f"engine at {shape_text(sizes)}"),
        *right("median", "p90", "p99", "speed-up", "upload", "compute", "download"),
        *right("per s", "GFLOP/s", "values", "warm-up"),
    )
    measured = _rows_at(report, sizes)
    rows = tuple(_latency_cells(entry, row) for entry, row in measured)
    if any(row.gpu for _, row in measured):
        in_batches = any(row.samples_per_request > 1 for _, row in measured)
        columns += right("weights", "activations", *GPU_COLUMNS)
        columns += right("J per 1,000 samples") if in_batches else ()
        rows = tuple(
            (*cells, *_gpu_cells(row, in_batches))
            for cells, (_, row) in zip(rows, measured, strict=True)
        )
    return Table(columns, rows, emphasised=winner_row(entry for entry, _ in measured))


def _without_repeats(table: Table, sizes: dict[str, int]) -> tuple[Table, str]:
    """Return the table without columns that are equal in all rows, and a text with their values."""
    if len(table.rows) < 2:
        return table, ""
    is_repeated = [len(set(cells)) == 1 for cells in zip(*table.rows, strict=True)]
    first = zip(table.headings, table.rows[0], is_repeated, strict=True)
    repeats = ", ".join(f"{title} {cell}" for title, cell, repeated in first if repeated)
    is_varied = [not repeated for repeated in is_repeated]
    narrow = replace(
        table,
        columns=tuple(compress(table.columns, is_varied)),
        rows=tuple(tuple(compress(row, is_varied)) for row in table.rows),
    )
    return narrow, f"In every row at {shape_text(sizes)}: {repeats}." if repeats else ""


def _latency_cells(entry: Entry, row: LatencyRow) -> tuple[str, ...]:
    median, p90, p99 = percentile_cells(row.end_to_end)
    return (
        str(entry.number),
        entry.label,
        median if row.end_to_end.stable else f"{median} (drifts)",
        p90,
        p99,
        ratio_cell(entry, row),
        percentile_cell(row.upload, 50),
        percentile_cell(row.compute, 50),
        percentile_cell(row.download, 50),
        number_text(row.throughput_per_s),
        number_text(row.flops_per_s / 1e9) if row.flops_per_s else "-",
        str(len(row.end_to_end.values_s)),
        str(len(row.end_to_end.warmup_s)),
    )


def width_section(report: Report) -> Section:
    """Return what the width of the profiles costs, with one sentence of advice."""
    key, title = "width", "What the width of the profile costs"
    width = report.profile_width
    if width is None:
        return Section(key, title)
    if not width.rows:
        return Section(key, title, (width.advice,))
    text = (
        f"{report.title_of(width.label)} beside an engine of the same recipe that takes one shape"
        " only, in one interleaved run. Cost is the median of the first over the median of the"
        " second, with its 95 % interval: above 1, the width costs time. The answers of the second"
        " were not checked."
    )
    rows = tuple(
        (shape_text(row.sizes), interval(row.cost, 3) if row.cost else "-", row.missing)
        for row in width.rows
    )
    columns = (*left("shape"), *right("cost"), *left("not measurable"))
    return Section(key, title, (text, width.advice), tables=(Table(columns, rows),))


def advice_section(report: Report) -> Section:
    """Return all attempts; empty if the plan did not ask for advice."""
    key, title = "advice", "What would make it faster"
    advice = report.advice
    if advice is None:
        return Section(key, title)
    text = (
        *filter(None, (advice.note,)),
        f"{report.title_of(advice.label)} at {shape_text(advice.sizes)} beside engines with one"
        " change each, in one interleaved run. A change is advised if it certainly saves more than"
        " 2 % end to end. The interval is that in which a new measurement falls with 95 %"
        " probability; one wider than 10 % of the latency promises nothing.",
        advice.conclusion,
    )
    columns = (*left("rule", "found", "outcome"), *right("gain"), *left("how"))
    rows = tuple(
        (
            attempt.rule,
            attempt.reason,
            "; ".join(filter(None, (attempt.outcome, attempt.detail))),
            gain_text(attempt, advice) if attempt.gain else "-",
            attempt.how,
        )
        for attempt in advice.attempts
    )
    return Section(key, title, text, tables=(Table(columns, rows),) if rows else ())


def gain_text(attempt: Attempt, advice: Advice) -> str:
    """Return `saves 7.1 % to 8.9 %, about 28.0 us`, or the detail if no ratio was measured."""
    gain = attempt.gain
    if gain is None:
        return attempt.detail
    text = f"saves {100 * gain.low:.1f} % to {100 * gain.high:.1f} %"
    if attempt.per == "sample":
        return f"{text} of the time per sample"
    if advice.latency_s and gain.value > 0:
        text += f", about {time_text(gain.value * advice.latency_s)}"
    return text


def throughput_section(report: Report) -> Section:
    """Return throughput under load: the best point of each engine, all points, and what is open."""
    lines = [(entry, load_of(entry)) for entry in entries(report)]
    measured = [(entry, curve) for entry, curve in lines if curve is not None]
    if not measured:
        return Section("throughput", "Throughput")
    limit_s = measured[0][1].limit_s
    limit = "" if limit_s is None else f" whose p99 is within {time_text(limit_s)}"
    text = (
        "Every session runs one request of the batch after another, in a thread of its own. On a"
        " GPU the sessions share one engine, on a CPU each has its own."
        f" The best point has the highest throughput{limit}. Best points are compared in"
        " several processes; speed-up is the ratio of throughputs to that of the baseline, with its"
        ' 95 % interval. "-" means not measured, or too few requests: p99 needs 1,000.',
    )
    best = winner_row(entry for entry, _ in measured)
    tables = (
        Table(
            (
                *left("#", "engine", "best point"),
                *right("samples/s", "median", "p99", "speed-up"),
                *left("not compared because"),
            ),
            tuple(_best_cells(entry, curve) for entry, curve in measured),
            emphasised=best,
        ),
        _point_table(measured),
        Table(
            left("#", "engine", "not tried"),
            tuple(
                (str(entry.number), entry.label, reason)
                for entry, curve in measured
                for reason in curve.untried
            ),
        ),
    )
    return Section("throughput", "Throughput", text, tables=tables)


def load_of(entry: Entry) -> LoadCurve | None:
    """Return the curve of an engine; None if it was not measured under load."""
    return entry.benchmark.load if entry.benchmark else None


def _best_cells(entry: Entry, curve: LoadCurve) -> tuple[str, ...]:
    best = curve.best
    return (
        str(entry.number),
        entry.label,
        best.where if best else "none",
        number_text(best.samples_per_s) if best else "-",
        time_text(best.p50_s) if best else "-",
        time_text(best.p99_s) if best and best.p99_s is not None else "-",
        interval(curve.ratio, 2) if curve.ratio else "-",
        curve.ratio_missing if best else curve.why_over_limit(),
    )


def _point_table(measured: Sequence[tuple[Entry, LoadCurve]]) -> Table:
    columns = (
        *left("#", "engine"),
        *right("batch", "sessions", "samples/s", "median", "p99", "requests", "waited for a CPU"),
    )
    rows = tuple(
        (
            str(entry.number),
            entry.label,
            "-" if point.batch is None else str(point.batch),
            str(point.sessions),
            number_text(point.samples_per_s),
            time_text(point.p50_s),
            "-" if point.p99_s is None else time_text(point.p99_s),
            str(point.requests),
            f"{point.waiting:.0%}",
        )
        for entry, curve in measured
        for point in curve.points
    )
    return Table(columns, rows, title="All points", folded=True)


def gpu_cells(row: LatencyRow | None) -> tuple[str, str]:
    """Return the cells of one row for `GPU_COLUMNS`; "-" for a figure that is not known."""
    cost = row.gpu if row else None
    if cost is None:
        return "-", "-"
    return _bytes_cell(cost.peak_bytes), _energy_cell(cost.energy_per_1000_requests_j)


def _gpu_cells(row: LatencyRow, in_batches: bool) -> tuple[str, ...]:
    cost = row.gpu or GpuCost()
    cells = (_bytes_cell(cost.weights_bytes), _bytes_cell(cost.activation_bytes), *gpu_cells(row))
    if not in_batches:
        return cells
    energy_j = cost.energy_per_1000_requests_j
    return (*cells, _energy_cell(energy_j and energy_j / row.samples_per_request))


def _bytes_cell(count: int | None) -> str:
    return "-" if count is None else bytes_text(count)


def _energy_cell(energy_j: float | None) -> str:
    return "-" if energy_j is None else number_text(energy_j)


def _gpu_text(report: Report) -> tuple[str, ...]:
    """Return what the figures of the GPU mean; nothing in a report without any."""
    costs = [row.gpu for sizes in shapes(report) for _, row in _rows_at(report, sizes) if row.gpu]
    if not costs:
        return ()
    text = (
        "On the GPU: weights and activations are the engine's own; GPU memory is the peak of its"
        " whole process, with CUDA's context. A request is one run of the shape. J per 1,000"
        " requests is the energy of the whole GPU, with its idle power and with other processes."
        " Engines on the CPU have none of these figures."
    )
    if any(cost.peak_source == "device" for cost in costs):
        text += (
            " NVML does not list every process with its memory: for those, GPU memory is what"
            " became free when the process ended."
        )
    return (text,)


def _missing_gpu_figures(report: Report) -> Table:
    """Return why figures of the GPU are missing, each reason of an engine once."""
    rows: dict[tuple[str, ...], None] = {}
    for sizes in shapes(report):
        for entry, row in _rows_at(report, sizes):
            for figure, reason in row.gpu.missing.items() if row.gpu else ():
                rows[str(entry.number), entry.label, figure, reason] = None
    return Table(left("#", "not known on the GPU", "figure", "why"), tuple(rows))


def limit_section(report: Report) -> Section:
    """Return the bottleneck of every row, and its distance from the device's peaks."""
    measured = [_rows_at(report, sizes) for sizes in shapes(report)]
    if not any(row.bound for rows in measured for _, row in rows):
        return Section("limits", "Bottlenecks")
    text = (
        "GFLOP/s and GB/s are the FLOPs and bytes of the source graph, divided by the median end to"
        " end. Each node counts its own bytes. Shares are of the device's peak; for them, bytes are"
        " scaled to the engine's precision. A share of the memory over 100 % means that the engine"
        " fuses nodes or finds data in caches.",
        "MFU (model FLOPs utilisation) is the share of the peak of arithmetic in the precision"
        " behind it. Marks of practice, from training on many devices: GPT-3 21 %, Gopher 33 %,"
        " PaLM 46 % (Chowdhery et al., 2022). Small batches stay far below.",
        *(f"Peaks of {peaks_text(peaks)}." for peaks in report.peaks),
        *gpu_lines(report.gpu_use),
    )
    tables = tuple(_limits_table(rows) for rows in measured)
    return Section("limits", "Bottlenecks", text, tables=tables)


def _limits_table(measured: Sequence[tuple[Entry, LatencyRow]]) -> Table:
    sizes = measured[0][1].sizes
    columns = (*left("#", f"engine at {shape_text(sizes)}"), *LIMIT_COLUMNS)
    rows = tuple((str(entry.number), entry.label, *limit_cells(row)) for entry, row in measured)
    return Table(columns, rows, emphasised=winner_row(entry for entry, _ in measured))
