"""The report of a language model, as data, and reading reports of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.core.frozen import Frozen
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

    label: str = Field(description="Label of the candidate.")
    failure: str = Field(default="", description="Why there is no engine, or no figures.")
    weight_bytes: int = Field(default=0, description="Size of its weights.")
    facts: dict[str, str] = Field(
        default_factory=dict,
        description="What OpenVINO says that it runs, as far as it changes answers.",
    )
    judged: Judged | None = Field(default=None, description="Its scores on the selection set.")
    times: AnswerTimes | None = Field(
        default=None, description="Its times. null: it was not timed, because it failed."
    )


class LanguageReport(Frozen):
    """Everything that a compile of a language model found."""

    kind: Literal["language_model"] = Field(
        default="language_model", description="Tells it from the report of engines."
    )
    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this format.")
    name: str = Field(description="The plan's name.")
    created: str = Field(description="When the report was written, in UTC.")
    command: str = Field(description="The command that repeats this compile.")
    plan: LanguagePlan
    source_digest: str = Field(
        default="", description="Digest of the model's files. Empty: an earlier version wrote this."
    )
    model: Description
    environment: Environment
    reference_perplexity: float = Field(description="Of the selection set, by the model in fp32.")
    verdict: Verdict = Field(description="The verdict, as of engines.")
    headline: str = Field(description="The result in one sentence.")
    winner: str = Field(default="", description="Label of the fastest candidate within the limits.")
    reasons: tuple[str, ...] = Field(default=(), description="Why this verdict.")
    next_steps: tuple[str, ...] = Field(default=(), description="What to do next.")
    notes: tuple[str, ...] = Field(default=(), description="What a reader must know.")
    candidates: tuple[LanguageResult, ...] = Field(
        default=(), description="All candidates with their scores and times."
    )
    baseline: AnswerTimes | None = Field(
        default=None, description="The times of the model as it is."
    )
    load_1min: float = Field(default=0.0, description="Load of the host at the end of the race.")
    validation: Judged | None = Field(
        default=None, description="Scores of the winner on the validation set."
    )
    delivered: LanguageEngine | None = Field(
        default=None, description="The engine in the folder `engine`. null: there is none."
    )
    steps: tuple[Step, ...] = Field(
        default=(), description="What ran, with its times, and what was reused."
    )

    @property
    def has_engine(self) -> bool:
        return self.delivered is not None

    def result(self, label: str) -> LanguageResult | None:
        return next((each for each in self.candidates if each.label == label), None)


AnyReport = Report | LanguageReport


def language_schema() -> str:
    """Return the JSON schema of the report.json of a language model, as published in
    docs/reference/language-report.schema.json.
    """
    return json.dumps(LanguageReport.model_json_schema(mode="serialization"), indent=1) + "\n"


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
