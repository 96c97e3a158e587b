"""Compile a plan: a plan in, a report out.

`compile_plan` lists the steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.compiler.advice.delivered import advise_on
from pipeline.compiler.baselines import STAGES as BASELINE_STAGES
from pipeline.compiler.baselines import (
    baseline_notes,
    build_baselines,
    build_exact,
    build_reference,
    check_baselines,
    examine_code,
    fit_baselines,
    kept_baseline,
    unfit_notes,
)
from pipeline.compiler.candidates.further import ablate, rescue
from pipeline.compiler.candidates.host_recipes import check_candidates, recipes_of
from pipeline.compiler.candidates.side_by_side import candidates_of, prepare_all
from pipeline.compiler.candidates.stages import check_engine, reference_outputs
from pipeline.compiler.context import CompileContext, open_context
from pipeline.compiler.decision import choose
from pipeline.compiler.graph import STAGES as GRAPH_STAGES
from pipeline.compiler.graph import (
    export_model,
    postprocess_model,
    prepared_model,
    preprocess_model,
)
from pipeline.compiler.measure import BENCHMARK, measure
from pipeline.compiler.objective import THROUGHPUT
from pipeline.compiler.profile_width import WIDTH, measure_width
from pipeline.compiler.speed import is_slower_or_equal
from pipeline.compiler.write_up import PACKING, write_up
from pipeline.core.artifacts import Engine, Note, OnnxModel
from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Runner
from pipeline.onnx_graph.files import file_size, read_proto
from pipeline.plan.schema import Plan
from pipeline.postprocess import check_steps
from pipeline.quantization.existing_qdq import given_precision
from pipeline.report.bundle import deliver_engine, withdraw_engine
from pipeline.report.files import write_report
from pipeline.results.accuracy import ValidationReport
from pipeline.results.candidates import Candidate
from pipeline.results.report import Report, ReportFiles
from pipeline.serving_inputs import check_serving
from pipeline.stages.validate import check_outputs
from pipeline.text_inputs import TOKENIZER_FILE

STAGES = (*GRAPH_STAGES, *BASELINE_STAGES, THROUGHPUT, BENCHMARK, WIDTH, PACKING)


def compile_plan(plan: Plan, runner: Runner, command: str) -> Report:
    """Compile a plan and report the fastest engine that keeps its accuracy, or why there is none.

    Raises a CrucibleError for an impossible request. A wrong or slow engine is no error: it is
    part of the report.
    """
    context = open_context(plan, runner)
    check_candidates(context)

    exported = export_model(context)
    check_steps(plan.postprocess, exported.inputs, exported.outputs, context.plan.profiles)
    check_outputs(plan.accuracy, exported.outputs, plan.postprocess)
    whole = preprocess_model(context, exported)
    raw = postprocess_model(context, whole)
    check_serving(plan.serving, raw.inputs, raw.outputs)
    # with whole outputs: a tiny difference may swap indices
    model = prepared_model(whole, context)
    context = replace(context, given=given_precision(read_proto(model.path, weights=False).graph))
    recipes, notes = recipes_of(context, size=file_size(model.path))
    reference = build_reference(context, exported)
    expected = reference_outputs(context, reference, context.data.selection)
    checked = check_baselines(context, build_baselines(context, raw), reference, expected)
    baselines = fit_baselines(checked) or [build_exact(context, context.raw_source, raw)]
    findings = examine_code(context, exported)
    candidates = candidates_of(prepare_all(context, model, recipes, expected))
    ablated = ablate(context, model, rescue(context, model, candidates, expected), expected)
    measured = measure(context, model, baselines, ablated)
    measured = replace(
        measured, profile_width=measure_width(context, model, choose(measured.candidates))
    )
    validation = validate_winner(context, reference, choose(measured.candidates))
    kept = kept_baseline(context, raw, measured, baselines, expected)
    notes = (
        *notes,
        *unfit_notes(checked),
        *baseline_notes(baselines, measured.candidates, context.given),
    )
    report = write_up(context, (raw, model), measured, kept, validation, notes, command)
    report = report.model_copy(update={"module": findings})
    return with_advice(context, report, whole, reference)


def validate_winner(
    context: CompileContext, reference: Engine, winner: Candidate | None
) -> ValidationReport | None:
    """Check the winner on the validation set, which is read only here.

    None without a validation set, or if the baseline is kept.
    """
    if winner is None or winner.engine is None or context.data.validation is None:
        return None
    if is_slower_or_equal(winner):
        return None
    expected = reference_outputs(context, reference, context.data.validation, at_every_size=False)
    return check_engine(context, winner.engine, expected, context.data.validation)


def with_advice(
    context: CompileContext, report: Report, whole: OnnxModel, reference: Engine
) -> Report:
    """Add the advice that the plan asks for. A note says why there is none."""
    if not context.plan.advise:
        return report
    engine = report.engine_delivered
    if engine is None:
        note = Note(stage="advise", text="there is no advice: no engine is delivered")
        return report.model_copy(update={"notes": (*report.notes, note)})
    try:
        prepare = partial(prepared_model, whole)
        advice = advise_on(context, report, engine, prepare, reference)
    except ModelError as error:
        note = Note(stage="advise", text=f"there is no advice: {error.message}", level="info")
        return report.model_copy(update={"notes": (*report.notes, note)})
    return report.model_copy(update={"advice": advice, "steps": tuple(context.runner.steps)})


def publish_report(report: Report, folder: Path) -> ReportFiles:
    """Write the delivered engine and the reports into the user's folder.

    Without a delivered engine, the engine of an earlier compile is removed from there.
    """
    if report.delivered:
        text = report.plan.serving.text
        beside = {TOKENIZER_FILE: text.file} if text else {}
        deliver_engine(report.delivered, folder / "engine", beside=beside)
    else:
        withdraw_engine(folder / "engine")
    return write_report(report, folder)
