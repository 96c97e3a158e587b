"""The requests of /v1. A parameter that the engine cannot serve is known, and takes only the value
that changes nothing. One that OpenAI's API does not have is refused, as there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from pipeline.core.frozen import Frozen
from service.http.openai.errors import BadParameter, NotServed, shown_value
from service.language.generation import Sampling

MAX_PROMPTS = 64
MAX_STOPS = 4
MAX_TOKEN = 2**31 - 1
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
SEEDS = 2**63

Prompt = str | tuple[int, ...]


def prompts_from(value: object) -> object:
    """Convert a text, tokens, or a list of either to a list of prompts."""
    if isinstance(value, str):
        return (valid_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"expected a text, tokens, or a list of such prompts, got {shown_value(value)}"
        )
    if _are_tokens(value):
        return (tuple(value),)
    if not all(isinstance(each, str) or _are_tokens(each) for each in value):
        raise ValueError(f"expected texts and lists of tokens, got {shown_value(value)}")
    return tuple(tuple(each) if isinstance(each, list) else valid_text(each) for each in value)


def valid_text(value: str) -> str:
    """Return a text. ValueError if it has half of a surrogate pair, as JSON may."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("expected Unicode text, got half of a surrogate pair") from None
    return value


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(
        type(each) is int and 0 <= each <= MAX_TOKEN for each in value
    )


def stops_from(value: object) -> object:
    """Convert one stop text or a list to a list; null is none."""
    return () if value is None else (value,) if isinstance(value, str) else value


def text_from(value: object) -> object:
    """Join the parts of a message's content. ValueError if one is no text."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"expected parts of the type 'text', got one of the type {shown_value(kind)}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


StopText = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(valid_text)]
Empty = Annotated[tuple[Any, ...], Field(max_length=0)]
EmptyMap = Annotated[dict[str, Any], Field(max_length=0)]


class TextFormat(Frozen):
    """Free text: the engine forces no other form."""

    type: Literal["text"]


class StreamOptions(Frozen):
    """What a stream has besides the answer."""

    include_usage: bool = Field(default=False, description="End with an event of the usage")
    include_obfuscation: bool = Field(default=False, description="Ignored: nothing is padded")


class _Request(Frozen, defer_build=False):
    """What both kinds of requests have."""

    # strict, as OpenAI's API: the text "1" is no number
    model_config = ConfigDict(strict=True)

    model: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Name of a language model, or NAME@VERSION; see /v1/models"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="0: always the likeliest token. Default: 1"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    stop: Annotated[
        tuple[StopText, ...],
        Field(max_length=MAX_STOPS),
        BeforeValidator(stops_from, json_schema_input_type=StopText | tuple[StopText, ...] | None),
    ] = Field(default=(), strict=False, description="Up to 4 texts that end the answer")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stream: bool | None = Field(default=None, description="Answer as server-sent events")
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="Ignored")

    n: Literal[1] | None = Field(default=None, description="One answer for each prompt")
    logit_bias: EmptyMap | None = Field(default=None, description="Not served")

    def check(self) -> None:
        """BadParameter if two parameters do not fit together."""
        if self.stream_options is not None and not self.stream:
            raise BadParameter(
                "expected `stream_options` only with `stream`, got it without",
                "set `stream` to true, or leave it out",
                "stream_options",
            )

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return how tokens are chosen, with OpenAI's defaults."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % SEEDS,
            stop=self.stop,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether each token that is generated is the likeliest one."""
        return self.temperature == 0 and not (self.presence_penalty or self.frequency_penalty)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """Continue one or several prompts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 16}]
        }
    )

    prompt: Annotated[
        tuple[Prompt, ...],
        Field(min_length=1, max_length=MAX_PROMPTS),
        BeforeValidator(
            prompts_from,
            json_schema_input_type=str | tuple[int, ...] | tuple[Prompt, ...],
        ),
    ] = Field(strict=False, description="Text, tokens, or a list of either: a choice for each")
    echo: bool | None = Field(default=None, description="Begin with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = Field(
        default=None, description="Log-probability of each token; no others beside it"
    )

    best_of: Literal[1] | None = Field(default=None, description="One answer for each prompt")
    suffix: Literal[""] | None = Field(default=None, description="Not served")

    def check(self) -> None:
        super().check()
        if self.token_limit == 0 and not self.echo:
            raise BadParameter(
                "expected `max_tokens` of at least 1, got 0 without `echo`",
                "raise it, or set `echo` for the log-probabilities of the prompt",
                "max_tokens",
            )

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token that comes is the likeliest one, without any of the prompt."""
        return self.is_greedy and not self.echo

    @property
    def token_limit(self) -> int:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class Message(Frozen):
    """One message of a chat. What an answer of this API holds may be sent back as it is."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        AfterValidator(valid_text),
        BeforeValidator(
            text_from, json_schema_input_type=str | tuple[dict[Literal["type", "text"], str], ...]
        ),
    ] = Field(description="Text, or a list of parts of text, which are joined by line feeds")
    name: str | None = Field(default=None, description="Ignored")
    annotations: Any = Field(default=None, description="Ignored")
    refusal: Literal[""] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Empty | None = Field(default=None, strict=False)

    @property
    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: few have a developer beside the system."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatRequest(_Request):
    """Answer a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "smollm2", "messages": [{"role": "user", "content": "Who are you?"}]}
            ]
        }
    )

    messages: Annotated[tuple[Message, ...], Field(min_length=1, strict=False)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        default=None,
        description="The newer name of max_tokens. Default: as many as the context has room for",
    )
    logprobs: bool | None = Field(default=None, description="Log-probability of each token")

    metadata: dict[str, str] | None = Field(default=None, description="Ignored")
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="Ignored")
    parallel_tool_calls: bool | None = Field(default=None, description="Ignored")
    safety_identifier: str | None = Field(default=None, description="Ignored")
    prompt_cache_key: str | None = Field(default=None, description="Ignored")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None,
        description="1 with `logprobs`, where temperature 0 takes the likeliest token; others not",
    )
    tools: Empty | None = Field(default=None, strict=False, description="Not served")
    tool_choice: Literal["none", "auto"] | None = Field(default=None, description="Not served")
    functions: Empty | None = Field(default=None, strict=False, description="Not served")
    function_call: Literal["none", "auto"] | None = Field(default=None, description="Not served")
    response_format: TextFormat | None = Field(default=None, description="Text only")
    modalities: tuple[Literal["text"], ...] | None = Field(
        default=None, strict=False, description="Text only"
    )
    audio: None = Field(default=None, description="Not served")
    prediction: None = Field(default=None, description="Not served")
    reasoning_effort: None = Field(default=None, description="Not served")
    verbosity: Literal["medium"] | None = Field(default=None, description="Not served")
    web_search_options: None = Field(default=None, description="Not served")
    store: Literal[False] | None = Field(default=None, description="Nothing is stored")

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise BadParameter(
                "expected one of `max_tokens` and `max_completion_tokens`, got both",
                "leave out `max_tokens`, the older name",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadParameter(
                "expected `top_logprobs` only with `logprobs`, got it without",
                "set `logprobs` to true, or leave it out",
                "top_logprobs",
            )
        if self.top_logprobs and not (self.top_logprobs == 1 and self.is_greedy):
            raise NotServed(
                f"the engine tells the log-probability of no token but the one it took, got"
                f" `top_logprobs` of {self.top_logprobs}",
                "ask for 1 with `temperature` 0 and without penalties, which take the likeliest"
                " token; or leave it out",
                "top_logprobs",
            )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
