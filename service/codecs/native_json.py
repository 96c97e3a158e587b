"""Crucible's own JSON form of requests and answers.

{"inputs": {"image": [[...]]}, "outputs": ["scores"], "timeout_s": 1.0}
{"model": ..., "version": 1, "device": ..., "outputs": {"scores": [[...]]}, "timing": {...}}

`outputs` and `timeout_s` of a request are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from pipeline.core.shapes import Tensors
from service.codecs.json_values import array_from_values, json_of, parsed_object
from service.codecs.oip import timing_parameters
from service.errors import Unprocessable
from service.inference import InferAnswer

KEYS = ("inputs", "outputs", "timeout_s")


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """The contents of a request, without the model."""

    inputs: Tensors
    outputs: tuple[str, ...] = ()  # empty: all
    timeout_s: float | None = None


def parse_json(body: bytes | memoryview, dtypes: Mapping[str, str]) -> PlainRequest:
    """Parse a request in JSON; `dtypes` are those of the model's inputs."""
    document = parsed_object(body, "the body")
    inputs, outputs, timeout_s = (document.get(key) for key in KEYS)
    unknown = sorted(set(document) - set(KEYS))
    if unknown:
        raise Unprocessable(f"no key '{unknown[0]}'", f"the keys are {', '.join(KEYS)}")
    if not isinstance(inputs, dict):
        raise Unprocessable(
            "expected `inputs` to be an object with an array per input",
            f"the inputs are {', '.join(dtypes)}",
        )
    unknown_inputs = sorted(set(inputs) - set(dtypes))
    if unknown_inputs:
        raise Unprocessable(
            f"no input '{unknown_inputs[0]}'", f"the inputs are {', '.join(dtypes)}"
        )
    arrays = {
        name: array_from_values(name, dtypes[name], values) for name, values in inputs.items()
    }
    return PlainRequest(arrays, _names(outputs), timeout_from(timeout_s))


def encode_json(answer: InferAnswer) -> bytes:
    """Encode an answer in JSON; Unprocessable if an output is not finite."""
    timing = timing_parameters(answer)
    document = {
        "model": answer.model,
        "version": answer.version,
        "device": timing.pop("device"),
        "outputs": {
            name: json_of(array, name, flat=False) for name, array in answer.outputs.items()
        },
        "timing": timing,
    }
    return orjson.dumps(document)


def timeout_from(value: object) -> float | None:
    """Check a time-out in seconds, above 0; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise Unprocessable(
            f"expected `timeout_s` to be a number of seconds, got {value!r:.40}",
            "leave it out for the time-out of the model",
        )
    return float(value)


def _names(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Unprocessable(
            "expected `outputs` to be a list of names", "leave it out for all of them"
        )
    return tuple(value)
