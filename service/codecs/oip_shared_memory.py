"""The system shared memory extension of the Open Inference Protocol: which tensors of a request lie
in a region, and what an answer says of outputs that were written to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.core.shapes import Tensors
from service.codecs.tensors import bytes_of, datatype_of_array, dtype_of, size_of
from service.errors import Unprocessable
from service.inference import InferAnswer
from service.regions import Place, Region, SharedInput

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"


def place_from(name: str, parameters: Mapping[str, object]) -> Place | None:
    """The place that the parameters of a tensor name; None if they name no region."""
    if REGION not in parameters:
        return None
    region = parameters[REGION]
    if not isinstance(region, str):
        raise Unprocessable(
            f"'{name}': expected `{REGION}` to be a text, got {region!r:.40}",
            "send the name of a registered region",
        )
    sizes = {key: whole(f"'{name}': {key}", parameters.get(key, 0)) for key in (BYTE_SIZE, OFFSET)}
    return Place(region, sizes[BYTE_SIZE], sizes[OFFSET])


def whole(what: str, value: object) -> int:
    """A number of bytes; Unprocessable if it is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Unprocessable(
            f"{what}: expected a number of bytes, got {value!r:.40}", "send a whole number from 0"
        )
    return value


def shared_input(name: str, dtype: str, shape: tuple[int, ...], place: Place) -> SharedInput:
    """An input at a place; Unprocessable if the place has another size."""
    expected = size_of(dtype, shape)
    if place.byte_size != expected:
        raise Unprocessable(
            f"'{name}': {dtype} {list(shape)} is {expected} bytes, `{BYTE_SIZE}` says"
            f" {place.byte_size}",
            "send exactly the bytes of the tensor",
        )
    return SharedInput(place, dtype_of(name, dtype), shape)


def parameters_of(place: Place) -> dict[str, str | int]:
    """The parameters of a tensor at a place."""
    return {REGION: place.region, BYTE_SIZE: place.byte_size, OFFSET: place.offset}


def write_outputs(outputs: Tensors, regions: Mapping[str, Region]) -> None:
    """Write the outputs that belong into a region; Unprocessable if one does not fit."""
    for name, region in regions.items():
        region.write(bytes_of(outputs[name]))


def written_outputs(outputs: Tensors, places: Mapping[str, Place]) -> list[dict[str, object]]:
    """Describe the outputs that were written, with the bytes that each has."""
    return [
        {
            "name": name,
            "datatype": datatype_of_array(outputs[name]),
            "shape": outputs[name].shape,
            "parameters": parameters_of(replace(place, byte_size=outputs[name].nbytes)),
        }
        for name, place in places.items()
    ]


def without_outputs(answer: InferAnswer, places: Mapping[str, Place]) -> InferAnswer:
    """The answer without the outputs that were written to a region."""
    if not places:
        return answer
    kept = {name: array for name, array in answer.outputs.items() if name not in places}
    return replace(answer, outputs=kept)
