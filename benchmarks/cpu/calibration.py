"""Accuracy of int8 against the number of calibration samples and the method, on the digits and on
MiniLM, by ONNX Runtime.

Each draw takes samples at random from the plan's calibration set and goes through the stages of a
compile, up to the check on the selection set. Several draws show how much of a figure is the luck
of the draw. With most samples, weights of 7 and of 8 bits: on x86 without VNNI the latter can
saturate. Nothing is timed, so a busy machine does no harm. Takes about 15 minutes of CPU time; a
run that was stopped goes on where it stood.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common import ROOT, Row, argument_parser, publish
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.compiler.baselines import build_baselines
from pipeline.compiler.candidates.stages import (
    build_engine,
    check_engine,
    convert_model,
    reference_outputs,
)
from pipeline.compiler.context import CompileContext, open_context
from pipeline.compiler.graph import export_model, simplify_model
from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CalibrationMethod, Precision
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.execution.child_process import TimeLimit
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import home, load_plan
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import CandidateConfig
from pipeline.stages.validate import ReferenceOutputs

DRAWS = {"digits": {10: 5, 50: 5, 100: 5, 500: 1}, "minilm": {10: 3, 50: 2, 100: 1, 500: 1}}
"""By plan: samples, and how often they are drawn. 500 are all, or nearly all, that the two sets
hold.
"""

ENOUGH, MOST = 100, 500
WORK = ROOT / "build" / "calibration"
BITS: tuple[Literal[7, 8], ...] = (7, 8)


def main(words: Sequence[str]) -> None:
    parser = argument_parser("calibration", __doc__)
    parser.add_argument("plan", nargs="?", choices=DRAWS, help="one model only [default: both]")
    asked = parser.parse_args(words).plan
    plans = [asked] if asked else list(DRAWS)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = list(chain.from_iterable(pool.map(measure, plans)))
    publish("calibration", rows, targets(rows))
    for plan in plans:
        shutil.rmtree(WORK / plan)


def measure(plan: str) -> list[Row]:
    """The rows of all draws of one plan."""
    context = open_context(load_plan(ROOT / "configs" / f"{plan}.yaml"), Runner(Store(home())))
    exported = export_model(context)
    model = simplify_model(context, exported)
    expected = reference_outputs(
        context, build_baselines(context, exported)[0], context.data.selection
    )
    rows: list[Row] = []
    for samples, seed in (
        (samples, seed) for samples, draws in DRAWS[plan].items() for seed in range(draws)
    ):
        drawn = with_drawn_samples(context, samples, seed)
        for candidate in candidates(BITS if samples == MOST else (None,)):
            rows.append(
                {
                    "model": context.plan.name,
                    "samples": samples,
                    "draw": seed,
                    **accuracy(drawn, model, candidate, expected),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def candidates(bits: Sequence[Literal[7, 8] | None]) -> list[CandidateConfig]:
    """int8 by every method, with each of these weight bits; None is what suits this CPU."""
    choices = [
        {"method": method, "weight_bits": each} for method in CalibrationMethod for each in bits
    ]
    return [
        CandidateConfig.model_validate(
            {"backend": "onnxruntime", "precision": Precision.INT8, **choice}
        )
        for choice in choices
    ]


def with_drawn_samples(context: CompileContext, samples: int, seed: int) -> CompileContext:
    """Return the context with a random part of its calibration set and a temporary store.

    Samples are drawn without replacement. The store is large and is removed in the end.
    """
    folder = WORK / context.plan.name / f"{samples}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    source = context.plan.data.calibration
    assert isinstance(source, tuple)
    files = {path: dict(np.load(path)) for path in source}
    places = [
        (path, row)
        for path, arrays in files.items()
        for row in range(len(next(iter(arrays.values()))))
    ]
    chosen = sorted(np.random.default_rng(seed).permutation(len(places))[:samples])
    taken = []
    for path, arrays in files.items():
        rows = [row for each, row in (places[index] for index in chosen) if each == path]
        if rows:
            taken.append(folder / path.name)
            np.savez(taken[-1], **{name: array[rows] for name, array in arrays.items()})
    calibration = open_set(
        CalibrationSet, tuple(taken), context.data.selection.specs, context.plan.profiles
    )
    assert calibration.samples == samples
    return replace(
        context,
        runner=Runner(Store(WORK / context.plan.name / "store"), run=here),
        data=replace(context.data, calibration=calibration),
    )


def here(
    function: Callable[..., Any],
    *arguments: Any,
    name: str,
    log: Path | None = None,
    progress: Progress = silent,
    limit: TimeLimit | None = None,
) -> Any:
    """A stage in this process: a child for each of some 300 stages would spend most of its time on
    imports.
    """
    return function(*arguments, progress)


def accuracy(
    context: CompileContext,
    model: OnnxModel,
    candidate: CandidateConfig,
    expected: ReferenceOutputs,
) -> Row:
    """What the int8 engine loses on the selection set: of the plan's own metric, and of the mean
    cosine to the reference.
    """
    recipe = recipe_from_candidate(candidate, onnxruntime_.probe(), context.plan, calibrated=True)
    engine = build_engine(context, convert_model(context, model, recipe), recipe)
    report = check_engine(context, engine, expected, context.data.selection)
    by_cosine = replace(
        context,
        plan=context.plan.model_copy(
            update={"accuracy": context.plan.accuracy.model_copy(update={"metric": "cosine"})}
        ),
    )
    cosine = check_engine(
        by_cosine, engine, expected, context.data.selection
    ).metric  # from the store where it is the plan's own metric
    assert report.metric is not None
    assert cosine is not None
    return {
        "method": str(recipe.method),
        "weight_bits": recipe.weight_bits,
        "metric": report.metric.name,
        "drop": report.metric.drop,
        "max_drop": report.metric.max_drop,
        "mean_cosine": cosine.candidate,
        "smallest_cosine": min(output.cosine for output in report.outputs),
        "passed": report.passed,
    }


def targets(rows: Sequence[Row]) -> dict[str, bool]:
    """Whether each method passes the plan's gate in every draw of enough samples, with weights as
    they suit this CPU.
    """
    usual = rows[0]["weight_bits"]
    found = {}
    for plan in dict.fromkeys(str(row["model"]) for row in rows):
        for method in CalibrationMethod:
            same = [
                row
                for row in rows
                if (row["model"], row["method"], row["weight_bits"]) == (plan, str(method), usual)
            ]
            enough = [row for row in same if int(row["samples"] or 0) >= ENOUGH]
            held = sum(bool(row["passed"]) for row in enough)
            found[
                f"{plan}, {method}: passes with {ENOUGH} samples or more ({held} of {len(enough)}"
                " draws)"
            ] = held == len(enough) > 0
    return found
