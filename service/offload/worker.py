"""A process that does what would hold up the server's event loop: `python -m
service.offload.worker`, spoken to over its stdin and stdout.

A request and its answer are each   8 bytes: length of the head | 8 bytes: length of the body |
                                    head, JSON | body
It ends when its stdin does, so it does not outlive the server. What it decodes comes from
strangers: a decoder that crashes takes only this process along.
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
Given = dict[str, Any]
Work = Callable[..., tuple[Head, Parts]]


def _decoded(tensors: Tensors, rest: Head) -> tuple[Head, Parts]:
    length, parts = binary_form(tensors, rest)
    return {"header_length": length}, parts


def decode_oip(body: bytes, header_length: int | None) -> tuple[Head, Parts]:
    """Any request of the protocol, as one with binary tensors."""
    rest = {key: value for key, value in split(body, header_length)[1].items() if key != "inputs"}
    return _decoded(parse_request(body, header_length).inputs, rest)


def decode_json(body: bytes, dtypes: dict[str, str]) -> tuple[Head, Parts]:
    asked = parse_json(body, dtypes)
    timeout = (
        {}
        if asked.timeout_s is None
        else {"parameters": {"timeout": max(1, int(asked.timeout_s * 1e6))}}
    )
    return _decoded(
        asked.inputs, {**timeout, "outputs": [{"name": name} for name in asked.outputs]}
    )


def decode_npz(body: bytes, limit: int) -> tuple[Head, Parts]:
    return _decoded(arrays_from_npz(body, limit), {})


def decode_image(body: bytes, recipe: dict[str, object], dtype: str) -> tuple[Head, Parts]:
    made = InputRecipe.model_validate(recipe)
    return _decoded({made.input: array_from_image(body, made, dtype)}, {})


def encode(
    body: bytes,
    header_length: int,
    answer: Given,
    timing: Given,
    plain: bool,
    binary: dict[str, bool],
) -> tuple[Head, Parts]:
    """An answer, which came in the form of a request, as JSON."""
    tensors = parse_request(body, header_length).inputs
    whole = InferAnswer(**answer, outputs=tensors, timing=Timing(**timing))
    parts = (
        [encode_json(whole)] if plain else encode_answer(whole, OipRequest({}, binary_of=binary))
    )
    return {"header_length": len(parts[0])}, parts


WORK: Mapping[str, Work] = {
    work.__name__: work for work in (decode_oip, decode_json, decode_npz, decode_image, encode)
}


def answer_head(answer: InferAnswer) -> dict[str, object]:
    """What `encode` is told of an answer beside its tensors."""
    named = {name: getattr(answer, name) for name in ("model", "version", "device", "id")}
    return {"answer": named, "timing": asdict(answer.timing)}


def done(head: Head, body: bytes, works: Mapping[str, Work] = WORK) -> tuple[Head, Parts]:
    """What is asked for, or how it is refused."""
    arguments = dict(head)
    try:
        return works[str(arguments.pop("work"))](body, **arguments)
    except ServiceError as error:
        return {
            "error": type(error).__name__,
            "message": error.message,
            "next": error.next_step,
        }, []


def main(given: BinaryIO, taken: BinaryIO, works: Mapping[str, Work] = WORK) -> None:
    while lengths := given.read(LENGTHS.size):
        head_length, body_length = LENGTHS.unpack(lengths)
        head = orjson.loads(given.read(head_length))
        said, parts = done(head, given.read(body_length), works)
        text = orjson.dumps(said)
        for part in (LENGTHS.pack(len(text), sum(map(len, parts))), text, *parts):
            taken.write(part)
        taken.flush()


def serve(works: Mapping[str, Work]) -> None:
    """Be a helper, until the server hangs up."""
    os.nice(5)  # the server comes first
    main(sys.stdin.buffer, sys.stdout.buffer, works)


if __name__ == "__main__":
    serve(WORK)
