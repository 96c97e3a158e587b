"""The report of a language model, as data, and reading reports of both kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.core import Frozen
from pipeline.host.environment import Environment
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.gate import Judged
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.source import Description
from pipeline.llm.speed.times import AnswerTimes
from pipeline.report.files import (
    checked_report,
    document_of_report,
    report_file,
    report_from_document,
)
from pipeline.results.report import Report, Step, Verdict

SCHEMA_VERSION = 1


class LanguageResult(Frozen):
    """One candidate, and what became of it."""

    label: str
    failure: str = ""  # why there is no engine, or no figures
    weight_bytes: int = 0
    facts: dict[str, str] = Field(default_factory=dict)  # of OpenVINO, which change answers
    judged: Judged | None = None
    times: AnswerTimes | None = None  # None: it was not timed, because it failed


class LanguageReport(Frozen):
    """Everything that a compile of a language model found."""

    kind: Literal["language_model"] = "language_model"
    schema_version: int = SCHEMA_VERSION
    name: str
    created: str  # UTC
    command: str
    plan: LanguagePlan
    model: Description
    environment: Environment
    reference_perplexity: float  # of the selection set, by the model in fp32
    verdict: Verdict
    headline: str
    winner: str = ""
    reasons: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    candidates: tuple[LanguageResult, ...] = ()
    baseline: AnswerTimes | None = None
    load_1min: float = 0.0
    validation: Judged | None = None  # of the winner
    delivered: LanguageEngine | None = None
    steps: tuple[Step, ...] = ()

    @property
    def has_engine(self) -> bool:
        return self.delivered is not None

    def result(self, label: str) -> LanguageResult | None:
        return next((each for each in self.candidates if each.label == label), None)


AnyReport = Report | LanguageReport


def load_any_report(path: Path) -> AnyReport:
    """Read the report of a folder, or its report.json, of engines or of a language model. Errors
    as `load_report`.
    """
    file = report_file(path)
    return any_report_from_json(file.read_bytes(), str(file), file.parent)


def any_report_from_json(text: bytes, where: str, folder: Path) -> AnyReport:
    """Parse a report.json of either kind, as `report_from_json` does."""
    document = document_of_report(text, where)
    if document.get("kind") == "language_model":
        return checked_report(document, LanguageReport, SCHEMA_VERSION, where, folder)
    return report_from_document(document, where, folder)
