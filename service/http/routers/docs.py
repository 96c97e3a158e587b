"""/docs: the OpenAPI document as a plain page. FastAPI's own page loads its scripts from a CDN;
this one needs no script and no network.
"""

from __future__ import annotations

import html
import json
from typing import Any

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)
POLICY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c2024; background: #fff }
h2 { margin-top: 2.5rem; border-top: 1px solid #d0d5da; padding-top: 1rem }
code, pre { font: 14px/1.45 ui-monospace, monospace }
pre { background: #f3f5f7; padding: .8rem; overflow-x: auto }
td, th { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0 }
"""


@router.get("/docs")
async def docs(request: Request) -> Response:
    """All paths with what they take and give."""
    return Response(
        page(request.app.openapi()), media_type="text/html; charset=utf-8", headers=POLICY
    )


def page(document: dict[str, Any]) -> str:
    """An OpenAPI document for people."""
    title, about = (html.escape(document["info"].get(key, "")) for key in ("title", "description"))
    operations = "".join(
        _operation(method, path, operation, document)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    machine = (
        'For machines: <a href="/openapi.json">/openapi.json</a>. Every refusal has the same form:'
    )
    refusal = _example(document["components"]["schemas"]["Refusal"])
    head = (
        '<!doctype html><html lang="en"><meta'
        f' charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    )
    return f"{head}<h1>{title}</h1><p>{about}</p><p>{machine}</p>{refusal}{operations}</html>"


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    parts = [
        f"<h2><code>{method.upper()}"
        f" {html.escape(path)}</code></h2><p>{html.escape(operation.get('description', ''))}</p>"
    ]
    if rows := "".join(_parameter(parameter) for parameter in operation.get("parameters", ())):
        parts.append(f"<table><tr><th>Parameter</th><th>In</th><th>About</th></tr>{rows}</table>")
    for form, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content["schema"], document)
        fields = ", ".join(schema.get("properties", ()))
        parts.append(f"<p>Takes <code>{html.escape(form)}</code>: {html.escape(fields)}</p>")
        parts.append(
            _example({"examples": [content["example"]]} if "example" in content else schema)
        )
    for status, answer in operation["responses"].items():
        if status.isdecimal():
            forms = ", ".join(answer.get("content", ()))
            parts.append(
                f"<p>{status}: {html.escape(answer['description'])}"
                f" <code>{html.escape(forms)}</code></p>"
            )
            parts += [
                _example(_resolved(content.get("schema", {}), document))
                for content in answer.get("content", {}).values()
            ]
    return "".join(parts)


def _parameter(parameter: dict[str, Any]) -> str:
    cells = (
        parameter["name"],
        parameter["in"],
        parameter.get("description", "") or parameter.get("schema", {}).get("description", ""),
    )
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    schema = schema.get("anyOf", [schema])[0]  # the other one is null
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _example(schema: dict[str, Any]) -> str:
    return "".join(
        f"<pre>{html.escape(json.dumps(example, indent=1))}</pre>"
        for example in schema.get("examples", ())[:1]
    )
