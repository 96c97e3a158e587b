"""Helpers: what they answer is checked, and one that breaks the protocol is replaced."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from service.errors import TooLarge, Unavailable, Unprocessable
from service.offload.pool import Helpers

DOUBLE = "tests.service.builders.helper_double"


def with_a_helper(story: Callable[[Helpers], Awaitable[None]]) -> None:
    async def run() -> None:
        helpers = Helpers(1, DOUBLE)
        try:
            await story(helpers)
        finally:
            await helpers.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "work", ["huge_head", "huge_body", "half", "rubbish", "negative", "unknown"]
)
def test_a_helper_that_answers_what_it_must_not_is_replaced(work: str) -> None:
    async def story(helpers: Helpers) -> None:
        with pytest.raises(Unavailable, match="ended") as error:
            await helpers.ask(work, [b"x"])
        assert error.value.headers == {"Retry-After": "1"}
        assert helpers._idle == []
        assert await helpers.ask("right", [b"x"]) == (2, b"{}")

    with_a_helper(story)


def test_a_refusal_is_the_clients_error_and_the_helper_stays() -> None:
    async def story(helpers: Helpers) -> None:
        with pytest.raises(TooLarge, match="much") as caught:
            await helpers.ask("refuse", [b"x"])
        assert caught.value.next_step == "less"
        (helper,) = helpers._idle
        with pytest.raises(Unprocessable, match="no"):
            await helpers.ask("refuse_strangely", [b"x"])
        assert helpers._idle == [helper]

    with_a_helper(story)
