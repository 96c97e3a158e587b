"""Trying a language model in a browser: the answer as it comes, and how it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import Server, until
from tests.service.pages.browser import accessibility_faults, chromium, opened, overflow

__all__ = ["chromium"]  # a fixture
PHONE = {"viewport": {"width": 390, "height": 800}}
WITHIN_MS = WITHIN_S * 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_models(tmp_path_factory.mktemp("pages"), models="add") as server:
        yield server


def test_a_chat_is_streamed_and_goes_on(chromium: Any, server: Server) -> None:
    url = f"{server.url}/ui/models/capitals/try"
    with opened(chromium, url, **PHONE) as page:
        for number in (1, 2):
            page.fill("textarea", "hi")
            page.click("button:text-is('Send')")
            page.wait_for_selector("#progress:has-text('tokens')", timeout=WITHIN_MS)
            page.wait_for_selector("#stop", state="hidden", timeout=WITHIN_MS)
            answers = page.locator("#turns pre").all_inner_texts()
            assert len(answers) == 2 * number
            assert answers[-1].startswith("<S><USER>HI<ASSISTANT>")
        assert "<ASSISTANT><S>" in answers[-1], "the second prompt has the first answer"
        assert page.input_value("textarea") == ""
        assert overflow(page) == 0
    assert accessibility_faults(chromium, url) == []


def test_an_answer_is_stopped_and_errors_are_shown(chromium: Any, server: Server) -> None:
    with opened(chromium, f"{server.url}/ui/models/hangs/try") as page:
        page.fill("textarea", "hello")
        page.uncheck("input[name=is_chat]")
        page.click("button:text-is('Send')")
        page.wait_for_selector("#turns pre:text-is('HE')", timeout=WITHIN_MS)
        page.click("#stop")
        page.wait_for_selector("#progress:has-text('stopped')", timeout=WITHIN_MS)
        until(lambda: '{"answer": "ends", "model": "hangs"}' in server.log())
        page.wait_for_selector("#stop", state="hidden", timeout=WITHIN_MS)
    with opened(chromium, f"{server.url}/ui/models/lost/try") as page:
        page.fill("textarea", "hello")
        page.uncheck("input[name=is_chat]")
        page.click("button:text-is('Send')")
        page.wait_for_selector("[role=alert]:has-text('was lost')", timeout=WITHIN_MS)


def test_without_script_the_whole_answer_comes(chromium: Any, server: Server) -> None:
    url = f"{server.url}/ui/models/capitals/try"
    with opened(chromium, url, java_script_enabled=False, **PHONE) as page:
        page.fill("textarea", "hi")
        page.click("button:text-is('Send')")
        assert page.locator("#turns pre").all_inner_texts() == ["hi", "<S><USER>HI<ASSISTANT>"]
        assert overflow(page) == 0
