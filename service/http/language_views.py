"""The parts of a language model's report, as JSON answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.llm.gate import Judged
from pipeline.measurement.statistics import Interval
from pipeline.results.report import Verdict
from service.http.schemas import Times, times_of

if TYPE_CHECKING:
    from pipeline.llm.results import LanguageReport
    from pipeline.llm.speed.times import AnswerTimes


class AnswerLatency(Frozen):
    """How fast one engine of a language model answers."""

    label: str
    answer: Times = Field(description="From the request to the last token")
    first_token_ms: float = Field(description="Median")
    next_token_ms: float = Field(description="Median")
    ratio: Interval | None = Field(
        description="Baseline / this engine, with its 95 % interval; null for the baseline"
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio")
    peak_memory_bytes: int


class LanguageLatencyView(Frozen):
    """How fast the engines of a language model answer, of those that are accurate enough."""

    name: str
    verdict: Verdict
    winner: str | None
    prompt_tokens: int = Field(description="Length of the prompts")
    output_tokens: int = Field(description="Length of the answers")
    baseline: AnswerLatency | None
    candidates: tuple[AnswerLatency, ...] = Field(description="The measured candidates")


class CandidatePerplexity(Frozen):
    label: str
    failure: str = Field(description="Why there are no figures")
    selection: Judged | None


class LanguageAccuracyView(Frozen):
    """The accuracy of the engines of a language model, against the model in fp32."""

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    reference_perplexity: float = Field(description="Of the model in fp32, on the selection set")
    winner: str | None
    validation: Judged | None = Field(description="Of the winner, on the validation set")
    candidates: tuple[CandidatePerplexity, ...]


def latency_of_language_report(report: LanguageReport) -> LanguageLatencyView:
    """Extract the times of a report."""
    timed = (each.times for each in report.candidates)
    return LanguageLatencyView(
        name=report.name,
        verdict=report.verdict,
        winner=report.winner or None,
        prompt_tokens=report.plan.benchmark.prompt_tokens,
        output_tokens=report.plan.benchmark.output_tokens,
        baseline=_latency(report.baseline),
        candidates=tuple(each for times in timed if (each := _latency(times)) is not None),
    )


def accuracy_of_language_report(report: LanguageReport) -> LanguageAccuracyView:
    """Extract the accuracy of a report."""
    return LanguageAccuracyView(
        name=report.name,
        verdict=report.verdict,
        reasons=report.reasons,
        reference_perplexity=report.reference_perplexity,
        winner=report.winner or None,
        validation=report.validation,
        candidates=tuple(
            CandidatePerplexity(label=each.label, failure=each.failure, selection=each.judged)
            for each in report.candidates
        ),
    )


def samples_of_language_report(report: LanguageReport) -> list[dict[str, Any]]:
    """Extract all raw times of answers, by engine."""
    timed = (report.baseline, *(each.times for each in report.candidates))
    return [
        {"label": times.label, "answer": times.answer.model_dump(mode="json")}
        for times in timed
        if times is not None and times.answer is not None
    ]


def _latency(times: AnswerTimes | None) -> AnswerLatency | None:
    if times is None or times.answer is None:
        return None
    return AnswerLatency(
        label=times.label,
        answer=times_of(times.answer),
        first_token_ms=1e3 * times.first_token_s,
        next_token_ms=1e3 * times.next_token_s,
        ratio=times.ratio,
        ratio_missing=times.ratio_missing,
        peak_memory_bytes=times.memory_bytes,
    )
