"""Answers of the real GenAI, from a worker process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.served import Room, Served
from tests.service.serving.engines import play
from tests.service.serving.language.models import (
    CACHE_VALUES,
    CONTEXT,
    Tiny,
    deployed,
    ids_of,
    log_probs_of,
)

TOKENS = (50, 81, 301, 224, 88, 83, 277, 262, 261, 343)


def generator(engine: LanguageEngine) -> Served:
    """The pipeline with which the engine was scored."""
    return Served(engine, Room(context=CONTEXT, cache_values_per_token=CACHE_VALUES))


def test_greedy_answers_are_those_that_were_scored(tmp_path: Path, tiny: Tiny) -> None:
    scored = generator(tiny.engine).generate(np.array(TOKENS), 40)

    async def story() -> None:
        async with deployed(tmp_path, tiny) as bench:
            first = await bench.ask(TOKENS, max_tokens=40, log_probs=True)
            again = await bench.ask(TOKENS, max_tokens=40, log_probs=True)  # from the prefix cache
            for parts in (first, again):
                ids = ids_of(parts)
                assert ids == scored.tokens[: len(ids)].tolist()
                assert log_probs_of(parts) == pytest.approx(scored.log_probs[: len(ids)], abs=1e-4)
                assert parts[-1].finish == ("length" if len(ids) == 40 else "stop")
            assert bench.value("prompt_tokens_total") == 2 * len(TOKENS)

    play(story)
