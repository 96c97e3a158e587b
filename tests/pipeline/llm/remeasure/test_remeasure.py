"""A delivered language model validated and timed again, on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ModelError
from pipeline.llm.remeasure.times import (
    REMEASURED,
    Delivered,
    check_comparable,
    lacks_ratio,
    renewed_report,
)
from pipeline.llm.results import LanguageReport, load_any_report
from pipeline.llm.speed.race import Race
from pipeline.llm.speed.times import AnswerTimes, LevelTimes
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from tests.builders.cli import Result, crucible
from tests.pipeline.llm.models import texts, write_model, write_texts
from tests.pipeline.llm.remeasure.delivered import ROUGH, deliver

for package in ("openvino_genai", "openvino_tokenizers", "gguf", "accelerate", "nncf"):
    pytest.importorskip(package, reason=f"language models: no {package}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two output folders of compiles, `out` and `rough`."""
    folder = tmp_path_factory.mktemp("delivered")
    model = write_model(folder / "model", scale=0.2)
    deliver(folder, model)
    deliver(folder, model, ROUGH, "rough")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> LanguageReport:
    found = load_any_report(folder / "out")
    assert isinstance(found, LanguageReport)
    return found


def run(folder: Path, *arguments: str | Path) -> Result:
    return crucible(*arguments, cwd=folder, env={"CRUCIBLE_HOME": str(folder / "home")})


def test_validate_scores_the_engine_again(folder: Path) -> None:
    result = run(folder, "validate", "out")
    assert result.code == 0, result.err
    assert "passed on 6 validation texts" in result.out
    found = result.summary
    assert found["passed"]
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=1e-3)
    assert 0 <= found["judged"]["divergence"]["value"] < 1e-3


def test_validate_fails_beyond_the_limits(folder: Path) -> None:
    result = run(folder, "validate", "rough")
    assert result.code == 2, result.err
    assert "failed on 6 validation texts" in result.out
    assert "divergence of" in result.out
    assert not result.summary["passed"]
    wide = ("--set", "accuracy.max_kl=null", "--set", "accuracy.max_perplexity_increase=9")
    result = run(folder, "validate", "rough", *wide)
    assert result.code == 0, result.err


def test_validate_takes_other_texts(folder: Path) -> None:
    write_texts(folder / "mine.jsonl", texts(5, "calibration"))
    result = run(folder, "validate", "out", "--json", "--set", "texts.validation=mine.jsonl")
    assert result.code == 0, result.err
    assert len(result.out.splitlines()) == 1
    assert result.summary["texts"] == 5
    result = run(folder, "validate", "out", "--set", "texts.validation=none.jsonl")
    assert result.code == 1
    assert "no file at" in result.err


def test_bench_times_the_engine_beside_the_model_as_it_is(folder: Path) -> None:
    result = run(folder, "bench", "out", "--set", "benchmark.output_tokens=3")
    assert result.code == 0, result.err
    assert "first token, ms" in result.out
    found = result.summary
    baseline, engine = found["engines"]
    assert baseline["label"] == "transformers fp32"
    assert (found["prompt_tokens"], found["output_tokens"]) == (16, 3)
    assert [level["concurrency"] for level in engine["levels"]] == [1, 2]
    assert min(level["tokens_per_s"] for level in engine["levels"]) > 0
    assert engine["roofline"]["floor_s"] > 0
    assert "verdict" not in found, "another plan completes no report"


def test_bench_races_two_delivered_engines(folder: Path) -> None:
    result = run(folder, "bench", "out", "--against", "rough", "--json")
    assert result.code == 0, result.err
    other, one = result.summary["engines"]
    assert other["label"].endswith("(rough)")
    assert one["label"].endswith("(out)")
    assert "values_s" in one["levels"][0]["round"], "--json has all times"
    for engine in (other, one):
        assert engine["roofline"]["weight_bytes"] > 0
    assert other["levels"][0]["ratio"] is None
    level = one["levels"][0]
    assert bool(level["ratio"]) != bool(level["ratio_missing"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "out", "--batch", "1,2"), "--batch: not for 'out', a language model"),
        (("bench", "out", "--backend", "openvino"), "--backend: not for 'out'"),
        (("bench", "out", "--against", "out"), "'out', which is measured already"),
        (("bench", "out", "--against", "model"), "no language model in 'model'"),
        (("bench", "out", "--set", "benchmark.prompt_tokens=200"), "longest text of the selection"),
        (("bench", "out", "--set", "benchmark.prompt_token=2"), "prompt_token"),
        (("validate", "out", "--set", "texts.cached_tokens=99"), "below max_tokens"),
        (("advise", "out"), "holds a language model"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(folder, *arguments)
    assert result.code == 1, result.out
    assert message in result.err


@pytest.mark.parametrize("command", ["validate", "bench"])
def test_an_engine_whose_model_or_files_changed_is_not_measured(
    folder: Path, tmp_path: Path, command: str
) -> None:
    deliver(tmp_path, write_model(tmp_path / "model", scale=0.2))
    other = write_model(tmp_path / "other", scale=0.1)
    result = run(tmp_path, command, "out", "--set", f"language_model.path={other}")
    assert result.code == 1, result.out
    assert "have changed since this engine was compiled" in result.err
    weights = tmp_path / "out" / "engine" / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    result = run(tmp_path, command, "out")
    assert result.code == 1, result.out
    assert "is damaged" in result.err


# -- decisions ---------------------------------------------------------------


def row(label: str, ratio: Interval | None = None) -> AnswerTimes:
    samples = Samples(values_s=(0.1, 0.1, 0.1))
    level = LevelTimes(
        concurrency=1,
        round=samples,
        first_token_s=0.05,
        next_token_s=0.01,
        tokens_per_s=40.0,
        user_tokens_per_s=40.0,
        ratio=ratio,
    )
    return AnswerTimes(label=label, levels=(level,), ratio=ratio)


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.5, 2.5, "accepted"), (0.9, 1.2, "unproven"), (0.5, 0.9, "keep")]
)
def test_a_ratio_completes_the_report(
    report: LanguageReport, low: float, high: float, verdict: str
) -> None:
    assert lacks_ratio(report)
    ratio = Interval(value=(low + high) / 2, low=low, high=high)
    rows = (row("transformers fp32"), row(report.winner, ratio))
    race = Race(prompt_tokens=16, output_tokens=4, rows=rows, load_1min=0.5)
    renewed = renewed_report(report, race, (), "crucible bench out")
    assert renewed.verdict == verdict
    assert renewed.has_engine == (verdict != "keep")
    assert not lacks_ratio(renewed)
    assert renewed.candidates[0].judged == report.candidates[0].judged
    twice = renewed_report(renewed, race, (), "crucible bench out")
    assert twice.notes.count(REMEASURED) == 1
    assert json.loads(renewed.model_dump_json())["command"] == "crucible bench out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 7}, "to know 384 tokens as 'one' does, got 7"),
        ({"context": 64}, "to read 256 tokens, got a model for 64"),
    ],
)
def test_models_that_read_other_prompts_are_not_compared(
    report: LanguageReport, changes: dict[str, Any], message: str
) -> None:
    assert report.delivered is not None
    one = Delivered("one", report, report.delivered)
    model = report.model.model_copy(update=changes)
    other = replace(one, name="other", report=report.model_copy(update={"model": model}))
    check_comparable(one, one, report.plan)
    with pytest.raises(ModelError, match=message):
        check_comparable(other, one, report.plan)
