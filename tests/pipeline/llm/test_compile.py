"""Small random models from the folder to the verdict, against transformers in fp32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.llm.engine import ACTIVATION_GROUP, LanguageEngine, read_settings
from pipeline.llm.export import export
from pipeline.llm.gate import judge
from pipeline.llm.hf import load_model
from pipeline.llm.plan import LanguageAccuracy, LanguageCandidate
from pipeline.llm.reference import refer
from pipeline.llm.scoring import Graph, score
from pipeline.llm.served import Room, Served
from pipeline.llm.source import describe, find_source
from pipeline.llm.texts import read_documents
from pipeline.llm.weights import build
from pipeline.report.bundle import load_delivered
from tests.builders.cli import crucible
from tests.pipeline.llm.models import KINDS, language_plan, texts, write_model, write_texts

for package in ("openvino_genai", "openvino_tokenizers", "gguf", "accelerate", "nncf"):
    pytest.importorskip(package, reason=f"language models: no {package}")

EXACT = LanguageCandidate(weights="fp16", kv_cache="f32", arithmetic="f32")


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_the_engine_says_what_the_model_says(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    import torch

    source = find_source(str(write_model(tmp_path / "model", kind, **options)))
    about = describe(source, 256)
    folders = [tmp_path / name for name in ("exported", "engine", "reference")]
    for folder in folders:
        folder.mkdir()
    exported = export(source, about, folders[0])
    engine = build(exported, EXACT, source, None, folders[1])
    settings = read_settings(engine.root)
    assert settings.end_tokens == (2,)
    assert settings.special_tokens["bos_token"] == "<s>"
    assert (settings.context, settings.vocabulary) == (256, about.vocabulary)
    ids = np.random.default_rng(0).integers(3, 380, 160)
    with torch.inference_mode():
        logits = load_model(source)(torch.tensor(ids[None])).logits[0]
    wanted = torch.log_softmax(logits.double(), -1).numpy()
    assert Graph(engine).log_probs(ids, 20) == pytest.approx(wanted, abs=0.02)

    documents = read_documents(write_texts(tmp_path / "t.jsonl", texts(4)), "selection")
    reference = refer(source, documents, 96, "cpu", folders[2])
    room = Room(context=256, cache_values_per_token=about.cache_values_per_token)
    scores = score(engine, reference, 8, room)
    judged = judge(scores, LanguageAccuracy(max_perplexity_increase=0.001, max_kl=1e-4))
    assert judged.passed, judged.failures
    assert scores.path_difference < 1e-3
    assert scores.facts["KV_CACHE_PRECISION"] == "f32"
    assert [way.answers for way in scores.ways] == [4, 4, 4]
    assert max(way.largest_difference for way in scores.ways) < 1e-3


def test_activations_in_int8_say_nearly_what_f32_says(tmp_path: Path) -> None:
    source = find_source(str(write_model(tmp_path / "model")))
    about = describe(source, 256)
    (tmp_path / "exported").mkdir()
    exported = export(source, about, tmp_path / "exported")
    ids = np.random.default_rng(0).integers(3, 380, 40)
    found = []
    for arithmetic in ("f32", "int8"):
        recipe = LanguageCandidate.model_validate({"weights": "int8", "arithmetic": arithmetic})
        (tmp_path / arithmetic).mkdir()
        engine = build(exported, recipe, source, None, tmp_path / arithmetic)
        graph = Graph(engine)
        found.append(graph.log_probs(ids, 8))
    assert graph.facts["INFERENCE_PRECISION_HINT"] == "f32"
    assert graph.facts["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == str(ACTIVATION_GROUP)
    assert np.abs(found[1] - found[0]).mean() < 0.05


def test_prompts_are_read_in_chunks_and_from_the_cache(tmp_path: Path) -> None:
    """Steps tell what GenAI does: without it, the ways of serving would not differ."""
    source = find_source(str(write_model(tmp_path / "model")))
    about = describe(source, 256)
    for name in ("exported", "engine"):
        (tmp_path / name).mkdir()
    exported = export(source, about, tmp_path / "exported")
    engine = build(exported, EXACT, source, None, tmp_path / "engine")
    room = Room(context=256, cache_values_per_token=about.cache_values_per_token)
    prompt = np.random.default_rng(0).integers(3, 380, 100)
    served = Served(engine, room, prefix_caching=True, step_tokens=24)
    steps = []
    for _ in range(2):
        before = served.steps
        served.generate(prompt, 2)
        steps.append(served.steps - before)
    assert steps[0] >= 5 + 1, "five chunks, the last of which gives the first token"
    assert steps[1] < steps[0], "most of the prompt was in the cache"
    whole = Served(engine, room)
    whole.generate(prompt, 2)
    assert whole.steps == 2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A compile on the command line: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("language")
    model = write_model(folder / "model", scale=0.2)
    candidates = [
        {"weights": "int8", "kv_cache": "f32", "arithmetic": "f32"},
        {"weights": "int4_sym", "kv_cache": "f32", "arithmetic": "f32"},
        {"weights": "stored"},  # there is no GGUF file to be read
    ]
    benchmark = {"prompt_tokens": 16, "output_tokens": 4, "concurrency": [1, 3], "budget_s": 5}
    accuracy = {"max_perplexity_increase": 1.0, "max_kl": 0.02}
    plan = language_plan(
        folder, model, candidates=candidates, benchmark=benchmark, accuracy=accuracy
    )
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    home = {"CRUCIBLE_HOME": str(folder / "home")}
    result = crucible("compile", folder / "plan.yaml", "--out", folder / "out", env=home)
    return folder / "out", result.code, result.out + result.err


def test_a_compile_ends_with_an_engine_and_a_report(compiled: tuple[Path, int, str]) -> None:
    out, code, output = compiled
    assert code == 0, output
    report = json.loads((out / "report.json").read_text())
    assert report["verdict"] in ("accepted", "unproven", "keep")
    exact, rough, stored = report["candidates"]
    assert exact["judged"]["failures"] == []
    assert any("divergence of" in text for text in rough["judged"]["failures"])
    assert rough["times"] is None, "what is beyond the limits is not timed"
    assert "GGUF" in stored["failure"]
    assert report["baseline"]["label"] == "transformers fp32"
    assert [level["concurrency"] for level in exact["times"]["levels"]] == [1, 3]
    roof, parts = exact["times"]["roofline"], exact["times"]["parts"]
    assert exact["times"]["parts_missing"] == ""
    assert 0 < roof["weight_bytes"] <= exact["weight_bytes"]
    cached = exact["times"]["cache_bytes_per_token"]  # f32: 4 bytes a value, in blocks of 32
    assert 4 <= cached / report["model"]["cache_values_per_token"] < 16
    assert roof["memory_bytes_per_s"] > 0
    assert roof["share"] == roof["floor_s"] / exact["times"]["levels"][0]["next_token_s"]
    assert min(parts.values()) >= 0
    assert parts["products_s"] > 0
    page = (out / "report.html").read_text()
    assert report["headline"] in (out / "report.md").read_text().replace("\\", "")
    assert "int4_sym per channel" in page
    if report["verdict"] != "keep":
        engine = load_delivered(out / "engine", LanguageEngine)
        assert engine.label == report["winner"] == exact["label"]


def test_a_limit_that_nothing_keeps_rejects_all(
    compiled: tuple[Path, int, str], tmp_path: Path
) -> None:
    folder = compiled[0].parent
    result = crucible(
        "compile",
        folder / "plan.yaml",
        "--set",
        "accuracy.max_kl=1e-9",
        "--out",
        tmp_path / "out",
        env={"CRUCIBLE_HOME": str(folder / "home")},
    )
    assert result.code == 2, result.err
    assert json.loads(result.out.splitlines()[-1])["verdict"] == "rejected"
    assert not (tmp_path / "out" / "engine").exists()
