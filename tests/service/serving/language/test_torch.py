"""Answers of our decoder in slots: step by step, and from a worker process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.libraries import torch_
from pipeline.llm.libraries.protocol import ScoredGenerator
from pipeline.llm.plan import LanguageCandidate
from pipeline.llm.served import Room
from pipeline.llm.torch_engine.files import read_network
from pipeline.llm.torch_engine.slots import Slots
from service.auth import LOCAL
from service.errors import Conflict, Unprocessable
from service.language.generation import Sampling
from service.registry.models import DeploymentOptions, PromoteRequest
from service.serving.language.deployment import LanguageSpec
from service.serving.language.engines import EngineAnswer, News
from service.serving.language.messages import Generate
from service.serving.language.torch_engine.engine import TorchAnswer, TorchEngine
from tests.service.serving.engines import play
from tests.service.serving.language.models import (
    CACHE_VALUES,
    CONTEXT,
    PROMPT,
    Tiny,
    asking,
    deployed,
    ended_language_job,
    first_part,
    ids_of,
    language_version,
    log_probs_of,
    text_of,
    tiny_model,
    until,
)
from tests.service.serving.language.test_onnxruntime import NoTokenizer
from tests.service.serving.models import shelf

TOLERANCE = 1e-4
"""Of log-probabilities in fp32, in nats: sums of other shapes are rounded otherwise."""

MODES = [0, 2]
"""Steps that are sent ahead: none, as on a CPU, and those of a GPU."""

TOKENS = (50, 81, 301, 224, 88, 83, 277, 262, 261, 343)
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(3, 380, size).tolist() for size in (3, 70, 1, 24, 130, 9, 40)]
MOST = [12, 5, 20, 1, 9, 15, 7]
WARM = {"temperature": 1.5, "seed": 5, "top_k": 40, "top_p": 0.9, "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    for package in ("transformers", "accelerate", "safetensors"):
        pytest.importorskip(package, reason=f"language models: no {package}")
    recipe = LanguageCandidate(library="torch", weights="fp32")
    return tiny_model(tmp_path_factory.mktemp("torch"), recipe=recipe)


@pytest.fixture(scope="module")
def scored(exact: Tiny) -> ScoredGenerator:
    """The decoder as the gate opens it."""
    room = Room(context=CONTEXT, cache_values_per_token=CACHE_VALUES)
    return torch_.open_served(exact.engine, room)


def opened(
    engine: LanguageEngine, rows: int = 4, ahead: int = 0, ends: tuple[int, ...] = ()
) -> TorchEngine:
    slots = Slots(read_network(engine.root, "cpu"), rows, CONTEXT, chunk=32)
    return TorchEngine(slots, NoTokenizer(), frozenset(ends), ahead)


def begun(
    engine: TorchEngine, prompt: list[int], most: int, sampling: dict[str, Any], **more: Any
) -> TorchAnswer:
    message = Generate(1, is_text=False, sampling=Sampling(**sampling), **more)
    return engine.begin(message, prompt, most)


class Got:
    """What came of answers, until all have ended."""

    def __init__(self, engine: TorchEngine, answers: list[TorchAnswer]) -> None:
        self._engine, self._answers = engine, answers
        self.ids: list[list[int]] = [[] for _ in answers]
        self.log_probs: list[list[float]] = [[] for _ in answers]
        self.finish: list[str | None] = [None] * len(answers)

    def add(self, answer: EngineAnswer) -> None:
        number, news = self._answers.index(answer), answer.read()  # type: ignore[arg-type]
        self.ids[number] += news.ids
        self.log_probs[number] += news.log_probs
        self.finish[number] = news.finish

    def steps(self, count: int = 10_000) -> Got:
        while self._engine.is_busy and count:
            self._engine.step()
            count -= 1
            for answer in self._answers:
                self.add(answer)
        return self


def alone(engine: LanguageEngine, number: int, sampling: dict[str, Any]) -> Got:
    one = opened(engine, rows=1)
    return Got(one, [begun(one, PROMPTS[number], MOST[number], sampling)]).steps()


@pytest.mark.parametrize("ahead", MODES)
@pytest.mark.parametrize("sampling", [{}, WARM], ids=["greedy", "drawn"])
def test_more_answers_than_slots_are_those_that_each_has_alone(
    exact: Tiny, ahead: int, sampling: dict[str, Any]
) -> None:
    engine = opened(exact.engine, ahead=ahead)
    got = Got(engine, [begun(engine, *each, sampling) for each in zip(PROMPTS, MOST, strict=True)])
    got.steps()
    for number, most in enumerate(MOST):
        wanted = alone(exact.engine, number, sampling)
        assert got.ids[number] == wanted.ids[0]
        assert got.log_probs[number] == pytest.approx(wanted.log_probs[0], abs=TOLERANCE)
        assert (len(got.ids[number]), got.finish[number]) == (most, "length")
    assert engine.cache_usage == 0


def test_greedy_answers_are_those_that_the_gate_scores(
    exact: Tiny, scored: ScoredGenerator
) -> None:
    for number in (0, 4):
        wanted = scored.generate(np.array(PROMPTS[number]), MOST[number])
        got = alone(exact.engine, number, {})
        assert got.ids[0] == wanted.tokens.tolist()
        assert got.log_probs[0] == pytest.approx(wanted.log_probs, abs=TOLERANCE)


@pytest.mark.parametrize("ahead", MODES)
def test_an_answer_joins_while_others_go_on_and_one_leaves(exact: Tiny, ahead: int) -> None:
    engine = opened(exact.engine, ahead=ahead)
    first, second = (begun(engine, PROMPTS[n], MOST[n], {}) for n in (2, 0))
    early = Got(engine, [first, second]).steps(6)
    assert engine.cache_usage == 0.5
    third = begun(engine, PROMPTS[5], MOST[5], {})
    late = Got(engine, [first, second, third]).steps(4)
    assert all(late.ids), "all three go on"
    second.leave()
    late.steps()
    for place, number in ((0, 2), (1, 0), (2, 5)):
        ids = [*early.ids[place], *late.ids[place]] if place < 2 else late.ids[place]
        wanted = alone(exact.engine, number, {}).ids[0]
        assert ids == wanted[: len(ids)]
        assert (len(ids) == MOST[number]) == (place != 1)


def test_a_lonely_answer_goes_on_in_the_first_row(exact: Tiny) -> None:
    engine = opened(exact.engine)
    answers = [begun(engine, PROMPTS[n], MOST[n], {}) for n in (0, 6, 2)]
    got = Got(engine, answers)
    rows = []
    while engine.is_busy:
        got.steps(1)
        rows.append(answers[2].row)
    assert (rows[3], rows[-1]) == (2, 0)
    assert got.ids[2] == alone(exact.engine, 2, {}).ids[0]


def test_a_long_prompt_is_read_in_parts_while_others_go_on(exact: Tiny) -> None:
    engine = opened(exact.engine)
    short = begun(engine, PROMPTS[2], MOST[2], {})
    got = Got(engine, [short]).steps(1)
    long = begun(engine, PROMPTS[4], MOST[4], {})  # 130 tokens: 5 parts of 32
    before = len(got.ids[0])
    got.steps(4)
    assert len(got.ids[0]) == before + 4
    assert long.read().ids == []
    engine.step()
    assert len(long.read().ids) == 2, "its first token, and that of the step"


def test_answers_that_nobody_wants_free_their_rows(exact: Tiny) -> None:
    engine = opened(exact.engine, rows=1)
    first, unborn, last = (begun(engine, PROMPTS[n], MOST[n], {}) for n in (4, 0, 5))
    engine.step()  # the first one's prompt is read in part
    unborn.leave()
    first.leave()
    assert Got(engine, [last]).steps().ids[0] == alone(exact.engine, 5, {}).ids[0]
    assert (first.read().ids, unborn.read().ids) == ([], [])
    assert not engine.is_busy


@pytest.mark.parametrize("ahead", MODES)
def test_an_end_token_ends_an_answer(exact: Tiny, ahead: int) -> None:
    whole = alone(exact.engine, 2, {}).ids[0]
    end = whole[6]
    engine = opened(exact.engine, ahead=ahead, ends=(end,))
    got = Got(engine, [begun(engine, PROMPTS[2], MOST[2], {})]).steps()
    assert got.ids[0] == whole[: whole.index(end) + 1]
    assert got.finish == ["stop"]


def test_a_scored_prompt_comes_whole_with_its_first_token(
    exact: Tiny, scored: ScoredGenerator
) -> None:
    engine = opened(exact.engine)
    other = begun(engine, PROMPTS[2], MOST[2], {})
    answer = begun(engine, PROMPTS[4], 3, {}, log_probs=True, echo=True)
    got, came = Got(engine, [other]), list[News]()
    while engine.is_busy:
        got.steps(1)
        came.append(answer.read())
    first = next(news for news in came if news.ids)
    assert first.ids[:130] == PROMPTS[4]
    wanted = scored.log_probs(np.array(PROMPTS[4]))
    assert first.log_probs[1:130] == pytest.approx(wanted, abs=TOLERANCE)
    assert sum(len(news.ids) for news in came) == 130 + 3
    assert got.ids[0] == alone(exact.engine, 2, {}).ids[0], "the other one goes on beside it"


# -- the worker ----------------------------------------------------------------


def test_a_worker_answers_as_the_gate_scores(
    tmp_path: Path, exact: Tiny, scored: ScoredGenerator
) -> None:
    texts = (TOKENS, tuple(PROMPTS[4]))
    answers = [scored.generate(np.array(each), 30) for each in texts]
    prompts = [scored.log_probs(np.array(each)) for each in texts]

    async def story() -> None:
        async with deployed(tmp_path, exact) as bench:
            asked = (bench.ask(each, max_tokens=30, log_probs=True, echo=True) for each in texts)
            found = await asyncio.gather(*asked)
            for text, answer, prompt, parts in zip(texts, answers, prompts, found, strict=True):
                ids, (first, *rest) = ids_of(parts)[len(text) :], log_probs_of(parts)
                assert first is None
                assert ids == answer.tokens[: len(ids)].tolist()
                wanted = [*prompt, *answer.log_probs[: len(ids)]]
                assert rest == pytest.approx(wanted, abs=TOLERANCE)
            assert bench.deployment.served().max_batch == 8
            assert bench.deployment.memory_bytes > 0

    play(story)


def test_a_worker_answers_together_as_alone(tmp_path: Path, exact: Tiny) -> None:
    prompts = (TOKENS, TOKENS[::-1], PROMPT, TOKENS[:2])

    async def story() -> None:
        async with deployed(tmp_path, exact, max_batch=3) as bench:
            alone, together = await bench.ask_alone_and_together(prompts, max_tokens=30)
            assert list(map(text_of, together)) == list(map(text_of, alone))
            warm: dict[str, Any] = {"max_tokens": 20, **WARM}
            first = ids_of(await bench.ask(**warm))
            assert ids_of(await bench.ask(**warm)) == first
            assert ids_of(await bench.ask(**{**warm, "seed": 6})) != first
            text = text_of(alone[2])
            stop = text[len(text) // 2 :][:3]
            stopped = await bench.ask(max_tokens=30, stop=(stop,))
            assert text_of(stopped) == text[: text.index(stop)]
            assert stopped[-1].finish == "stop"
            none = await bench.ask(max_tokens=0, echo=True)
            assert (text_of(none), none[-1].finish) == (PROMPT, "length")
            full = await bench.ask(tuple(PROMPTS[4]) + TOKENS * 12)  # 6 tokens are left
            assert full[-1].finish == "stop" or len(ids_of(full)) == CONTEXT - 250
            with pytest.raises(Unprocessable, match="penalty"):
                await bench.ask(frequency_penalty=3.0)
            with pytest.raises(Unprocessable, match=f"takes {CONTEXT}"):
                await bench.ask(TOKENS * 26)

    play(story)


def test_a_client_that_leaves_frees_its_slot(tmp_path: Path, exact: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, exact, cache_tokens=CONTEXT + 1) as bench:
            assert bench.deployment.served().max_batch == 1, "there is room for one context"
            async with bench.deployment.generate(asking()) as long:
                await first_part(long)
                assert bench.value("cache_ratio") == 1
                waiting = asyncio.ensure_future(bench.ask(max_tokens=3))
                await until(lambda: bench.value("queue") == 1)
            assert len(ids_of(await waiting)) <= 3
            await until(lambda: bench.value("cache_ratio") == 0)
            assert bench.value("answers_total", state="cancelled") == 1

    play(story)


def test_the_free_memory_decides_how_many_slots_a_report_gets(tmp_path: Path, exact: Tiny) -> None:
    context_bytes = 4 * CACHE_VALUES * CONTEXT

    async def story() -> None:
        async with shelf(tmp_path) as here:
            deployments = here.deployments
            job = ended_language_job(here.folders, here.jobs, exact)
            view = await deployments.promote(LOCAL, "tiny", PromoteRequest(report=job))
            assert view.current.backend == "torch"
            size = view.current.size_bytes
            # half of what is free beside the model is for its cache: three contexts and a part
            here.host.free_bytes = size + 7 * context_bytes
            await deployments.deploy(LOCAL, "tiny", DeploymentOptions())
            (served,) = deployments.served(LOCAL)
            assert (served.max_batch, served.state) == (3, "ready")
            async with deployments.generate(asking(TOKENS, max_tokens=4)) as answer:
                assert len(ids_of([part async for part in answer])) == 4
            await deployments.unload(LOCAL, "tiny")
            many = DeploymentOptions(cache_tokens=9 * CONTEXT, max_batch=9)
            with pytest.raises(Conflict, match=f"{9 * context_bytes / 2**20:.1f} MiB of cache"):
                await deployments.deploy(LOCAL, "tiny", many)

    play(story)


def test_a_load_on_a_gpu_has_time_to_compile(exact: Tiny) -> None:
    target = exact.engine.target.model_copy(update={"compute_capability": "9.0"})
    on_gpu = exact.engine.model_copy(update={"target": target})
    specs = (
        LanguageSpec(language_version(exact), engine, DeploymentOptions(), ("cpu",), load_s)
        for engine, load_s in ((exact.engine, 180.0), (on_gpu, 180.0), (on_gpu, 900.0))
    )
    assert [spec.ready_s for spec in specs] == [180.0, 660.0, 1380.0]  # steps of 1, 2, 4, 8 answers
