"""Sections about the compile itself: stages, operators, host and notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.core.shapes import Dim
from pipeline.formatting import bytes_text, date, time_text
from pipeline.postprocess import names_of
from pipeline.postprocess import steps_in_words as postprocessing_in_words
from pipeline.preprocess import steps_in_words
from pipeline.report.tables import Bar, Section, Table, left, right
from pipeline.results.module_findings import CompiledGraphs
from pipeline.results.report import OperatorTable, Report, Step


class _StageTime(NamedTuple):
    """All steps of one stage."""

    stage: str
    steps: int
    reused: int
    ran_s: float  # in this run
    reused_s: float  # when the reused steps ran


def stage_section(report: Report) -> Section:
    steps = report.steps
    stages = [_stage_time(stage, steps) for stage in dict.fromkeys(step.stage for step in steps)]
    ran_s = sum(stage.ran_s for stage in stages)
    reused_s = sum(stage.reused_s for stage in stages)
    text = f"{time_text(ran_s)} of work in this run." if ran_s else "Every result was reused."
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
    columns = (*left("stage", "of"), *right("time"), *left("state", "date", "artifact"))
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


WAITS_MEAN = (
    "These calls need the values of a tensor. On a GPU they wait for all work so far, and none can"
    " start meanwhile; on any device torch.compile ends its graph there. Keep the value in a"
    " tensor, or make the call outside of the forward pass."
)


def module_section(report: Report) -> Section:
    """Return what the user's PyTorch module does that keeps it from running fast."""
    found = report.module
    if found is None:
        return Section("module", "The PyTorch module")
    text = [WAITS_MEAN] if found.waits else []
    if found.graphs:
        text.append(graphs_text(found.graphs))
    if found.failure:
        text.append(f"The module's code was not examined: {found.failure}.")
    rows = tuple((wait.call, wait.where or "in PyTorch", str(wait.count)) for wait in found.waits)
    table = Table((*left("call", "where"), *right("per run")), rows)
    return Section("module", "The PyTorch module", tuple(text), tables=(table,))


def module_lines(report: Report) -> tuple[str, ...]:
    """Return the advice about the user's PyTorch module, a sentence each."""
    found = report.module
    if found is None:
        return ()
    lines = tuple(
        f"{wait.call} {f'at {wait.where}' if wait.where else 'in PyTorch'} waits for a GPU"
        f" {times_text(wait.count)} per run, and ends a graph of torch.compile: keep the value in"
        " a tensor"
        for wait in found.waits
    )
    if found.graphs and (found.graphs.breaks or found.graphs.recompiles):
        lines += (graphs_text(found.graphs),)
    return lines


def graphs_text(graphs: CompiledGraphs) -> str:
    """Describe what torch.compile makes of a module."""
    text = (
        f"torch.compile makes {_count(graphs.graphs, 'graph')} of the module, with"
        f" {_count(graphs.breaks, 'graph break')}"
    )
    if graphs.first_break:
        where = f", at {graphs.where}" if graphs.where else ""
        text += f"; the first{where}: {graphs.first_break.rstrip('.')}"
    sizes = _count(graphs.sizes, "size")
    return f"{text}. Over {sizes} it compiled {_count(graphs.recompiles, 'graph')} again."


def times_text(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def preprocess_section(report: Report) -> Section:
    """Return the steps that engines do with their images, and what an image takes in a request."""
    steps = report.plan.preprocess
    engines = (candidate.engine for candidate in report.candidates)
    engine = next((engine for engine in engines if engine), report.delivered)
    shapes = {spec.name: spec.shape[1:] for spec in engine.inputs} if engine else {}
    rows = []
    for name, step in steps.items():
        shape = shapes.get(name, ())
        height, width = step.resize.target if step.resize else shape[:2] or ("", "")
        rows.append(
            (
                name,
                steps_in_words(step),
                _bytes_of_image(shape, 1),
                _bytes_of_image((height, width, *shape[2:]), 4),
            )
        )
    text = ["Engines take these images as uint8 [N, H, W, C]."]
    image = report.plan.serving.image
    if image and image.input in steps:
        text.append(
            f"The server decodes JPEG and PNG and resizes them to {image.size[0]} x"
            f" {image.size[1]} outside the engine, by Pillow's bilinear filter with antialiasing."
        )
    columns = (*left("input", "steps inside the engine"), *right("image", "image as float32"))
    return Section(
        "preprocess",
        "Preprocessing inside the engine",
        tuple(text) if steps else (),
        tables=(Table(columns, tuple(rows)),),
    )


def postprocess_section(report: Report) -> Section:
    """Return the steps that engines do with their outputs."""
    rows = tuple(
        (name, postprocessing_in_words(step), ", ".join(names_of(name, step)))
        for name, step in report.plan.postprocess.items()
    )
    text = (
        "In the graph the steps compute the same as in numpy. The errors of indices are those of"
        " the scores that the reference gives them, so equal scores may change places."
    )
    columns = left("output of the model", "steps inside the engine", "outputs of the engine")
    return Section(
        "postprocess",
        "Postprocessing inside the engine",
        (text,) if rows else (),
        tables=(Table(columns, rows),),
    )


def packing_section(report: Report) -> Section:
    """Return whether several sequences may share a row of the delivered engine, and why not."""
    proof, text = report.packing, ""
    if proof and proof.reason:
        text = f"Packing is off, so each row holds one sequence: {proof.reason}."
    elif proof and proof.largest_error is not None:
        text = (
            f"Packing is on: {proof.sequences} sequences of the selection set had the same answers"
            f" in {proof.rows} rows as alone. The largest difference is {proof.largest_error:.2g}"
            " of an output's largest value."
        )
    return Section("packing", "Several sequences in one row", (text,) if text else ())


def _bytes_of_image(shape: Sequence[Dim], bytes_of_value: int) -> str:
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return bytes_text(math.prod(sizes) * bytes_of_value) if len(sizes) == 3 else "-"


def operator_section(report: Report) -> Section:
    tables = report.operators
    rows: list[tuple[str, ...]] = []
    for name in operator_names(tables):
        rows.append((name, *(str(table.operators.get(name, 0)) for table in tables)))
    if tables:
        rows.append(("all nodes", *(str(sum(table.operators.values())) for table in tables)))
        rows.append(("file size", *(bytes_text(table.size_bytes) for table in tables)))
    columns = (*left("operator"), *right(*(table.stage for table in tables)))
    table = Table(columns, tuple(rows))
    return Section("operators", "Operators before and after", tables=(table,))


def operator_names(tables: Sequence[OperatorTable]) -> tuple[str, ...]:
    """Return the names of all operators, the most frequent first."""
    counts: dict[str, int] = {}
    for table in tables:
        for name, count in table.operators.items():
            counts[name] = max(counts.get(name, 0), count)
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


def environment_section(report: Report) -> Section:
    host = report.environment
    packages = ", ".join(f"{name} {version}" for name, version in sorted(host.packages.items()))
    rows = (
        ("CPU", host.cpu),
        ("CPU flags", " ".join(host.cpu_flags) or "none of the relevant ones"),
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


def note_section(report: Report) -> Section:
    notes = (
        (subject, f"{note.level}, {note.stage}: {note.text}")
        for subject, note in report.every_note()
    )
    return Section("notes", "Notes and warnings", items=grouped_notes(notes))


def grouped_notes(notes: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return each text once, followed by its engines. A note on the graph names no engine."""
    subjects: dict[str, list[str]] = {}
    for subject, text in notes:
        subjects.setdefault(text, []).append(subject)
    lines = []
    for text, names in subjects.items():
        lines.append(f"{text} ({', '.join(dict.fromkeys(names))})" if all(names) else text)
    return tuple(lines)
