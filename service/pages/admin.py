"""/ui/limits for everybody. /ui/admin for administrators: keys, the audit, and this host."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from pipeline.errors import CrucibleError
from service.http.routers.dependencies import CurrentService
from service.http.routers.limits import limits
from service.pages.access import Author, Visitor
from service.pages.rendering import page
from service.storage.audit_entry import ACTIONS, Filter
from service.storage.key import SCOPES

router = APIRouter(include_in_schema=False)
ENTRIES = 100
ADMIN = "/ui/admin"


@router.get("/ui/limits")
async def limits_page(request: Request, caller: Visitor, service: CurrentService) -> Response:
    return page(request, "limits.html", limits=await limits(caller, service))


@router.get(ADMIN)
async def admin_page(
    request: Request,
    caller: Visitor,
    service: CurrentService,
    action: Annotated[str, Query(max_length=100)] = "",
    owner: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    caller.require("admin")
    return await _admin(request, service, Filter(action=action, owner=owner))


@router.post("/ui/admin/keys")
async def create_key(
    request: Request,
    caller: Author,
    service: CurrentService,
    name: Annotated[str, Form(max_length=100)] = "",
    owner: Annotated[str, Form(max_length=100)] = "",
    scope: Annotated[tuple[str, ...], Form()] = (),
) -> Response:
    """Show the text of a new key, once."""
    caller.require("admin")
    if not name.strip() or not scope:
        failure = "expected a name and at least one scope: choose what the key may do"
        return await _admin(request, service, Filter(), failure=failure, status=422)
    try:
        _, text = await asyncio.to_thread(
            service.keys.create, name.strip(), scope, owner.strip(), caller.actor
        )
    except CrucibleError as error:
        return await _admin(request, service, Filter(), failure=error.message, status=422)
    return await _admin(request, service, Filter(), new_key=text)


@router.post("/ui/admin/keys/{prefix}/revoke")
async def revoke_key(prefix: str, caller: Author, service: CurrentService) -> Response:
    caller.require("admin")
    await asyncio.to_thread(service.keys.revoke, prefix, caller.actor)
    return RedirectResponse(ADMIN, 303)


async def _admin(
    request: Request,
    service: CurrentService,
    which: Filter,
    *,
    new_key: str = "",
    failure: str = "",
    status: int = 200,
) -> Response:
    service.host()  # the sandbox is known only when the server has started
    proof = await service.proof()
    return page(
        request,
        "admin.html",
        status,
        keys=await asyncio.to_thread(service.keys.list),
        entries=await asyncio.to_thread(service.jobs.audit.entries, which, ENTRIES),
        counts=await service.read(lambda: service.jobs.counts()),
        proof=proof,
        devices=service.devices,
        nodes=await service.runner.nodes(),
        which=which,
        actions=ACTIONS,
        scopes=SCOPES,
        new_key=new_key,
        failure=failure,
    )
