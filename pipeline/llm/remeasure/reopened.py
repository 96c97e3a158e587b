"""What scoring and timing a delivered engine needs of the compile that made it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Runner, StageCall
from pipeline.llm.compile import DESCRIBE, Compile, check_packages, room_of
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.libraries.registry import library_of
from pipeline.llm.plan import LanguagePlan, language_plan_from_document
from pipeline.llm.results import LanguageReport
from pipeline.llm.source import Description, describe, find_source


def override_language_plan(plan: LanguagePlan, overrides: list[str]) -> LanguagePlan:
    """Apply `a.b=value` overrides to a checked plan. Their relative paths are taken from the
    working folder.
    """
    document = plan.model_dump(mode="json")
    return language_plan_from_document(document, Path.cwd(), plan.name, overrides)


def reopen(
    report: LanguageReport, plan: LanguagePlan, engine: LanguageEngine, runner: Runner
) -> Compile:
    """Open a compile again, for its plan with overrides.

    ModelError if the model has changed since the engine was built. BackendUnavailable if the
    library of the engine is not installed, or if its device is not here.
    """
    if engine.recipe is not None:
        check_packages((engine.recipe.library,))
        library_of(engine.recipe.library).target("gpu" if engine.is_on_gpu else "cpu")
    source = find_source(plan.language_model.path)
    if report.source_digest not in ("", source.digest):
        raise ModelError(
            "the model's files have changed since this engine was compiled",
            "compile the plan again",
        )
    about = runner.stage(StageCall(DESCRIBE, Description, partial(describe, source, plan.context)))
    return Compile(plan, runner, source, about, room_of(plan, about))
