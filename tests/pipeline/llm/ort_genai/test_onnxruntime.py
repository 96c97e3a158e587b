"""ONNX Runtime GenAI as a library of language plans."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.errors import BackendUnavailable
from pipeline.llm.compile import available, libraries_of
from pipeline.llm.gate import judge
from pipeline.llm.libraries import onnxruntime_genai_ as library
from pipeline.llm.ort_genai.files import builder_options
from pipeline.llm.ort_genai.parts import operators_of
from pipeline.llm.plan import LanguageAccuracy, LanguageCandidate, language_plan_from_document
from pipeline.llm.reference import refer
from pipeline.llm.scoring import score
from pipeline.llm.served import Room
from pipeline.llm.source import describe, find_source
from pipeline.llm.texts import read_documents
from tests.pipeline.llm.models import KINDS, language_plan, texts, write_model, write_texts

IS_INSTALLED = importlib.util.find_spec("onnxruntime_genai") is not None


def candidate(**keys: Any) -> LanguageCandidate:
    return LanguageCandidate.model_validate({"library": "onnxruntime_genai", **keys})


def test_a_plan_needs_no_format_of_the_cache_and_no_group() -> None:
    found = candidate(weights="int8")
    assert (found.kv_cache, found.group_size, found.label) == ("f32", 32, "ort-genai int8 g32")
    assert candidate(weights="fp32").label == "ort-genai fp32"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weights": "fp16"}, "weights of onnxruntime_genai: expected fp32, int8"),
        ({"weights": "int8", "group_size": 48}, "expected 16, 32, 64, 128, 256, got 48"),
        ({"weights": "fp32", "group_size": 32}, "expected 0, got 32"),
        ({"weights": "int8", "kv_cache": "u8"}, "leave out kv_cache, which is f32"),
        ({"weights": "int8", "arithmetic": "bf16"}, "expected auto or f32, got bf16"),
        ({"weights": "int4_asym", "awq": True}, "awq and scale_estimation"),
    ],
)
def test_what_the_builder_has_not_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        candidate(**keys)


def test_the_builder_gets_the_format() -> None:
    words = builder_options(candidate(weights="int4_sym", group_size=64, arithmetic="f32"))
    assert words[words.index("-p") + 1] == "int4"
    assert {"block_size=64", "is_symmetric=true", "accuracy_level=1"} <= set(words)
    assert "is_symmetric=false" in builder_options(candidate(weights="int8"))
    assert not any("block_size" in word for word in builder_options(candidate(weights="fp32")))


def test_a_plan_without_candidates_has_it_where_it_is_installed(tmp_path: Path) -> None:
    plan = language_plan_from_document(language_plan(tmp_path, "model.gguf"), tmp_path, "it")
    assert ("onnxruntime_genai" in libraries_of(plan)) == IS_INSTALLED


@pytest.mark.skipif(IS_INSTALLED, reason="onnxruntime-genai is installed")
def test_where_it_is_missing_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="onnxruntime_genai") as error:
        available(("onnxruntime_genai",), "cpu")
    assert "onnxruntime-genai" in error.value.next_step


def test_operators_are_those_of_the_last_steps() -> None:
    def event(name: str, begin: int, kind: str = "", micros: int = 0) -> dict[str, Any]:
        category = "Node" if kind else "Session"
        return {
            "name": name,
            "cat": category,
            "ts": begin,
            "dur": micros,
            "args": {"op_name": kind},
        }

    prompt = [event("model_run", 0), event("a_kernel_time", 1, "MatMulNBits", 900)]
    steps = [event("model_run", at) for at in (1000, 2000)]
    kernels = [
        event("a_kernel_time", 1010, "MatMulNBits", 300),
        event("a_fence_before", 1010, "MatMulNBits", 77),
        event("b_kernel_time", 2010, "GroupQueryAttention", 100),
        event("a_kernel_time", 2020, "MatMulNBits", 200),
    ]
    found = operators_of([*prompt, *kernels, *steps], 2)
    assert found == pytest.approx({"MatMulNBits": 5e-4, "GroupQueryAttention": 1e-4})
    assert operators_of(prompt, 2) == {}, "a profile that does not hold all steps"


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_the_engine_says_what_the_model_says(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("onnxruntime_genai", reason="language models: no onnxruntime_genai")
    source = find_source(str(write_model(tmp_path / "model", kind, **options)))
    about = describe(source, 256)
    folders = [tmp_path / name for name in ("exported", "engine", "reference")]
    for folder in folders:
        folder.mkdir()
    exported = library.export(source, about, "cpu", folders[0])
    engine = library.build(exported, candidate(weights="fp32"), source, None, folders[1])
    documents = read_documents(write_texts(tmp_path / "t.jsonl", texts(4)), "selection")
    reference = refer(source, documents, 96, "cpu", folders[2])
    room = Room(context=256, cache_values_per_token=about.cache_values_per_token)
    scores = score(engine, reference, 8, room)
    judged = judge(scores, LanguageAccuracy(max_perplexity_increase=0.001, max_kl=1e-4))
    assert judged.passed, judged.failures
    assert scores.path_difference < 1e-3
    assert max(way.largest_difference for way in scores.ways) < 1e-3
    assert 0 < library.weight_bytes_read(engine) <= engine.weight_bytes
    if kind == "llama":
        parts = library.measure_parts(engine, room, np.arange(3, 35), 6)
        assert parts.products_s > 0
        assert parts.attention_s > 0
        assert min(parts.sampling_s, parts.scheduling_s, parts.other_operators_s) >= 0
