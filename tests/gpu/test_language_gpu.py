"""Our decoder in slots on a GPU: a worker alone, and the whole way from a plan to answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from pipeline.llm.plan import LanguageCandidate
from service.language.generation import Part
from tests.service.language_jobs.torch_story import PROMPTS, TOLERANCE, language_story
from tests.service.serving.engines import play
from tests.service.serving.language.models import (
    CACHE_VALUES,
    CONTEXT,
    deployed,
    ids_of,
    log_probs_of,
    tiny_model,
)

pytestmark = pytest.mark.gpu


def test_eight_answers_at_once_are_those_that_each_has_alone(tmp_path: Path) -> None:
    recipe = LanguageCandidate(library="torch", weights="fp32")
    tiny = tiny_model(tmp_path, recipe=recipe, device="gpu")
    assert tiny.engine.is_on_gpu

    async def story() -> None:
        async with deployed(tmp_path, tiny, load_s=300.0) as bench:
            held = bench.deployment.memory_bytes
            assert held > 4 * 8 * CONTEXT * CACHE_VALUES, "it is on the GPU, with its context"

            def ask(prompt: list[int], **drawn: Any) -> Coroutine[Any, Any, list[Part]]:
                return bench.ask(tuple(prompt), max_tokens=24, log_probs=True, **drawn)

            warm: dict[str, Any] = {
                "temperature": 0.8,
                "top_p": 0.9,
                "seed": 3,
                "frequency_penalty": 0.4,
            }
            for options in (dict[str, Any](), warm):
                alone = [await ask(prompt, **options) for prompt in PROMPTS]
                together = await asyncio.gather(*(ask(prompt, **options) for prompt in PROMPTS))
                for one, other in zip(alone, together, strict=True):
                    assert ids_of(other) == ids_of(one)
                    assert log_probs_of(other) == pytest.approx(log_probs_of(one), abs=TOLERANCE)
                assert len({tuple(ids_of(one)) for one in alone}) > len(PROMPTS) // 2

    play(story)


@pytest.mark.timeout(900)
def test_a_language_model_is_submitted_and_answers_in_slots(tmp_path: Path) -> None:
    language_story(tmp_path, "gpu")
