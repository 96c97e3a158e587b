"""What TensorRT makes of the three example plans on this host's GPU: every precision and every way
to it, one part after another.

    python -m benchmarks tensorrt_compile [PART ...] [--into DIR] [--seconds S] [--timeout S]
                                          [--list]

A part is MODEL/GROUP, or MODEL for all of its groups: one `crucible compile` of that plan with the
group's candidates. `choice` is the plan as it is, so that Crucible chooses the candidates by
itself. After each part DIR/tensorrt_MODEL.json is written anew, with what earlier runs found in
other parts; a part that fails says so there and does not stop the next. CRUCIBLE_HOME keeps engines
and the timing cache.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, ROOT, argument_parser
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.core.artifacts import NoteCode, Target
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.environment import environment
from pipeline.measurement.clock import monotonic
from pipeline.plan.files import load_plan
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import CandidateConfig
from pipeline.report.files import load_report
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.results.candidates import Candidate
from pipeline.results.precision_audit import reformats, time_by_precision
from pipeline.results.report import Report

Option = Mapping[str, str | bool]
Row = Mapping[str, Any]
FLOATS: tuple[Option, ...] = tuple(
    {"precision": precision} for precision in ("fp32", "tf32", "fp16", "bf16")
)
OWN: Option = {"precision": "int8"}
MODELOPT: Option = {"precision": "int8", "quantizer": "modelopt"}
ENTROPY: Option = {"precision": "int8", "precision_from": "flags", "method": "entropy"}
MINMAX: Option = {"precision": "int8", "precision_from": "flags", "method": "minmax"}
FLAGS: Option = {"precision": "fp16", "precision_from": "flags"}
EVERYWHERE: Option = {"precision": "fp16", "hardware_compatible": True}
CHOICE = "choice"  # the plan as it is
LABELLED: dict[str, tuple[Option, ...]] = {
    "float": FLOATS,
    "int8": (OWN, MODELOPT, ENTROPY, MINMAX),
    "other": ({"precision": "fp8"}, FLAGS, EVERYWHERE),
}
PARTS: dict[str, dict[str, tuple[Option, ...]]] = {
    "digits": {**LABELLED, CHOICE: ()},
    "minilm": LABELLED,
    "resnet50": {
        "float": FLOATS,
        "int8": (OWN, MODELOPT, ENTROPY),
        "other": (EVERYWHERE,),
        CHOICE: (),
    },
}
LEVEL = "tensorrt.optimization_level=1"
OVERRIDES: dict[str, tuple[str, ...]] = {
    "digits": (LEVEL,),
    "minilm": (LEVEL, "profiles=[{batch: [1, 8, 32], sequence: [4, 32, 128]}]"),
}
"""An encoder of 3 layers took 125 s to build in fp16 at level 3 with one profile (H200): for
accuracy, level 1 says the same. `choice` is the plan as it is.
"""

REQUIRED = {"digits": ("float", "int8"), "minilm": ("float", "int8"), "resnet50": (CHOICE,)}
"""Groups of which every candidate must come to a result."""

SECONDS, TIMEOUT_S = 1.0, 540.0
ENDED = (0, 2)  # 2: rejected, which is an answer too


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if arguments.list:
        print("\n".join(f"{model}/{group}" for model, groups in PARTS.items() for group in groups))
        return
    try:
        target = tensorrt_.probe()
    except BackendUnavailable as error:
        sys.exit(str(error))
    results: dict[str, Any] = {}
    for model, group in arguments.parts or [
        (model, group) for model, groups in PARTS.items() for group in groups
    ]:
        print(f"== {model}/{group}", flush=True)
        results[model] = add_part(
            arguments.into / f"tensorrt_{model}.json",
            model,
            group,
            run_part(model, group, target, arguments),
            target,
        )
        Console(width=160).print(table(results[model], group))
    print(json.dumps({model: document["parts"] for model, document in results.items()}))
    sys.exit(
        any(
            "failed" in part for document in results.values() for part in document["parts"].values()
        )
    )


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("tensorrt_compile", __doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        type=parts_of,
        metavar="PART",
        help="MODEL or MODEL/GROUP [default: all]",
    )
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the results go"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="benchmark.duration_s of all parts but `choice`",
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds after which a part is stopped"
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="other work runs on this GPU: keep no latency and no build time",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    found = parser.parse_args(words)
    found.parts = [part for parts in found.parts for part in parts]
    return found


def parts_of(text: str) -> list[tuple[str, str]]:
    """`digits` or `digits/int8` -> model and group of each part."""
    model, _, group = text.partition("/")
    groups = PARTS.get(model, {})
    if not groups or (group and group not in groups):
        raise argparse.ArgumentTypeError(f"no part '{text}'; --list prints them")
    return [(model, name) for name in groups if group in ("", name)]


def run_part(
    model: str, group: str, target: Target, arguments: argparse.Namespace
) -> Mapping[str, Any]:
    """Compile one group: what the document keeps of it, with its rows under "rows"; or under
    "failed" why there are none.
    """
    plan, start = ROOT / "configs" / f"{model}.yaml", monotonic()
    candidates, refused = possible(plan, PARTS[model][group], target)
    named = [
        f"candidates={json.dumps(candidates)}",
        f"benchmark.duration_s={arguments.seconds:g}",
        "fallback=false",
    ]
    overrides = [] if group == CHOICE else [*named, *OVERRIDES.get(model, ())]
    part = {
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "overrides": overrides,
    }
    if refused and not candidates:
        return {**part, "rows": refused}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline.cli", "compile", str(plan), "--out", folder]
        command += [word for override in overrides for word in ("--set", override)]
        try:
            code = subprocess.run(
                command, check=False, timeout=arguments.timeout, stdout=sys.stderr
            ).returncode
        except subprocess.TimeoutExpired:
            return {**part, "failed": f"stopped after {arguments.timeout:g} s", "rows": refused}
        if code not in ENDED:
            return {**part, "failed": f"crucible ended with exit code {code}", "rows": refused}
        report = load_report(Path(folder))
    said = {
        "seconds": round(monotonic() - start, 1),
        "verdict": report.verdict,
        "winner": report.winner,
        "reasons": report.reasons,
    }
    rows = [*rows_from_report(report), *refused]
    return {
        **part,
        **said,
        "shared": arguments.shared,
        "rows": [without_times(row) for row in rows] if arguments.shared else rows,
    }


def possible(
    plan_path: Path, options: Iterable[Option], target: Target
) -> tuple[list[dict[str, Any]], list[Row]]:
    """The candidates that this host can build, and rows for those that it refuses: named in a plan,
    one of these would stop the compile.
    """
    plan = load_plan(plan_path)
    candidates: list[dict[str, Any]] = []
    refused: list[Row] = []
    for option in options:
        candidate = {"backend": "tensorrt", **option}
        recipe = recipe_from_candidate(
            CandidateConfig.model_validate(candidate), target, plan, calibrated=True
        )
        try:
            tensorrt_.check_recipe(recipe, target)
        except UnsupportedError as error:
            refused.append({"candidate": recipe.label, "state": "refused", "reason": error.message})
        else:
            candidates.append(candidate)
    return candidates, refused


# -- rows --------------------------------------------------------------------


def rows_from_report(report: Report) -> list[Row]:
    """The baselines, then every candidate as far as it came."""
    baselines = [each for each in (report.baseline, *report.baselines) if each]
    rows: list[Row] = [
        {"candidate": each.label, "state": "baseline", "latency": latency(each)}
        for each in baselines
    ]
    return rows + [row_from_candidate(candidate, report) for candidate in report.candidates]


def row_from_candidate(candidate: Candidate, report: Report) -> Row:
    """All figures of one candidate; what it did not come to is None."""
    build = next(
        (step for step in report.steps if (step.stage, step.subject) == ("build", candidate.label)),
        None,
    )
    checked, engine, layers = candidate.selection, candidate.engine, candidate.layers
    metric = checked.metric if checked else None
    moving = reformats(layers) if layers else None
    # its build time would say nothing
    shared = any(note.code is NoteCode.GPU_SHARED for note in candidate.notes)
    return {
        "candidate": candidate.label,
        "state": candidate.state,
        "reason": candidate.reason,
        "metric": metric.name if metric else None,
        "reference": metric.reference if metric else None,
        "score": metric.candidate if metric else None,
        "drop": metric.drop if metric else None,
        "drop_low": metric.interval.low if metric else None,
        "drop_high": metric.interval.high if metric else None,
        "cosine": (
            min(output.cosine for output in checked.outputs)
            if checked and checked.outputs
            else None
        ),
        "samples": checked.samples if checked else None,
        "latency": latency(candidate.benchmark) if candidate.benchmark else [],
        "build_s": build.seconds if build and not shared else None,
        "engine_bytes": engine.size_bytes if engine else None,
        "time_share": (
            {name: round(share, 4) for name, share in time_by_precision(layers).items()}
            if layers
            else None
        ),
        "layers": len(layers.layers) if layers else None,
        "moving_layers": moving.count if moving else None,
        "moving_share": round(moving.share, 4) if moving else None,
        "notes": [note.text for note in candidate.notes if note.level == "warning"],
    }


def without_times(row: Row) -> Row:
    """What stays true of a row whose engine shared the GPU with others."""
    return {**row, "latency": [], "build_s": None}


def latency(benchmark: BenchmarkReport) -> list[dict[str, Any]]:
    """Medians in ms and the ratio to the baseline, at each size."""
    return [
        {
            "sizes": row.sizes,
            "end_to_end_ms": row.end_to_end.median_s * 1e3,
            "compute_ms": row.compute.median_s * 1e3,
            "stable": row.end_to_end.stable,
            "ratio": row.ratio.value if row.ratio else None,
            "ratio_low": row.ratio.low if row.ratio else None,
            "ratio_high": row.ratio.high if row.ratio else None,
        }
        for row in benchmark.rows
    ]


# -- the document ------------------------------------------------------------


def add_part(
    file: Path, model: str, group: str, part: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    """Write the model's document with this part in the place of an earlier run of it. Each part
    keeps the environment of its own run.
    """
    old = (
        json.loads(file.read_text(encoding="utf-8"))
        if file.is_file()
        else {"parts": {}, "rows": []}
    )
    here = {
        "target": target.model_dump(mode="json"),
        "environment": environment().model_dump(mode="json"),
    }
    parts = {
        **old["parts"],
        group: {key: value for key, value in part.items() if key != "rows"} | here,
    }
    rows = [row for row in old["rows"] if row["part"] != group] + [
        {"part": group, **row} for row in part["rows"]
    ]
    document = {
        "benchmark": f"tensorrt_{model}",
        "created": part["created"],
        "parts": {name: parts[name] for name in PARTS[model] if name in parts},
        "rows": [row for name in PARTS[model] for row in rows if row["part"] == name],
        "targets": targets(model, rows, parts),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def targets(
    model: str, rows: Iterable[Mapping[str, Any]], parts: Mapping[str, Any]
) -> dict[str, bool]:
    """What must hold: each candidate of the required groups ran and was compared with the
    reference; Crucible's own choice came to a winner.
    """
    required = [
        row for row in rows if row["part"] in REQUIRED[model] and row["state"] != "baseline"
    ]
    found = {
        f"{row['candidate']}: built, ran and compared with the reference": (
            row.get("cosine") is not None
        )
        for row in required
    }
    found |= {
        f"the part `{group}` ran": False
        for group in REQUIRED[model]
        if group not in parts or "failed" in parts[group]
    }
    if CHOICE in (*REQUIRED[model], *parts):
        found["Crucible chose among its own candidates"] = bool(parts.get(CHOICE, {}).get("winner"))
    return found


def table(document: Mapping[str, Any], group: str) -> Table:
    """One part, for the eye."""
    part = document["parts"][group]
    shown = Table(
        "candidate",
        "state",
        "drop",
        "cosine",
        "ms",
        "ratio",
        "build s",
        "time by precision",
        title=part.get("failed") or part.get("winner"),
    )
    for row in (row for row in document["rows"] if row["part"] == group):
        figures = [
            f"{row[key]:.4f}" if row.get(key) is not None else "" for key in ("drop", "cosine")
        ]
        times = [
            " / ".join(f"{at[key]:.3f}" for at in row.get("latency", ()) if at[key] is not None)
            for key in ("end_to_end_ms", "ratio")
        ]
        build = f"{row['build_s']:.1f}" if row.get("build_s") is not None else ""
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in (row.get("time_share") or {}).items()
        )
        shown.add_row(
            row["candidate"],
            row["state"],
            *figures,
            *times,
            build,
            shares or str(row.get("reason", ""))[:60],
        )
    return shown
