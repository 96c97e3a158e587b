"""/docs: the OpenAPI document as a plain page. FastAPI's page loads scripts from a CDN; this one
needs no script and no network.
"""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, Request, Response
from jinja2 import Environment, PackageLoader, Template

router = APIRouter(include_in_schema=False)
POLICY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/docs")
async def docs(request: Request) -> Response:
    """List all paths with their parameters, bodies and answers."""
    return Response(
        page(request.app.openapi()), media_type="text/html; charset=utf-8", headers=POLICY
    )


def page(document: dict[str, Any]) -> str:
    """Render an OpenAPI document as HTML."""
    resolved = partial(_resolved, schemas=document["components"]["schemas"])
    return _template().render(document, resolved=resolved)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("service.http"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["indented"] = partial(json.dumps, indent=1)
    return environment.get_template("docs.html")


def _resolved(schema: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Follow the schema's reference, if it has one."""
    schema = schema.get("anyOf", [schema])[0]  # the other alternative is null
    name = schema.get("$ref", "").rpartition("/")[2]
    return schemas[name] if name else schema
