"""/ui/sign-in: exchange a key for a session's cookie."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from service.auth import Caller
from service.errors import Unauthorized
from service.http.guard import SESSION_COOKIE
from service.http.routers.dependencies import CurrentService, caller_of
from service.pages.access import Author, session_of
from service.pages.rendering import SIGN_IN, page
from service.storage.sessions import SESSION_S

router = APIRouter(include_in_schema=False)


@router.get(SIGN_IN)
async def sign_in_page(request: Request, next: str = "/") -> Response:
    if caller_of(request).owner:
        return RedirectResponse(own_path(next), 303)
    return page(request, "sign_in.html", next=own_path(next), failure="")


@router.post(SIGN_IN)
async def sign_in(
    request: Request,
    service: CurrentService,
    key: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",
) -> Response:
    source = request.state.source
    try:
        known = await service.verify(key.strip(), source)
    except Unauthorized as error:
        return page(request, "sign_in.html", 401, next=own_path(next), failure=error.message)
    actor = Caller(known.owner, known.scopes, known.prefix, source).actor
    token = await asyncio.to_thread(service.sessions.begin, known, actor)
    answer = RedirectResponse(own_path(next), 303)
    answer.set_cookie(
        SESSION_COOKIE,
        token,
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        # TLS may end in a proxy; the header can only restrict the own cookie
        secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
    )
    return answer


@router.post("/ui/sign-out")
async def sign_out(request: Request, caller: Author, service: CurrentService) -> Response:
    token = session_of(request)
    await asyncio.to_thread(service.sessions.end, token, caller.actor)
    answer = RedirectResponse(SIGN_IN, 303)
    answer.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return answer


def own_path(path: str) -> str:
    """Return a path of this site; any other address becomes the first page."""
    is_own = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if is_own and path.isprintable() else "/"
