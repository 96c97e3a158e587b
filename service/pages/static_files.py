"""/ui/static: style sheets and scripts. Nothing is loaded from another server."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request, Response

from pipeline.report.graph.view import graph_script, graph_style
from service.errors import NotFound

router = APIRouter(include_in_schema=False)
FORMS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the digest of each file by its name."""
    folder = resources.files("service.pages") / "static"
    contents = {each.name: each.read_bytes() for each in folder.iterdir()}
    contents |= {"graph.js": graph_script().encode(), "graph.css": graph_style().encode()}
    return {
        name: (content, hashlib.sha256(content).hexdigest()[:16])
        for name, content in contents.items()
        if name.rpartition(".")[2] in FORMS
    }


def url_of(name: str) -> str:
    """Return a path that changes with the file, so that a browser may keep it for ever."""
    return f"/ui/static/{name}?{files()[name][1]}"


@router.get("/ui/static/{name}")
async def static_file(request: Request, name: str) -> Response:
    if name not in files():
        raise NotFound(f"no file '{name}'", "reload the page")
    content, digest = files()[name]
    newest = request.url.query == digest
    headers = {
        "Cache-Control": "max-age=31536000, immutable" if newest else "no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(content, media_type=FORMS[name.rpartition(".")[2]], headers=headers)
