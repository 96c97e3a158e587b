"""Answers of the real GenAI, from a worker process."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.served import Room, Served
from service.errors import Unavailable, Unprocessable
from service.language.generation import Sampling
from service.serving.language.messages import Cancel, Generate, Load, Piece, pieces_from
from service.serving.language.worker import Generator
from tests.service.serving.engines import play
from tests.service.serving.language.models import (
    CACHE_VALUES,
    CONTEXT,
    PROMPT,
    VOCABULARY,
    Tiny,
    asking,
    deployed,
    first_part,
    ids_of,
    log_probs_of,
    text_of,
    until,
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


def test_answers_together_are_those_that_each_has_alone(tmp_path: Path, tiny: Tiny) -> None:
    prompts = (TOKENS, TOKENS[::-1], (*TOKENS, *TOKENS), TOKENS[:2])

    async def story() -> None:
        async with deployed(tmp_path, tiny, max_batch=3) as bench:
            alone = [await bench.ask(each, max_tokens=30) for each in prompts]
            together = await asyncio.gather(*(bench.ask(each, max_tokens=30) for each in prompts))
            assert list(map(text_of, together)) == list(map(text_of, alone))
            assert list(map(ids_of, together)) == list(map(ids_of, alone))

    play(story)


def test_sampling_follows_its_seed_and_its_limits(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny) as bench:
            greedy = await bench.ask(max_tokens=20)
            warm: dict[str, Any] = {"max_tokens": 20, "temperature": 1.5, "seed": 5}
            first = await bench.ask(**warm)
            again, other = await asyncio.gather(bench.ask(**warm), bench.ask(**{**warm, "seed": 6}))
            assert ids_of(again) == ids_of(first)
            assert ids_of(other) != ids_of(first)
            assert ids_of(await bench.ask(**warm, top_k=1)) == ids_of(greedy)
            free = [ids_of(await bench.ask(**{**warm, "seed": None})) for _ in range(2)]
            assert free[0] != free[1]
            penalised = ids_of(await bench.ask(max_tokens=100, presence_penalty=2.0))
            assert len(set(penalised)) > len(set(ids_of(await bench.ask(max_tokens=100))))
            with pytest.raises(Unprocessable, match="penalty"):
                await bench.ask(frequency_penalty=3.0)

    play(story)


def test_an_answer_ends_before_a_stop_text_or_at_its_limit(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny) as bench:
            whole = await bench.ask(max_tokens=40)
            text = text_of(whole)
            stop = text[len(text) // 2 :][:3]  # mostly in two tokens
            parts = await bench.ask(max_tokens=40, stop=("never", stop))
            assert text_of(parts) == text[: text.index(stop)]
            assert parts[-1].finish == "stop"
            assert len(ids_of(parts)) < len(ids_of(whole))
            assert sum(part.finish is not None for part in parts) == 1
            none = await bench.ask(max_tokens=0, echo=True)
            assert (text_of(none), none[-1].finish) == (PROMPT, "length")
            echoed = await bench.ask(max_tokens=40, echo=True)
            assert text_of(echoed) == PROMPT + text
            full = await bench.ask(TOKENS * 25)  # 250 tokens of prompt: 6 are left
            assert full[-1].finish == "stop" or len(ids_of(full)) == CONTEXT - 250

    play(story)


def test_prompts_that_cannot_be_read_are_refused_before_anything_runs(
    tmp_path: Path, tiny: Tiny
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny) as bench:
            for prompt, message in (
                ("", "the prompt is empty"),
                ((), "the prompt is empty"),
                ((5, VOCABULARY), f"the token {VOCABULARY}, expected 0 to {VOCABULARY - 1}"),
                ((-1,), "the token -1"),
                ("a \ud800", "half of a surrogate pair"),
                (TOKENS * 26, f"has 260 tokens, and version 1 of .* takes {CONTEXT}"),
                ("word " * 300, f"takes {CONTEXT}"),
            ):
                with pytest.raises(Unprocessable, match=message):
                    await bench.ask(prompt)
            with pytest.raises(Unprocessable, match="not known where prompts are cached"):
                await bench.ask(echo=True, log_probs=True)
            assert bench.value("generated_tokens_total") == 0
            assert text_of(await bench.ask(max_tokens=4))

    play(story)


def test_the_log_probabilities_of_a_prompt_are_those_that_were_scored(
    tmp_path: Path, tiny: Tiny
) -> None:
    """GenAI mixes them up if other requests are in the same step."""
    random = np.random.default_rng(0)
    texts = [tuple(map(int, random.integers(3, 380, size))) for size in (200, 40, 255, 256)]
    served = generator(tiny.engine)
    scored = [served.log_probs(np.array(each)) for each in texts]

    async def story() -> None:
        async with deployed(tmp_path, tiny, prefix_caching=False) as bench:
            *others, with_answer = await asyncio.gather(
                *(bench.ask(each, echo=True, log_probs=True, max_tokens=0) for each in texts),
                bench.ask(TOKENS, max_tokens=60),
                bench.ask(texts[1], echo=True, log_probs=True, max_tokens=5),
            )
            for tokens, wanted, parts in zip(texts, scored, others, strict=False):
                first, *rest = log_probs_of(parts)
                assert first is None
                assert rest == pytest.approx(wanted, abs=1e-4)
                assert tuple(ids_of(parts)) == tokens
                assert parts[-1].finish == "length"
            _, *rest = log_probs_of(with_answer)
            assert rest[: len(scored[1])] == pytest.approx(scored[1], abs=1e-4)
            assert ids_of(with_answer)[:40] == list(texts[1])
            assert 1 <= len(ids_of(with_answer)) - 40 <= 5

    play(story)


def test_a_client_that_leaves_frees_its_place(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, max_batch=1, prefix_caching=False) as bench:
            async with bench.deployment.generate(asking()) as long:
                await first_part(long)
                assert bench.value("running") == 1
                assert bench.value("cache_ratio") > 0
                waiting = asyncio.ensure_future(bench.ask(max_tokens=3))
                await until(lambda: bench.value("queue") == 1)
            assert len(ids_of(await waiting)) <= 3
            assert bench.value("cache_ratio") == 0, "the first one has left the engine, too"
            assert bench.value("answers_total", state="cancelled") == 1
            assert (bench.value("running"), bench.value("queue")) == (0, 0)

    play(story)


class Sent:
    """Takes what a worker would send."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def send(self, message: object, body: bytes = b"") -> None:
        self.pieces += pieces_from(body) if body else ()


def steps_to_idle(generator: Generator) -> int:
    steps = 0
    while not generator.is_idle:
        generator.step()
        steps += 1
    return steps


@pytest.mark.parametrize("how", ["cancelled", "stop text"])
def test_an_answer_that_nobody_wants_leaves_the_engine(
    tmp_path: Path, tiny: Tiny, how: str
) -> None:
    file = tmp_path / "engine.json"
    document = {**tiny.engine.model_dump(mode="json"), "root": str(tiny.engine.root)}
    file.write_text(json.dumps(document))
    sent = Sent()
    load = Load(file, "it", CONTEXT, CONTEXT, together=1, prefix_caching=False)
    generator = Generator(load, sent)
    prompt = array("i", TOKENS).tobytes()
    generator.admit(Generate(1, is_text=False, sampling=Sampling(max_tokens=6)), prompt)
    generator.step()  # it waits for the request
    steps_to_idle(generator)
    text = "".join(piece.text for piece in sent.pieces)
    sampling = Sampling(stop=(text[:1],) if how == "stop text" else ())
    generator.admit(Generate(2, is_text=False, sampling=sampling), prompt)
    generator.step()
    if how == "cancelled":
        generator.cancel(Cancel(2))
    assert steps_to_idle(generator) <= 8, "the whole answer has 246 tokens"


def test_a_killed_worker_loses_what_ran_and_nothing_that_waits(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, max_batch=1) as bench:
            async with bench.deployment.generate(asking()) as running:
                await first_part(running)
                waiting = asyncio.ensure_future(bench.ask(TOKENS, max_tokens=3))
                await until(lambda: bench.value("queue") == 1)
                for pid in bench.deployment.pids:
                    for child in psutil.Process(pid).children():
                        child.kill()
                with pytest.raises(Unavailable, match="was lost"):
                    async for _ in running:
                        pass
            assert ids_of(await waiting)
            await until(lambda: bench.deployment.served().state == "ready")
            assert bench.value("prompt_tokens_total") > len(TOKENS)

    play(story)


@pytest.mark.parametrize(
    ("more", "surely", "beside"), [(900, 500, 700), (-100, 500, 300), (0, 200, 0)]
)
def test_an_engine_holds_at_least_what_its_allocator_says(
    more: int, surely: int, beside: int
) -> None:
    """Other processes may free memory of the GPU while the engine is loaded."""
    engine = SimpleNamespace(device_bytes=surely, cache_bytes=200)
    generator: Any = SimpleNamespace(_engine=engine)
    assert Generator.bytes_beside_cache(generator, more) == beside
