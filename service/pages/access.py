"""Who may see a page, and the token that every change from a page carries.

A browser sends the session's cookie by itself, even for a form that another site made. SameSite and
the guard's check of Origin refuse that; the token refuses it where a browser lacks both.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

from fastapi import Depends, Request

from service.auth import NOBODY, Caller
from service.errors import Forbidden, Unauthorized
from service.http.guard import session_token
from service.http.routers.dependencies import caller_of

FIELD, HEADER = "csrf", "x-csrf-token"
MAX_TEXT_BYTES = 16 << 20  # of one text field: JSON of tensors; a larger one is sent as a file


async def _visitor(request: Request) -> Caller:
    caller = caller_of(request)
    if caller == NOBODY:
        raise Unauthorized("you are not signed in, or your session has ended", "sign in again")
    return caller


async def _author(request: Request) -> Caller:
    caller = await _visitor(request)
    given = ""
    if csrf_token(request) and HEADER not in request.headers:
        form = await request.form(max_part_size=MAX_TEXT_BYTES)
        given = str(form.get(FIELD, ""))
    check_token(request, given)
    return caller


def check_token(request: Request, given: str) -> None:
    """Forbidden unless the request's header, or the text of its field, is the session's token."""
    expected, given = csrf_token(request), request.headers.get(HEADER, given)
    if expected and not hmac.compare_digest(expected.encode(), given.encode()):
        raise Forbidden("this form is too old, or was not made by this site", "reload the page")


def session_of(request: Request) -> str:
    """Return the token of the request's session, as the guard has read it; empty without one."""
    return session_token("; ".join(request.headers.getlist("cookie")))


def csrf_token(request: Request) -> str:
    """Return the token of the session's forms; empty without a session."""
    session = session_of(request)
    return hmac.digest(session.encode(), b"csrf", hashlib.sha256).hex() if session else ""


Visitor = Annotated[Caller, Depends(_visitor)]
"""Somebody who may read pages. Unauthorized without a session, if keys are required."""

Author = Annotated[Caller, Depends(_author)]
"""A visitor whose request may change something: its form carries the session's token."""
