"""POST /v1/embeddings: vectors of texts, by deployed encoders."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field

from pipeline.core.frozen import Frozen
from service.http.openai.encoder import Encoder
from service.http.openai.errors import ROOT, BadParameter
from service.http.openai.models import REFUSALS, find_encoder
from service.http.openai.requests import Prompt, prompts_from
from service.http.routers.dependencies import CurrentCaller, CurrentService
from service.http.routers.inference_io import while_connected
from service.inference import InferRequest

MAX_INPUTS = 2048  # as OpenAI's API

router = APIRouter(prefix=ROOT, tags=["language models"], responses=REFUSALS)


class EmbeddingRequest(Frozen, defer_build=False):
    """Make a vector of each text."""

    # strict, as OpenAI's API: the text "1" is no number
    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [{"model": "minilm", "input": "A cat sleeps"}]}
    )

    model: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Name of an encoder of texts, or NAME@VERSION; see /v1/models"
    )
    input: Annotated[
        tuple[Prompt, ...],
        Field(min_length=1, max_length=MAX_INPUTS),
        BeforeValidator(
            prompts_from,
            json_schema_input_type=str | tuple[int, ...] | tuple[Prompt, ...],
        ),
    ] = Field(
        strict=False,
        description="Text, tokens with the model's special ones, or a list of either",
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64`: little-endian float32. Default: float"
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Only the size of the model's vectors: none is cut"
    )
    user: str | None = Field(default=None, description="Ignored")


class Embedding(Frozen):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: tuple[float, ...] | str


class EmbeddingUsage(Frozen):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Frozen):
    """The answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: tuple[Embedding, ...]
    model: str
    usage: EmbeddingUsage


@router.post("/embeddings", response_model=EmbeddingList)
async def embed(
    body: EmbeddingRequest, request: Request, caller: CurrentCaller, service: CurrentService
) -> Response:
    """Make a vector of each text. Texts of one request, and of several, run in batches."""
    caller.require("infer")
    served, text = find_encoder(service, caller, body.model)
    of_texts = InferRequest(caller, served.model, {}, served.version, id=request.state.request_id)
    encoder = Encoder(service, served, text, of_texts)
    if body.dimensions not in (None, encoder.size):
        raise BadParameter(
            f"expected `dimensions` of {encoder.size}, the size of this model's vectors, got"
            f" {body.dimensions}",
            "leave it out",
            "dimensions",
        )
    await service.limits.check_tokens(caller.key)

    async def whole() -> Response:
        tokens = await encoder.tokens(body.input)
        count = sum(map(len, tokens))
        async with service.limits.tokens(caller.key, count, lambda: count):
            vectors = await encoder.vectors(tokens)
        model = f"{served.model}@{served.version}"
        is_text = body.encoding_format == "base64"
        answer = await asyncio.to_thread(_answer, model, vectors, is_text, count)
        return Response(answer, media_type="application/json")

    return await while_connected(whole(), request.receive)


def _answer(model: str, vectors: NDArray[np.float32], is_text: bool, tokens: int) -> bytes:
    """Return the JSON of an EmbeddingList."""
    little = vectors.astype("<f4")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if is_text else vector,
        }
        for index, vector in enumerate(little)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
