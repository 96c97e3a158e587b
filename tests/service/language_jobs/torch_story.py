"""A random Llama on our decoder, as a user has it: submitted, promoted, loaded and asked on the
command line and over /v1, on a CPU or on a GPU.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.builders.cli import crucible
from tests.pipeline.llm.models import language_plan, write_model
from tests.service.integration.test_docs import served

TOLERANCE = 1e-3
"""Of log-probabilities in fp32, in nats: each size of a batch has kernels of its own."""

SLOTS, TOKENS = 8, 24
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(3, 380, size).tolist() for size in (3, 200, 17, 64, 65, 130, 1, 90)]
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.4}
REQUESTS = [(prompt, GREEDY) for prompt in PROMPTS] + [(prompt, DRAWN) for prompt in PROMPTS[:2]]
"""More than there are slots."""


def told(*arguments: str, url: str) -> Any:
    """What a command says as JSON."""
    done = crucible(*arguments, "--json", env={"CRUCIBLE_URL": url})
    assert done.code == 0, done.err
    return json.loads(done.out)


def language_story(folder: Path, device: str) -> None:
    """Compile a model for a device, serve it, and compare answers at once with those alone."""
    model = write_model(folder / "model", scale=0.2)
    plan = language_plan(
        folder,
        model,
        device=device,
        candidates=[{"library": "torch", "weights": "fp32"}],
        benchmark={"prompt_tokens": 16, "output_tokens": 4, "budget_s": 3},
        accuracy={"max_perplexity_increase": 1.0},
    )
    (folder / "tiny.yaml").write_text(yaml.safe_dump(plan))
    with served("crucible serve", folder / "home") as url:
        job = told("submit", str(folder / "tiny.yaml"), "--wait", url=url)
        assert job["device"].startswith(device), job
        told("promote", "tiny", job["id"], "--override", url=url)
        loaded = told("load", "tiny", "--max-batch", str(SLOTS), url=url)
        assert loaded["deployment"]["device"] == job["device"]
        assert loaded["deployment"]["memory_bytes"] > 0
        with httpx.Client(base_url=url, timeout=120) as web:
            check_answers(web)
            figures = web.get("/metrics").text
        assert 'crucible_language_generated_tokens_total{model="tiny",version="1"}' in figures
        assert crucible("unload", "tiny", env={"CRUCIBLE_URL": url}).code == 0


def ask(web: httpx.Client, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "logprobs": 1, **options}
    answer = web.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert isinstance(choice, dict)
    return choice


def check_answers(web: httpx.Client) -> None:
    alone = [ask(web, prompt, **options) for prompt, options in REQUESTS]
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        asked = [pool.submit(ask, web, prompt, **options) for prompt, options in REQUESTS]
        together = [each.result() for each in asked]
    for one, other in zip(alone, together, strict=True):
        assert other["text"] == one["text"]
        assert other["logprobs"]["tokens"] == one["logprobs"]["tokens"]
        logs, wanted = (each["logprobs"]["token_logprobs"] for each in (other, one))
        assert logs == pytest.approx(wanted, abs=TOLERANCE)
        assert other["finish_reason"] == one["finish_reason"]
    assert len({each["text"] for each in alone}) > SLOTS - 2, "answers can be told apart"
    scored = ask(web, PROMPTS[1], echo=True, **GREEDY)
    first, *logs = scored["logprobs"]["token_logprobs"]
    assert first is None
    assert len(logs) >= len(PROMPTS[1])
    assert logs[len(PROMPTS[1]) - 1 :] == pytest.approx(
        alone[1]["logprobs"]["token_logprobs"], abs=TOLERANCE
    )
