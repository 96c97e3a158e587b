"""A helper process that renders chat templates: `python -m service.offload.chat_worker`.

A template comes with a model, so it is a stranger's program. It runs in Jinja's sandbox, in a
process without rights (service/sandbox), with a limit of time, memory and output. A template that
takes too long ends the process by a signal: no code of the template can hold that up.

What a template may use is what transformers gives it, so that it renders the same text.
"""

from __future__ import annotations

import datetime as dt
import json
import signal
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import orjson
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from service.errors import TooLarge, Unprocessable
from service.offload.worker import limit_memory, serve
from service.sandbox.framing import Parts

RENDER_S = 1.0  # of CPU time, so that a busy host refuses no template
OUT_OF_TIME = signal.SIGPROF
MAX_OUTPUT_BYTES = 2**20
MEMORY_BYTES = 256 * 2**20  # beyond what the process has at its start
TEMPLATES = 16  # compiled ones that are kept
MAX_REASON = 300  # characters of an error inside of a template
NEXT_STEP = "send other messages, or render the chat yourself and use /v1/completions"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which says what a template must not touch."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse the template. Jinja's own answer looks like an empty text."""
        kind = type(obj).__name__
        raise SecurityError(f"access to attribute '{attribute[:40]}' of '{kind}' is unsafe")


class _Generation(Extension):
    """`{% generation %}` marks answers for training, and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *values: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*values, **fields)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore."""

    def __init__(*values: Any, **fields: Any) -> None:
        self, *rest = values  # a field may be called `self`
        Namespace.__init__(self, *rest, **fields)
        for name in dict(*rest, **fields):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with '_', got '{name[:40]}'")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML must not have."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(TEMPLATES)
def compiled(template: str) -> Template:
    """Compile a template, in an environment of its own."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment.from_string(template)


def render(body: bytes) -> tuple[int, Parts]:
    """Render a chat, given as JSON: `template`, and `values` that it may use.

    Unprocessable if the template fails or refuses the chat, TooLarge if its text is too long.
    """
    request = orjson.loads(body)
    signal.setitimer(signal.ITIMER_PROF, RENDER_S)
    try:
        return 0, _pieces(request["template"], request["values"])
    except TooLarge:
        raise
    except TemplateError as error:
        raise Unprocessable(f"the chat template refused: {_reason(error)}", NEXT_STEP) from None
    except Exception as error:  # noqa: BLE001  any error of a stranger's program
        reason = f"{type(error).__name__}: {_reason(error)}"
        raise Unprocessable(f"the chat template failed: {reason}", NEXT_STEP) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _pieces(template: str, values: dict[str, Any]) -> Sequence[bytes]:
    pieces, size = [], 0
    for piece in compiled(template).generate(values):
        pieces.append(piece.encode("utf-8", "replace"))
        size += len(pieces[-1])
        if size > MAX_OUTPUT_BYTES:
            raise TooLarge(
                f"the chat template makes a text of more than {MAX_OUTPUT_BYTES} bytes", NEXT_STEP
            )
    return pieces


def _reason(error: Exception) -> str:
    return str(error)[:MAX_REASON] or type(error).__name__


if __name__ == "__main__":
    limit_memory(MEMORY_BYTES)
    serve({"render": render})
