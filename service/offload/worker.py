"""A helper process for work that would block the server's event loop: `python -m
service.offload.worker`. It reads requests from stdin and writes answers to stdout.

A request is a frame: its head names a function and its arguments, and its body is the first
argument. The answer is a frame, too. A helper ends at the end of its stdin, so it does not outlive
the server. The bodies are untrusted: if a decoder crashes, it ends only this process.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, TypeAdapter

from pipeline.core.frozen import Frozen
from pipeline.serving_inputs import InputRecipe
from service.codecs.images import array_from_image
from service.codecs.native_json import encode_json, parse_json
from service.codecs.npy import arrays_from_npz
from service.codecs.oip import OipRequest, binary_form, encode_answer, parse_request, split
from service.errors import ServiceError
from service.inference import InferAnswer, Timing
from service.offload.model_files import check_language_model, check_model, read_interface
from service.sandbox.framing import Failed, Parts, failed_from_error, frame, read_frame
from service.sandbox.launch import limit

Fields = dict[str, Any]
Work = Callable[..., tuple[int, Parts]]
"""Returns the length of the JSON at the start of a body, and the parts of the body."""


class Result(Frozen):
    """The result of the work is the body."""

    kind: Literal["result"] = "result"
    header_length: Annotated[int, Field(ge=0)]  # of the JSON at the start of the body


FromHelper = Annotated[Result | Failed, Field(discriminator="kind")]
FROM_HELPER: TypeAdapter[FromHelper] = TypeAdapter(FromHelper)


def decode_oip(body: bytes, header_length: int | None) -> tuple[int, Parts]:
    """Convert any request of the protocol to one with binary tensors."""
    rest = {key: value for key, value in split(body, header_length)[1].items() if key != "inputs"}
    request = parse_request(body, header_length)
    return binary_form(request.inputs, rest, request.shared_inputs)


def decode_json(body: bytes, dtypes: dict[str, str]) -> tuple[int, Parts]:
    request = parse_json(body, dtypes)
    rest: dict[str, object] = {}
    if request.timeout_s is not None:
        rest["parameters"] = {"timeout": max(1, int(request.timeout_s * 1e6))}
    rest["outputs"] = [{"name": name} for name in request.outputs]
    return binary_form(request.inputs, rest)


def decode_npz(body: bytes, limit: int) -> tuple[int, Parts]:
    return binary_form(arrays_from_npz(body, limit), {})


def decode_image(body: bytes, recipe: dict[str, object], dtype: str) -> tuple[int, Parts]:
    checked_recipe = InputRecipe.model_validate(recipe)
    array = array_from_image(body, checked_recipe, dtype)
    return binary_form({checked_recipe.input: array}, {})


def encode(
    body: bytes,
    header_length: int,
    answer: Fields,
    timing: Fields,
    plain: bool,
    binary: dict[str, bool],
    written: list[Fields],
) -> tuple[int, Parts]:
    """Encode an answer as JSON; it comes in the form of a binary request."""
    tensors = parse_request(body, header_length).inputs
    full_answer = InferAnswer(**answer, outputs=tensors, timing=Timing(**timing))
    parts: Parts
    if plain:
        parts = [encode_json(full_answer)]
    else:
        parts = encode_answer(full_answer, OipRequest({}, binary_of=binary), written)
    return len(parts[0]), parts


WORK: Mapping[str, Work] = {
    work.__name__: work
    for work in (
        decode_oip,
        decode_json,
        decode_npz,
        decode_image,
        encode,
        check_model,
        check_language_model,
        read_interface,
    )
}


def answer_head(answer: InferAnswer) -> dict[str, object]:
    """The arguments of `encode` for an answer, without its tensors."""
    fields = {name: getattr(answer, name) for name in ("model", "version", "device", "id")}
    return {"answer": fields, "timing": asdict(answer.timing)}


def answer(head: Fields, body: bytes, works: Mapping[str, Work]) -> tuple[FromHelper, Parts]:
    """Do the requested work; return its result, or the error of the service."""
    try:
        length, parts = works[head.pop("work")](body, **head)
        return Result(header_length=length), parts
    except ServiceError as error:
        return failed_from_error(error), ()


def serve(works: Mapping[str, Work]) -> None:
    """Work as a helper until the server closes stdin."""
    os.nice(5)  # the server has priority
    while True:
        try:
            head, body = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        message, parts = answer(orjson.loads(head), body, works)
        sys.stdout.buffer.writelines(frame(FROM_HELPER.dump_json(message), parts))
        sys.stdout.buffer.flush()
        del body, parts  # they may be large, and the next request may be far away


def limit_memory(more_bytes: int) -> None:
    """Limit the memory of this process to what it has and `more_bytes`."""
    status = Path("/proc/self/status").read_text("ascii")
    used = next(int(line.split()[1]) for line in status.splitlines() if line[:7] == "VmData:")
    limit(resource.RLIMIT_DATA, used * 1024 + more_bytes)


if __name__ == "__main__":
    serve(WORK)
