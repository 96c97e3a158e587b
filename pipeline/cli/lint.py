"""`crucible lint`: find problems of a quantised model, fix them, and measure the speedup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from pipeline import backends
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.candidates.stages import build_engine, convert_model
from pipeline.compiler.context import CompileContext, open_context
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.recipe import Recipe
from pipeline.core.shapes import Profile
from pipeline.errors import InternalError, ModelError, PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.measurement.statistics import Interval
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.plan.baselines import AS_GIVEN
from pipeline.plan.default_candidates import default_candidates
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import Plan
from pipeline.plan.source import check_profiles
from pipeline.quantization.existing_qdq import QUANTISED_TOLERANCE, given_precision
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.fixes import mend
from pipeline.quantization.lint.rules import EVERYWHERE, Finding, lint
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark

ALL = "all fixes"


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed model file."""

    path: Path
    applied: Counter[str]  # number of fixes by rule
    difference: float  # largest difference of outputs, in units of their largest magnitude


@dataclass(frozen=True, slots=True)
class Gain:
    """The speedup of one rule's fix or of all fixes."""

    what: str  # the rule, or ALL
    ratio: Interval | None  # median of the original model over that of the fixed one
    failure: str = ""  # why there is no ratio


def read_named(path: Path) -> onnx.ModelProto:
    """Read an ONNX file, flattened, with a name for every node.

    ModelError if the model has no Q/DQ nodes on activations.
    """
    proto = flatten(read_proto(path))
    if given_precision(proto.graph) is None:
        message = (
            f"expected a model with QuantizeLinear and DequantizeLinear on activations; '{path}'"
            " quantises no activation"
        )
        raise ModelError(
            message, "to quantise a float model, give `crucible compile` calibration data"
        )
    return proto


def findings_of(path: Path, backend: str | None) -> dict[str, tuple[Finding, ...]]:
    """Return the findings by backend: for `backend`, or for all with rules if it is None."""
    if backend is not None and backend not in EVERYWHERE:
        raise PlanError(
            f"no rules for the backend '{backend}'", f"expected one of {', '.join(EVERYWHERE)}"
        )
    proto = read_named(path)
    names = [backend] if backend else EVERYWHERE
    return {name: lint(proto.graph, name) for name in names}


def fix_model(path: Path, out: Path, backend: str, profiles: tuple[Profile, ...]) -> Fixed:
    """Write the fixed model to `out`, and compare its outputs with those of the original.

    Both models run at all sizes of the profiles. InternalError, and no file, if outputs differ.
    """
    if out.resolve() == path.resolve():
        raise PlanError(f"--fix would overwrite '{path}'", "choose another file")
    proto = read_named(path)
    model = onnx_model(path.resolve().parent, path.name)
    complete = check_profiles(model.inputs, profiles)
    applied = mend(proto, backend)
    write_proto(proto, out)
    difference = largest_difference(model, out, complete)
    if difference > QUANTISED_TOLERANCE:
        out.unlink()
        raise InternalError(
            f"the fixed model's outputs differ by {difference:.3g} of their largest magnitude after"
            f" {dict(applied)}"
        )
    return Fixed(out, applied, difference)


def largest_difference(model: OnnxModel, after: Path, profiles: tuple[Profile, ...]) -> float:
    """Return the largest difference over all outputs and generated inputs.

    It is in units of an output's largest magnitude. Both models run in ONNX Runtime without
    optimisations.
    """
    run_before, run_after = open_reference(model.path), open_reference(after)
    largest = 0.0
    for feeds in feeds_of(model, profiles, ()):
        expected, actual = run_before(feeds), run_after(feeds)
        for name, values in expected.items():
            difference = np.abs(np.subtract(actual[name], values, dtype=np.float64))
            magnitude = np.abs(values).max(initial=0) or 1
            largest = max(largest, float(difference.max(initial=0.0) / magnitude))
    return largest


def measure_fixes(plan: Plan, backend: str, folder: Path, runner: Runner) -> tuple[Gain, ...]:
    """Measure the speedup of each rule's fix alone and of all fixes together.

    The original and the fixed models run side by side in one interleaved run on this host.
    """
    context = open_context(plan, runner)
    assert context.source.path is not None
    if context.given is None:
        read_named(context.source.path)  # raises ModelError
    source = onnx_model(context.source.path.parent, context.source.path.name)
    target = backends.backend(backend).probe()
    (candidate,) = default_candidates({backend: target}, False, context.given)
    recipe = recipe_from_candidate(candidate, target, context.plan, False, context.given)
    variants = {"as given": source} | dict(_fixed_models(context.source.path, backend, folder))
    engines = [_engine(context, model, recipe, what) for what, model in variants.items()]
    roles = [Role.BASELINE, *[Role.COMPARED] * (len(engines) - 1)]
    entries = [RaceEntry(engine, role) for engine, role in zip(engines, roles, strict=True)]
    measured: Benchmarks = runner.run(
        benchmark,
        entries,
        source,
        context.plan.benchmark,
        ENOUGH_RUNS,
        name="lint",
        progress=runner.progress("benchmark"),
    )
    _, *fixed = zip(variants, measured.results, strict=True)
    return tuple(_gain(what, result) for what, result in fixed)


def _fixed_models(path: Path, backend: str, folder: Path) -> Iterable[tuple[str, OnnxModel]]:
    """Write and yield the model with each rule's fix alone, if there are several, and with all."""
    applied = list(mend(read_named(path), backend))
    selections = [applied] if applied else []
    if len(applied) > 1:
        selections = [*([rule] for rule in applied), applied]
    for rules in selections:
        proto = read_named(path)
        mend(proto, backend, rules)
        name = f"{'-and-'.join(rules)}.onnx"
        write_proto(proto, folder / name)
        yield rules[0] if len(rules) == 1 else ALL, onnx_model(folder, name)


def _engine(context: CompileContext, model: OnnxModel, recipe: Recipe, what: str) -> Engine:
    # What is measured is the effect of the fixes, which a conversion would apply by itself.
    unrepaired = recipe.model_copy(update={"variant": AS_GIVEN})
    return build_engine(
        context,
        convert_model(context, model, unrepaired),
        recipe.model_copy(update={"variant": what}),
    )


def _gain(what: str, result: BenchmarkReport | BenchmarkFailure) -> Gain:
    if isinstance(result, BenchmarkFailure):
        return Gain(what, None, result.reason)
    return Gain(what, result.rows[0].ratio, result.rows[0].ratio_missing)


# --- in words ---


def finding_lines(findings: dict[str, tuple[Finding, ...]]) -> list[str]:
    """Return one line for each finding, with the backends that it concerns."""
    backends_of: dict[Finding, list[str]] = {}
    for backend, backend_findings in findings.items():
        for finding in backend_findings:
            backends_of.setdefault(finding, []).append(backend)
    lines = []
    for finding, names in backends_of.items():
        where = f" at {', '.join(finding.nodes)}" if finding.nodes else ""
        fix = "; --fix fixes it" if finding.fixable else ""
        lines.append(
            f"{finding.rule} [{', '.join(names)}]{where}: {finding.why}: {finding.cost}{fix}"
        )
    return lines or [f"no findings for {', '.join(findings)}"]


def fixed_lines(fixed: Fixed) -> list[str]:
    """Describe the fixes of a model, and the comparison of its outputs."""
    if not fixed.applied:
        return [
            f"no finding can be fixed without changing the arithmetic; '{fixed.path}' is the"
            " unchanged model"
        ]
    agreement = "bit-identical"
    if fixed.difference != 0:
        agreement = f"equal to {fixed.difference:.1e} of their largest magnitude"
    counts = ", ".join(f"{rule} {count}" for rule, count in fixed.applied.items())
    return [
        f"fixed: {counts}; ONNX Runtime's outputs before and after are {agreement}: {fixed.path}"
    ]


def gain_lines(gains: tuple[Gain, ...], findings: tuple[Finding, ...]) -> list[str]:
    """Describe the measured speedups, and name the rules that could not be measured."""
    lines = []
    for gain in gains:
        outcome = gain.failure
        if ratio := gain.ratio:
            interval = f"95 % {ratio.low:.3f} to {ratio.high:.3f}"
            outcome = f"{ratio.value:.3f} times as fast ({interval})"
        lines.append(f"measured, {gain.what}: {outcome}")
    unfixable = dict.fromkeys(finding.rule for finding in findings if not finding.fixable)
    if unfixable:
        lines.append(
            f"not measured: {', '.join(unfixable)}: fixing them changes the arithmetic, so there is"
            " no model to compare with"
        )
    return lines
