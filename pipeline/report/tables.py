"""The content of a report as values: sections with sentences and tables, in the order in which
people read it. markdown.py and html.py render them; cli/terminal.py renders tables of its own.

Candidates and baselines are numbered once, in `entries`: every table and figure uses these numbers.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pipeline.core import Precision
from pipeline.formatting import (
    bytes_text,
    date,
    interval,
    number_text,
    shape_text,
    state_label,
    time_text,
)
from pipeline.measurement.clock import Samples
from pipeline.report.performance_summary import gpu_lines, limit_cells, peaks_text, ratio_text
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.precision_audit import (
    forced_share,
    fusions,
    node_text,
    percent_text,
    reformats,
    slowest,
    time_by_precision,
)
from pipeline.results.report import (
    AblationRow,
    BenchmarkReport,
    Candidate,
    LatencyRow,
    MetricResult,
    NodeHarm,
    NodeRanking,
    OperatorTable,
    Report,
    Rescue,
    SizeCheck,
    Step,
    ValidationReport,
)

MAX_LAYERS = 15  # in the table of the slowest layers
MAX_NODE_NAMES = 4  # of one layer
MAX_NODES = 10  # in the table of layer errors; report.json holds all
MAX_ERROR = 10.0  # an error of 1 leaves nothing of a tensor; what overflows has no end
LAYER_ERRORS = "layer-errors"  # the key of that section

Part = Literal["winner", "baseline", "candidate"]


# -- tables and sections -----------------------------------------------------


class Column(NamedTuple):
    """One column of a table."""

    title: str
    align: Literal["left", "right"] = "left"
    wrap: bool = True  # whether a terminal may break its texts into lines


def left(*titles: str) -> tuple[Column, ...]:
    """Columns of texts."""
    return tuple(Column(title) for title in titles)


def right(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, "right") for title in titles)


class Bar(NamedTuple):
    """Two lengths from 0 to 1, drawn one after the other."""

    ran: float
    reused: float


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as plain text, not escaped. Each renderer escapes them for its format."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    emphasised: int | None = None  # the index of the winner's row
    bars: tuple[Bar, ...] = ()  # one per row, for HTML
    folded: bool = False  # HTML shows the table closed, under its title

    @property
    def headings(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)


@dataclass(frozen=True, slots=True)
class Section:
    """One heading with its content."""

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    code: str = ""
    tables: tuple[Table, ...] = ()

    @property
    def is_empty(self) -> bool:
        has_rows = any(table.rows for table in self.tables)
        return not (self.paragraphs or self.items or self.code or has_rows)


LIMIT_COLUMNS = (
    *right("GFLOP/s", "GB/s", "of peak arithmetic", "of peak memory"),
    *left("bound by", "why", "next"),
)  # of the cells that `limit_cells` returns


# -- entries -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the comparison: a candidate or a baseline, with its number in every table and
    figure.
    """

    number: int
    label: str
    part: Part
    candidate: Candidate | None
    benchmark: BenchmarkReport | None

    @property
    def state(self) -> str:
        if self.candidate is None or self.part == "winner":
            return self.part
        return self.candidate.state

    def row(self, sizes: dict[str, int]) -> LatencyRow | None:
        """The latency at one shape, if it was measured."""
        rows = self.benchmark.rows if self.benchmark else ()
        return next((row for row in rows if row.sizes == sizes), None)


def entries(report: Report) -> tuple[Entry, ...]:
    """Candidates and baselines, the fastest at the first shape first, those without figures
    last.
    """
    winner = report.winner if report.verdict != "rejected" else None
    lines = [
        Entry(
            0,
            candidate.title,
            "winner" if candidate.label == winner else "candidate",
            candidate,
            candidate.benchmark,
        )
        for candidate in report.candidates
    ]
    baselines = [report.baseline, *report.baselines] if report.baseline else report.baselines
    for baseline in baselines:
        part: Part = "winner" if baseline.label == winner else "baseline"
        lines.append(Entry(0, baseline.label, part, None, baseline))
    lines.sort(key=_first_median_s)
    return tuple(replace(line, number=number) for number, line in enumerate(lines, start=1))


def _first_median_s(entry: Entry) -> float:
    rows = entry.benchmark.rows if entry.benchmark else ()
    return rows[0].end_to_end.median_s if rows else math.inf


def shapes(report: Report) -> tuple[dict[str, int], ...]:
    """Every benchmarked shape, in the order of the benchmark."""
    distinct: list[dict[str, int]] = []
    for entry in entries(report):
        for row in entry.benchmark.rows if entry.benchmark else ():
            if row.sizes not in distinct:
                distinct.append(row.sizes)
    return tuple(distinct)


# -- the whole report --------------------------------------------------------


def sections(report: Report) -> tuple[Section, ...]:
    """Every section that is not empty. The verdict and its reasons are not among them."""
    plan = json.dumps(report.plan.model_dump(mode="json", exclude_defaults=True), indent=2)
    parts = (
        Section("command", "Repeat it", code=report.command),
        _candidates(report),
        _sizes(report),
        _rescues(report),
        layer_errors(report),
        _ablation(report),
        _validation(report),
        _latency(report),
        _limits(report),
        _layers(report),
        _stages(report),
        _operators(report),
        _environment(report),
        _notes(report),
        Section("plan", "The plan", code=plan),
    )
    return tuple(section for section in parts if not section.is_empty)


def headline(report: Report) -> str:
    """The outcome in one sentence."""
    if report.winner is None:
        return "No candidate came through."
    if report.verdict == "keep":
        return _headline_of_kept(report)
    parts = [report.title_of(report.winner)]
    if report.ratio is not None and report.baseline is not None:
        parts.append(
            f"runs at {interval(report.ratio, 2)} times the speed of {report.baseline.label}"
        )
    elif report.ratio_missing:
        parts.append("was chosen, but how fast it is could not be measured")
    if report.validation is not None and report.validation.metric is not None:
        metric = report.validation.metric
        parts.append(
            f"with {metric.name} {metric.candidate:.4f} against {metric.reference:.4f} of the"
            " reference"
        )
    return " ".join(parts) + "."


def _headline_of_kept(report: Report) -> str:
    """The outcome if nothing is faster than what the user has."""
    outcome = f"Keep {report.winner}: no candidate that kept its accuracy is measurably faster."
    if report.ratio is None:
        return outcome
    return f"{outcome} The fastest runs at {interval(report.ratio, 2)} times its speed."


# -- the sections ------------------------------------------------------------


def _candidates(report: Report) -> Section:
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
    tables = (
        Table(columns, rows, emphasised=_winner_row(lines)),
        _not_chosen(lines),
        _not_compared(lines),
    )
    return Section("candidates", "Candidates", tuple(text), tables=tables)


def _winner_row(lines: Iterable[Entry]) -> int | None:
    return next((index for index, entry in enumerate(lines) if entry.part == "winner"), None)


def _candidate_row(entry: Entry, sizes: dict[str, int]) -> tuple[str, ...]:
    row = entry.row(sizes)
    selection = entry.candidate.selection if entry.candidate else None
    metric = selection.metric if selection else None
    engine = entry.candidate.engine if entry.candidate else None
    percentiles = _percentiles(row.end_to_end) if row else ("-", "-", "-")
    return (
        str(entry.number),
        entry.label,
        state_label(entry.state),
        interval(metric.interval, 4) if metric else "-",
        cosine_text(selection) or "-",
        *percentiles,
        _ratio_cell(entry, row),
        bytes_text(engine.size_bytes) if engine else "-",
        bytes_text(row.peak_memory_bytes) if row and row.peak_memory_bytes else "-",
    )


def cosine_text(selection: ValidationReport | None) -> str:
    """The smallest cosine of all outputs; empty if none was computed."""
    if selection is None or not selection.outputs:
        return ""
    return f"{min(error.cosine for error in selection.outputs):.5f}"


def _ratio_cell(entry: Entry, row: LatencyRow | None) -> str:
    if row and row.ratio:
        return interval(row.ratio, 2)
    return ratio_text(row, entry.benchmark.stopped if entry.benchmark else "") or "-"


def _not_chosen(lines: Iterable[Entry]) -> Table:
    """Why candidates were not chosen."""
    rows: list[tuple[str, ...]] = []
    for entry in lines:
        if entry.candidate and entry.candidate.reason:
            state = state_label(entry.state)
            rows.append((str(entry.number), entry.label, state, entry.candidate.reason))
    return Table(left("#", "not chosen", "state", "why"), tuple(rows))


def _not_compared(lines: Iterable[Entry]) -> Table:
    """Why engines that were measured have no ratio, or ran in fewer processes than others."""
    rows: list[tuple[str, ...]] = []
    for entry in lines:
        if entry.benchmark and entry.benchmark.rows:
            reason = entry.benchmark.stopped or entry.benchmark.rows[0].ratio_missing
            if reason:
                rows.append((str(entry.number), entry.label, reason))
    return Table(left("#", "not compared to the end", "why"), tuple(rows))


def _sizes(report: Report) -> Section:
    """Results of the gate at other sizes: all of the winner, and the failures of others."""
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
        "The gate looks at batch 1 and at min, opt and max of every profile, besides the batches of"
        " the whole selection set. Samples are cut or repeated to fill a batch. Inputs of sizes"
        " that no sample has are generated."
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
        _number(check.cosine, ".5f"),
        _number(check.drop, "+.4f"),
        outcome,
    )


def _rescues(report: Report) -> Section:
    rows = tuple(
        (rescue.label, step.step, step.label or "-", state_label(step.outcome))
        for rescue in report.rescues
        for step in rescue.steps
    )
    text = tuple(f"{rescue.label}: {rescue.conclusion}" for rescue in report.rescues)
    table = Table(left("of", "step", "engine", "outcome"), rows)
    return Section("rescue", "Rescue", text, tables=(table,))


# -- layer errors ------------------------------------------------------------


def layer_errors(report: Report) -> Section:
    """The worst nodes of each rescue that ranked its nodes."""
    text = (
        "Errors are relative to the norm of what fp32 gives at the same place (signal to noise in"
        " dB beside them), in the worst batch. Own: this node alone is low, on exact inputs."
        " Accumulated: at its output, with every node as low as in the engine."
    )
    tables = tuple(
        layer_error_table(rescue.label, ranking, kept_patterns(report, rescue))
        for rescue, ranking in ranked_rescues(report)
    )
    return Section(LAYER_ERRORS, "Which layers hurt", (text,) if tables else (), tables=tables)


def layer_error_table(label: str, ranking: NodeRanking, kept: tuple[str, ...] = ()) -> Table:
    """The worst nodes; `kept` are patterns of the nodes that the engine that passed has in fp32."""
    columns = (
        *left(f"of {len(ranking.nodes)} nodes of {label}", "operator"),
        *right("own error", "accumulated", "largest value"),
        *left("kept"),
    )
    rows = tuple(
        (
            harm.node,
            harm.operator,
            error_text(harm.error),
            error_text(harm.accumulated),
            f"{harm.largest:.3g} (overflows)" if harm.overflows else f"{harm.largest:.3g}",
            "fp32" if is_kept(harm, kept) else "",
        )
        for harm in ranking.nodes[:MAX_NODES]
    )
    return Table(columns, rows)


def error_text(error: float) -> str:
    """`0.016 (36 dB)`; from an error of 10 on, nothing is left to compare."""
    if error >= MAX_ERROR:
        return "all is lost"
    return f"{error:.2g} ({round(-20 * math.log10(error))} dB)" if error else "0"


def ranked_rescues(report: Report) -> Iterator[tuple[Rescue, NodeRanking]]:
    """The rescues that ranked their nodes."""
    for rescue in report.rescues:
        if rescue.ranking is not None:
            yield rescue, rescue.ranking


def kept_patterns(report: Report, rescue: Rescue) -> tuple[str, ...]:
    """The nodes that the engine that passed keeps in fp32; empty if none passed."""
    label = rescue.steps[-1].label
    for candidate in report.candidates:
        if candidate.label == label:
            return candidate.recipe.keep_fp32 if candidate.state == "measured" else ()
    return ()


def is_kept(harm: NodeHarm, patterns: tuple[str, ...]) -> bool:
    """Return True if a pattern matches the node's name."""
    return any(fnmatch.fnmatchcase(harm.node, pattern) for pattern in patterns)


# -- switches reversed -------------------------------------------------------


def _ablation(report: Report) -> Section:
    """The effect of each switch of the placement on one candidate."""
    key, title = "ablation", "Switches reversed"
    ablation = report.ablation
    if ablation is None:
        return Section(key, title)
    if not ablation.label:
        text = (
            "No int8 candidate with Q/DQ placed by Crucible gave answers, so no switch was"
            " reversed."
        )
        return Section(key, title, (text,))
    text = (
        f"{ablation.label} again, each time with one switch of `placement` the other way. Changes"
        " are against that candidate, on the selection set: a drop that changes by more than 0 is"
        " worse. Speed-up is its median over the one after, at the first shape, with its 95 %"
        " interval: above 1, reversing the switch makes it faster."
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
        _number(row.drop, ".4f"),
        _number(row.drop_change, "+.4f"),
        _number(row.cosine, ".5f"),
        _number(row.cosine_change, "+.5f"),
        interval(row.ratio, 2) if row.ratio else "-",
        ablation_outcome(row),
    )


def ablation_outcome(row: AblationRow) -> str:
    """The result of the reversed switch, in words."""
    if row.state is None:
        return "changes nothing in this graph"
    state = state_label(row.state)
    return f"{state}: {row.reason}" if row.reason else state


# -- accuracy and latency ----------------------------------------------------


def _validation(report: Report) -> Section:
    validation = report.validation
    if validation is None:
        return Section("validation", "Validation")
    winner = report.title_of(report.winner) if report.winner else "The winner"
    text = [
        f"{winner} on {validation.samples} samples of the {validation.role} set, read once."
        f" Reference: {report.reference}."
    ]
    if validation.metric is not None:
        text.append(_metric_text(validation.metric))
    return Section(
        "validation",
        "Validation",
        tuple(text),
        items=validation.failures,
        tables=(_output_errors(validation),),
    )


def _metric_text(metric: MetricResult) -> str:
    outcome = "within" if metric.passed else "over"
    return (
        f"{metric.name}: {metric.reference:.4f} (reference), {metric.candidate:.4f} (engine)."
        f" Drop {interval(metric.interval, 4)}, {outcome} the allowed {metric.max_drop:g}."
    )


def _output_errors(validation: ValidationReport) -> Table:
    columns = (
        *left("output"),
        *right("max abs", "mean abs", "max rel", "min cosine", "SNR", "NaN", "Inf", "worst sample"),
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
            "yes" if error.passed else "no",
        )
        for error in validation.outputs
    )
    return Table(columns, rows)


def _latency(report: Report) -> Section:
    percentiles = (
        "Percentiles stand only where enough raw values do: p90 needs 100, p99 needs 1,000. Upload,"
        " compute and download are medians. Drifts: the median still moved between blocks."
    )
    measured = f"Measured {date(report.benchmarked or report.created)}"
    if any(step.stage == "benchmark" and step.reused for step in report.steps):
        measured += (
            ", in an earlier run on this host with the same engines: the figures come from the"
            " store"
        )
    tables = tuple(_latency_table(report, sizes) for sizes in shapes(report))
    return Section("latency", "Latency", (percentiles, f"{measured}."), tables=tables)


def _rows_at(report: Report, sizes: dict[str, int]) -> list[tuple[Entry, LatencyRow]]:
    """The entries that were measured at one shape."""
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
    return Table(columns, rows, emphasised=_winner_row(entry for entry, _ in measured))


def _latency_cells(entry: Entry, row: LatencyRow) -> tuple[str, ...]:
    median, p90, p99 = _percentiles(row.end_to_end)
    return (
        str(entry.number),
        entry.label,
        median if row.end_to_end.stable else f"{median} (drifts)",
        p90,
        p99,
        _ratio_cell(entry, row),
        _percentile(row.upload, 50),
        _percentile(row.compute, 50),
        _percentile(row.download, 50),
        number_text(row.throughput_per_s),
        number_text(row.flops_per_s / 1e9) if row.flops_per_s else "-",
        str(len(row.end_to_end.values_s)),
        str(len(row.end_to_end.warmup_s)),
    )


def _limits(report: Report) -> Section:
    """What binds every row, and how far it is from the device's peaks."""
    measured = [_rows_at(report, sizes) for sizes in shapes(report)]
    if not any(row.bound for rows in measured for _, row in rows):
        return Section("limits", "What binds each row")
    text = (
        "GFLOP/s and GB/s are those of the source graph over the median end to end, each node"
        " moving its own bytes. Shares are of the device's peak; bytes are scaled to the engine's"
        " precision there; over 100 %: it fuses, or finds data in caches.",
        *(f"Peaks of {peaks_text(peaks)}." for peaks in report.peaks),
        *gpu_lines(report.gpu_use),
    )
    tables = tuple(_limits_table(rows) for rows in measured)
    return Section("limits", "What binds each row", text, tables=tables)


def _limits_table(measured: Sequence[tuple[Entry, LatencyRow]]) -> Table:
    sizes = measured[0][1].sizes
    columns = (*left("#", f"engine at {shape_text(sizes)}"), *LIMIT_COLUMNS)
    rows = tuple((str(entry.number), entry.label, *limit_cells(row)) for entry, row in measured)
    return Table(columns, rows, emphasised=_winner_row(entry for entry, _ in measured))


# -- layers ------------------------------------------------------------------


def _layers(report: Report) -> Section:
    """What really ran in the engines that give evidence of it; layer by layer for the winner and
    for mislabelled engines.
    """
    audits = _layer_audits(report)
    fused: list[tuple[str, ...]] = []
    for entry, table in audits:
        if texts := fusions(table):
            fused.append((str(entry.number), _label_of(entry, table), "; ".join(texts)))
    slowest_layers = [
        _layer_table(entry, table)
        for entry, table in audits
        if entry.state in ("winner", "mislabelled")
    ]
    text = tuple(
        f"Share of the time per precision at {sizes}, each layer timed by itself. The precision of"
        " a layer is known by its kernel's name (tactic), else by the types it reads and writes."
        " Reformats are all layers that only move or convert data."
        for sizes in dict.fromkeys(shape_text(table.sizes) for _, table in audits)
    )
    tables = (
        _precision_table(audits),
        Table(left("#", "engine", "fusions"), tuple(fused)),
        *slowest_layers,
    )
    return Section("layers", "What really ran", text, tables=tables)


def _layer_audits(report: Report) -> list[tuple[Entry, LayerTable]]:
    """Every table of layers with its entry: one table per profile."""
    audits: list[tuple[Entry, LayerTable]] = []
    for entry in entries(report):
        if entry.candidate and entry.candidate.layers:
            tables = (entry.candidate.layers, *entry.candidate.other_layers)
            audits += [(entry, table) for table in tables]
    return audits


def _precision_table(audits: Sequence[tuple[Entry, LayerTable]]) -> Table:
    """The share of the time per precision; a column for nodes left in fp32 if there are any."""
    times = [time_by_precision(table) for _, table in audits]
    names = [name for name in (*Precision, "integer") if any(name in time for time in times)]
    has_kept_nodes = any(entry.candidate.kept_fp32 for entry, _ in audits if entry.candidate)
    columns = (
        *left("#", "engine"),
        *right(*names),
        *right("reformats", "not known", "layers", "of them reformats"),
    )
    if has_kept_nodes:
        columns += right("nodes left in fp32")
    rows: list[tuple[str, ...]] = []
    for entry, table in audits:
        row = (str(entry.number), _label_of(entry, table), *_share_cells(table, names))
        rows.append((*row, _kept_cell(entry, table)) if has_kept_nodes else row)
    return Table(columns, tuple(rows), emphasised=_winner_row(entry for entry, _ in audits))


def _label_of(entry: Entry, table: LayerTable) -> str:
    return f"{entry.label}, profile {table.profile + 1}" if table.profile else entry.label


def _share_cells(table: LayerTable, names: list[str]) -> tuple[str, ...]:
    shares = time_by_precision(table)
    cells = (
        percent_text(shares[name]) if name in shares else "-"
        for name in (*names, "none", "unknown")
    )
    return (*cells, str(len(table.layers)), str(reformats(table).count))


def _kept_cell(entry: Entry, table: LayerTable) -> str:
    """How many nodes the conversion left in fp32, and the share of the time that they take."""
    nodes = entry.candidate.kept_fp32 if entry.candidate else ()
    return f"{len(nodes)}: {percent_text(forced_share(table, nodes))} of the time" if nodes else "-"


def _layer_table(entry: Entry, table: LayerTable) -> Table:
    total_s = sum(layer.seconds or 0.0 for layer in table.layers) or 1.0
    columns = (
        *right("time", "share"),
        *left("precision", "known by", "ONNX nodes", "kind", "kernel"),
    )
    rows = tuple(_layer_cells(layer, total_s) for layer in slowest(table.layers, MAX_LAYERS))
    title = f"The {len(rows)} slowest layers of {_label_of(entry, table)}"
    return Table(columns, rows, title, folded=True)


def _layer_cells(layer: Layer, total_s: float) -> tuple[str, ...]:
    seconds = layer.seconds or 0.0
    return (
        time_text(seconds),
        percent_text(seconds / total_s),
        str(layer.precision),
        layer.evidence if layer.evidence != "none" else "-",
        node_text(layer, MAX_NODE_NAMES),
        layer.kind,
        layer.tactic,
    )


# -- the compile -------------------------------------------------------------


class _StageTime(NamedTuple):
    """All steps of one stage."""

    stage: str
    steps: int
    reused: int
    ran_s: float  # in this run
    reused_s: float  # when the reused steps ran


def _stages(report: Report) -> Section:
    steps = report.steps
    stages = [_stage_time(stage, steps) for stage in dict.fromkeys(step.stage for step in steps)]
    ran_s = sum(stage.ran_s for stage in stages)
    reused_s = sum(stage.reused_s for stage in stages)
    text = f"{time_text(ran_s)} of work in this run." if ran_s else "Nothing had to run anew."
    if reused_s:
        text += (
            f" {sum(stage.reused for stage in stages)} of {len(steps)} steps came from the store"
            f" (hatched); they took {time_text(reused_s)} when they ran."
        )
    tables = (_stage_table(stages), _step_table(steps))
    return Section("stages", "Time per stage", (text,) if stages else (), tables=tables)


def _stage_time(stage: str, steps: Sequence[Step]) -> _StageTime:
    own = [step for step in steps if step.stage == stage]
    reused = [step for step in own if step.reused]
    reused_s = sum(step.seconds for step in reused)
    ran_s = sum(step.seconds for step in own if not step.reused)
    return _StageTime(stage, len(own), len(reused), ran_s, reused_s)


def _stage_table(stages: Sequence[_StageTime]) -> Table:
    longest_s = max((stage.ran_s + stage.reused_s for stage in stages), default=0.0) or 1.0
    rows = tuple(
        (
            stage.stage,
            str(stage.steps),
            str(stage.reused),
            time_text(stage.ran_s) if stage.ran_s else "-",
            time_text(stage.reused_s) if stage.reused_s else "-",
        )
        for stage in stages
    )
    bars = tuple(Bar(stage.ran_s / longest_s, stage.reused_s / longest_s) for stage in stages)
    columns = (*left("stage"), *right("steps", "reused", "ran now", "took then"))
    return Table(columns, rows, bars=bars)


def _step_table(steps: Sequence[Step]) -> Table:
    columns = (*left("stage", "of"), *right("time"), *left("state", "made", "artifact"))
    rows = tuple(
        (
            step.stage,
            step.subject,
            time_text(step.seconds),
            "reused" if step.reused else "ran",
            date(step.created),
            step.digest[:12],
        )
        for step in steps
    )
    return Table(columns, rows, "Every step, with its date", folded=True)


def _operators(report: Report) -> Section:
    tables = report.operators
    rows: list[tuple[str, ...]] = []
    for name in operator_names(tables):
        rows.append((name, *(str(table.operators.get(name, 0)) for table in tables)))
    if tables:
        rows.append(("all nodes", *(str(sum(table.operators.values())) for table in tables)))
        rows.append(("file size", *(bytes_text(table.size_bytes) for table in tables)))
    columns = (*left("operator"), *right(*(table.stage for table in tables)))
    title = "Every operator, and the file sizes"
    table = Table(columns, tuple(rows), title, folded=True)
    return Section("operators", "Operators before and after", tables=(table,))


def operator_names(tables: Sequence[OperatorTable]) -> tuple[str, ...]:
    """The names of all operators, the most frequent first."""
    counts: dict[str, int] = {}
    for table in tables:
        for name, count in table.operators.items():
            counts[name] = max(counts.get(name, 0), count)
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


def _environment(report: Report) -> Section:
    host = report.environment
    packages = ", ".join(f"{name} {version}" for name, version in sorted(host.packages.items()))
    rows = (
        ("CPU", host.cpu),
        ("CPU flags", " ".join(host.cpu_flags) or "none of those that matter"),
        ("cores", str(host.cores)),
        ("governor", host.governor or "unknown"),
        ("load, 1 min", f"{host.load_1min:.2f}"),
        ("memory", bytes_text(host.memory_bytes)),
        ("GPU", ", ".join(host.gpus) or "none"),
        ("system", host.os),
        ("Python", host.python),
        ("packages", packages),
        ("report written", date(report.created)),
        ("latency measured", date(report.benchmarked or report.created)),
    )
    return Section("environment", "Environment", tables=(Table(left("what", "value"), rows),))


def _notes(report: Report) -> Section:
    notes = (
        (subject, f"{note.level}, {note.stage}: {note.text}")
        for subject, note in report.every_note()
    )
    return Section("notes", "Notes and warnings", items=_grouped(notes))


def _grouped(notes: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Each text once, followed by its engines. A note without an engine is one of the graph, and
    names none.
    """
    subjects: dict[str, list[str]] = {}
    for subject, text in notes:
        subjects.setdefault(text, []).append(subject)
    lines = []
    for text, names in subjects.items():
        lines.append(f"{text} ({', '.join(dict.fromkeys(names))})" if all(names) else text)
    return tuple(lines)


# -- cells -------------------------------------------------------------------


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percentile(samples: Samples, percent: float) -> str:
    seconds = samples.percentile_or_absent(percent)
    return "-" if seconds is None else time_text(seconds)


def _percentiles(samples: Samples) -> tuple[str, str, str]:
    return (_percentile(samples, 50), _percentile(samples, 90), _percentile(samples, 99))
