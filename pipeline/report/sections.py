"""A report as headings, sentences and tables: what `render.py` writes as Markdown and as HTML, in
the order in which people read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from pipeline.core import Precision
from pipeline.formatting import bytes_text, date, interval, number_text, shape_text, time_text
from pipeline.measurement.measure import Samples
from pipeline.report.outline import Bar, Entry, Section, Table, entries, shapes
from pipeline.report.performance_summary import (
    LIMITS_HEADER,
    gpu_lines,
    limit_cells,
    peaks_text,
    ratio_text,
)
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
from pipeline.results.report import AblationRow, LatencyRow, Report, SizeCheck, ValidationReport

SLOWEST_SHOWN = 15
NODES_SHOWN = 4


def sections(report: Report) -> tuple[Section, ...]:
    """Everything but the verdict, which `headline` and the report's own reasons tell."""
    found = (
        Section("command", "Repeat it", code=report.command),
        _candidates(report),
        _sizes(report),
        _rescues(report),
        _ablation(report),
        _validation(report),
        _latency(report),
        _limits(report),
        _layers(report),
        _stages(report),
        _operators(report),
        _environment(report),
        _notes(report),
        Section(
            "plan",
            "The plan",
            code=json.dumps(report.plan.model_dump(mode="json", exclude_defaults=True), indent=2),
        ),
    )
    return tuple(
        section
        for section in found
        if section.paragraphs
        or section.items
        or section.code
        or any(t.rows for t in section.tables)
    )


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
    """Nothing is faster than what the user has."""
    kept = f"Keep {report.winner}: no candidate that kept its accuracy is measurably faster."
    if report.ratio is None:
        return kept
    return f"{kept} The fastest runs at {interval(report.ratio, 2)} times its speed."


# -- the sections
# ------------------------------------------------------------------------------


def _candidates(report: Report) -> Section:
    lines = entries(report)
    first = shapes(report)[0] if shapes(report) else {}
    header = (
        "#",
        "engine",
        "state",
        ">drop",
        ">cosine",
        ">median",
        ">p90",
        ">p99",
        ">speed-up",
        ">size",
        ">memory",
    )
    winner = next((index for index, entry in enumerate(lines) if entry.part == "winner"), None)
    text = []
    if shapes(report):
        text = [
            f"Latency end to end at {shape_text(first)}; speed-up against the baseline with its 95"
            ' % interval. "-" means not measured.'
        ]
    generated = any(
        item.selection and item.selection.role == "generated" for item in report.candidates
    )
    where = "generated inputs, which prove nothing," if generated else "the selection set"
    text.append(
        f"Accuracy on {where} against the reference, {report.reference}. The drop is in units of"
        " the metric."
    )
    reasons = tuple(
        (str(e.number), e.label, e.state, e.candidate.reason)
        for e in lines
        if e.candidate and e.candidate.reason
    )
    found = Table(header, tuple(_candidate_row(entry, first) for entry in lines), winner)
    tables = (found, Table(("#", "not chosen", "state", "why"), reasons), _without_ratio(lines))
    return Section("candidates", "Candidates", tuple(text), tables=tables)


def _candidate_row(entry: Entry, sizes: dict[str, int]) -> tuple[str, ...]:
    row = entry.row(sizes)
    selection = entry.candidate.selection if entry.candidate else None
    engine = entry.candidate.engine if entry.candidate else None
    return (
        str(entry.number),
        entry.label,
        entry.state,
        interval(selection.metric.interval, 4) if selection and selection.metric else "-",
        (
            f"{min(error.cosine for error in selection.outputs):.5f}"
            if selection and selection.outputs
            else "-"
        ),
        *(_percentiles(row.end_to_end) if row else ("-", "-", "-")),
        _ratio_cell(entry, row),
        bytes_text(engine.size_bytes) if engine else "-",
        bytes_text(row.peak_memory_bytes) if row and row.peak_memory_bytes else "-",
    )


def _ratio_cell(entry: Entry, row: LatencyRow | None) -> str:
    if row and row.ratio:
        return interval(row.ratio, 2)
    return ratio_text(row, entry.benchmark.stopped if entry.benchmark else "") or "-"


def _without_ratio(lines: Iterable[Entry]) -> Table:
    """Why engines that were measured have no ratio, or ran in fewer processes than others."""
    found: list[tuple[str, ...]] = []
    for entry in lines:
        if entry.benchmark and entry.benchmark.rows:
            why = entry.benchmark.stopped or entry.benchmark.rows[0].ratio_missing
            found += [(str(entry.number), entry.label, why)] if why else []
    return Table(("#", "not compared to the end", "why"), tuple(found))


def _sizes(report: Report) -> Section:
    """What the gate found at other sizes: of the winner at all, of others where they failed."""
    rows: list[tuple[str, ...]] = []
    for entry in entries(report):
        selection = entry.candidate.selection if entry.candidate else None
        for check in selection.sizes if selection else ():
            if entry.part == "winner" or check.failures:
                rows.append(
                    (str(entry.number), entry.label, *_size_cells(check, len(report.plan.profiles)))
                )
    header = ("#", "engine", "size", "inputs", ">samples", ">cosine", ">drop", "outcome")
    text = (
        "The gate looks at batch 1 and at min, opt and max of every profile, besides the batches of"
        " the whole selection set. "
    )
    text += (
        "Samples are cut or repeated to fill a batch. Inputs of sizes that no sample has are"
        " generated."
    )
    return Section(
        "sizes",
        "Accuracy at every size",
        (text,) if rows else (),
        tables=(Table(header, tuple(rows)),),
    )


def _size_cells(check: SizeCheck, profiles: int) -> tuple[str, ...]:
    outcome = check.not_checked and f"not checked: {check.not_checked}"
    return (
        check.where(profiles),
        check.inputs,
        str(check.samples),
        "-" if check.cosine is None else f"{check.cosine:.5f}",
        "-" if check.drop is None else f"{check.drop:+.4f}",
        "; ".join(check.failures) or outcome or "passed",
    )


def _rescues(report: Report) -> Section:
    rows = tuple(
        (found.label, step.step, step.label or "-", step.outcome)
        for found in report.rescues
        for step in found.steps
    )
    text = tuple(f"{found.label}: {found.conclusion}" for found in report.rescues)
    return Section(
        "rescue", "Rescue", text, tables=(Table(("of", "step", "engine", "outcome"), rows),)
    )


def _ablation(report: Report) -> Section:
    """What each switch of the placement does to one candidate."""
    found = report.ablation
    if found is None:
        return Section("ablation", "Switches reversed")
    if not found.label:
        return Section(
            "ablation",
            "Switches reversed",
            (
                (
                    "No int8 candidate with Q/DQ placed by Crucible gave answers, so no switch was"
                    " reversed."
                ),
            ),
        )
    text = (
        (
            f"{found.label} again, each time with one switch of `placement` the other way. Changes"
            " are against that candidate, on the selection set: a drop that changes by more than 0"
            " is worse. Speed-up is its median over the one after, at the first shape, with its 95"
            " % interval: above 1, reversing the switch makes it faster."
        ),
    )
    header = (
        "switch",
        "from",
        "to",
        ">drop",
        ">change",
        ">cosine",
        ">change",
        ">speed-up",
        "outcome",
    )
    return Section(
        "ablation",
        "Switches reversed",
        text,
        tables=(Table(header, tuple(_ablation_row(row) for row in found.rows)),),
    )


def _ablation_row(row: AblationRow) -> tuple[str, ...]:
    figures = (
        (row.drop, ".4f"),
        (row.drop_change, "+.4f"),
        (row.cosine, ".5f"),
        (row.cosine_change, "+.5f"),
    )
    return (
        row.switch,
        "on" if row.before else "off",
        "on" if row.after else "off",
        *("-" if value is None else format(value, form) for value, form in figures),
        interval(row.ratio, 2) if row.ratio else "-",
        ablation_outcome(row),
    )


def ablation_outcome(row: AblationRow) -> str:
    """What became of the reversed switch, in words."""
    if row.state is None:
        return "changes nothing in this graph"
    return f"{row.state}: {row.reason}" if row.reason else str(row.state)


def _validation(report: Report) -> Section:
    found = report.validation
    if found is None:
        return Section("validation", "Validation")
    winner = report.title_of(report.winner) if report.winner else "The winner"
    text = [
        f"{winner} on {found.samples} samples of the {found.role} set, read once. Reference:"
        f" {report.reference}."
    ]
    if found.metric is not None:
        metric = found.metric
        judged = "within" if metric.passed else "over"
        text.append(
            f"{metric.name}: {metric.reference:.4f} (reference), {metric.candidate:.4f} (engine). "
            f"Drop {interval(metric.interval, 4)}, {judged} the allowed {metric.max_drop:g}."
        )
    return Section(
        "validation", "Validation", tuple(text), items=found.failures, tables=(_errors(found),)
    )


def _errors(found: ValidationReport) -> Table:
    header = (
        "output",
        ">max abs",
        ">mean abs",
        ">max rel",
        ">min cosine",
        ">SNR",
        ">NaN",
        ">Inf",
        ">worst sample",
        "passed",
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
        for error in found.outputs
    )
    return Table(header, rows)


def _latency(report: Report) -> Section:
    reused = any(step.stage == "benchmark" and step.reused for step in report.steps)
    kept = (
        ", in an earlier run on this host with the same engines: the figures come from the store"
        if reused
        else ""
    )
    text = (
        (
            "Percentiles stand only where enough raw values do: p90 needs 100, p99 needs 1,000."
            " Upload, compute and download are medians. Drifts: the median still moved between"
            " blocks."
        ),
        f"Measured {date(report.benchmarked or report.created)}{kept}.",
    )
    return Section(
        "latency",
        "Latency",
        text,
        tables=tuple(_latency_table(report, sizes) for sizes in shapes(report)),
    )


def _latency_table(report: Report, sizes: dict[str, int]) -> Table:
    columns = (
        "median",
        "p90",
        "p99",
        "speed-up",
        "upload",
        "compute",
        "download",
        "per s",
        "GFLOP/s",
        "values",
        "warm-up",
    )
    header = ("#", f"engine at {shape_text(sizes)}", *(f">{column}" for column in columns))
    pairs = [(entry, row) for entry in entries(report) if (row := entry.row(sizes))]
    winner = next((index for index, (entry, _) in enumerate(pairs) if entry.part == "winner"), None)
    rows = tuple(
        (
            str(entry.number),
            entry.label,
            _percentiles(row.end_to_end)[0] + ("" if row.end_to_end.stable else " (drifts)"),
            *_percentiles(row.end_to_end)[1:],
            _ratio_cell(entry, row),
            *(_percentile(part, 50) for part in (row.upload, row.compute, row.download)),
            number_text(row.throughput_per_s),
            number_text(row.flops_per_s / 1e9) if row.flops_per_s else "-",
            str(len(row.end_to_end.values_s)),
            str(len(row.end_to_end.warmup_s)),
        )
        for entry, row in pairs
    )
    return Table(header, rows, winner)


def _limits(report: Report) -> Section:
    """What binds every row, and how far it is from the device's peaks."""
    if not any(
        row.bound for entry in entries(report) if entry.benchmark for row in entry.benchmark.rows
    ):
        return Section("limits", "What binds each row")
    text = (
        (
            "GFLOP/s and GB/s are those of the source graph over the median end to end, each node"
            " moving its own bytes. Shares are of the device's peak; bytes are scaled to the"
            " engine's precision there; over 100 %: it fuses, or finds data in caches."
        ),
        *(f"Peaks of {peaks_text(peaks)}." for peaks in report.peaks),
        *gpu_lines(report.gpu_use),
    )
    tables = []
    for sizes in shapes(report):
        pairs = [(entry, row) for entry in entries(report) if (row := entry.row(sizes))]
        winner = next(
            (index for index, (entry, _) in enumerate(pairs) if entry.part == "winner"), None
        )
        rows = tuple((str(entry.number), entry.label, *limit_cells(row)) for entry, row in pairs)
        tables.append(Table(("#", f"engine at {shape_text(sizes)}", *LIMITS_HEADER), rows, winner))
    return Section("limits", "What binds each row", text, tables=tuple(tables))


def _layers(report: Report) -> Section:
    """What the engines that give evidence of it really ran; for the winner, and for engines called
    by a wrong name, layer by layer.
    """
    proven = [
        (entry, table)
        for entry in entries(report)
        if entry.candidate and entry.candidate.layers
        for table in (entry.candidate.layers, *entry.candidate.other_layers)
    ]
    names = [
        name
        for name in (*Precision, "integer")
        if any(name in time_by_precision(table) for _, table in proven)
    ]
    text = tuple(
        f"Share of the time per precision at {sizes}, each layer timed by itself. The precision of"
        " a layer is known by its kernel's name (tactic), else by the types it reads and writes."
        " Reformats are all layers that only move or convert data."
        for sizes in dict.fromkeys(shape_text(table.sizes) for _, table in proven)
    )
    kept = any(entry.candidate.kept_fp32 for entry, _ in proven if entry.candidate)
    shares = tuple(
        (
            str(entry.number),
            _label_of(entry, table),
            *_share_cells(table, names),
            *([_kept_cell(entry, table)] if kept else []),
        )
        for entry, table in proven
    )
    fused = tuple(
        (str(entry.number), _label_of(entry, table), "; ".join(found))
        for entry, table in proven
        if (found := fusions(table))
    )
    header = (
        "#",
        "engine",
        *(f">{name}" for name in names),
        ">reformats",
        ">not known",
        ">layers",
        ">of them reformats",
    )
    header += (">nodes left in fp32",) if kept else ()
    winner = next(
        (index for index, (entry, _) in enumerate(proven) if entry.part == "winner"), None
    )
    each = (
        _layer_table(entry, table)
        for entry, table in proven
        if entry.state in ("winner", "mislabelled")
    )
    return Section(
        "layers",
        "What really ran",
        text,
        tables=(Table(header, shares, winner), Table(("#", "engine", "fusions"), fused), *each),
    )


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
    kept = entry.candidate.kept_fp32 if entry.candidate else ()
    return f"{len(kept)}: {percent_text(forced_share(table, kept))} of the time" if kept else "-"


def _layer_table(entry: Entry, table: LayerTable) -> Table:
    whole = sum(layer.seconds or 0.0 for layer in table.layers) or 1.0

    def cells(layer: Layer) -> tuple[str, ...]:
        seconds = layer.seconds or 0.0
        known = layer.evidence if layer.evidence != "none" else "-"
        return (
            time_text(seconds),
            percent_text(seconds / whole),
            str(layer.precision),
            known,
            node_text(layer, NODES_SHOWN),
            layer.kind,
            layer.tactic,
        )

    header = (">time", ">share", "precision", "known by", "ONNX nodes", "kind", "kernel")
    rows = tuple(cells(layer) for layer in slowest(table.layers, SLOWEST_SHOWN))
    return Table(
        header, rows, folded=f"The {len(rows)} slowest layers of {_label_of(entry, table)}"
    )


def _stages(report: Report) -> Section:
    steps = report.steps
    names = tuple(dict.fromkeys(step.stage for step in steps))
    ran = [sum(s.seconds for s in steps if s.stage == name and not s.reused) for name in names]
    kept = [sum(s.seconds for s in steps if s.stage == name and s.reused) for name in names]
    counts = [
        (sum(s.stage == name for s in steps), sum(s.stage == name and s.reused for s in steps))
        for name in names
    ]
    longest = max((a + b for a, b in zip(ran, kept, strict=True)), default=0.0) or 1.0
    rows = tuple(
        (
            name,
            str(count),
            str(reused),
            time_text(now) if now else "-",
            time_text(then) if then else "-",
        )
        for name, (count, reused), now, then in zip(names, counts, ran, kept, strict=True)
    )
    bars = tuple(Bar(now / longest, then / longest) for now, then in zip(ran, kept, strict=True))
    text = f"{time_text(sum(ran))} of work in this run." if any(ran) else "Nothing had to run anew."
    if any(kept):
        text += (
            f" {sum(s.reused for s in steps)} of {len(steps)} steps came from the store (hatched);"
            f" they took {time_text(sum(kept))} when they ran."
        )
    each = tuple(
        (
            s.stage,
            s.subject,
            time_text(s.seconds),
            "reused" if s.reused else "ran",
            date(s.created),
            s.digest[:12],
        )
        for s in steps
    )
    tables = (
        Table(("stage", ">steps", ">reused", ">ran now", ">took then"), rows, bars=bars),
        Table(
            ("stage", "of", ">time", "state", "made", "artifact"),
            each,
            folded="Every step, with its date",
        ),
    )
    return Section("stages", "Time per stage", (text,) if rows else (), tables=tables)


def _operators(report: Report) -> Section:
    tables = report.operators
    totals: dict[str, int] = {}
    for table in tables:
        for name, count in table.operators.items():
            totals[name] = max(totals.get(name, 0), count)
    names = sorted(totals, key=lambda name: (-totals[name], name))
    rows = [(name, *(str(table.operators.get(name, 0)) for table in tables)) for name in names]
    rows.append(("all nodes", *(str(sum(table.operators.values())) for table in tables)))
    rows.append(("file size", *(bytes_text(table.size_bytes) for table in tables)))
    header = ("operator", *(f">{table.stage}" for table in tables))
    found = Table(
        header, tuple(rows) if tables else (), folded="Every operator, and the file sizes"
    )
    return Section("operators", "Operators before and after", tables=(found,))


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
    return Section("environment", "Environment", tables=(Table(("what", "value"), rows),))


def _notes(report: Report) -> Section:
    found = (
        (subject, f"{note.level}, {note.stage}: {note.text}")
        for subject, note in report.every_note()
    )
    return Section("notes", "Notes and warnings", items=_grouped(found))


def _grouped(notes: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Each text once, followed by the engines it was said of; what was said of the graph itself was
    said of all.
    """
    subjects: dict[str, list[str]] = {}
    for subject, text in notes:
        subjects.setdefault(text, []).append(subject)
    return tuple(
        text + (f" ({', '.join(dict.fromkeys(found))})" if all(found) else "")
        for text, found in subjects.items()
    )


def _percentile(samples: Samples, percent: float) -> str:
    seconds = samples.percentile_or_absent(percent)
    return "-" if seconds is None else time_text(seconds)


def _percentiles(samples: Samples) -> tuple[str, str, str]:
    return (_percentile(samples, 50), _percentile(samples, 90), _percentile(samples, 99))
