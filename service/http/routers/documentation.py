"""/help: the site of the documentation, which `make docs` builds."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from pipeline.errors import PlanError
from service.errors import NotFound

router = APIRouter(include_in_schema=False)
START = "index.html"
INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
POLICY = (
    "default-src 'none'; script-src 'self'{hashes}; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self'; worker-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Site:
    """The files of the site by their path in it, and the hashes of the scripts in each page.

    A path of a request is only looked up here, so it cannot name another file.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)


def open_site(folder: Path | None) -> Site:
    """Read which files the site has. PlanError if the folder holds no site."""
    if folder is None:
        return Site()
    files = {
        file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()
    }
    if START not in files:
        raise PlanError(
            f"the setting docs names '{folder}', where no {START} is",
            "build the site with `make docs`, and name build/docs",
        )
    pages = {name: file for name, file in files.items() if name.endswith(".html")}
    return Site(files, {name: _hashes(file.read_bytes()) for name, file in pages.items()})


def _hashes(page: bytes) -> str:
    """The sources of a policy that allow the scripts written in a page, and no other."""
    digests = (hashlib.sha256(script).digest() for script in INLINE_SCRIPT.findall(page))
    return "".join(f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


@router.get("/help")
async def start(request: Request) -> Response:
    """Lead to the first page, since the links of a page are relative."""
    _site_of(request)
    return RedirectResponse(f"help/{START}")


@router.get("/help/{name:path}")
async def page(name: str, request: Request) -> Response:
    """Return a file of the site."""
    site, name = _site_of(request), name or START
    if name not in site.files:
        raise NotFound("no such page of the documentation", f"begin at /help/{START}")
    headers = {
        "Content-Security-Policy": POLICY.format(hashes=site.hashes.get(name, "")),
        "X-Content-Type-Options": "nosniff",
    }
    return FileResponse(site.files[name], headers=headers)


def _site_of(request: Request) -> Site:
    """The site of this server. NotFound says how to build one."""
    site: Site = request.app.state.site
    if not site.files:
        raise NotFound(
            "this server has no site of the documentation",
            "the operator builds it with `make docs` in the checkout, and sets"
            " CRUCIBLE_SERVICE_DOCS to the folder build/docs; GET /docs lists all paths",
        )
    return site
