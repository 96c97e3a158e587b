"""Workers of language models that crash, hang and lie: what it costs, and what is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from pipeline.errors import HostError
from service.errors import TimedOut, TooMany, Unavailable
from tests.service.builders.jobs import WITHIN_S
from tests.service.serving.engines import MODEL, play, processes_of
from tests.service.serving.language.models import (
    Bench,
    Tiny,
    asking,
    deployed,
    text_of,
    until,
)

DOUBLE = str(Path(__file__).with_name("worker_double.py"))


def double(behaviour: str) -> tuple[str, ...]:
    return (sys.executable, DOUBLE, behaviour)


def state(bench: Bench) -> str:
    return bench.deployment.served().state


def test_an_honest_worker_answers(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, double("honest")) as bench:
            assert text_of(await bench.ask()) == "abc"
            assert bench.value("generated_tokens_total") == 3
            assert bench.value("first_token_seconds_count") == 1
            assert bench.value("next_token_seconds_count") == 2
            assert bench.value("answers_total", state="length") == 1
            assert bench.value("cache_ratio") == 0.5

    play(story)


@pytest.mark.parametrize(
    ("behaviour", "load_s", "error", "message"),
    [
        ("unloadable", WITHIN_S, HostError, "its files are bad"),
        ("mute", 0.5, TimedOut, "within 0.5 s"),
    ],
)
def test_a_worker_that_does_not_load_is_an_error_and_leaves_nothing(
    tmp_path: Path,
    tiny: Tiny,
    behaviour: str,
    load_s: float,
    error: type[Exception],
    message: str,
) -> None:
    async def story() -> None:
        with pytest.raises(error, match=message):
            async with deployed(tmp_path, tiny, double(behaviour), load_s=load_s):
                pass
        assert processes_of(f"serve-{MODEL}-") == []
        assert list(tmp_path.iterdir()) == []

    play(story)


@pytest.mark.parametrize(
    "behaviour",
    [
        "rubbish",
        "long",
        "eager",
        "chatty",
        "other",
        "unknown",
        "short",
        "scored",
        "echoes",
        "finish",
    ],
)
def test_a_worker_that_lies_is_stopped_and_its_answers_are_unavailable(
    tmp_path: Path, tiny: Tiny, behaviour: str
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, double(behaviour)) as bench:
            with pytest.raises(Unavailable) as error:
                await bench.ask(timeout_s=WITHIN_S)
            assert int(error.value.headers["Retry-After"]) >= 1
            await until(lambda: "protocol" in bench.deployment.served().reason)

    play(story)


def test_a_worker_that_always_crashes_is_given_up(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, double("crash")) as bench:
            with pytest.raises(Unavailable, match="is failed: its worker"):
                await bench.ask()  # it never begins, so each worker gets it
            assert state(bench) == "failed"
            assert bench.value("answers_total", state="failed") == 1

    play(story)


@pytest.mark.parametrize("behaviour", ["hang", "silent"])
def test_a_worker_that_is_silent_is_stopped(tmp_path: Path, tiny: Tiny, behaviour: str) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, double(behaviour), stuck_s=0.2) as bench:
            request = asyncio.ensure_future(bench.ask())
            await until(lambda: "did not answer any more" in bench.deployment.served().reason)
            request.cancel()
            with pytest.raises((Unavailable, asyncio.CancelledError)):
                await request

    play(story)


def test_an_answer_has_its_time_and_no_more(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with deployed(
            tmp_path, tiny, double("unbegun"), answer_timeout_s=0.3, max_batch=1, queue_limit=1
        ) as bench:
            with pytest.raises(TimedOut, match=r"within 0\.3 s"):
                await bench.ask()
            with pytest.raises(TimedOut, match=r"within 0\.1 s"):
                await bench.ask(timeout_s=0.1)
            assert bench.value("answers_total", state="timed_out") == 2
            assert bench.value("queue") == 0

    play(story)


def test_a_full_queue_refuses_and_a_client_that_leaves_makes_room(
    tmp_path: Path, tiny: Tiny
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, tiny, double("unbegun"), max_batch=1, queue_limit=1) as bench:
            async with bench.deployment.generate(asking()) as answer:
                assert answer.prompt_tokens == 2
                async with bench.deployment.generate(asking()):
                    assert bench.value("queue") == 2
                    with pytest.raises(TooMany, match="1 requests already wait"):
                        await bench.ask()
                async with bench.deployment.generate(asking()):
                    assert bench.value("queue") == 2
            assert bench.value("answers_total", state="cancelled") == 3
            assert bench.value("answers_total", state="refused") == 1

    play(story)
