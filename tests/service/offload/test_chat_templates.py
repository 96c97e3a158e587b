"""Chat templates: the text is that of transformers, and a hostile one harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.errors import Unprocessable
from service.language.generation import ServedLanguage
from service.offload.chat_templates import ChatTemplates
from service.offload.chat_worker import MAX_OUTPUT_BYTES, compiled
from service.sandbox.layers import Sandbox
from tests.service.language.double import Language

CHAT = [
    {"role": "system", "content": " Answer in short. "},
    {"role": "user", "content": 'Two <b>&</b> "three"?\n'},
    {"role": "assistant", "content": "Fünf 🙂"},
    {"role": "user", "content": "Why?"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

# in the manner of three families, and of what they use of Jinja
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "1 Jan 2026" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|end|>\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
NAMESPACES = """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- macro shown(message) %}<|im_start|>{{ message.role }}
{{ message.content | tojson }}{{ message | tojson(indent=2) }}<|im_end|>
{% endmacro %}
{%- for message in messages %}
    {%- if loop.index0 > ns.last %}{% break %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {{- shown(message) }}
        {%- endgeneration %}
    {%- else %}
        {{- shown(message) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
SHORT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHERS = """
{% if tools %}tools{% endif %}
    {% for message in messages %}
    {{ loop.index }}: {{ message.content | upper }} {{ unknown }} {{ message.get('name', '-') }}
    {% if loop.index == 2 %}{% continue %}{% endif %}
    {% endfor %}
{{ strftime_now("%Y")[:2] }}{{ dict(a=1) | tojson }}{{ dict.fromkeys(["k"]) }}{{ eos_token }}
"""


def served(template: str) -> ServedLanguage:
    return Language(chat_template=template).served("m", 1)


def with_templates(
    home: Path, story: Callable[[ChatTemplates], Awaitable[None]], finds: bool = False
) -> None:
    async def run() -> None:
        sandbox = Sandbox(home)
        if finds:
            sandbox.find()
        templates = ChatTemplates(sandbox)
        try:
            await story(templates)
        finally:
            await templates.close()

    asyncio.run(run())


@pytest.mark.parametrize("template", [HEADERS, NAMESPACES, SHORT, OTHERS])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:2]])
def test_a_chat_is_rendered_as_by_transformers(template: str, chat: list[dict[str, str]]) -> None:
    pytest.importorskip("transformers", reason="language models: no transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [chat], chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    values: dict[str, Any] = {
        **SPECIAL,
        "messages": chat,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    assert compiled(template).render(values) == expected
    assert "three" in expected.lower()


def test_a_helper_renders_chats_and_says_why_a_template_refuses_one(tmp_path: Path) -> None:
    async def story(templates: ChatTemplates) -> None:
        assert await templates.prompt(served(SHORT), CHAT[3:]) == (
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        refuses = served("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(Unprocessable, match="refused: roles must alternate") as error:
            await templates.prompt(refuses, CHAT)
        assert "/v1/completions" in error.value.next_step
        with pytest.raises(Unprocessable, match="'m' has no chat template"):
            await templates.prompt(served(""), CHAT)

    with_templates(tmp_path, story)


HOSTILE = {
    "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}": "took more",
    "{{ 9 ** (9 ** 9) }}": "took more than 1 s",
    "{{ range(10**9) | list }}": "Range too big",
    "{{ 'a' * 10**10 }}": "MemoryError",
    "{{ 'a' * 2**21 }}": f"more than {MAX_OUTPUT_BYTES} bytes",
    "{% for a in range(9999) %}{{ 'a' * 999 }}{% endfor %}": "bytes",
    "{{ ''.__class__ }}": "unsafe",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.format.__globals__ }}": "unsafe",
    "{{ '{0.__class__}'.format(1) }}": "unsafe",
    "{{ raise_exception.__globals__['dt'].sys.modules['os'].system('id') }}": "unsafe",
    "{{ lipsum.__globals__ }}": "unsafe",
    "{% set n = namespace(__class__=1) %}": "begins with '_'",
    "{% set n = namespace() %}{% set n._x = 1 %}": "begins with '_'",
    "{% include '/etc/passwd' %}": "TypeError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% for": "refused",
}


def test_a_hostile_template_is_refused_and_the_next_one_is_rendered(tmp_path: Path) -> None:
    async def story(templates: ChatTemplates) -> None:
        for template, reason in HOSTILE.items():
            with pytest.raises(Unprocessable) as error:
                await templates.prompt(served(template), CHAT)
            assert reason in str(error.value), template
        for _ in range(2):
            assert await templates.prompt(served("{{ bos_token }}"), CHAT) == "<s>"

    with_templates(tmp_path, story)


def test_the_helper_stays_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    async def story(templates: ChatTemplates) -> None:
        pids = []
        for number in range(3):
            assert await templates.prompt(served("{{ bos_token }}"), CHAT) == "<s>"
            (helper,) = templates._helpers._idle
            pids.append(helper.pid)
            if number == 1:
                helper.kill()
                await helper.wait()
        assert pids[0] == pids[1] != pids[2]

    with_templates(tmp_path, story)


def test_the_helper_runs_in_the_layers_of_the_sandbox(tmp_path: Path) -> None:
    async def story(templates: ChatTemplates) -> None:
        assert await templates.prompt(served("{{ bos_token }}"), CHAT) == "<s>"
        (helper,) = templates._helpers._idle
        status = Path(f"/proc/{helper.pid}/status").read_text("ascii")
        assert "NoNewPrivs:\t1" in status
        if templates._helpers._sandbox.layers.seccomp:  # a container may have filters, too
            assert "Seccomp:\t2" in status

    with_templates(tmp_path, story, finds=True)
