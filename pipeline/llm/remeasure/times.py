"""Time a delivered engine again, beside the model as it is or beside another delivered engine."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Runner
from pipeline.host.environment import environment
from pipeline.llm.compile import best_of, check_packages, decide, in_transformers
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.remeasure.reopened import reopen
from pipeline.llm.results import LanguageReport
from pipeline.llm.speed.race import Race
from pipeline.llm.texts import read_texts
from pipeline.report.bundle import check_if_sealed
from pipeline.results.report import Step

REMEASURED = (
    "The times are those of a new run of the baseline and the engine: no other candidate was timed"
    " beside them."
)


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivered engine, its report, and what results call it."""

    name: str
    report: LanguageReport
    engine: LanguageEngine


def benchmark_again(
    one: Delivered, plan: LanguagePlan, runner: Runner, against: Delivered | None = None
) -> Race:
    """Time an engine in one interleaved run with its baseline: the model as it is, or another
    engine. The row of the baseline is the first.

    Errors as `reopen`; ModelError, too, if the other engine is of a model with other tokens or a
    shorter context, or if one of them cannot be timed.
    """
    run = reopen(one.report, plan, one.engine, runner)
    if against is None:
        baseline = in_transformers(one.engine, one.engine.target)
        engines = {baseline.label: baseline, one.name: one.engine}
    else:
        check_comparable(against, one, plan)
        engines = {against.name: against.engine, one.name: one.engine}
        values = against.report.model.cache_values_per_token
        largest = max(values, run.room.cache_values_per_token)
        run = replace(run, room=run.room.model_copy(update={"cache_values_per_token": largest}))
    _, selection, _ = read_texts(plan.texts)
    run.check_lengths(selection)
    reference = run.refer(selection)
    for engine in engines.values():
        if engine.recipe is not None:
            check_if_sealed(engine)  # again: the reference may have taken minutes
    race = run.race(engines, reference)
    for row in race.rows:
        if row.failure:
            raise ModelError(f"{row.label} cannot be timed: {row.failure}", "see `crucible doctor`")
    return race


def check_comparable(other: Delivered, one: Delivered, plan: LanguagePlan) -> None:
    """ModelError unless another engine reads the same prompts. BackendUnavailable if its library is
    not installed.
    """
    if other.engine.recipe is not None:
        check_packages((other.engine.recipe.library,))
    wanted, found = one.report.model, other.report.model
    if found.vocabulary != wanted.vocabulary:
        raise ModelError(
            f"expected '{other.name}' to know {wanted.vocabulary} tokens as '{one.name}' does, got"
            f" {found.vocabulary}",
            "compare engines of one model, or of models with one tokenizer",
        )
    if found.context < plan.context:
        raise ModelError(
            f"expected '{other.name}' to read {plan.context} tokens, got a model for"
            f" {found.context}",
            f"lower it: --set context={found.context}",
        )
    if other.engine.is_on_gpu != one.engine.is_on_gpu:
        raise ModelError(
            f"expected '{other.name}' to run on the device of '{one.name}': one is for a GPU",
            "compare engines for one device",
        )


def lacks_ratio(report: LanguageReport) -> bool:
    """Return True if the delivered engine was timed without a ratio: the host was too busy."""
    result = report.result(report.winner)
    return result is not None and result.times is not None and result.times.ratio is None


def renewed_report(
    report: LanguageReport, race: Race, steps: Sequence[Step], command: str
) -> LanguageReport:
    """Return the report with the times of a run against the model as it is, dated now. The verdict
    follows from them; the scores stay.
    """
    baseline, row = race.rows
    candidates = tuple(
        each.model_copy(update={"times": row if each.label == row.label else None})
        for each in report.candidates
    )
    objective = report.plan.objective
    decided = decide(baseline, best_of([row], objective), report.validation, candidates, objective)
    return report.model_copy(
        update={
            "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "command": command,
            "environment": environment(),
            "verdict": decided.verdict,
            "headline": decided.headline,
            "winner": decided.winner,
            "reasons": decided.reasons,
            "next_steps": decided.next_steps,
            "notes": (*(note for note in report.notes if note != REMEASURED), REMEASURED),
            "candidates": candidates,
            "baseline": baseline,
            "load_1min": race.load_1min,
            "delivered": report.delivered if decided.winner else None,
            "steps": (*(step.model_copy(update={"reused": True}) for step in report.steps), *steps),
        }
    )
