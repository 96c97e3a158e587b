"""A random Llama compiled for a GPU on the command line, and its engine opened again."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.libraries import torch_
from pipeline.llm.served import Room
from pipeline.report.bundle import load_delivered
from tests.builders.cli import crucible
from tests.pipeline.llm.models import language_plan, write_model

pytestmark = [
    pytest.mark.gpu,
    # of torch's own import of inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.mark.timeout(900)  # each candidate is compiled by several processes
def test_a_random_llama_is_compiled_for_a_gpu_and_answers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", scale=0.2)
    benchmark = {"prompt_tokens": 16, "output_tokens": 8, "concurrency": [1, 2], "budget_s": 60}
    forms = ["bf16", "int8", "int4_asym"]
    forms += ["fp8"] * (torch.cuda.get_device_capability() >= (8, 9))
    candidates = [{"library": "torch", "weights": each} for each in forms]
    # of random weights, int4 keeps little
    accuracy = {"max_perplexity_increase": 1.0, "max_kl": 0.8}
    plan = language_plan(
        tmp_path,
        model,
        device="gpu",
        candidates=candidates,
        benchmark=benchmark,
        accuracy=accuracy,
    )
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    done = crucible("compile", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {each["label"]: each for each in report["candidates"]}
    labels = {f"torch {each}{' g64' * each.startswith('int4')}" for each in forms}
    assert set(rows) == labels, done.err
    assert {each["failure"] for each in rows.values()} == {""}
    for label, row in rows.items():
        assert row["judged"]["failures"] == [], label
        limit = 0.8 if "int4" in label else 0.15 if "fp8" in label else 0.05
        assert row["judged"]["divergence"]["value"] < limit, label
        assert row["facts"]["step"] in ("fused", "overlapped"), label
        levels = {each["concurrency"] for each in row["times"]["levels"]}
        assert levels == {1, 2}, label
        assert row["times"]["roofline"]["memory_bytes_per_s"] > 1e11, label
    assert report["baseline"]["label"] == "transformers bf16"
    engine = load_delivered(tmp_path / "out" / "engine", LanguageEngine)
    assert engine.is_on_gpu
    served = torch_.open_served(engine, Room(context=256, cache_values_per_token=128))
    prompt = np.arange(5, 21)
    alone = served.generate(prompt, 8)
    together = served.generate_together([prompt, prompt[::-1].copy()], 8)
    assert together[0].log_probs == pytest.approx(alone.log_probs, abs=0.1)
