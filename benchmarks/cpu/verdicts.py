"""What a compile with default candidates says of several architectures, and how long it takes,
stage by stage.

    python -m benchmarks verdicts [NAME ...] [--beside N] [--into FILE]

NAME: an architecture of verdict_models.py, `mlp_onnx`, its first one as an ONNX file, or `digits`,
the demo. Weights are random but for digits, and so are the inputs: what is looked at is speed, and
whether 16 and 8 bits keep the answers, by cosine. `--beside N` runs N busy loops meanwhile: a row
then ends with the true order of the engines, or says that the host cannot tell. Rows that are
measured again take the place of earlier ones in FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.common import DIGITS, RESULTS, ROOT, argument_parser
from pipeline.host.environment import environment
from pipeline.host.gpu import find_gpus
from pipeline.measurement.clock import monotonic
from pipeline.report.files import load_report
from pipeline.results.report import Report

SAMPLES = {"calibration": 64, "selection": 64, "validation": 64}
DEMO = "digits"
WIDTH = 125  # of the demo's table, in characters
BESIDE = 2  # busy loops
BUSY_LOOP = "while True: pass"
IN_ONNX = "mlp_onnx"
Row = Mapping[str, Any]
LIMITS_S = {
    "mlp": (15.0, 30.0),
    IN_ONNX: (15.0, 30.0),
    DEMO: (60.0, 60.0),
}  # on the CPU, and on a GPU


def main(words: Sequence[str]) -> None:
    arguments = parser().parse_args(words)
    file: Path = arguments.into
    runs = [(name, arguments.beside) for name in arguments.names]
    if not runs:  # make bench
        runs = [(name, arguments.beside) for name in (*architectures(), DEMO)]
        runs += [] if arguments.beside else [(name, BESIDE) for name in ("mlp", DEMO)]
    for name, beside in runs:
        row = measured(name, beside, arguments.set)
        keep(file, {**row, "note": arguments.note} if arguments.note else row)
        show([row])
    document = json.loads(file.read_text())
    show(list(document["rows"].values()))
    print(json.dumps({"targets": document["targets"]}))


def parser() -> argparse.ArgumentParser:
    options = argument_parser("verdicts", __doc__)
    on_gpu = bool(find_gpus().devices)
    options.add_argument("names", nargs="*", choices=[*architectures(), DEMO, []], metavar="NAME")
    options.add_argument(
        "--beside", type=int, default=0, metavar="N", help="busy loops that run meanwhile"
    )
    options.add_argument("--note", default="", help="what else ran on this host meanwhile")
    options.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="as for crucible compile"
    )
    into = RESULTS / ("verdicts_gpu.json" if on_gpu else "verdicts.json")
    options.add_argument("--into", type=Path, default=into, metavar="FILE")
    return options


def architectures() -> tuple[str, ...]:
    """Their names, without importing torch."""
    return (IN_ONNX, "mlp", "convnet", "gru", "overflowing", "encoder", "resnet18", "mobilenet")


def measured(name: str, beside: int, overrides: Sequence[str]) -> Row:
    """One compile with an empty store, the whole process timed."""
    with tempfile.TemporaryDirectory() as folder, busy_loops(beside):
        plan = DIGITS if name == DEMO else plan_of(name, Path(folder))
        command = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "compile",
            str(plan),
            "--out",
            f"{folder}/out",
        ]
        command += [] if name == DEMO else ["--json"]  # what the demo prints is shown
        command += [word for override in overrides for word in ("--set", override)]
        begin = monotonic()
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            env={
                **environment_of_this_process(),
                "CRUCIBLE_HOME": f"{folder}/home",
                "COLUMNS": str(WIDTH),
            },
        )
        seconds = monotonic() - begin
        if done.returncode not in (0, 2):
            return {"model": name, "beside": beside, "failed": done.stderr.strip()[-600:], **here()}
        row = row_of(name, load_report(Path(folder) / "out"), seconds)
        shown = {"output": demo_output(done, folder)} if name == DEMO else {}
        return {**row, **shown, "beside": beside, "set": list(overrides), **here()}


def demo_output(done: subprocess.CompletedProcess[str], folder: str) -> str:
    """What the demo prints from its table on, with the folder that it has by default."""
    _, heading, table = done.stderr.partition("digits: candidates")
    text = "\n".join(line.rstrip() for line in (heading + table + done.stdout).splitlines())
    return text.replace(f"{folder}/out", "crucible-out/digits")


def environment_of_this_process() -> dict[str, str]:
    import os

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": ":".join(paths)}


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that want a core all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def plan_of(name: str, folder: Path) -> Path:
    """A plan with default candidates, and data sets of random inputs."""
    from benchmarks.cpu.verdict_models import ARCHITECTURES

    model = ARCHITECTURES[name.removesuffix("_onnx")]
    for seed, (role, samples) in enumerate(SAMPLES.items()):
        random = np.random.default_rng(seed)
        np.savez(
            folder / f"{role}.npz", x=random.standard_normal((samples, *model.shape), np.float32)
        )
    plan: dict[str, Any] = {
        "name": name,
        "model": {
            "entrypoint": f"verdict_models:{name}",
            "python_path": str(Path(__file__).parent),
            "weights_from": "random: for speed only",
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", *model.shape]}],
        },
        "profiles": [{"batch": list(model.batch)}],
        "data": {role: f"{role}.npz" for role in SAMPLES},
        "accuracy": {"metric": "cosine", "max_drop": 0.01},
        "benchmark": {"sizes": [{"batch": size} for size in model.sizes]},
    }
    if name == IN_ONNX:
        onnx.save(two_layers(), folder / "model.onnx")
        plan["model"] = {"path": "model.onnx", "weights_from": "random: for speed only"}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return folder / "plan.yaml"


def two_layers() -> onnx.ModelProto:
    """The model of `mlp`, made without PyTorch: x [batch, 64] -> scores [batch, 10]."""
    random = np.random.default_rng(0)
    sizes = {"first": (64, 128), "second": (128, 10)}
    weights = [
        onnx.numpy_helper.from_array(
            (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32), layer
        )
        for layer, shape in sizes.items()
    ]
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "first"], ["inner"]),
        onnx.helper.make_node("Relu", ["inner"], ["positive"]),
        onnx.helper.make_node("MatMul", ["positive", "second"], ["scores"]),
    ]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 64), ("scores", 10))
    ]
    graph = onnx.helper.make_graph(nodes, "two_layers", ends[:1], ends[1:], weights)
    opset = [onnx.helper.make_opsetid("", 20)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)


def row_of(name: str, report: Report, seconds: float) -> dict[str, Any]:
    """What the report says, and where the time went."""
    stages: dict[str, float] = defaultdict(float)
    for step in report.steps:
        stages[step.stage] += step.seconds
    longest = sorted(stages, key=stages.__getitem__, reverse=True)
    engines = [report.baseline, *report.baselines, *(each.benchmark for each in report.candidates)]
    first = [(each.label, each.rows[0], each.stopped) for each in engines if each]
    return {
        "model": name,
        "verdict": report.verdict,
        "winner": report.winner,
        "baseline": report.baseline.label if report.baseline else None,
        "ratio": report.ratio.model_dump() if report.ratio else None,
        "ratio_missing": report.ratio_missing,
        "delivered": report.delivered.recipe.label if report.delivered else None,
        "seconds": round(seconds, 1),
        "stages_s": {stage: round(stages[stage], 1) for stage in longest},
        "engines": [
            {
                "label": label,
                "median_ms": round(row.end_to_end.median_s * 1e3, 5),
                "compute_ms": round(row.compute.median_s * 1e3, 5),
                "processes": len(row.end_to_end.processes),
                "ratio": row.ratio.model_dump() if row.ratio else None,
                "why": stopped or row.ratio_missing,
            }
            for label, row, stopped in first
        ],
        "not_measured": {
            each.label: f"{each.state}: {each.reason}"
            for each in report.candidates
            if not each.benchmark
        },
        "reasons": list(report.reasons),
    }


def here() -> dict[str, Any]:
    """Where and when a row was measured."""
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"created": created, "environment": environment().model_dump()}


def keep(file: Path, row: Row) -> None:
    """Put a row in the place of an earlier one of the same model, beside as many busy loops."""
    document = json.loads(file.read_text()) if file.is_file() else {"rows": {}}
    loops = f" beside {row['beside']} busy loops" if row["beside"] else ""
    rows = {**document["rows"], f"{row['model']}{loops}": dict(row)}
    written = {"benchmark": "verdicts", "rows": rows, "targets": targets(rows)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def targets(rows: Mapping[str, Any]) -> dict[str, bool]:
    """Which rows end in time, and whether every one has a verdict that its figures bear out."""
    found = {}
    for name, row in rows.items():
        if (limit := limit_of(row)) is not None:
            found[f"{name}: at most {limit:g} s (got {row.get('seconds', 0):.0f})"] = (
                row.get("seconds", limit + 1) <= limit
            )
    right = [is_borne_out(row) for row in rows.values()]
    found[f"every verdict is what its ratio says (got {sum(right)} of {len(right)})"] = all(right)
    return found


def limit_of(row: Row) -> float | None:
    """Seconds that a compile may take on a quiet host."""
    limits = LIMITS_S.get(row["model"])
    return limits[bool(row["environment"]["gpus"])] if limits and not row["beside"] else None


def is_borne_out(row: Row) -> bool:
    """Accepted is certainly faster, keep is not, and where nothing can be told there is a reason in
    its place.
    """
    ratio, verdict = row.get("ratio"), row.get("verdict")
    if ratio is None:
        return verdict == "rejected" or (verdict == "unproven" and bool(row["ratio_missing"]))
    if ratio["high"] > 10 * ratio["low"]:
        return False
    return ratio["low"] > 1 if verdict == "accepted" else verdict == "keep" and ratio["low"] <= 1


def show(rows: Sequence[Row]) -> None:
    table = Table(
        *(
            "model",
            "busy loops",
            "verdict",
            "winner",
            "times baseline (95 %)",
            "baseline",
            "s",
            "limit s",
        )
    )
    for row in rows:
        table.add_row(*cells(row))
    Console(width=170).print(table)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    if "failed" in row:
        return (row["model"], str(row["beside"]), "failed", row["failed"][-80:], "", "", "", "")
    ratio = row["ratio"]
    told = (
        f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        if ratio
        else row["ratio_missing"]
    )
    limit = f"{limits:g}" if (limits := limit_of(row)) is not None else ""
    return (
        row["model"],
        str(row["beside"]),
        row["verdict"],
        str(row["winner"]),
        told,
        str(row["baseline"]),
        f"{row['seconds']:.0f}",
        limit,
    )
