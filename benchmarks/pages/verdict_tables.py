"""The verdicts' section of docs/benchmarks.md and the demo's output in the README, from
verdicts*.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.common import text_of

Document = Mapping[str, Any]
LONGEST = 3  # stages that a row names

ABOUT = """## Verdicts on small and awkward models
What `crucible compile` says with default candidates, from an empty store: of the demo, and of
models in `benchmarks/cpu/verdict_models.py` with random weights. `mlp` has two layers, and
`mlp_onnx` is an ONNX file of the same sizes, without biases and with other weights. A model that is
not in a table has no row yet. `accepted` is faster (95 %) than the best of what runs today (the
baseline), `keep` means that nothing is, and `unproven` that this host could not tell. Beside two
busy loops a row ends with the true order, or says why not. Seconds are those of the whole process.
Stages that ran side by side are added up, so together they may exceed it."""
COLUMNS = (
    "model",
    "verdict",
    "engine",
    "times the baseline (95 %)",
    "baseline",
    "s",
    "longest stages, s",
)
GPU = """### On a GPU
TensorRT beside PyTorch. Repeat it there with `python -m benchmarks verdicts`."""


def verdicts_section(cpu: Document | None, gpu: Document | None) -> list[str]:
    """Both tables, as far as they were measured."""
    lines: list[str] = []
    if cpu:
        lines += [
            ABOUT,
            "Repeat it with `.venv/bin/python -m benchmarks verdicts`.",
            "",
            *_measured(cpu),
        ]
    if gpu:
        lines += [*([] if cpu else [ABOUT, ""]), GPU, "", *_measured(gpu)]
    return lines


def demo_section(cpu: Document | None) -> list[str]:
    """What the demo printed, and where."""
    row = cpu["rows"].get("digits") if cpu else None
    if row is None:
        return []
    host = row["environment"]
    flags = " ".join(host["cpu_flags"])
    return [
        (
            f"It ends like this, after {row['seconds']:.0f} s ({host['cpu']}, {host['cores']} cores"
            f" of a virtual machine, CPU flags {flags};"
        ),
        f"{row['created'][:10]}; engines differ where flags do):",
        "",
        "```console",
        *row["output"].splitlines(),
        "```",
    ]


def _measured(document: Document) -> list[str]:
    rows = document["rows"]
    hosts = dict.fromkeys(_environment(row) for row in rows.values())
    marks = {
        host: f" [{number + 1}]" if len(hosts) > 1 else "" for number, host in enumerate(hosts)
    }
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [
        f"| {' | '.join(_cells(name, row, marks[_environment(row)]))} |"
        for name, row in rows.items()
    ]
    told = [
        f"- {'met' if met else '**missed**'}: {target}"
        for target, met in document["targets"].items()
    ]
    told += [f"- {name}: {row['note']}" for name, row in rows.items() if row.get("note")]
    return [*lines, "", *told, "", *(f"{marks[host].strip()} {host}".strip() for host in hosts), ""]


def _cells(name: str, row: Mapping[str, Any], mark: str) -> Iterable[str]:
    if "failed" in row:
        return (
            name + mark,
            "failed",
            row["failed"].splitlines()[-1].replace("|", "/"),
            "",
            "",
            "",
            "",
        )
    ratio = row["ratio"]
    told = (
        f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        if ratio
        else row["ratio_missing"]
    )
    longest = sorted(row["stages_s"].items(), key=lambda item: -item[1])[:LONGEST]
    stages = ", ".join(f"{stage} {text_of(spent)}" for stage, spent in longest)
    engine = row["delivered"] or "-"
    name += f" (`--set {' '.join(row['set'])}`)" if row["set"] else ""
    return (
        name + mark,
        row["verdict"],
        engine,
        told or "-",
        str(row["baseline"]),
        f"{row['seconds']:.0f}",
        stages,
    )


def _environment(row: Mapping[str, Any]) -> str:
    """Where a row was measured, and with what."""
    host = row["environment"]
    gpu = f"{', '.join(host['gpus'])}, driver {host['gpu_driver']}, " if host["gpus"] else ""
    shown = ("torch", "onnxruntime", "openvino", "tensorrt")
    packages = ", ".join(
        f"{name} {host['packages'][name]}" for name in shown if name in host["packages"]
    )
    return (
        f"{row['created'][:10]}, {gpu}{host['cpu']}, {host['cores']} cores, flags"
        f" {' '.join(host['cpu_flags'])}; Python {host['python']}, {packages}."
    )
