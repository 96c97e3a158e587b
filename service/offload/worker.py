"""A helper process for work that would block the server's event loop: `python -m
service.offload.worker`. It reads requests from stdin and writes answers to stdout.

A request and its answer are each   8 bytes: length of the head | 8 bytes: length of the body |
                                    head, JSON | body
It ends at the end of its stdin, so it does not outlive the server. The bodies are untrusted: if a
decoder crashes, it ends only this process.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

import orjson

from pipeline.core import Tensors
from pipeline.serving_inputs import InputRecipe
from service.codecs.images import array_from_image
from service.codecs.native_json import encode_json, parse_json
from service.codecs.npy import arrays_from_npz
from service.codecs.oip import OipRequest, binary_form, encode_answer, parse_request, split
from service.errors import ServiceError
from service.inference import InferAnswer, Timing

LENGTHS = struct.Struct("<QQ")

Head = Mapping[str, object]
Parts = Sequence[bytes | memoryview]
Fields = dict[str, Any]
Work = Callable[..., tuple[Head, Parts]]


def _decoded(tensors: Tensors, rest: Head) -> tuple[Head, Parts]:
    length, parts = binary_form(tensors, rest)
    return {"header_length": length}, parts


def decode_oip(body: bytes, header_length: int | None) -> tuple[Head, Parts]:
    """Convert any request of the protocol to one with binary tensors."""
    rest = {key: value for key, value in split(body, header_length)[1].items() if key != "inputs"}
    return _decoded(parse_request(body, header_length).inputs, rest)


def decode_json(body: bytes, dtypes: dict[str, str]) -> tuple[Head, Parts]:
    request = parse_json(body, dtypes)
    rest: dict[str, object] = {}
    if request.timeout_s is not None:
        rest["parameters"] = {"timeout": max(1, int(request.timeout_s * 1e6))}
    rest["outputs"] = [{"name": name} for name in request.outputs]
    return _decoded(request.inputs, rest)


def decode_npz(body: bytes, limit: int) -> tuple[Head, Parts]:
    return _decoded(arrays_from_npz(body, limit), {})


def decode_image(body: bytes, recipe: dict[str, object], dtype: str) -> tuple[Head, Parts]:
    checked_recipe = InputRecipe.model_validate(recipe)
    array = array_from_image(body, checked_recipe, dtype)
    return _decoded({checked_recipe.input: array}, {})


def encode(
    body: bytes,
    header_length: int,
    answer: Fields,
    timing: Fields,
    plain: bool,
    binary: dict[str, bool],
) -> tuple[Head, Parts]:
    """Encode an answer as JSON; it comes in the form of a binary request."""
    tensors = parse_request(body, header_length).inputs
    full_answer = InferAnswer(**answer, outputs=tensors, timing=Timing(**timing))
    parts: Parts
    if plain:
        parts = [encode_json(full_answer)]
    else:
        parts = encode_answer(full_answer, OipRequest({}, binary_of=binary))
    return {"header_length": len(parts[0])}, parts


WORK: Mapping[str, Work] = {
    work.__name__: work for work in (decode_oip, decode_json, decode_npz, decode_image, encode)
}


def answer_head(answer: InferAnswer) -> dict[str, object]:
    """The arguments of `encode` for an answer, without its tensors."""
    fields = {name: getattr(answer, name) for name in ("model", "version", "device", "id")}
    return {"answer": fields, "timing": asdict(answer.timing)}


def done(head: Head, body: bytes, works: Mapping[str, Work] = WORK) -> tuple[Head, Parts]:
    """Do the requested work; return its result, or the error of the service."""
    arguments = dict(head)
    try:
        return works[str(arguments.pop("work"))](body, **arguments)
    except ServiceError as error:
        return {
            "error": type(error).__name__,
            "message": error.message,
            "next": error.next_step,
        }, []


def main(requests: BinaryIO, answers: BinaryIO, works: Mapping[str, Work] = WORK) -> None:
    while lengths := requests.read(LENGTHS.size):
        head_length, body_length = LENGTHS.unpack(lengths)
        head = orjson.loads(requests.read(head_length))
        answer_head, parts = done(head, requests.read(body_length), works)
        text = orjson.dumps(answer_head)
        for part in (LENGTHS.pack(len(text), sum(map(len, parts))), text, *parts):
            answers.write(part)
        answers.flush()


def serve(works: Mapping[str, Work]) -> None:
    """Work as a helper until the server closes stdin."""
    os.nice(5)  # the server has priority
    main(sys.stdin.buffer, sys.stdout.buffer, works)


if __name__ == "__main__":
    serve(WORK)
