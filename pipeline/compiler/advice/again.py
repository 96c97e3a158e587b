"""Advice on a delivered engine, for `crucible advise`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from pipeline.compiler.advice.delivered import advise_on
from pipeline.compiler.baselines import build_reference
from pipeline.compiler.graph import export_model, prepared_model, preprocess_model
from pipeline.compiler.remeasure import reopen_context
from pipeline.core.artifacts import Engine
from pipeline.execution.stage_runner import Runner
from pipeline.plan.schema import Plan
from pipeline.results.advice import Advice
from pipeline.results.report import Report


def advise_again(
    report: Report, plan: Plan, engine: Engine, runner: Runner, only: Iterable[str] = ()
) -> Advice:
    """Try changes on a delivered engine. Measurements are never reused.

    ModelError if the source has changed since the engine was built, and if no candidate is made
    from the simplified ONNX graph.
    """
    context = reopen_context(report, plan, runner)
    exported = export_model(context)
    prepare = partial(prepared_model, preprocess_model(context, exported))
    return advise_on(context, report, engine, prepare, build_reference(context, exported), only)
