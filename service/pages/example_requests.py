"""One inference request as commands that a reader can copy: curl, Python, and Triton's client."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from pipeline.core.shapes import TensorSpec
from service.codecs.images import FORMATS
from service.codecs.tensors import Array, datatype_of
from service.http.routers.infer import JSON, NPY

ZEROS = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """One input of a request, and where its values came from."""

    spec: TensorSpec
    array: Array
    kind: str = ZEROS  # JSON, NPY, or the Content-Type of an image
    file: str | None = None  # name of a .npy file or an image
    values: object = None  # parsed JSON


@dataclass(frozen=True, slots=True)
class Example:
    """The same request for one tool; `text` is empty if the tool cannot send it, as `note` says."""

    tool: str
    text: str
    note: str = ""


def examples(url: str, model: str, sent: list[Sent], needs_key: bool) -> tuple[Example, ...]:
    """Return the request for each tool. `url` is that of the service, and ends with a slash."""
    target = f"{url}models/{model}/infer"
    return (
        Example("curl", _curl(target, sent, needs_key)),
        Example("Python", _python(target, sent, needs_key), "Needs httpx."),
        _triton(url, model, sent, needs_key),
    )


def _curl(target: str, sent: list[Sent], needs_key: bool) -> str:
    command = [f"curl {target}"]
    if needs_key:
        command.append('-H "Authorization: Bearer $CRUCIBLE_KEY"')
    before = ""
    if file := _only_file(sent):
        command += [
            f"-H {shlex.quote(f'Content-Type: {file.kind}')}",
            f"-H 'Accept: {JSON}'",
            f"--data-binary {shlex.quote(f'@{file.file}')}",
        ]
    elif all(each.kind == JSON for each in sent):
        body = orjson.dumps({"inputs": {each.spec.name: each.values for each in sent}}).decode()
        command += [f"-H 'Content-Type: {JSON}'", f"-d {shlex.quote(body)}"]
    else:
        before = (
            "python3 - > request.json <<'END' &&\n"
            f"import json, numpy\nprint(json.dumps({_python_body(sent)}))\nEND\n"
        )
        command += [f"-H 'Content-Type: {JSON}'", "-d @request.json"]
    return before + " \\\n  ".join(command)


def _python(target: str, sent: list[Sent], needs_key: bool) -> str:
    file = _only_file(sent)
    needs_numpy = not file and any(each.kind != JSON for each in sent)
    headers = {"Content-Type": file.kind, "Accept": JSON} if file else {}
    pairs = [f"{name!r}: {value!r}" for name, value in headers.items()]
    if needs_key:
        pairs.append('"Authorization": f"Bearer {os.environ[\'CRUCIBLE_KEY\']}"')
    body = f"content=open({file.file!r}, 'rb').read()" if file else f"json={_python_body(sent)}"
    return "\n".join(
        (
            *(["import os", ""] if needs_key else []),
            "import httpx",
            *(["import numpy"] if needs_numpy else []),
            "",
            "answer = httpx.post(",
            f"    {target!r},",
            *([f"    headers={{{', '.join(pairs)}}},"] if pairs else []),
            f"    {body},",
            "    timeout=60,",
            ")",
            "print(answer.status_code, answer.json())",
        )
    )


def _triton(url: str, model: str, sent: list[Sent], needs_key: bool) -> Example:
    if any(each.kind in FORMATS for each in sent):
        note = "The Open Inference Protocol takes tensors only: decode the image to one first."
        return Example("tritonclient", "", note)
    parts = urlsplit(url)
    options = ", ssl=True" if parts.scheme == "https" else ""
    key = '{"Authorization": f"Bearer {os.environ[\'CRUCIBLE_KEY\']}"}' if needs_key else "None"
    lines = [
        *(["import os", ""] if needs_key else []),
        "import numpy",
        "import tritonclient.http as triton",
        "",
        f"client = triton.InferenceServerClient({parts.netloc!r}{options})",
        "inputs = []",
    ]
    for each in sent:
        datatype = datatype_of(each.spec.dtype)
        lines += [
            f"array = {_numpy(each)}",
            f"tensor = triton.InferInput({each.spec.name!r}, list(array.shape), {datatype!r})",
            "tensor.set_data_from_numpy(array)",
            "inputs.append(tensor)",
        ]
    lines += [
        f"answer = client.infer({model!r}, inputs, headers={key})",
        'for output in answer.get_response()["outputs"]:',
        '    print(output["name"], answer.as_numpy(output["name"]))',
    ]
    return Example("tritonclient", "\n".join(lines), "Needs tritonclient[http].")


def _only_file(sent: list[Sent]) -> Sent | None:
    """Return the file that alone is the body of the request."""
    return sent[0] if len(sent) == 1 and sent[0].file else None


def _python_body(sent: list[Sent]) -> str:
    """Return the JSON document as an expression of Python."""
    pairs = (
        f"{each.spec.name!r}: {each.values!r}"
        if each.kind == JSON
        else f"{each.spec.name!r}: {_numpy(each)}.tolist()"
        for each in sent
    )
    return f"{{'inputs': {{{', '.join(pairs)}}}}}"


def _numpy(each: Sent) -> str:
    """Return an array as an expression; bfloat16 as float32, since numpy itself has no bfloat16."""
    is_bfloat16 = each.spec.dtype == "bfloat16"
    dtype = "float32" if is_bfloat16 else each.spec.dtype
    if each.kind == NPY:
        load = f"numpy.load({each.file!r})"
        return f"({load}.view('u2').astype('u4') << 16).view('f4')" if is_bfloat16 else load
    if each.kind == JSON:
        return f"numpy.array({each.values!r}, {dtype!r})"
    return f"numpy.zeros({list(each.array.shape)}, {dtype!r})"
