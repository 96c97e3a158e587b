"""/ui/models/NAME/try: send one request to a model from a form, and see the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData, UploadFile

from pipeline.core.shapes import TensorSpec
from service.codecs.images import FORMATS
from service.codecs.tensors import Array, dtype_of
from service.context import Service
from service.errors import ServiceError, TooLarge, Unprocessable
from service.http.routers.dependencies import CurrentService
from service.http.routers.infer import JSON, NPY, parse_body
from service.http.routers.inference_io import infer_while_connected
from service.http.routers.models import Name
from service.inference import InferAnswer, InferRequest, Served
from service.pages.access import MAX_TEXT_BYTES, Author, Visitor
from service.pages.example_requests import Example, Sent, examples
from service.pages.language.try_language import language_of, language_page, try_language
from service.pages.original import (
    NoOriginal,
    OriginalAnswer,
    answer_of_original,
    difference_text,
    original_of,
)
from service.pages.rendering import page
from service.registry.models import ModelView, Version

router = APIRouter(include_in_schema=False)
MAX_EXAMPLE_VALUES = 512  # that a text field shows; a larger input begins empty, which means zeros
FIRST_VALUES = 8  # of an output
BEST = 5  # of class scores
MIN_CLASSES = 5  # an output without labels looks like class scores from this many columns
CHANNELS = 3  # of an image, in front of its pixels or after them
NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class InputField:
    """One input of the form. Fields of the form are numbered: a model's names may be any text."""

    spec: TensorSpec
    shape: tuple[int, ...]  # the smallest that the engine takes: of the zeros of an empty field
    text: str  # JSON
    takes_image: bool
    looks_like_image: bool  # and the plan does not say how an image becomes this input
    fault: str = ""


@dataclass(frozen=True, slots=True)
class OutputView:
    """The start of one output."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranked: tuple[tuple[str, str], ...]  # the highest scores of the first row; empty: no scores
    first: tuple[str, ...]  # values in row-major order
    more: int  # values that are not shown
    # of the original model, in the place of those in `ranked` or `first`; empty: it has none
    original: tuple[str, ...] = ()
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer of the original model, for a page that shows it beside the engine's."""

    missing: str = ""  # why there can be none; "" if there may be one
    is_wanted: bool = True  # by the form
    failure: str = ""  # why this request has none
    answer: OriginalAnswer | None = None


@router.get("/ui/models/{name}/try")
async def try_page(
    request: Request, name: Name, caller: Visitor, service: CurrentService
) -> Response:
    caller.require("infer")
    if (language := language_of(service, caller, name)) is not None:
        return language_page(request, language)
    model = await service.models.view(caller, name)
    missing = await _why_no_original(service, _answering(model))
    return _page(request, model, _fields(_answering(model)), Comparison(missing))


@router.post("/ui/models/{name}/try")
async def try_model(
    request: Request, name: Name, caller: Author, service: CurrentService
) -> Response:
    """Run the request of the form as POST /models/NAME/infer would.

    If the form says so, the original model answers it, too.
    """
    caller.require("infer")
    if (language := language_of(service, caller, name)) is not None:
        return await try_language(request, service, caller, language)
    model = await service.models.view(caller, name)
    served = service.serving.find(caller, name)
    async with request.form(max_part_size=MAX_TEXT_BYTES) as form:
        fields, sent = _fields(_answering(model), form), []
        is_compared = form.get("compare") is not None
        for number, field in enumerate(fields):
            try:
                sent.append(await _sent(service, served, field, form.get(f"file-{number}")))
            except (Unprocessable, TooLarge) as error:
                fields[number] = replace(field, fault=_text(error))
    comparison = Comparison(await _why_no_original(service, _answering(model)), is_compared)
    if len(sent) < len(fields):
        return _page(request, model, fields, comparison, status=422)
    inputs = {each.spec.name: each.array for each in sent}
    try:
        answer = await infer_while_connected(
            service, InferRequest(caller, name, inputs), request.receive
        )
    except Unprocessable as error:
        if len(fields) == 1:  # it can only be about this one
            fields = [replace(fields[0], fault=_text(error))]
            return _page(request, model, fields, comparison, status=422)
        return _page(request, model, fields, comparison, refusal=error, status=422)
    if is_compared:
        comparison = await _compared(service, _version_of(model, answer.version), inputs)
    shown = examples(str(request.base_url), name, sent, service.settings.needs_keys)
    return _page(request, model, fields, comparison, answer=answer, shown=shown)


async def _why_no_original(service: Service, version: Version) -> str:
    """Return why the original model of a version cannot answer; "" if it can."""
    try:
        await asyncio.to_thread(original_of, version, service.folders)
    except NoOriginal as error:
        return str(error)
    return ""


async def _compared(service: Service, version: Version, inputs: Mapping[str, Array]) -> Comparison:
    """Return the answer of the original model, or why there is none."""
    try:
        return Comparison(answer=await answer_of_original(service, version, inputs))
    except NoOriginal as error:
        return Comparison(failure=str(error))


def _page(
    request: Request,
    model: ModelView,
    fields: list[InputField],
    comparison: Comparison,
    status: int = 200,
    refusal: ServiceError | None = None,
    answer: InferAnswer | None = None,
    shown: tuple[Example, ...] = (),
) -> Response:
    labels = _answering(model).labels
    return page(
        request,
        "try.html",
        status,
        model=model,
        fields=fields,
        image_types=",".join(FORMATS),
        refusal=refusal,
        answer=answer,
        comparison=comparison,
        outputs=[
            with_original(
                output_view(output, array, labels.get(output, ())), array, comparison.answer
            )
            for output, array in (answer.outputs if answer else {}).items()
        ],
        examples=shown,
    )


def _answering(model: ModelView) -> Version:
    """Return the version that answers, or the current one if none does."""
    return _version_of(model, model.deployment.version)


def _version_of(model: ModelView, number: int | None) -> Version:
    return next((each for each in model.versions if each.version == number), model.current)


def _fields(version: Version, form: FormData | None = None) -> list[InputField]:
    """Return a field for each input, with its text in the form, or with zeros."""
    sizes = version.profiles[0].sizes("min") if version.profiles else {}
    values = version.profiles[0].values_at("min") if version.profiles else {}
    fields = []
    for number, spec in enumerate(version.inputs):
        shape = tuple(max(1, sizes.get(d, 1)) if isinstance(d, str) else d for d in spec.shape)
        text = "" if form is None else str(form.get(f"text-{number}", ""))
        if form is None and np.prod(shape) <= MAX_EXAMPLE_VALUES:
            # 0 instead of 0.0: shorter, and JSON has one kind of number
            zeros = np.zeros(shape, bool if spec.dtype == "bool" else int).tolist()
            text = orjson.dumps(values.get(spec.name, zeros)).decode()
        image = version.image
        takes_image = image is not None and image.input == spec.name and len(version.inputs) == 1
        is_image_shape = len(shape) == 4 and CHANNELS in (shape[1], shape[3])
        looks_like_image = is_image_shape and len(version.inputs) == 1 and image is None
        fields.append(InputField(spec, shape, text, takes_image, looks_like_image))
    return fields


def _text(error: ServiceError) -> str:
    return "; ".join(filter(None, (error.message, error.next_step)))


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape, dtype_of(spec.name, spec.dtype))


async def _sent(service: Service, served: Served, field: InputField, file: object) -> Sent:
    """Return one input as the form gives it: a file, else the text, else zeros.

    Unprocessable or TooLarge if it cannot be read.
    """
    spec = field.spec
    if isinstance(file, UploadFile) and file.size:
        body = await file.read()
        kind = _kind_of_file(field, file, body)
        return Sent(spec, await _array(service, served, spec, kind, body), kind, file.filename)
    if not field.text.strip():
        return Sent(spec, _zeros(spec, field.shape))
    try:
        values = orjson.loads(field.text)
    except orjson.JSONDecodeError as error:
        raise Unprocessable(
            f"this is not JSON: {error}", "write nested lists of numbers, such as [[0, 0.5]]"
        ) from None
    body = orjson.dumps({"inputs": {spec.name: values}})
    return Sent(spec, await _array(service, served, spec, JSON, body), JSON, values=values)


def _kind_of_file(field: InputField, file: UploadFile, body: bytes) -> str:
    """Return the Content-Type of a file; Unprocessable if this input takes no such file."""
    if body.startswith(NPY_MAGIC):
        return NPY
    if field.takes_image and file.content_type in FORMATS:
        return file.content_type
    expected = f", or one of {', '.join(FORMATS)}" if field.takes_image else ""
    raise Unprocessable(f"expected a .npy file{expected}, got {file.content_type}")


async def _array(
    service: Service, served: Served, spec: TensorSpec, kind: str, body: bytes
) -> Array:
    """Decode one input as a request with this one alone."""
    alone = replace(served, inputs=(spec,))
    return (await parse_body(service, alone, kind, body)).inputs[spec.name]


def output_view(name: str, array: Array, labels: tuple[str, ...]) -> OutputView:
    """Return the highest scores if an output looks like class scores, else its first values."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if array.ndim == 2 and array.size and (labels or (is_float and array.shape[1] >= MIN_CLASSES)):
        best = _best(array)
        named = [labels[each] if each < len(labels) else f"class {each}" for each in best]
        ranked = tuple(zip(named, _texts(array[0], best), strict=True))
        return OutputView(name, array.dtype.name, array.shape, ranked, (), 0)
    first = _texts(array.ravel(), range(min(FIRST_VALUES, array.size)))
    return OutputView(name, array.dtype.name, array.shape, (), first, array.size - len(first))


def with_original(view: OutputView, array: Array, answer: OriginalAnswer | None) -> OutputView:
    """Add the values of the original model to the view of an output, and how far they differ."""
    if answer is None:
        return view
    expected = answer.outputs.get(view.name)
    if expected is None:
        return replace(view, difference="The original has no such output.")
    difference = difference_text(array, expected, answer.metric, bool(view.ranked))
    if expected.shape != array.shape:
        return replace(view, difference=difference)
    shown = _texts(expected.ravel(), range(len(view.first)))
    if view.ranked:
        shown = _texts(expected[0], _best(array))
    return replace(view, original=shown, difference=difference)


def _best(array: Array) -> list[int]:
    """Return the classes of the highest scores of the first row, the highest first."""
    best: list[int] = np.argsort(-array[0].astype(np.float64), kind="stable")[:BEST].tolist()
    return best


def _texts(values: Array, indices: Iterable[int]) -> tuple[str, ...]:
    """Return the values at these indices as texts."""
    chosen = values[list(indices)]
    if chosen.dtype.name == "bfloat16":  # else its values would be no floats of Python
        chosen = chosen.astype(np.float32)
    return tuple(
        f"{each:.6g}" if isinstance(each, float) else str(each) for each in chosen.tolist()
    )
