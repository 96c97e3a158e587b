"""The plan of a language model: what is refused, and where its paths begin."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import PlanError
from pipeline.llm.plan import (
    Goodput,
    LanguageCandidate,
    LanguagePlan,
    any_plan_from_json,
    is_language_plan,
    language_plan_from_document,
    load_any_plan,
)
from pipeline.plan.schema import Plan

TEXTS = {"selection": "s.jsonl", "validation": "v.jsonl"}
PLAN: dict[str, Any] = {"language_model": {"path": "m.gguf"}, "texts": TEXTS}


def test_paths_begin_at_the_folder_of_the_plan(tmp_path: Path) -> None:
    plan = language_plan_from_document(PLAN, tmp_path, "a plan")
    assert plan.name == "a-plan"
    assert plan.language_model.path == str(tmp_path / "m.gguf")
    assert plan.texts.validation == tmp_path / "v.jsonl"
    packaged = {**PLAN, "language_model": {"path": "package:here/m.gguf"}}
    named = language_plan_from_document(packaged, tmp_path)
    assert named.language_model.path == "package:here/m.gguf"


def test_only_a_plan_of_a_language_model_is_one() -> None:
    assert is_language_plan(PLAN)
    assert not is_language_plan({"model": {}})
    assert not is_language_plan(None)


def test_labels_tell_candidates_apart() -> None:
    given = (
        LanguageCandidate(weights="int8"),
        LanguageCandidate(weights="int8", kv_cache="f16", arithmetic="f32"),
        LanguageCandidate(weights="int4_asym", group_size=32, awq=True),
        LanguageCandidate(weights="int4_sym"),
        LanguageCandidate(weights="int8", arithmetic="int8"),
    )
    assert [each.label for each in given] == [
        "int8 kv-u8",
        "int8 kv-f16 f32",
        "int4_asym g32 awq kv-u8",
        "int4_sym per channel kv-u8",
        "int8 kv-u8 act-int8",
    ]


def test_levels_and_limits_are_read_as_they_are_written() -> None:
    limits = {"max_first_token_s": 1, "max_next_token_s": 0.1}
    change = {"benchmark": {"concurrency": 4}, "objective": limits}
    plan = language_plan_from_document({**PLAN, **change}, Path("/"))
    assert plan.benchmark.concurrency == (4,)
    assert plan.objective == Goodput(max_first_token_s=1, max_next_token_s=0.1)
    assert language_plan_from_document(PLAN, Path("/")).objective == "latency"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contxt": 9}, "unknown key 'contxt': did you mean 'context'?"),
        ({"texts": {"selection": "s.jsonl"}}, "texts.validation: Field required"),
        ({"context": 100}, "context: 100 tokens, but texts and answers take up to 512"),
        ({"language_model": {"path": "package:x"}}, "expected package:NAME/FILE"),
        ({"candidates": [{"weights": "int5"}]}, "candidates.0.weights"),
        (
            {"candidates": [{"weights": "fp16", "arithmetic": "int8"}]},
            "arithmetic int8 is for int8 and int4 weights, got fp16",
        ),
        (
            {"candidates": [{"weights": "int8", "group_size": 32}]},
            "group_size, awq and scale_estimation are for int4 weights",
        ),
        (
            {"candidates": [{"weights": "int8"}, {"weights": "int8"}]},
            "'int8 kv-u8' is listed twice",
        ),
        ({"effort": "high"}, "expected texts.calibration"),
        ({"benchmark": {"concurrency": [4, 1]}}, "expected ascending numbers such as [1, 4]"),
        ({"benchmark": {"concurrency": []}}, "expected ascending numbers"),
        ({"benchmark": {"concurrency": 0}}, "greater than or equal to 1"),
        ({"objective": "throughput"}, "expected latency or {max_first_token_s: 1"),
        ({"objective": {"max_first_token_s": 1}}, "max_next_token_s"),
        (
            {"texts": {**TEXTS, "max_tokens": 64, "cached_tokens": 64}},
            "texts.cached_tokens: expected below max_tokens, 64, got 64",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        language_plan_from_document({**PLAN, **change}, tmp_path)
    assert message in str(error.value)


def test_overrides_set_one_key(tmp_path: Path) -> None:
    plan = language_plan_from_document(
        PLAN, tmp_path, overrides=["accuracy.max_perplexity_increase=0.5"]
    )
    assert plan.accuracy.max_perplexity_increase == 0.5
    assert "accuracy" not in PLAN


def test_an_override_that_cannot_be_set_names_the_page_of_these_plans(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        language_plan_from_document(PLAN, tmp_path, overrides=["language_model.path.x=1"])
    assert "docs/reference/language-plan.md" in error.value.next_step


def test_a_file_holds_a_plan_of_either_kind(tmp_path: Path) -> None:
    (tmp_path / "language.yaml").write_text(yaml.safe_dump(PLAN))
    (tmp_path / "engines.yaml").write_text("model: {path: m.onnx}")
    for name, kind in (("language", LanguagePlan), ("engines", Plan)):
        plan = load_any_plan(tmp_path / f"{name}.yaml")
        assert isinstance(plan, kind)
        assert plan.name == name
        assert any_plan_from_json(plan.model_dump_json()) == plan
