"""Score a delivered engine again, on the validation set of its plan or on other texts."""

from __future__ import annotations

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.execution.stage_runner import Runner
from pipeline.llm.compile import SCORE
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.gate import Judged, judge
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.remeasure.reopened import reopen
from pipeline.llm.results import LanguageReport
from pipeline.llm.scoring import Scores, score
from pipeline.llm.texts import read_texts
from pipeline.report.bundle import check_if_sealed


class ScoresAgain(Frozen):
    """The scores of a delivered engine against the limits of its plan."""

    label: str = Field(description="Label of the engine.")
    texts: int = Field(description="Number of texts.")
    reference_perplexity: float = Field(description="Of the model in fp32 on these texts.")
    judged: Judged

    @property
    def perplexity(self) -> float:
        return self.reference_perplexity * (1 + self.judged.perplexity_increase.value)


def validate_again(
    report: LanguageReport, plan: LanguagePlan, engine: LanguageEngine, runner: Runner
) -> ScoresAgain:
    """Score an engine on the validation set against the model in fp32. Errors as `reopen`."""
    run = reopen(report, plan, engine, runner)
    _, _, validation = read_texts(plan.texts)
    run.check_lengths(validation)
    reference = run.refer(validation)
    check_if_sealed(engine)  # again: the reference may have taken minutes
    arguments = (engine, reference, plan.texts.cached_tokens, run.room)
    scores: Scores = runner.anew(SCORE, f"{engine.label}, {reference.name}", score, *arguments)
    return ScoresAgain(
        label=engine.label,
        texts=reference.documents,
        reference_perplexity=reference.perplexity,
        judged=judge(scores, plan.accuracy),
    )
