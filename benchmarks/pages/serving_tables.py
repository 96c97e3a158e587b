"""The sections of docs/benchmarks.md on serving, from serving*.json and soak.json. Without those
files they are empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, text_of
from benchmarks.serving.figures import CNN, CRUCIBLE, DIRECT, STAGES, WIRE
from benchmarks.serving.peers_list import FASTAPI
from benchmarks.serving.rounds import MANY

Document = Mapping[str, Any]

ABOUT = f"""## Serving
`python -m benchmarks serving`: servers take turns, each alone on the machine and started anew in
every round, over loopback, with raw bytes in and out. p50 and p99 are those of one connection,
requests/s those of 16 (median, lowest and highest of the rounds). CPU is milliseconds per request
at 16 connections: of the client, of the process that listens ("API"), and of all the server's other
processes. "API full at" is the rate at which that CPU time would fill one core: one API process
gets no further, however many cores the workers have. Every peer has one API process and one worker,
is set up as its documentation advises, and joins requests where it can; {FASTAPI} joins none."""
HEADS = {
    WIRE: (
        f"""### The wire
A model that does almost nothing: [1, 3, 224, 224] float32, 602 KB, and the same back. Ratios are
those to {FASTAPI}."""
    ),
    CNN: (
        """### A CNN
One ONNX file in ONNX Runtime fp32 with all cores. Ratios are those to Crucible's engine in a direct
Session: at batch 1, and at its best batch. What server and client take of the cores the engine
lacks. The servers of PyTriton and mosec are written in C++ and Rust, the others in Python."""
    ),
}
COLUMNS = (
    "server",
    "p50 ms",
    "ratio",
    "p99 ms",
    "requests/s",
    "ratio",
    "CPU ms: client",
    "API",
    "worker",
    "API full at",
)
GPU = """## Serving from a GPU
`python -m benchmarks serving --backend tensorrt`: the engine runs on the GPU and leaves the cores
of the host to server and client. The columns are those above; nothing but Crucible's engine in a
direct Session is there to be compared with. The engine is slow on purpose: the targets name how
fast it may be. Without `overlap`, it waits between two batches for the worker, which copies answers
out and the next inputs in; with it, the second table, it need not."""
PERF_ANALYZER = """## perf_analyzer
`python -m benchmarks perf_analyzer`: Triton's own load generator, unmodified, against a small CNN
in ONNX Runtime. That it runs is what is shown: it takes as much of the cores as the server does.
Queue and compute are what it reads from the server's statistics."""
SOAK = """## Soak
`make soak`: 16 connections ask one small model, each request with a number and an input of its own,
while other models are compiled. Every answer is held against what the same engine gave in a direct
Session before."""


def serving_section(document: Document | None) -> list[str]:
    """Both tables and the targets."""
    if document is None:
        return []
    lines = [ABOUT, ""]
    for load, head in HEADS.items():
        rows = [row for row in document["rows"] if row["load"] == load]
        lines += [head, "", *_table(rows), "", *_stages(rows)]
    return [
        *lines,
        *_told(document["rows"]),
        "",
        *_targets(document),
        "",
        f"{_environment(document)}{_run(document)}",
        "",
    ]


def serving_gpu_section(*documents: Document | None) -> list[str]:
    """For each run, the table of a CNN on the GPU, with what it is and where it ran."""
    lines = [line for document in documents if document for line in _gpu_run(document)]
    return [GPU, "", *lines] if lines else []


def _gpu_run(document: Document) -> list[str]:
    rows = document["rows"]
    where = f"{_environment(document)} {_run_on_gpu(document)}"
    return [*_table(rows), "", *_stages(rows), *_tail(rows), *_targets(document), "", where, ""]


def soak_section(document: Document | None) -> list[str]:
    if document is None:
        return []
    (row,) = document["rows"]
    lines = [
        "| what | |",
        "|---|---|",
        *(f"| {name} | {text_of(value)} |" for name, value in row.items()),
    ]
    return [SOAK, "", *lines, "", *_targets(document), "", _environment(document), ""]


def perf_analyzer_section(document: Document | None) -> list[str]:
    if document is None:
        return []
    rows = document["rows"]
    lines = [
        f"| {' | '.join(rows[0])} |",
        f"|{'---|' * len(rows[0])}",
        *(f"| {' | '.join(map(text_of, row.values()))} |" for row in rows),
    ]
    ran = f"{sum(document['targets'].values())} of {len(rows)} runs ended without an error."
    return [
        PERF_ANALYZER,
        "",
        *lines,
        "",
        ran,
        "",
        f"{_environment(document)} {document['run']['perf_analyzer']}.",
        "",
    ]


def document_of(name: str, results: Path = RESULTS) -> Document | None:
    file = results / f"{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        server = (
            f"{row['server']}"
            f" {row['version']}{': ' + row['note'].replace('|', '/') if row['note'] else ''}"
        )
        rate = (
            f"{text_of(row['per_s'])} ({text_of(row['per_s_low'])} to {text_of(row['per_s_high'])})"
        )
        cells = [row["p50_ms"], row["p50_ratio"], row["p99_ms"], rate, row["per_s_ratio"]]
        cells += [
            row["client_cpu_ms"],
            row["api_cpu_ms"],
            row["worker_cpu_ms"],
            row["api_full_at_per_s"],
        ]
        lines.append(f"| {server} | {' | '.join(text_of(cell) for cell in cells)} |")
    return lines


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where Crucible's time went on one connection; nothing for a result from before that was
    kept.
    """
    ours = next(
        (
            row
            for row in rows
            if row["server"] == CRUCIBLE
            and None not in [row.get(f"{stage}_ms") for stage in STAGES]
        ),
        None,
    )
    if ours is None:
        return []
    told = ", ".join(f"{stage.replace('_', ' ')} {ours[f'{stage}_ms']:.3f}" for stage in STAGES)
    many = {stage: ours.get(f"{stage}_of_many_ms") for stage in STAGES}
    rest = ours["p50_ms"] - sum(ours[f"{stage}_ms"] for stage in STAGES)
    said = (
        f"Where Crucible's answers say that their time went on one connection, ms: {told}; the"
        f" other {rest:.3f} are HTTP on both sides."
    )
    if None not in (*many.values(), ours.get("batch_of_many")):
        told = ", ".join(f"{stage.replace('_', ' ')} {ms:.3f}" for stage, ms in many.items())
        said += f" On {MANY}, in batches of {ours['batch_of_many']:g}: {told}."
    return [said, ""]


def _tail(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The server's p99 beside the engine's median: the engine's own p99 is that of few runs, which
    one disturbance moves.
    """
    ours, engine = (
        next((row for row in rows if row["server"] == server), {}) for server in (CRUCIBLE, DIRECT)
    )
    if not ours.get("p99_ms") or not engine.get("p50_ms"):
        return []
    over = ours["p99_ms"] - engine["p50_ms"]
    message = f"Crucible's p99 on one connection is {over:.2f} ms over the engine's median."
    return [f"{message} The engine's own p99 moves with every disturbance of the host.", ""]


def _told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How near Python comes to mosec, and where one API process ends."""
    wire = {row["server"]: row for row in rows if row["load"] == WIRE}
    ours, mosec = wire.get(CRUCIBLE), wire.get("mosec")
    lines = []
    if ours and ours["api_full_at_per_s"]:
        lines.append(
            f"One API process of Crucible is full at {text_of(ours['api_full_at_per_s'])}"
            " requests/s of 602 KB."
        )
    if ours and mosec and ours["per_s_ratio"] and mosec["per_s_ratio"]:
        message = (
            f"{mosec['per_s_ratio']:.2f}x {FASTAPI}'s requests/s, Crucible"
            f" {ours['per_s_ratio']:.2f}x"
        )
        lines.append(f"mosec, whose server is written in Rust, reaches {message}.")
    return lines


def _run(document: Document) -> str:
    """The version that the engine's rows ran in, and how long everybody ran; a result from before
    that was kept says less.
    """
    packages, run = document["environment"]["packages"], document.get("run")
    lasted = (
        f" {run['rounds']} rounds, {run['seconds']:g} s of each measured stretch." if run else ""
    )
    return (
        f" onnxruntime {packages['onnxruntime']} in the rows of the engine and of Crucible.{lasted}"
    )


def _run_on_gpu(document: Document) -> str:
    """The engine, the network, and how it was served."""
    run, ran = document["run"], next(row["ran_on"] for row in document["rows"])
    network = (
        f"{run['cnn']} on [1, 3, {run['side']}, {run['side']}] float32, which it first enlarges"
        f" {run['enlarged']} times"
    )
    # a result from before that was kept has none
    overlap = f"with{'' if run.get('overlap') else 'out'} overlap"
    served = (
        f"at most {run['max_batch'] or 'all that the engine takes of'} rows together, a batch held"
        f" open for {run['max_delay_s'] * 1e3:g} ms"
    )
    return (
        f"{ran}: {network}; {served}, {overlap}. {run['rounds']} rounds, {run['seconds']:g} s of"
        " each measured stretch."
    )


def _targets(document: Document) -> list[str]:
    return [
        f"- {'met' if met else '**missed**'}: {target}"
        for target, met in document["targets"].items()
    ]


def _environment(document: Document) -> str:
    host = document["environment"]
    return (
        f"{document['created'][:10]}, {host['cpu']}, {host['cores']} cores, flags"
        f" {' '.join(host['cpu_flags'])}; Python {host['python']}."
    )
