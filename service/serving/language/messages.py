"""All messages between the server and the worker of a language model: frames of JSON, some with a
body.

    server -> worker   Load, once; Generate for each request, whose body is the prompt; Cancel
    worker -> server   Ready, or Failed as its last; for each request Accepted or Refused; a Step
                       whenever tokens came, whose body are the Pieces of all answers

The server trusts none of the worker's messages: an invalid or impossible one is BadMessage, and
ends the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from service.language.generation import Finish, Sampling
from service.sandbox.framing import BadMessage, Failed, LongText

MAX_PROMPT_BYTES = 16 * 2**20
MAX_STEP_BYTES = 64 * 2**20  # an echoed prompt of 200,000 tokens has some 10 MiB
MAX_TOKEN_TEXT = 4096

Count = Annotated[int, Field(ge=0, le=2**48)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenText = Annotated[str, Field(max_length=MAX_TOKEN_TEXT)]
LogProb = Annotated[float, Field(le=0.01, allow_inf_nan=False)]  # 0, and what rounding adds
CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Load:
    """The engine to load, and how it serves."""

    engine: Path  # file of a LanguageEngine in JSON, with its root
    name: str  # of the engine, in messages
    context: int  # tokens of prompt and answer together
    cache_tokens: int  # of all answers together
    together: int  # answers
    prefix_caching: bool
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Generate:
    """One request. The body is its prompt: text in UTF-8, or tokens as little-endian int32."""

    number: Count
    is_text: bool
    sampling: Sampling
    special_tokens: bool = True
    log_probs: bool = False
    echo: bool = False
    kind: Literal["generate"] = "generate"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Cancel:
    """Nobody waits for this answer any more."""

    number: Count
    kind: Literal["cancel"] = "cancel"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Ready:
    """The engine is loaded."""

    memory_bytes: Count
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Accepted:
    """The prompt is in tokens, and fits. The request waits for its turn."""

    number: Count
    prompt_tokens: Count
    kind: Literal["accepted"] = "accepted"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Refused:
    """The request cannot be answered; the worker goes on."""

    number: Count
    message: LongText
    next_step: LongText = ""
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Step:
    """The engine has run once. The body are Pieces."""

    cache_usage: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    began: tuple[Count, ...] = ()  # requests whose turn has come
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Piece:
    """What has come of one answer. Lists of one length, for each token."""

    number: Count
    text: str  # whole characters
    ids: tuple[TokenId, ...] = ()
    texts: tuple[TokenText, ...] = ()
    log_probs: tuple[LogProb | None, ...] = ()
    prompt: Count = 0  # how many of the tokens are of the prompt
    finish: Finish | None = None


FromWorker = Annotated[Ready | Accepted | Refused | Step | Failed, Field(discriminator="kind")]
FromServer = Annotated[Load | Generate | Cancel, Field(discriminator="kind")]
FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(FromWorker)
FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(FromServer)
PIECES: TypeAdapter[tuple[Piece, ...]] = TypeAdapter(tuple[Piece, ...])


def pieces_from(body: bytes) -> tuple[Piece, ...]:
    """Parse the body of a step. BadMessage if it is none."""
    try:
        pieces = PIECES.validate_json(body, strict=True)
    except ValidationError as error:
        raise BadMessage(f"no pieces of answers: {error.error_count()} errors") from error
    for piece in pieces:
        if not piece.prompt <= len(piece.ids) == len(piece.texts) == len(piece.log_probs):
            raise BadMessage(
                f"expected as many texts and log-probabilities as tokens, got {len(piece.ids)}"
                f" tokens, {len(piece.texts)} texts, {len(piece.log_probs)} log-probabilities"
            )
    return pieces
