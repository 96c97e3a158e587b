"""Texts that are too short are refused before the model runs, which takes minutes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from pipeline.errors import DataError, PlanError
from pipeline.llm import reference
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.texts import check_prompts, check_texts
from tests.builders.cli import crucible
from tests.pipeline.llm.models import language_plan, texts, write_model, write_texts

for package in ("openvino_genai", "openvino_tokenizers", "gguf", "accelerate", "nncf"):
    pytest.importorskip(package, reason=f"language models: no {package}")

PLAN = LanguagePlan.model_validate(
    {
        "language_model": {"path": "m"},
        "texts": {"selection": "s.jsonl", "validation": "v.jsonl", "cached_tokens": 8},
        "benchmark": {"prompt_tokens": 40},
    }
)


def test_a_text_needs_two_tokens_beside_those_that_are_read_one_by_one() -> None:
    check_texts("validation", (10, 11), PLAN)
    with pytest.raises(DataError, match=r"text 2 of texts.validation has 9 tokens, expected at"):
        check_texts("validation", (10, 9), PLAN)


def test_a_prompt_needs_a_text_of_its_length() -> None:
    check_prompts((12, 40), PLAN)
    with pytest.raises(PlanError, match="40, but the longest text of the selection set has 39"):
        check_prompts((12, 39), PLAN)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("benchmark.prompt_tokens=97", "plan.invalid", "the longest text of the selection set has"),
        ("texts.validation=short.jsonl", "data.invalid", "text 1 of texts.validation has"),
    ],
)
def test_a_compile_says_so_before_it_computes(
    tmp_path: Path, change: str, code: str, message: str
) -> None:
    benchmark = {"prompt_tokens": 16}
    plan = language_plan(tmp_path, write_model(tmp_path / "model"), benchmark=benchmark)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    write_texts(tmp_path / "short.jsonl", ["a", *texts(3, "validation")])
    done = crucible("compile", tmp_path / "plan.yaml", "--set", change, "--out", tmp_path / "out")
    assert done.code == 1
    assert code in done.err
    assert message in done.err
    assert "count tokens" in done.err
    assert not {"reference", "export_language_model"} & {*done.err.split()}, done.err


@pytest.mark.parametrize(("free", "place"), [(149, "cpu"), (150, "cuda")])
def test_a_model_that_fits_is_the_reference_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, free: int, place: str
) -> None:
    weights = torch.zeros(25, dtype=torch.float32)  # 100 bytes
    moved = list[str]()
    model: Any = SimpleNamespace(parameters=lambda: [weights], to=moved.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1000))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert reference._placed(model, "gpu") == place
    assert moved == ([] if place == "cpu" else ["cuda"])
    assert not torch.backends.cudnn.allow_tf32
    assert reference._placed(model, "cpu") == "cpu"
