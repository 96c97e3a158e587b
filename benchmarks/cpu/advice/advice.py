"""Does an engine gain what an advice promises? Each advice is followed, and the new engine measured
beside the old one in a race of its own.

Four models with a known flaw, and ResNet-50, ViT-B/16 and BERT-base as a classifier of 128 tokens,
at batch 1, compiled without the rewrites that are defaults: in fp32 of ONNX Runtime, or with --gpu
in fp16 of TensorRT. Weights are random: speed only.

    python -m benchmarks advice [NAME ...] [--gpu] [--budget-s S] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Row, argument_parser, publish
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.advice.again import advise_again
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.graph import export_plan
from pipeline.core.artifacts import Engine
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.measurement.statistics import Interval
from pipeline.plan.files import home, override_plan, plan_from_document
from pipeline.plan.schema import Plan
from pipeline.results.advice import Advice, Attempt, Outcome, gain_of
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.results.report import Report
from pipeline.stages.benchmark import benchmark

HERE = Path(__file__).resolve().parent
BUDGET_S, LARGE_BUDGET_S = 45.0, 120.0  # of a race; there are two for each model
TOKENS = 30522
LARGE_GAIN = 0.05
LARGE_GAINS = 3  # advices that reach it
CPU: Row = {"backend": "onnxruntime", "precision": "fp32"}
GPU: Row = {"backend": "tensorrt", "precision": "fp16"}
WHY_RANDOM = "for speed only, which does not depend on the values"


@dataclass(frozen=True)
class Case:
    """A model of nets.py, and the shape of its only input without the batch."""

    name: str
    about: str
    shape: tuple[int, ...]
    is_text: bool = False
    budget_s: float = BUDGET_S


CASES = (
    Case("adapters", "adapters that nobody merged", (128, 768)),
    Case("first_token", "one token is read, all are computed", (128, 512)),
    Case("last_position", "all positions are scored, the last is read", (128, 512)),
    Case("wide_layers", "one row goes through wide layers", (2048,)),
    Case("resnet50", "ResNet-50", (3, 224, 224), budget_s=LARGE_BUDGET_S),
    Case("vit_b_16", "ViT-B/16", (3, 224, 224), budget_s=LARGE_BUDGET_S),
    Case("bert_base", "BERT-base, 128 tokens", (128,), is_text=True, budget_s=LARGE_BUDGET_S),
)


def _known(name: str) -> str:
    names = [case.name for case in CASES]
    if name not in names:
        raise argparse.ArgumentTypeError(f"expected {', '.join(names)}, got '{name}'")
    return name


def main(words: Sequence[str]) -> None:
    parser = argument_parser("advice", __doc__)
    parser.add_argument("names", nargs="*", type=_known, metavar="NAME")
    parser.add_argument("--gpu", action="store_true", help="TensorRT instead of ONNX Runtime")
    text = f"of a race; left out: {BUDGET_S:g}, and {LARGE_BUDGET_S:g} for the three large models"
    parser.add_argument("--budget-s", type=float, metavar="S", help=text)
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: all cores")
    arguments = parser.parse_args(words)
    candidate = GPU if arguments.gpu else CPU
    run = {"budget_s": arguments.budget_s, "threads": arguments.threads}
    logging.disable(logging.INFO)  # the exporter logs every step
    rows: list[Row] = []
    attempts: list[Row] = []
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            own = {} if arguments.budget_s is not None else {"budget_s": case.budget_s}
            found = measured(case, candidate, {**run, **own})
            rows += found[0]
            attempts += found[1]
            print(*found[0], *found[1], sep="\n", flush=True)
    publish(
        "advice_gpu" if arguments.gpu else "advice",
        rows,
        targets_of(rows),
        run=run,
        details={"attempts": attempts},
    )


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    followed = [row for row in rows if row["in_promise"] is not None]
    held = sum(bool(row["in_promise"]) for row in followed)
    large = sum(float(row["gain_%"] or 0) >= 100 * LARGE_GAIN for row in followed)
    return {
        f"every gain lies in the interval promised (got {held} of {len(followed)})": bool(followed)
        and held == len(followed),
        f"at least {LARGE_GAINS} advices gain {LARGE_GAIN:.0%} or more (got {large})": large
        >= LARGE_GAINS,
    }


def measured(case: Case, candidate: Row, measuring: Row) -> tuple[list[Row], list[Row]]:
    """A row for each advice, or one that there is none; and a row for each attempt."""
    runner = Runner(Store(home()))
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(case, Path(folder), candidate, measuring)
        report = compiled(plan, runner)
        advice = advise_again(report, plan, engine_of(report), runner)
        followed = [
            engine_of(compiled(override_plan(plan, (attempt.how,)), runner))
            for attempt in advice.advised
        ]
        rows = rows_of(case, plan, runner, advice, [engine_of(report), *followed])
    return rows, [attempt_row(case, attempt) for attempt in advice.attempts]


def plan_of(case: Case, folder: Path, candidate: Row, measuring: Row) -> Plan:
    """The plan of a case and its only candidate, with random data in this folder. `measuring`: keys
    of `benchmark`.
    """
    name, dtype = ("input_ids", "int64") if case.is_text else ("x", "float32")
    selection: Any = {"generate": "random", "samples": 4, "seed": 2, "because": WHY_RANDOM}
    if case.is_text:
        ids = np.random.default_rng(0).integers(1000, TOKENS, (4, *case.shape))
        np.savez(folder / "texts.npz", input_ids=ids)
        selection = [str(folder / "texts.npz")]
    document = {
        "name": case.name,
        "model": {
            "entrypoint": f"nets:{case.name}",
            "python_path": str(HERE),
            "weights_from": "random: speed does not depend on the values",
            "inputs": [{"name": name, "dtype": dtype, "shape": ["batch", *case.shape]}],
            "outputs": ["y"],
        },
        "profiles": [{"batch": [1, 1, 1]}],
        "data": {"selection": selection},
        "accuracy": {"thresholds": {"min_cosine": 0.99}},
        "candidates": [dict(candidate)],
        "simplify": {"rewrites": []},
        "benchmark": dict(measuring),
    }
    return plan_from_document(document, HERE)


def compiled(plan: Plan, runner: Runner) -> Report:
    """Compile a plan. Its verdict is of no interest, so that its race ends after four processes."""
    short = plan.benchmark.model_copy(update={"budget_s": 1.0, "baselines": ("eager",)})
    return compile_plan(plan.model_copy(update={"benchmark": short}), runner, "benchmarks advice")


def engine_of(report: Report) -> Engine:
    """The only candidate's engine, whatever the verdict delivers."""
    (candidate,) = report.candidates
    if candidate.engine is None or candidate.state != "measured":
        raise SystemExit(f"{report.plan.name}: {candidate.label}: {candidate.reason}")
    return candidate.engine


def rows_of(
    case: Case, plan: Plan, runner: Runner, advice: Advice, engines: Sequence[Engine]
) -> list[Row]:
    """Measure the engine and those that follow the advices, and compare with the promises."""
    before_ms = None if advice.latency_s is None else 1e3 * advice.latency_s
    if not advice.advised:
        nothing = row_of(case, "none", None, None)
        return [{**nothing, "before_ms": before_ms}]
    entries = [RaceEntry(engines[0], Role.BASELINE)]
    entries += [RaceEntry(engine, Role.CHANGE) for engine in engines[1:]]
    run = benchmark(entries, export_plan(plan, runner, simplified=False), plan.benchmark)
    results = [result for result in run.results if isinstance(result, BenchmarkReport)]
    if len(results) < len(engines):
        raise SystemExit(f"{case.name}: an engine failed: {json.dumps(str(run.results))[:600]}")
    now_ms = 1e3 * results[0].rows[0].end_to_end.median_s
    rows: list[Row] = []
    for attempt, result in zip(advice.advised, results[1:], strict=True):
        first = result.rows[0]
        gained = gain_of(first.ratio) if first.ratio else None
        row = row_of(case, attempt.rule, attempt.gain, gained)
        after_ms = 1e3 * first.end_to_end.median_s
        rows.append({**row, "before_ms": now_ms, "after_ms": after_ms})
    return rows


def row_of(case: Case, rule: str, promise: Interval | None, gain: Interval | None) -> Row:
    held = None
    if promise is not None and gain is not None:
        held = promise.low <= gain.value <= promise.high
    return {
        "model": case.about,
        "advice": rule,
        "promised_low_%": 100 * promise.low if promise else None,
        "promised_high_%": 100 * promise.high if promise else None,
        "gain_%": 100 * gain.value if gain else None,
        "in_promise": held,
        "before_ms": None,
        "after_ms": None,
    }


def attempt_row(case: Case, attempt: Attempt) -> Row:
    """What was tried, and with which outcome."""
    gain = attempt.gain
    return {
        "model": case.about,
        "rule": attempt.rule,
        "outcome": str(attempt.outcome),
        "gain_low_%": 100 * gain.low if gain else None,
        "gain_high_%": 100 * gain.high if gain else None,
        "detail": attempt.detail,
        "how": attempt.how if attempt.outcome is Outcome.ADVISED else "",
    }
