"""The sections of a report, in the order in which people read them.

markdown.py and html.py render them; cli/terminal.py renders tables of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from pipeline.formatting import bytes_text, interval, shape_text, state_label
from pipeline.report.accuracy_sections import (
    ablation_section,
    metric_section,
    rescue_section,
    size_section,
    validation_section,
)
from pipeline.report.entries import Entry, entries, percentile_cells, ratio_cell, shapes, winner_row
from pipeline.report.latency_sections import (
    GPU_COLUMNS,
    advice_section,
    gpu_cells,
    latency_section,
    limit_section,
    throughput_section,
    width_section,
)
from pipeline.report.layer_errors import layer_error_section
from pipeline.report.layer_sections import layer_section
from pipeline.report.run_sections import (
    environment_section,
    module_section,
    note_section,
    operator_section,
    packing_section,
    postprocess_section,
    preprocess_section,
    stage_section,
)
from pipeline.report.tables import Section, Table, left, right
from pipeline.results.accuracy import ValidationReport
from pipeline.results.report import Report


def sections(report: Report) -> tuple[Section, ...]:
    """Return every section that is not empty. The verdict and its reasons are not among them."""
    plan = json.dumps(
        report.plan.model_dump(mode="json", exclude_defaults=True, by_alias=False), indent=2
    )
    parts = (
        Section("command", "Repeat it", code=report.command),
        _candidate_section(report),
        preprocess_section(report),
        postprocess_section(report),
        metric_section(report),
        size_section(report),
        rescue_section(report),
        layer_error_section(report),
        ablation_section(report),
        validation_section(report),
        packing_section(report),
        throughput_section(report),
        latency_section(report),
        width_section(report),
        advice_section(report),
        limit_section(report),
        layer_section(report),
        module_section(report),
        stage_section(report),
        operator_section(report),
        environment_section(report),
        note_section(report),
        Section("plan", "The plan", code=plan),
    )
    return tuple(section for section in parts if not section.is_empty)


def headline(report: Report) -> str:
    """Return the outcome in one sentence."""
    if report.winner is None:
        return "No candidate passed."
    if report.verdict == "keep":
        return _headline_of_kept(report)
    parts = [report.title_of(report.winner)]
    if report.ratio is not None and report.baseline is not None:
        unit = "throughput" if report.best_point else "speed"
        parts.append(
            f"runs at {interval(report.ratio, 2)} times the {unit} of {report.baseline.label}"
        )
    elif report.best_point and report.is_baseline_over_limit:
        parts.append("is within the limit, which no baseline meets,")
    elif report.ratio_missing:
        parts.append("was chosen (its speed could not be measured)")
    if report.validation is not None and report.validation.metric is not None:
        metric = report.validation.metric
        parts.append(
            f"with {metric.name} {metric.candidate:.4f} against {metric.reference:.4f} of the"
            " reference"
        )
    point = f" Best point: {report.best_point.in_words()}." if report.best_point else ""
    return " ".join(parts) + "." + point


def _headline_of_kept(report: Report) -> str:
    """Return the outcome if no candidate is faster than the baseline."""
    outcome = f"Keep {report.winner}: no candidate that kept its accuracy is measurably faster."
    if report.ratio is None:
        return outcome
    return f"{outcome} The fastest runs at {interval(report.ratio, 2)} times its speed."


def _candidate_section(report: Report) -> Section:
    lines = entries(report)
    first = shapes(report)[0] if shapes(report) else {}
    columns = (
        *left("#", "engine", "state"),
        *right("drop", "cosine", "median", "p90", "p99", "speed-up", "size", "memory"),
    )
    text = []
    if shapes(report):
        text.append(
            f"Latency end to end at {shape_text(first)}; speed-up against the baseline with its 95"
            ' % interval. "-" means not measured.'
        )
    selections = [candidate.selection for candidate in report.candidates if candidate.selection]
    generated = any(selection.role == "generated" for selection in selections)
    where = "generated inputs, which prove nothing," if generated else "the selection set"
    text.append(
        f"Accuracy on {where} against the reference, {report.reference}. The drop is in units of"
        " the metric."
    )
    rows = tuple(_candidate_row(entry, first) for entry in lines)
    first_rows = [entry.row(first) for entry in lines]
    if any(row and row.gpu for row in first_rows):
        columns += right(*GPU_COLUMNS)
        text.append("GPU memory and energy are explained below, under Latency.")
        rows = tuple((*cells, *gpu_cells(row)) for cells, row in zip(rows, first_rows, strict=True))
    tables = (
        Table(columns, rows, emphasised=winner_row(lines), row_key="entry"),
        _not_chosen(lines),
        _not_compared(lines),
    )
    return Section("candidates", "Candidates", tuple(text), tables=tables)


def _candidate_row(entry: Entry, sizes: dict[str, int]) -> tuple[str, ...]:
    row = entry.row(sizes)
    selection = entry.candidate.selection if entry.candidate else None
    metric = selection.metric if selection else None
    engine = entry.candidate.engine if entry.candidate else None
    percentiles = percentile_cells(row.end_to_end) if row else ("-", "-", "-")
    return (
        str(entry.number),
        entry.label,
        state_label(entry.state),
        interval(metric.interval, 4) if metric else "-",
        cosine_text(selection) or "-",
        *percentiles,
        ratio_cell(entry, row),
        bytes_text(engine.size_bytes) if engine else "-",
        bytes_text(row.peak_memory_bytes) if row and row.peak_memory_bytes else "-",
    )


def cosine_text(selection: ValidationReport | None) -> str:
    """Return the smallest cosine of all outputs; "" if none was computed."""
    if selection is None or selection.cosine is None:
        return ""
    return f"{selection.cosine:.5f}"


def _not_chosen(lines: Iterable[Entry]) -> Table:
    """Return the reasons why candidates were not chosen."""
    rows: list[tuple[str, ...]] = []
    for entry in lines:
        if entry.candidate and entry.candidate.reason:
            state = state_label(entry.state)
            rows.append((str(entry.number), entry.label, state, entry.candidate.reason))
    return Table(left("#", "not chosen", "state", "why"), tuple(rows))


def _not_compared(lines: Iterable[Entry]) -> Table:
    """Return why measured engines have no ratio, or ran in fewer processes than others."""
    rows: list[tuple[str, ...]] = []
    for entry in lines:
        if entry.benchmark and entry.benchmark.rows:
            reason = entry.benchmark.stopped or entry.benchmark.rows[0].ratio_missing
            if reason:
                rows.append((str(entry.number), entry.label, reason))
    return Table(left("#", "not compared to the end", "why"), tuple(rows))
