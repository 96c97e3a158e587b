"""Answers of ONNX Runtime GenAI: by turns with a model that counts, and from a worker process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.llm.ort_genai.opened import OpenModel, Served
from pipeline.llm.plan import LanguageCandidate
from service.errors import Unprocessable
from service.language.generation import Sampling
from service.serving.language.engines import EngineAnswer
from service.serving.language.messages import Generate
from service.serving.language.onnxruntime_engine import CHUNK, OnnxruntimeEngine
from tests.service.serving.engines import play
from tests.service.serving.language.models import (
    PROMPT,
    Tiny,
    asking,
    deployed,
    first_part,
    ids_of,
    log_probs_of,
    text_of,
    tiny_model,
    until,
)

VOCABULARY, END = 1000, 9
TOKENS = (50, 81, 301, 224, 88, 83, 277, 262, 261, 343)


class CountingText:
    """The likeliest token after n is n + 1."""

    def __init__(self, size: int, reads: list[int]) -> None:
        self._free, self._reads = size, reads

    def read_all(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        self._free -= ids.size
        assert self._free >= 0, "more tokens than the text has room for"
        self._reads.append(ids.size)
        logits = np.zeros((ids.size, VOCABULARY), dtype=np.float32)
        logits[np.arange(ids.size), (ids + 1) % VOCABULARY] = 20
        return logits

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        last: NDArray[np.float32] = self.read_all(ids)[-1]
        return last


class CountingModel:
    def __init__(self) -> None:
        self.reads = list[int]()

    def text(self, tokens: int) -> Any:
        return CountingText(tokens, self.reads)


class NoTokenizer:
    def encode(self, text: str, special_tokens: bool) -> list[int]:
        raise AssertionError("prompts are tokens")

    def decode(self, tokens: object, skip_special_tokens: bool) -> str:
        raise AssertionError("answers are tokens")


def counting(cache_tokens: int = 10_000) -> tuple[OnnxruntimeEngine, CountingModel]:
    model = CountingModel()
    return OnnxruntimeEngine(model, NoTokenizer(), cache_tokens, frozenset({END})), model


def begun(engine: OnnxruntimeEngine, prompt: list[int], most: int, **options: Any) -> EngineAnswer:
    return engine.begin(Generate(1, is_text=False, sampling=Sampling(), **options), prompt, most)


def test_answers_take_turns_and_end_by_limit_or_by_an_end_token() -> None:
    engine, model = counting()
    long, short = begun(engine, [100, 101], 3), begun(engine, [6], 50)
    engine.step()
    assert (long.read().ids, short.read().ids) == ([102], [7])
    while engine.is_busy:
        engine.step()
    rest, end = long.read(), short.read()
    assert (rest.ids, rest.finish) == ([103, 104], "length")
    assert (end.ids, end.finish) == ([8, END], "stop")
    assert end.log_probs == pytest.approx([0, 0], abs=1e-4)
    assert model.reads == [2, 1, 1, 1, 1, 1]
    assert engine.cache_usage == 0


def test_a_long_prompt_is_read_in_chunks_while_others_go_on() -> None:
    engine, model = counting()
    prompt = list(range(10, 10 + 2 * CHUNK + 5))
    long, other = begun(engine, prompt, 2), begun(engine, [500], 9)
    for _ in range(3):
        engine.step()
    assert long.read().ids == [prompt[-1] + 1]
    assert other.read().ids == [501, 502, 503]
    assert model.reads == [CHUNK, 1, CHUNK, 1, 5, 1]


def test_a_scored_prompt_has_log_probabilities_over_its_chunks() -> None:
    engine, _ = counting()
    prompt = list(range(100, 100 + CHUNK + 3))
    prompt[5] = 700  # neither it nor its successor is likely
    answer = begun(engine, prompt, 1, log_probs=True, echo=True)
    while engine.is_busy:
        engine.step()
    news = answer.read()
    assert news.ids == [*prompt, prompt[-1] + 1]
    unlikely = [at for at, each in enumerate(news.log_probs) if each < -10]
    assert unlikely == [5, 6]


def test_an_answer_waits_for_room_and_one_that_never_fits_is_refused() -> None:
    engine, _ = counting(cache_tokens=20)
    first, second = begun(engine, [100], 11), begun(engine, [200], 11)
    assert begun(engine, [300], 20).read().has_no_room
    engine.step()
    assert engine.cache_usage == 12 / 20
    assert (first.read().ids, second.read().ids) == ([101], [])
    first.leave()
    engine.step()
    assert second.read().ids == [201]
    second.leave()
    assert not engine.is_busy


# -- the library itself --------------------------------------------------------


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    pytest.importorskip("onnxruntime_genai", reason="language models: no onnxruntime_genai")
    recipe = LanguageCandidate(library="onnxruntime_genai", weights="fp32")
    return tiny_model(tmp_path_factory.mktemp("onnxruntime"), recipe=recipe)


def test_greedy_answers_are_those_that_were_scored(tmp_path: Path, exact: Tiny) -> None:
    served = Served(OpenModel(exact.engine))
    scored = served.generate(np.array(TOKENS), 40)
    prompt = served.log_probs(np.array(TOKENS))

    async def story() -> None:
        async with deployed(tmp_path, exact) as bench:
            parts = await bench.ask(TOKENS, max_tokens=40, log_probs=True, echo=True)
            first, *rest = log_probs_of(parts)
            ids = ids_of(parts)[len(TOKENS) :]
            assert first is None
            assert ids == scored.tokens[: len(ids)].tolist()
            wanted = [*prompt, *scored.log_probs[: len(ids)]]
            assert rest == pytest.approx(wanted, abs=1e-3)

    play(story)


def test_answers_together_are_those_that_each_has_alone(tmp_path: Path, exact: Tiny) -> None:
    prompts = (TOKENS, TOKENS[::-1], PROMPT, TOKENS[:2])

    async def story() -> None:
        async with deployed(tmp_path, exact, max_batch=3) as bench:
            alone, together = await bench.ask_alone_and_together(prompts, max_tokens=30)
            assert list(map(text_of, together)) == list(map(text_of, alone))
            warm: dict[str, Any] = {"max_tokens": 20, "temperature": 1.5, "seed": 5}
            assert ids_of(await bench.ask(**warm)) == ids_of(await bench.ask(**warm))
            with pytest.raises(Unprocessable, match="penalty"):
                await bench.ask(frequency_penalty=3.0)

    play(story)


def test_a_client_that_leaves_frees_its_place(tmp_path: Path, exact: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, exact, max_batch=1) as bench:
            async with bench.deployment.generate(asking()) as long:
                await first_part(long)
                waiting = asyncio.ensure_future(bench.ask(max_tokens=3))
                await until(lambda: bench.value("queue") == 1)
            assert len(ids_of(await waiting)) <= 3
            await until(lambda: bench.value("cache_ratio") == 0)
            assert (bench.value("running"), bench.value("queue")) == (0, 0)

    play(story)
