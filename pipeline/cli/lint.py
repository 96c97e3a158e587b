"""`crucible lint`: the findings on a quantised model, a file with what can be mended exactly, and
what that gains, measured here.
"""

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
from pipeline.compiler.candidates import build_engine, convert_model
from pipeline.compiler.context import CompileContext, open_context
from pipeline.core import Engine, OnnxModel, Profile, Recipe
from pipeline.errors import InternalError, ModelError, PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.measurement.measure import Interval
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.plan.recipes import default_candidates, recipe_from_candidate
from pipeline.plan.schema import Plan
from pipeline.plan.source import check_profiles
from pipeline.quantization.existing_qdq import QUANTISED_TOLERANCE, given_precision
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.fixes import mend
from pipeline.quantization.lint.rules import EVERYWHERE, Finding, lint
from pipeline.results.report import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark

ALL = "all fixes"


@dataclass(frozen=True, slots=True)
class Fixed:
    """A mended file: how often each rule's fix was applied, and the largest difference of its
    outputs, in units of their largest magnitude.
    """

    path: Path
    applied: Counter[str]
    difference: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What one rule's fix, or all of them, gain: median of the model as given over that of the
    mended one.
    """

    what: str
    ratio: Interval | None
    failure: str = ""


def read_named(path: Path) -> onnx.ModelProto:
    """An ONNX file, flat, every node with a name; ModelError if it holds no Q/DQ of activations."""
    proto = flatten(read_proto(path))
    if given_precision(proto.graph) is None:
        message = (
            f"'{path}' quantises no activation: lint looks at models that hold QuantizeLinear and"
            " DequantizeLinear already"
        )
        raise ModelError(
            message, "to quantise a plain model, give `crucible compile` calibration data"
        )
    return proto


def findings_of(path: Path, backend: str | None) -> dict[str, tuple[Finding, ...]]:
    """Findings per backend; for all that have rules if none is named."""
    if backend is not None and backend not in EVERYWHERE:
        raise PlanError(
            f"no rules for the backend '{backend}'", f"expected one of {', '.join(EVERYWHERE)}"
        )
    proto = read_named(path)
    return {name: lint(proto.graph, name) for name in ([backend] if backend else EVERYWHERE)}


def fix_model(path: Path, out: Path, backend: str, profiles: tuple[Profile, ...]) -> Fixed:
    """Write the mended model to `out`, run before and after at all sizes of the profiles;
    ModelError, and no file, if an answer moves.
    """
    if out.resolve() == path.resolve():
        raise PlanError(f"--fix would overwrite '{path}'", "name another file")
    proto = read_named(path)
    model = onnx_model(path.resolve().parent, path.name)
    complete = check_profiles(model.inputs, profiles)
    applied = mend(proto, backend)
    write_proto(proto, out)
    difference = largest_difference(model, out, complete)
    if difference > QUANTISED_TOLERANCE:
        out.unlink()
        raise InternalError(
            f"the mended model's answers differ by {difference:.3g} of the largest magnitude after"
            f" {dict(applied)}"
        )
    return Fixed(out, applied, difference)


def largest_difference(model: OnnxModel, after: Path, profiles: tuple[Profile, ...]) -> float:
    """Over all outputs and generated inputs, in units of an output's largest magnitude; ONNX
    Runtime without optimisations.
    """
    runs = open_reference(model.path), open_reference(after)
    worst = 0.0
    for feeds in feeds_of(model, profiles, ()):
        expected, got = runs[0](feeds), runs[1](feeds)
        for name, want in expected.items():
            apart = np.abs(np.subtract(got[name], want, dtype=np.float64)).max(initial=0.0)
            worst = max(worst, float(apart / (np.abs(want).max(initial=0) or 1)))
    return worst


def measure_fixes(plan: Plan, backend: str, folder: Path, runner: Runner) -> tuple[Gain, ...]:
    """The model as given beside the same with each rule mended alone and with all of them, in one
    interleaved run on this host.
    """
    context = open_context(plan, runner)
    assert context.source.path is not None
    if context.given is None:
        read_named(context.source.path)  # says so
    source = onnx_model(context.source.path.parent, context.source.path.name)
    target = backends.backend(backend).probe()
    (candidate,) = default_candidates({backend: target}, False, context.given)
    recipe = recipe_from_candidate(candidate, target, context.plan, False, context.given)
    variants = {"as given": source} | dict(_mended(context.source.path, backend, folder))
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
    return tuple(
        _gain(what, result)
        for what, result in list(zip(variants, measured.results, strict=True))[1:]
    )


def _mended(path: Path, backend: str, folder: Path) -> Iterable[tuple[str, OnnxModel]]:
    """The model with each rule mended alone, where more than one can be, and with all."""
    applied = list(mend(read_named(path), backend))
    for rules in [[rule] for rule in applied if len(applied) > 1] + [applied] * bool(applied):
        proto = read_named(path)
        mend(proto, backend, rules)
        name = f"{'-and-'.join(rules)}.onnx"
        write_proto(proto, folder / name)
        yield rules[0] if len(rules) == 1 else ALL, onnx_model(folder, name)


def _engine(context: CompileContext, model: OnnxModel, recipe: Recipe, what: str) -> Engine:
    return build_engine(
        context, convert_model(context, model, recipe), recipe.model_copy(update={"variant": what})
    )


def _gain(what: str, result: BenchmarkReport | BenchmarkFailure) -> Gain:
    if isinstance(result, BenchmarkFailure):
        return Gain(what, None, result.reason)
    return Gain(what, result.rows[0].ratio, result.rows[0].ratio_missing)


# --- in words ---


def finding_lines(findings: dict[str, tuple[Finding, ...]]) -> list[str]:
    """Each finding once, with the backends that it is about."""
    about: dict[Finding, list[str]] = {}
    for backend, each in findings.items():
        for finding in each:
            about.setdefault(finding, []).append(backend)
    lines = []
    for finding, names in about.items():
        where = f" at {', '.join(finding.nodes)}" if finding.nodes else ""
        fix = "; --fix mends it" if finding.fixable else ""
        lines.append(
            f"{finding.rule} [{', '.join(names)}]{where}: {finding.why}: {finding.cost}{fix}"
        )
    return lines or [f"no findings for {', '.join(findings)}"]


def fixed_lines(fixed: Fixed) -> list[str]:
    """What was mended, and how the answers compare."""
    if not fixed.applied:
        return [
            f"nothing can be mended without changing the arithmetic; '{fixed.path}' is the model as"
            " it was"
        ]
    same = (
        "equal bit by bit"
        if fixed.difference == 0
        else f"equal to {fixed.difference:.1e} of their largest magnitude"
    )
    counts = ", ".join(f"{rule} {count}" for rule, count in fixed.applied.items())
    return [f"mended: {counts}; before and after, ONNX Runtime's answers are {same}: {fixed.path}"]


def gain_lines(gains: tuple[Gain, ...], findings: tuple[Finding, ...]) -> list[str]:
    """What mending gains, and which findings cannot be measured."""
    lines = []
    for gain in gains:
        interval = (
            f"{gain.ratio.value:.3f} times as fast (95 % {gain.ratio.low:.3f} to"
            f" {gain.ratio.high:.3f})"
            if gain.ratio
            else gain.failure
        )
        lines.append(f"measured, {gain.what}: {interval}")
    rest = dict.fromkeys(finding.rule for finding in findings if not finding.fixable)
    lines += (
        [
            f"not measured: {', '.join(rest)}: mending them changes the arithmetic, so there is no"
            " model to compare with"
        ]
        if rest
        else []
    )
    return lines
