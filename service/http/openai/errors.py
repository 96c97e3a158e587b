"""Refusals of /v1 in OpenAI's form:

{"error": {"message": what was expected, what came, what to do next, "type", "param", "code"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError

from service.errors import Answer, NotFound, TooMany, Unauthorized, Unprocessable
from service.sandbox.framing import cut

ROOT = "/v1"
MAX_NAME = 80  # characters of a parameter's name that a refusal repeats
SHORT = Repr()
SHORT.maxlevel = 2  # of lists in a wrong value
DOCUMENTED = "GET /docs shows what this path takes"
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
NOT_SERVED = frozenset(
    {
        "n",
        "best_of",
        "suffix",
        "logit_bias",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "modalities",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "store",
    }
)
"""Parameters that take one value only, because the engine has no more."""

VALIDATION_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "json_invalid": "invalid_json",
}


class BadParameter(Unprocessable):
    """A parameter of /v1 is invalid, or the engine cannot serve it."""

    def __init__(self, message: str, next_step: str, param: str) -> None:
        super().__init__(message, next_step)
        self.param = param


class NotServed(BadParameter):
    """A value that OpenAI's API has, and the engine cannot serve."""


CODES = {
    NotServed: "unsupported_parameter",
    BadParameter: "invalid_value",
    NotFound: "model_not_found",
    Unauthorized: "invalid_api_key",
    TooMany: "rate_limit_exceeded",
}
"""OpenAI's codes. Any other error has ours."""


@dataclass(frozen=True, slots=True)
class _Detail:
    message: str
    param: str | None
    code: str | None


def is_openai(path: str) -> bool:
    """Whether a path speaks OpenAI's protocol."""
    return path == ROOT or path.startswith(f"{ROOT}/")


def refusal_body(answer: Answer, error: BaseException | None) -> bytes:
    """Return the body of a refusal. `error` is what was refused, if it is known."""
    status = _status(answer)
    if isinstance(error, RequestValidationError):
        detail = _invalid(error)
    else:
        message, step = answer.body["error"], answer.body.get("next", "")
        if step:
            message = f"{message}. {step[0].upper()}{step[1:]}"
        code = next((CODES[each] for each in CODES if isinstance(error, each)), None)
        param = error.param if isinstance(error, BadParameter) else None
        if isinstance(error, NotFound):
            param = "model"
        detail = _Detail(message, param, code or answer.body["code"])
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps(
        {
            "error": {
                "message": detail.message,
                "type": kind,
                "param": detail.param,
                "code": detail.code,
            }
        }
    )


def refusal_response(request: Request, answer: Answer) -> Response:
    """Send a refusal."""
    body = refusal_body(answer, getattr(request.state, "refusal", None))
    return Response(body, _status(answer), answer.headers, "application/json")


def _status(answer: Answer) -> int:
    """OpenAI's API has no 422."""
    return 400 if answer.status == Unprocessable.status else answer.status


def _invalid(error: RequestValidationError) -> _Detail:
    """Describe the first fault of a body."""
    fault = error.errors()[0]
    kind, place = fault["type"], fault["loc"][1:]  # after `body`
    code = VALIDATION_CODES.get(kind, "invalid_value")
    if kind == "json_invalid":
        reason = fault.get("ctx", {}).get("error", "")
        return _Detail(f"the body is not JSON: {reason}. {DOCUMENTED}", None, code)
    param = name_of(place)
    if not param:
        return _Detail(f"expected a JSON object as the body. {DOCUMENTED}", None, code)
    if kind == "extra_forbidden":
        return _Detail(f"this path has no parameter `{param}`. {DOCUMENTED}", param, code)
    if kind == "missing":
        return _Detail(f"expected the parameter `{param}`, got none. {DOCUMENTED}", param, code)
    shown = shown_value(fault["input"])
    if place[0] in NOT_SERVED:
        param = str(place[0])
        message = f"the engine serves only the default of `{param}`, got {shown}. Leave it out"
        return _Detail(message, param, "unsupported_parameter")
    return _Detail(f"`{param}`: {_reason(fault, shown)}. {DOCUMENTED}", param, code)


def _reason(fault: Mapping[str, Any], shown: str) -> str:
    match fault["type"], fault.get("ctx", {}):
        case "too_short", {"min_length": least, "actual_length": count}:
            return f"expected at least {least}, got {count}"
        case "too_long", {"max_length": most, "actual_length": count}:
            return f"expected at most {most}, got {count}"
        case "value_error", {"error": error}:  # of our own checks, which say what came
            return str(error)
    return f"{fault['msg']}, got {shown}"


def shown_value(value: object) -> str:
    """Return a value of a request, cut, for a message about it."""
    return SHORT.repr(value)


def name_of(place: tuple[int | str, ...]) -> str:
    """Return the name of a parameter, such as `messages[0].content`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return cut("".join(parts).removeprefix("."), MAX_NAME)
