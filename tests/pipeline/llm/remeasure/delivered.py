"""Delivered engines of a small random Llama, without the race of a compile."""

from __future__ import annotations

from pathlib import Path

from pipeline.execution.store import Key, Store
from pipeline.host.environment import environment
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.gate import Judged
from pipeline.llm.libraries.registry import library_of
from pipeline.llm.plan import LanguageCandidate, language_plan_from_document
from pipeline.llm.render import publish
from pipeline.llm.results import LanguageReport, LanguageResult
from pipeline.llm.source import describe, find_source
from pipeline.llm.speed.times import AnswerTimes
from pipeline.measurement.statistics import Interval
from tests.pipeline.llm.models import language_plan

CONTEXT = 256
EXACT = LanguageCandidate(weights="fp16", kv_cache="f32", arithmetic="f32")
ROUGH = LanguageCandidate(weights="int4_sym")
BENCHMARK = {"prompt_tokens": 16, "output_tokens": 4, "concurrency": [1, 2], "budget_s": 1}


def judged() -> Judged:
    """Scores of an engine that is exact."""
    zero, one = (Interval(value=value, low=value, high=value) for value in (0.0, 1.0))
    return Judged(
        perplexity_increase=zero,
        cached_perplexity_increase=zero,
        divergence=zero,
        agreement=one,
        greedy_equal=1.0,
        path_difference=0.0,
        tokens=100,
        failures=(),
    )


def deliver(
    folder: Path, model: Path, recipe: LanguageCandidate = EXACT, name: str = "out"
) -> LanguageReport:
    """Build an engine of a model and put it, with its report, into `folder/name`. How fast it is
    could not be measured.
    """
    library = library_of(recipe.library)
    source = find_source(str(model))
    about = describe(source, CONTEXT)
    work = folder / f"exported-{name}"
    work.mkdir()
    exported = library.export(source, about, "cpu", work)

    def make(out: Path) -> LanguageEngine:
        return library.build(exported, recipe, source, None, out)

    key = Key("weights", 1, (source.digest, recipe.label))
    engine = Store(folder / f"store-{name}").get(key, LanguageEngine, make).value
    document = language_plan(folder, model, benchmark=BENCHMARK, accuracy={"max_kl": 0.01})
    report = LanguageReport(
        name="tiny",
        created="2026-01-01T00:00:00+00:00",
        command="crucible compile plan.yaml",
        plan=language_plan_from_document(document, folder, "tiny"),
        source_digest=source.digest,
        model=about,
        environment=environment(),
        reference_perplexity=100.0,
        verdict="unproven",
        headline="How fast it is could not be measured.",
        winner=engine.label,
        candidates=(
            LanguageResult(
                label=engine.label, judged=judged(), times=AnswerTimes(label=engine.label)
            ),
        ),
        validation=judged(),
        delivered=engine,
    )
    publish(report, folder / name)
    return report
