"""Our decoder as a candidate, on a CPU: built, opened again, scored, and refused where it must."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import BackendUnavailable, DamagedError, PlanError, UnsupportedError
from pipeline.llm.compile import libraries_of
from pipeline.llm.engine import LanguageEngine, read_settings
from pipeline.llm.gate import judge
from pipeline.llm.libraries import torch_
from pipeline.llm.plan import (
    LanguageAccuracy,
    LanguageCandidate,
    LanguagePlan,
    language_plan_from_document,
)
from pipeline.llm.reference import refer
from pipeline.llm.scoring import Scores, score
from pipeline.llm.served import Room
from pipeline.llm.source import describe, find_source
from pipeline.llm.texts import read_documents
from pipeline.llm.torch_engine.decoder import Decoder
from pipeline.llm.torch_engine.files import NETWORK_FILE, read_network
from pipeline.llm.torch_engine.quantise import Form, quantised
from pipeline.llm.torch_engine.weights import network_of
from tests.pipeline.llm.models import language_plan, texts, write_model, write_texts
from tests.pipeline.llm.torch_engine.test_decoder import PROMPTS, module_of

CACHED_TOKENS = 8
PLAN: dict[str, Any] = {
    "language_model": {"path": "m"},
    "texts": {"selection": "s.jsonl", "validation": "v.jsonl"},
}


def built(folder: Path, weights: str, **options: Any) -> LanguageEngine:
    source = find_source(str(write_model(folder / "model", scale=0.2, **options)))
    for name in ("exported", "engine"):
        (folder / name).mkdir()
    exported = torch_.export(source, describe(source, 256), "cpu", folder / "exported")
    recipe = LanguageCandidate.model_validate({"library": "torch", "weights": weights})
    return torch_.build(exported, recipe, source, None, folder / "engine")


def scores_of(folder: Path, engine: LanguageEngine) -> Scores:
    source = find_source(str(folder / "model"))
    documents = read_documents(write_texts(folder / "t.jsonl", texts(4)), "selection")
    (folder / "reference").mkdir()
    reference = refer(source, documents, 96, "cpu", folder / "reference")
    values = read_settings(engine.root).cache_values_per_token
    return score(engine, reference, CACHED_TOKENS, Room(context=256, cache_values_per_token=values))


@pytest.mark.parametrize(
    ("options", "weights", "limit", "path_limit"),
    [
        ({"tie_word_embeddings": True}, "fp32", 1e-4, 1e-4),
        ({}, "bf16", 0.01, 0.03),  # a text read at once and one by one is rounded otherwise
        ({}, "int8", 0.02, 0.03),
        ({}, "int4_sym", 0.6, 0.03),  # of random weights, four bits tell little
        ({}, "int4_asym", 0.6, 0.03),
    ],
    ids=["fp32, tied", "bf16", "int8", "int4_sym", "int4_asym"],
)
def test_a_built_engine_says_what_the_model_says(
    tmp_path: Path, options: dict[str, Any], weights: str, limit: float, path_limit: float
) -> None:
    engine = built(tmp_path, weights, **options)
    label = f"torch {weights} g64" if weights.startswith("int4") else f"torch {weights}"
    assert (engine.label, engine.is_on_gpu) == (label, False)
    scores = scores_of(tmp_path, engine)
    judged = judge(scores, LanguageAccuracy(max_perplexity_increase=1.0, max_kl=limit))
    assert judged.passed, judged.failures
    assert scores.path_difference < path_limit, "greedy answers are scored by the step that serves"
    ways = ["in a batch of 4", "in slots, prompt in chunks of 24"]
    assert [each.way for each in scores.ways] == ways
    assert scores.facts["step"] == "eager"
    assert scores.facts.get("output head") == ("int8" if "int4" in weights else None)
    assert torch_.weight_bytes_read(engine) < engine.weight_bytes


@pytest.mark.parametrize(
    ("kind", "form"),  # with biases; with norms of heads
    [("qwen2", "int8"), ("qwen3", "fp8"), ("qwen2", "int4_asym"), ("qwen3", "int4_sym")],
)
def test_a_network_is_the_same_after_it_was_written(kind: str, form: Form, tmp_path: Path) -> None:
    from pipeline.llm.torch_engine.files import write_network

    network = quantised(network_of(module_of(write_model(tmp_path / "model", kind))), form, 32)
    write_network(network, tmp_path)
    again = read_network(tmp_path, "cpu")
    one, other = (Decoder(each, 128).generate_together(PROMPTS, 8) for each in (network, again))
    for first, second in zip(one, other, strict=True):
        assert first.tokens.tolist() == second.tokens.tolist()
        assert np.array_equal(first.log_probs, second.log_probs)


def test_a_damaged_engine_is_refused(tmp_path: Path) -> None:
    engine = built(tmp_path, "fp32")
    file = engine.root / NETWORK_FILE
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "layers": 3}))
    with pytest.raises(DamagedError, match=r"layers\.2"):
        read_network(engine.root, "cpu")
    file.write_text(json.dumps({**facts, "layers": 10**9}))
    with pytest.raises(DamagedError, match="cannot be read"):
        read_network(engine.root, "cpu")
    file.write_text(json.dumps(facts))
    (engine.root / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DamagedError, match="cannot be read"):
        read_network(engine.root, "cpu")


def test_a_context_beyond_the_window_is_refused(tmp_path: Path) -> None:
    network = network_of(module_of(write_model(tmp_path, "mistral", sliding_window=64)))
    assert network.window == 64
    Decoder(network, 64)
    with pytest.raises(UnsupportedError, match="looks back 64 tokens, and 65 are asked"):
        Decoder(network, 65)


def test_an_unused_window_is_none(tmp_path: Path) -> None:
    network = network_of(module_of(write_model(tmp_path, "qwen2", use_sliding_window=False)))
    assert network.window is None


def test_a_gpu_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch_.target("cpu")
    monkeypatch.setattr(torch_, "host_target", lambda _: here)
    with pytest.raises(BackendUnavailable, match=r"`device: gpu` needs a GPU that PyTorch can use"):
        torch_.target("gpu")


def plan_with(**keys: Any) -> LanguagePlan:
    return language_plan_from_document({**PLAN, **keys}, Path("/"))


def test_a_plan_for_a_gpu_has_our_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert libraries_of(plan_with()) == ("openvino_genai",)
    assert libraries_of(plan_with(device="gpu")) == ("torch",)
    mixed = [{"weights": "int8"}, {"library": "torch", "weights": "bf16"}]
    plan = plan_with(candidates=mixed)
    assert libraries_of(plan) == ("openvino_genai", "torch")
    assert [each.kv_cache for each in plan.candidates] == ["u8", "bf16"]
    assert LanguagePlan.model_validate_json(plan.model_dump_json()) == plan
    source = find_source(str(write_model(tmp_path / "model")))
    about = describe(source, 256)
    labels = [each.label for each in torch_.default_candidates(about, source, plan)]
    assert labels == ["torch bf16", "torch int8", "torch int4_asym g64"]
    thorough = plan_with(device="gpu", effort="high")
    for has_fp8 in (False, True):
        monkeypatch.setattr(torch_, "target", lambda _: None)
        monkeypatch.setattr(torch_, "has_fp8", lambda _, has_fp8=has_fp8: has_fp8)
        more = [each.label for each in torch_.default_candidates(about, source, thorough)]
        assert more == [*labels, "torch int4_sym g64", *["torch fp8"] * has_fp8]
    assert language_plan(tmp_path, "m").get("device") is None, "the default is a CPU"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"device": "gpu", "candidates": [{"weights": "int8"}]}, "is of openvino_genai, expected"),
        ({"device": "tpu"}, "device"),
        ({"candidates": [{"library": "torch", "weights": "stored"}]}, "got stored"),
        (
            {"candidates": [{"library": "torch", "weights": "int4_sym", "group_size": 48}]},
            "expected 32, 64, 128, got 48",
        ),
        (
            {"candidates": [{"library": "torch", "weights": "int4_sym", "awq": True}]},
            "awq and scale_estimation are for int4 weights of openvino_genai",
        ),
        (
            {"candidates": [{"library": "torch", "weights": "fp8", "group_size": 64}]},
            "group_size of torch fp8: expected 0, got 64",
        ),
        (
            {"candidates": [{"library": "torch", "weights": "fp8"}]},
            "'torch fp8' needs a GPU that has fp8, got `device: cpu`",
        ),
        ({"candidates": [{"weights": "bf16"}]}, "weights of openvino_genai"),
        (
            {"candidates": [{"library": "torch", "weights": "bf16", "kv_cache": "u8"}]},
            "kv_cache, which is bf16",
        ),
        (
            {"candidates": [{"library": "torch", "weights": "bf16", "arithmetic": "f32"}]},
            "leave out arithmetic",
        ),
        ({"candidates": [{"library": "torch", "weights": [1]}]}, "weights"),
    ],
)
def test_what_a_library_lacks_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_with(**keys)
