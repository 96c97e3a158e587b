"""Trying a language model: without script, and the stream that the script reads."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import httpx

from tests.service.builders.app import Desk, at_desk
from tests.service.language.double import DoubleGenerating, Language
from tests.service.pages.test_pages import HOSTILE, Scripts, csrf_of, signed_in

PATH = "/ui/models/capitals/try"


def chat_of(page: str) -> str:
    """The chat so far, as the form holds it."""
    match = re.search(r'name="chat" value="([^"]*)"', page)
    assert match
    return html.unescape(match[1])


def test_a_text_is_continued_and_a_chat_goes_on(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def send(status: int = 200, **form: str) -> str:
            answer = await desk.client.post(PATH, data=form)
            assert answer.status_code == status, answer.text
            assert Scripts(answer.text).found == []
            return answer.text

        empty = (await desk.client.get(PATH)).text
        assert "Version 3, int8 kv-f16" in empty
        assert Scripts(empty).found == []
        text = await send(text="hello", max_tokens="3")
        assert '<pre tabindex="0">HEL</pre>' in text
        assert "3 tokens, cut" in text
        assert ">hello</textarea>" in text

        first = await send(text=HOSTILE, is_chat="on", max_tokens="90")
        assert HOSTILE not in first
        chat = json.loads(chat_of(first))
        assert [turn["role"] for turn in chat] == ["user", "assistant"]
        assert chat[0]["content"] == HOSTILE
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        second = await send(text="c", is_chat="on", chat=json.dumps(chat))
        *_, last = json.loads(chat_of(second))
        assert last["content"] == "<S><USER>A<ASSISTANT>B<USER>C<ASSISTANT>"
        assert second.count('<pre tabindex="0">') == 4

        for field, value, shown in (
            ("max_tokens", "0", "greater than or equal to 1"),
            ("temperature", "hot", "valid number"),
            ("text", "", "Field required"),
            ("chat", "{", "the chat so far cannot be read"),
        ):
            text = await send(422, **{"text": "keep me", field: value})
            assert shown in text
            if field != "text":
                assert "keep me" in text
        assert "expected a prompt of 1 to 99 tokens" in await send(422, text="a" * 100)

    at_desk(tmp_path, story, generating=DoubleGenerating())


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    models = {"plain": Language(chat_template=""), "bad": Language(chat_template="{{ 1 / 0 }}")}

    async def story(desk: Desk) -> None:
        page = (await desk.client.get("/ui/models/plain/try")).text
        assert "is_chat" not in page
        refused = await desk.client.post("/ui/models/bad/try", data={"text": "hi", "is_chat": "on"})
        assert refused.status_code == 422
        assert "the chat template failed: ZeroDivisionError" in refused.text
        answer = await desk.client.post("/ui/models/bad/try", data={"text": "hi"})
        assert ">HI</pre>" in answer.text

    at_desk(tmp_path, story, generating=DoubleGenerating(models))


def test_the_stream_has_the_events_of_the_api_and_its_refusals_are_parts_of_a_page(
    tmp_path: Path,
) -> None:
    head = {"HX-Request": "true"}

    async def story(desk: Desk) -> None:
        async def send(name: str = "capitals", **form: str) -> httpx.Response:
            path = f"/ui/models/{name}/try/stream"
            return await desk.client.post(path, data={"text": "hi", **form}, headers=head)

        answer = await send()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        *events, usage = map(json.loads, data[:-1])
        assert "".join(event["choices"][0]["text"] for event in events) == "HI"
        assert usage["usage"]["completion_tokens"] == 2
        assert '"delta":{"content":"<"}' in (await send(is_chat="on")).text
        assert "event: error" in (await send("lost", text="hello")).text
        for refused, status in (
            (await send("full"), 429),
            (await send("none"), 404),
            (await send(max_tokens="0"), 422),
        ):
            assert refused.status_code == status
            assert refused.text.lstrip().startswith("<div")

    at_desk(tmp_path, story, generating=DoubleGenerating())


def test_a_session_needs_the_scope_and_its_form_the_token(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await signed_in(desk, "compile")
        assert (await desk.client.get(PATH)).status_code == 403
        await signed_in(desk, "admin")
        token = csrf_of((await desk.client.get(PATH)).text)
        for path in (PATH, f"{PATH}/stream"):
            form = {"text": "hi"}
            assert (await desk.client.post(path, data=form)).status_code == 403
            assert (await desk.client.post(path, data=form | {"csrf": token})).status_code == 200

    at_desk(tmp_path, story, generating=DoubleGenerating(), keys_required=True)
