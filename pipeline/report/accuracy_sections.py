"""Sections about accuracy: other sizes, fallbacks, reversed switches, the validation set."""

from __future__ import annotations

from pipeline.accuracy.drop import MIN_CLASS_SAMPLES
from pipeline.accuracy.metrics.metric import ROUNDING
from pipeline.formatting import interval, state_label
from pipeline.measurement.statistics import Interval
from pipeline.report.entries import entries
from pipeline.report.tables import Section, Table, left, number_cell, right
from pipeline.results.accuracy import MetricResult, OutputError, SizeCheck, ValidationReport
from pipeline.results.candidates import AblationRow
from pipeline.results.report import Report


def metric_section(report: Report) -> Section:
    """Return the metric of each engine on the selection set, and its worst class."""
    rows: list[tuple[str, ...]] = []
    results: list[MetricResult] = []
    for entry in entries(report):
        selection = entry.candidate.selection if entry.candidate else None
        if selection is not None and selection.metric is not None:
            results.append(selection.metric)
            rows.append((str(entry.number), entry.label, *_metric_cells(selection.metric)))
    columns = (*left("#", "engine"), *right("reference", "engine", "drop"))
    if any(result.worst_class for result in results):
        columns += (*left("worst class"), *right("samples", "its reference", "its engine", "drop"))
    else:
        rows = [row[: len(columns)] for row in rows]
    text = tuple(_metric_heading(result) for result in results[:1])
    table = Table(columns, tuple(rows))
    return Section("metric", "The metric of each engine", text, tables=(table,))


def _metric_heading(metric: MetricResult) -> str:
    better = "lower" if metric.lower_is_better else "higher"
    limits = f"the drop may be {metric.max_drop:g}"
    if metric.max_class_drop is not None:
        limits += f", and that of a class {metric.max_class_drop:g}"
    small = ""
    if metric.small_classes:
        small = f" Not judged, with fewer than {MIN_CLASS_SAMPLES} samples: {metric.small_classes}"
        small += f" of {metric.small_classes + metric.judged_classes} classes."
    return (
        f"{metric.name} on the selection set; {better} is better, and {limits}. Intervals are 95"
        f" %.{small}"
    )


def _metric_cells(metric: MetricResult) -> tuple[str, ...]:
    worst = metric.worst_class
    return (
        f"{metric.reference:.4f}",
        f"{metric.candidate:.4f}",
        interval(metric.interval, 4),
        worst.name if worst else "-",
        str(worst.samples) if worst else "-",
        f"{worst.reference:.4f}" if worst else "-",
        f"{worst.candidate:.4f}" if worst else "-",
        interval(worst.interval, 4) if worst else "-",
    )


def size_section(report: Report) -> Section:
    """Return the gate's results at other sizes: all of the winner, and the failures of others."""
    profiles = len(report.plan.profiles)
    rows: list[tuple[str, ...]] = []
    for entry in entries(report):
        selection = entry.candidate.selection if entry.candidate else None
        for check in selection.sizes if selection else ():
            if entry.part == "winner" or check.failures:
                rows.append((str(entry.number), entry.label, *_size_cells(check, profiles)))
    columns = (
        *left("#", "engine", "size", "inputs"),
        *right("samples", "cosine", "drop"),
        *left("outcome"),
    )
    text = (
        "The gate checks batch 1, and min, opt and max of every profile, besides the batches of the"
        " whole selection set. Samples are cut or repeated to fill a batch. Inputs of sizes that no"
        " sample has are generated."
    )
    return Section(
        "sizes",
        "Accuracy at every size",
        (text,) if rows else (),
        tables=(Table(columns, tuple(rows)),),
    )


def _size_cells(check: SizeCheck, profiles: int) -> tuple[str, ...]:
    outcome = "; ".join(check.failures) or "passed"
    if check.not_checked and not check.failures:
        outcome = f"not checked: {check.not_checked}"
    return (
        check.where(profiles),
        check.inputs,
        str(check.samples),
        number_cell(check.cosine, ".5f"),
        number_cell(check.drop, "+.4f"),
        outcome,
    )


def rescue_section(report: Report) -> Section:
    rows = tuple(
        (rescue.label, step.step, step.label or "-", state_label(step.outcome))
        for rescue in report.rescues
        for step in rescue.steps
    )
    text = tuple(f"{rescue.label}: {rescue.conclusion}" for rescue in report.rescues)
    table = Table(left("of", "step", "engine", "outcome"), rows)
    return Section("rescue", "Fallback", text, tables=(table,))


def ablation_section(report: Report) -> Section:
    """Return the effect of each switch of the placement on one candidate."""
    key, title = "ablation", "Switches reversed"
    ablation = report.ablation
    if ablation is None:
        return Section(key, title)
    if not ablation.label:
        text = (
            "No int8 candidate with Q/DQ placed by Crucible has results, so no switch was reversed."
        )
        return Section(key, title, (text,))
    text = (
        f"Each row is {ablation.label} with one switch of `placement` reversed. Changes are against"
        " that candidate, on the selection set: a drop that changes by more than 0 is worse."
        " Speed-up is the median before over the median after, at the first shape, with its 95 %"
        " interval. Above 1, reversing the switch makes the engine faster."
    )
    columns = (
        *left("switch", "from", "to"),
        *right("drop", "change", "cosine", "change", "speed-up"),
        *left("outcome"),
    )
    rows = tuple(_ablation_row(row) for row in ablation.rows)
    return Section(key, title, (text,), tables=(Table(columns, rows),))


def _ablation_row(row: AblationRow) -> tuple[str, ...]:
    return (
        row.switch,
        "on" if row.before else "off",
        "on" if row.after else "off",
        number_cell(row.drop, ".4f"),
        number_cell(row.drop_change, "+.4f"),
        number_cell(row.cosine, ".5f"),
        number_cell(row.cosine_change, "+.5f"),
        interval(row.ratio, 2) if row.ratio else "-",
        ablation_outcome(row),
    )


def ablation_outcome(row: AblationRow) -> str:
    """Return the result of the reversed switch, in words."""
    if row.state is None:
        return "changes nothing in this graph"
    state = state_label(row.state)
    return f"{state}: {row.reason}" if row.reason else state


def validation_section(report: Report) -> Section:
    validation = report.validation
    if validation is None:
        return Section("validation", "Validation")
    winner = report.title_of(report.winner) if report.winner else "The winner"
    text = [
        f"{winner} on {validation.samples} samples of the {validation.role} set, read once."
        f" Reference: {report.reference}."
    ]
    if validation.metric is not None:
        text += _metric_texts(validation.metric)
    return Section(
        "validation",
        "Validation",
        tuple(text),
        items=validation.failures,
        tables=(_output_errors(validation),),
    )


def _metric_texts(metric: MetricResult) -> tuple[str, ...]:
    better = "lower" if metric.lower_is_better else "higher"
    text = (
        f"{metric.name} ({better} is better): {metric.reference:.4f} (reference),"
        f" {metric.candidate:.4f} (engine). {_drop_text(metric.interval, metric.max_drop)}"
    )
    return (text, *((_class_text(metric),) if metric.judged_classes + metric.small_classes else ()))


def _drop_text(drop: Interval, limit: float | None) -> str:
    if limit is None:
        return f"Drop {interval(drop, 4)}."
    outcome = "within" if drop.value <= limit + ROUNDING else "over"
    return f"Drop {interval(drop, 4)}, {outcome} the allowed {limit:g}."


def _class_text(metric: MetricResult) -> str:
    """Describe the worst class, and the classes with too few samples to be judged."""
    worst, small = metric.worst_class, metric.small_classes
    few = f"fewer than {MIN_CLASS_SAMPLES} samples"
    if worst is None:
        return f"No class is judged by itself: all {small} have {few}."
    left_out = f" Not judged, with {few}: {small}." if small else ""
    return (
        f"Worst of {metric.judged_classes} classes: {worst.name}, with {worst.samples} samples,"
        f" {worst.reference:.4f} (reference), {worst.candidate:.4f} (engine)."
        f" {_drop_text(worst.interval, metric.max_class_drop)}{left_out}"
    )


def _output_errors(validation: ValidationReport) -> Table:
    has_indices = any(error.agreement is not None for error in validation.outputs)
    columns = (
        *left("output"),
        *right("max abs", "mean abs", "max rel", "min cosine", "SNR", "NaN", "Inf", "worst sample"),
        *(right("agreement") if has_indices else ()),
        *left("passed"),
    )
    rows = tuple(
        (
            error.output,
            f"{error.max_abs:.3g}",
            f"{error.mean_abs:.3g}",
            f"{error.max_rel:.3g}",
            f"{error.cosine:.5f}",
            f"{error.snr_db:.1f} dB",
            str(error.nan),
            str(error.inf),
            str(error.worst_sample),
            *((_agreement(error),) if has_indices else ()),
            "yes" if error.passed else "no",
        )
        for error in validation.outputs
    )
    return Table(columns, rows)


def _agreement(error: OutputError) -> str:
    return "" if error.agreement is None else f"{error.agreement:.4f}"
