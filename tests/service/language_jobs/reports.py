"""The report of a language model as a child leaves it, without a compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core.artifacts import Target
from pipeline.execution.store import Key, Store
from pipeline.host.environment import environment
from pipeline.llm.engine import MODEL_FILE, SETTINGS_FILE, LanguageEngine, LanguageSettings
from pipeline.llm.gate import Judged
from pipeline.llm.plan import LanguageCandidate, LanguageModelConfig, LanguagePlan, Texts
from pipeline.llm.render import publish
from pipeline.llm.results import LanguageReport, LanguageResult
from pipeline.llm.source import Description
from pipeline.llm.speed.times import AnswerTimes, LevelTimes
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval

INT8 = LanguageCandidate(weights="int8")
INT4 = LanguageCandidate(weights="int4_sym")
HOSTILE = "<script>alert(1)</script>"


def around(value: float) -> Interval:
    return Interval(value=value, low=0.9 * value, high=1.1 * value)


def judged(increase: float, *failures: str) -> Judged:
    return Judged(
        perplexity_increase=around(increase),
        cached_perplexity_increase=around(increase),
        divergence=around(0.001),
        agreement=around(0.9),
        greedy_equal=0.75,
        path_difference=0.001,
        tokens=570,
        failures=failures,
    )


def times(label: str, answer_s: float, ratio: Interval | None = None) -> AnswerTimes:
    return AnswerTimes(
        label=label,
        levels=(
            LevelTimes(
                concurrency=1,
                round=Samples(values_s=tuple(answer_s * (1 + n / 1000) for n in range(8))),
                first_token_s=answer_s / 4,
                next_token_s=answer_s / 40,
                tokens_per_s=32 / answer_s,
                user_tokens_per_s=32 / answer_s,
            ),
        ),
        memory_bytes=10**8,
        ratio=ratio,
    )


def sample_language_report(store: Path, **changes: Any) -> LanguageReport:
    """int8 wins, int4 fails, fp16 could not be built. The engine is in a store."""
    target = Target(backend="openvino", version="1", device="a CPU")

    def make(folder: Path) -> LanguageEngine:
        (folder / MODEL_FILE).write_bytes(b"engine")
        settings = LanguageSettings(
            end_tokens=(2,),
            special_tokens={},
            context=256,
            vocabulary=384,
            cache_values_per_token=128,
        )
        (folder / SETTINGS_FILE).write_text(settings.model_dump_json())
        return LanguageEngine(
            root=folder,
            file=MODEL_FILE,
            library="openvino_genai",
            recipe=INT8,
            target=target,
            weight_bytes=6,
        )

    engine = Store(store).get(Key("weights", 1, ("a",)), LanguageEngine, make).value
    texts = Texts(selection=Path("selection.jsonl"), validation=Path("validation.jsonl"))
    candidates = (
        LanguageResult(
            label=INT8.label,
            weight_bytes=6,
            judged=judged(0.01),
            times=times(INT8.label, 0.2, around(4.0)),
        ),
        LanguageResult(label=INT4.label, weight_bytes=3, judged=judged(0.2, "too rough")),
        LanguageResult(label="fp16 kv-u8", failure=f"no memory {HOSTILE}"),
    )
    report = LanguageReport(
        name="tiny",
        created="2026-05-05T00:00:00+00:00",
        command="a test",
        plan=LanguagePlan(language_model=LanguageModelConfig(path="tiny.gguf"), texts=texts),
        model=Description(
            architecture="llama",
            parameters=1000,
            layers=2,
            hidden=64,
            cache_values_per_token=128,
            vocabulary=384,
            context=256,
            window=None,
            stored_as="float32",
            stored_bits=32,
        ),
        environment=environment(),
        reference_perplexity=12.5,
        verdict="accepted",
        headline=f"{INT8.label} answers 4.00 times as fast",
        winner=INT8.label,
        candidates=candidates,
        baseline=times("transformers fp32", 0.8),
        validation=judged(0.01),
        delivered=engine,
    )
    return report.model_copy(update=changes)


def write_language_out(out: Path, store: Path, **changes: Any) -> LanguageReport:
    """The report with its engine in `out`, as a child leaves it."""
    report = sample_language_report(store, **changes)
    publish(report, out)
    return report
