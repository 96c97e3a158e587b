"""GET /v1/models: the language models and the encoders of texts; and how requests name them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as InPath

from service.auth import Caller
from service.context import Service
from service.errors import Unprocessable
from service.http.openai.answers import ModelList, ModelObject, OpenAIRefusal
from service.http.openai.errors import ROOT, BadParameter
from service.http.routers.dependencies import CurrentCaller, CurrentService
from service.inference import Served, ServedText
from service.language.generation import ServedLanguage

VERSIONED = re.compile(r"(.*)@([1-9][0-9]{0,14})")
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OpenAIRefusal, "description": "Refused, in OpenAI's form"},
    "5XX": {"model": OpenAIRefusal, "description": "Not possible now, or an error of the service"},
}
router = APIRouter(prefix=ROOT, tags=["language models"], responses=REFUSALS)
ModelId = Annotated[str, InPath(description="NAME, or NAME@VERSION")]


@router.get("/models")
async def list_models(caller: CurrentCaller, service: CurrentService) -> ModelList:
    """List the language models and the encoders of texts that are deployed."""
    caller.require("infer")
    by_name = {each.model: _object(each.model, each) for each in _encoders(service, caller)}
    for each in service.generating.languages(caller):
        by_name[each.model] = _object(each.model, each)
    return ModelList(data=tuple(by_name[name] for name in sorted(by_name)))


@router.get("/models/{model}")
async def get_model(model: ModelId, caller: CurrentCaller, service: CurrentService) -> ModelObject:
    """Return one language model or encoder of texts that is deployed."""
    caller.require("infer")
    name, version = _name_and_version(model)
    for each in _encoders(service, caller):
        if each.model == name and version in (None, each.version):
            return _object(model, each)
    return _object(model, find(service, caller, model))


def find(service: Service, caller: Caller, model: str) -> ServedLanguage:
    """Return the language model with an id of this API: NAME or NAME@VERSION.

    NotFound if it is not deployed; BadParameter if it is no language model.
    """
    name, version = _name_and_version(model)
    try:
        return service.generating.find_language(caller, name, version)
    except Unprocessable as error:
        raise BadParameter(error.message, error.next_step, "model") from error


def find_encoder(service: Service, caller: Caller, model: str) -> tuple[Served, ServedText]:
    """Return the encoder of texts with such an id. Errors as of `find`."""
    name, version = _name_and_version(model)
    try:
        served = service.serving.find(caller, name, version)
    except Unprocessable:
        raise BadParameter(
            f"'{name}' is a language model, which makes no embeddings",
            "send a prompt to /v1/completions, or name another model of /v1/models",
            "model",
        ) from None
    if served.text is None:
        raise BadParameter(
            f"'{name}' takes tensors, and no text",
            f"send POST /models/{name}/infer, or compile it with `serving.text` in its plan",
            "model",
        )
    return served, served.text


def _encoders(service: Service, caller: Caller) -> tuple[Served, ...]:
    return tuple(each for each in service.serving.served(caller) if each.text is not None)


def _name_and_version(model: str) -> tuple[str, int | None]:
    match = VERSIONED.fullmatch(model)
    return (match[1], int(match[2])) if match else (model, None)


def _object(name: str, served: Served | ServedLanguage) -> ModelObject:
    return ModelObject(id=name, created=served.created_s, owned_by=served.owner)
