"""Pages for programs: the Python API, the HTTP API and gRPC."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pipeline
from service.app import create_app
from service.client import Client, Inference, Upload
from service.grpc.descriptors import HEALTH, SERVICE
from service.grpc.methods import METHODS
from service.grpc.statuses import STATUSES
from service.settings import Settings
from tests.docs.markdown import Schema, code, page, reference_of, table, type_text

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "service" / "grpc" / "protos"
ABOUT_PYTHON = """`import pipeline` compiles plans and opens engines in this process.
`service.client` talks to a server. Importing either loads no heavy library. Everything else may
change without notice."""
ABOUT_HTTP = """A running server shows the same at `/docs`, and for machines at `/openapi.json`.
Every refusal is `{"error": what was expected and what came, "code": ..., "next": what to do}`; see
[errors](errors.md). Every answer has an `X-Request-Id`, which the log names too. Where keys are
needed, send `Authorization: Bearer KEY`."""
ABOUT_GRPC = """The server speaks `inference.GRPCInferenceService`, the protocol of Triton's
clients, and gRPC's health checks. The methods of CUDA shared memory, traces and log settings are
UNIMPLEMENTED. Where keys are needed, send the metadata `authorization: Bearer KEY`. An error has
the metadata `crucible-code`, which [errors](errors.md) lists, and `retry-after` if time helps."""


class _Annotation(str):
    """An annotation that a signature shows as it is written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def python_page() -> str:
    exported = [getattr(pipeline, name) for name in pipeline.__all__]
    return page(
        "Python",
        "the docstrings of `pipeline/api.py` and `service/client/`",
        ABOUT_PYTHON,
        *_documented("pipeline", exported),
        *_documented("service.client", [Client, Upload, Inference]),
    )


def _documented(module: str, objects: list[Any]) -> Iterator[str]:
    for each in objects:
        yield f"## `{module}.{each.__name__}`"
        yield from _signature_and_text(each.__name__, each)
        if inspect.isclass(each) and not issubclass(each, Exception):
            for name, method in _methods(each):
                yield f"### `{each.__name__}.{name}`"
                yield from _signature_and_text(name, method)


def _methods(cls: type) -> list[tuple[str, Callable[..., object]]]:
    public = inspect.getmembers(cls, inspect.isfunction)
    return [(name, method) for name, method in public if not name.startswith("_")]


def _signature_and_text(name: str, documented: Callable[..., object]) -> Iterator[str]:
    signature = inspect.signature(documented)
    parameters = [
        each.replace(annotation=_Annotation(each.annotation))
        if isinstance(each.annotation, str)
        else each
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    returned = signature.return_annotation
    answer = _Annotation(returned) if isinstance(returned, str) else returned
    shown = signature.replace(parameters=parameters, return_annotation=answer)
    yield f"```python\n{name}{shown}\n```"
    yield inspect.getdoc(documented) or ""


def http_page() -> str:
    with tempfile.TemporaryDirectory() as home:
        document = create_app(Settings(home=Path(home))).openapi()
    schemas = document["components"]["schemas"]
    links = {
        name: f"[{name}](#{name})" for name, schema in schemas.items() if "properties" in schema
    }
    return page(
        "HTTP",
        "the OpenAPI document of the service",
        ABOUT_HTTP,
        *(
            part
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            for part in _operation(f"{method.upper()} {path}", operation, schemas, links)
        ),
        "## Bodies",
        *(part for name in links for part in _body(name, schemas, links)),
    )


def _operation(
    title: str, operation: Schema, schemas: Schema, links: dict[str, str]
) -> Iterator[str]:
    yield f"## `{title}`"
    yield operation.get("description", "")
    yield table(
        ("parameter", "in", "type", "meaning"),
        (
            (
                code(each["name"]),
                each["in"],
                type_text(each["schema"], schemas, links),
                each.get("description") or each["schema"].get("description", ""),
            )
            for each in operation.get("parameters", ())
        ),
    )
    forms = operation.get("requestBody", {}).get("content", {})
    yield table(
        ("request body", "content"),
        ((code(form), _content(content, schemas, links)) for form, content in forms.items()),
    )
    yield table(
        ("status", "answer"),
        (
            (status, f"{answer['description']} {_forms(answer, schemas, links)}")
            for status, answer in operation["responses"].items()
            if status.isdecimal()
        ),
    )


def _forms(answer: Schema, schemas: Schema, links: dict[str, str]) -> str:
    texts = (
        f"{code(form)} {_content(content, schemas, links)}".strip()
        for form, content in answer.get("content", {}).items()
    )
    joined = "; ".join(texts)
    return f"({joined})" if joined else ""


def _content(content: Schema, schemas: Schema, links: dict[str, str]) -> str:
    schema = content.get("schema", {})
    if keys := schema.get("properties"):
        return ", ".join(code(key) for key in keys)
    return type_text(schema, schemas, links) if schema.get("type") or reference_of(schema) else ""


def _body(name: str, schemas: Schema, links: dict[str, str]) -> Iterator[str]:
    schema = schemas[name]
    yield f"### `{name}` {{ #{name} }}"
    yield schema.get("description", "")
    yield table(
        ("key", "type", "meaning"),
        (
            (code(key), type_text(each, schemas, links), each.get("description", ""))
            for key, each in schema["properties"].items()
        ),
    )


def grpc_page() -> str:
    text = (PROTOS / "grpc_service.proto").read_text(encoding="utf-8")
    rows = []
    for service in (SERVICE, HEALTH):
        for method in service.methods:
            if method.name in METHODS:
                rows.append(
                    (
                        code(f"{service.full_name}/{method.name}"),
                        METHODS[method.name].may,
                        code(method.input_type.name),
                        code(method.output_type.name),
                        _comment(text, method.name),
                    )
                )
    return page(
        "gRPC",
        "`service/grpc/protos` and `service/grpc/methods.py`",
        ABOUT_GRPC,
        "## Methods",
        "`ModelStreamInfer` and `Watch` answer with a stream. The scope is that of the key.",
        table(("method", "scope", "message", "answer", "meaning"), rows),
        "## Statuses",
        "Both protocols refuse for the same reasons:",
        table(
            ("HTTP status", "gRPC status"),
            ((str(status), code(grpc.name)) for status, grpc in STATUSES.items()),
        ),
    )


def _comment(text: str, method: str) -> str:
    """The sentence about a method in the comments of the published definition."""
    match = re.search(rf"rpc {method}\([^@]*?(?://@@.*\n\s*)*?//@@\s{{5}}(?P<about>[A-Z].*)", text)
    return match["about"] if match else ""
