"""The plan of a language model: `language_model` is its key instead of `model`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from pipeline.core.frozen import Frozen
from pipeline.errors import PlanError
from pipeline.plan.files import (
    apply_override,
    explain,
    plan_from_document,
    read_document,
    safe_name,
)
from pipeline.plan.schema import Plan
from pipeline.plan.sections.written import as_tuple

KEY = "language_model"
KEYS = "docs/reference/language-plan.md"

Effort = Literal["normal", "high"]
Device = Literal["cpu", "gpu"]
LibraryName = Literal["openvino_genai", "onnxruntime_genai", "torch"]
WeightFormat = Literal["fp32", "fp16", "bf16", "int8", "fp8", "int4_sym", "int4_asym", "stored"]
CacheFormat = Literal["f32", "f16", "bf16", "u8"]
Arithmetic = Literal["auto", "f32", "bf16", "f16", "int8"]

MAX_CONCURRENCY = 64

WEIGHTS: dict[LibraryName, tuple[WeightFormat, ...]] = {
    "openvino_genai": ("fp16", "int8", "int4_sym", "int4_asym", "stored"),
    "onnxruntime_genai": ("fp32", "int8", "int4_sym", "int4_asym"),
    "torch": ("fp32", "fp16", "bf16", "int8", "fp8", "int4_sym", "int4_asym"),
}
"""The formats that each library has."""

LIBRARIES_ON: dict[Device, tuple[LibraryName, ...]] = {
    "cpu": ("openvino_genai", "onnxruntime_genai", "torch"),
    "gpu": ("torch",),
}
"""The libraries that run on a device. The first one has the candidates of a plan without any."""

PACKAGE = "package:"

GREEDY_PROMPT_TOKENS, GREEDY_TOKENS = 64, 50
"""Lengths of the answers that are compared with those of the model in fp32."""


def checked_path(text: str) -> str:
    """Return the path of a model. ValueError if `package:` is not followed by NAME/FILE."""
    name, _, file = text.removeprefix(PACKAGE).partition("/")
    if text.startswith(PACKAGE) and not (name and file):
        raise ValueError("expected package:NAME/FILE, a file inside an installed package")
    return text


class LanguageModelConfig(Frozen):
    """The trained model."""

    path: Annotated[str, AfterValidator(checked_path)] = Field(
        description=(
            "A GGUF file, or a folder in the form of Hugging Face (config.json, tokenizer,"
            " safetensors). `package:NAME/FILE` is a file inside an installed Python package."
        )
    )


class Texts(Frozen):
    """The user's texts. Each set is a .jsonl file with `{"text": ...}` a line, or a folder of .txt
    files.
    """

    calibration: Path | None = Field(
        default=None,
        description="Chooses scales, for candidates with `awq` or `scale_estimation`.",
    )
    selection: Path = Field(description="Every candidate is scored on it.")
    validation: Path = Field(description="Read once, at the end, for the winner.")
    max_tokens: int = Field(
        default=512, ge=16, description="Longer texts are cut after this number of tokens."
    )
    cached_tokens: int = Field(
        default=64,
        ge=1,
        description=(
            "The last tokens of each text are scored one by one, too, as they are generated:"
            " through the KV cache in its format."
        ),
    )


class LanguageAccuracy(Frozen):
    """The limits. The worse end of each 95 % interval decides."""

    max_perplexity_increase: float = Field(
        default=0.02, ge=0, description="Against the model in fp32: 0.02 is 2 %."
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Mean Kullback-Leibler divergence from the model in fp32, in nats per token.",
    )
    min_agreement: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of tokens whose likeliest successor is that of the model in fp32.",
    )
    max_path_difference: float = Field(
        default=0.1,
        gt=0,
        description=(
            "Mean difference of log-probabilities between the pipeline that serves and the one that"
            " is scored, in nats. Above it, a candidate is not what its scores say."
        ),
    )
    max_serving_difference: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Mean difference of log-probabilities, in nats, between an answer alone and the same"
            " one in a batch, with a prefix from the cache, or with its prompt read in chunks."
        ),
    )


ACTIVATIONS: dict[str, CacheFormat] = {"fp32": "f32", "fp16": "f16"}
"""The format of activations, keys and values of our decoder, by that of its weights. Others: bf16.
"""

GROUPS: dict[str, tuple[int, ...]] = {
    "onnxruntime_genai": (32, 16, 64, 128, 256),
    "torch": (64, 32, 128),
}
"""Sizes of groups that a library has; the first one is the default."""


def _groups(library: str, weights: str) -> tuple[int, ...]:
    in_groups = weights.startswith("int4") or (weights, library) == ("int8", "onnxruntime_genai")
    return GROUPS[library] if in_groups else (0,)


class LanguageCandidate(Frozen):
    """One form of the model on one library."""

    library: LibraryName = Field(
        default="openvino_genai",
        description=(
            "`openvino_genai` and `onnxruntime_genai`, on CPUs; `torch`: Crucible's own decoder,"
            " with `device: gpu` on a GPU."
        ),
    )
    weights: WeightFormat = Field(
        description=(
            "`fp16`; `int8`; `int4_sym` and `int4_asym`: without and with a zero point;"
            " `stored`: the file as GenAI itself reads it. `torch`: `fp32`, `fp16`, `bf16`,"
            " `int8` and `fp8` (a GPU's) with one scale per output channel, and int4 in groups."
            " `onnxruntime_genai`: `fp32`, and `int8` or int4 in groups."
        )
    )
    group_size: int = Field(
        default=0,
        ge=0,
        description=(
            "int4, and int8 of `onnxruntime_genai`: weights that share a scale. 0: all of one"
            " output channel; with `onnxruntime_genai` 32. `torch`: 32, 64 (default) or 128."
        ),
    )
    kv_cache: CacheFormat = Field(
        default="u8",
        description=(
            "Format of keys and values. `torch`: that of the activations, always."
            " `onnxruntime_genai`: `f32`, always."
        ),
    )
    arithmetic: Arithmetic = Field(
        default="auto",
        description=(
            "Precision of the products. `auto`: what OpenVINO chooses for this CPU, bf16 where it"
            " has that; with `onnxruntime_genai` int8, where weights have few bits. `int8`, with"
            " int8 and int4 weights of OpenVINO: activations are quantised as they come, in groups"
            " of 64, and the rest is in f32."
        ),
    )
    awq: bool = Field(default=False, description="int4: scale salient channels by activations.")
    scale_estimation: bool = Field(
        default=False, description="int4: choose scales by the error of the layer's output."
    )

    @model_validator(mode="before")
    @classmethod
    def _cache_of_activations(cls, written: object) -> object:
        """Two libraries have one format of the cache: a plan need not name it."""
        if not isinstance(written, Mapping):
            return written
        library, weights = str(written.get("library")), str(written.get("weights"))
        if library not in GROUPS:
            return written
        cache = ACTIVATIONS.get(weights, "bf16") if library == "torch" else "f32"
        return {"kv_cache": cache, "group_size": _groups(library, weights)[0], **written}

    @model_validator(mode="after")
    def _library_has_the_format(self) -> LanguageCandidate:
        known = WEIGHTS[self.library]
        if self.weights not in known:
            raise ValueError(
                f"weights of {self.library}: expected {', '.join(known)}, got {self.weights}"
            )
        if self.library == "torch":
            wanted = ACTIVATIONS.get(self.weights, "bf16")
            if self.kv_cache != wanted or self.arithmetic != "auto":
                raise ValueError(
                    f"torch {self.weights}: leave out arithmetic and kv_cache, which is {wanted}"
                )
        if self.library == "onnxruntime_genai":
            if self.kv_cache != "f32":
                raise ValueError("onnxruntime_genai: leave out kv_cache, which is f32")
            if self.arithmetic not in ("auto", "f32"):
                raise ValueError(
                    f"arithmetic of {self.library}: expected auto or f32, got {self.arithmetic}"
                )
        if self.library in GROUPS:
            groups = sorted(_groups(self.library, self.weights))
            if self.group_size not in groups:
                raise ValueError(
                    f"group_size of {self.library} {self.weights}: expected"
                    f" {', '.join(map(str, groups))}, got {self.group_size}"
                )
            if self.awq or self.scale_estimation:
                raise ValueError("awq and scale_estimation are for int4 weights of openvino_genai")
        return self

    @model_validator(mode="after")
    def _int8_needs_few_bits(self) -> LanguageCandidate:
        if self.arithmetic == "int8" and not self.weights.startswith("int"):
            raise ValueError(f"arithmetic int8 is for int8 and int4 weights, got {self.weights}")
        return self

    @model_validator(mode="after")
    def _only_int4_has_groups(self) -> LanguageCandidate:
        is_asked = self.group_size or self.awq or self.scale_estimation
        if self.library not in GROUPS and is_asked and not self.weights.startswith("int4"):
            raise ValueError("group_size, awq and scale_estimation are for int4 weights")
        return self

    @property
    def label(self) -> str:
        """The unique short name for tables: `int4_asym g64 kv-u8`, `torch int4_sym g64`."""
        if self.library == "torch":
            return f"torch {self.weights}" + f" g{self.group_size}" * bool(self.group_size)
        is_ort = self.library == "onnxruntime_genai"
        parts: list[str] = ["ort-genai"] * is_ort + [self.weights]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        elif self.weights.startswith("int4"):
            parts.append("per channel")
        parts += ["awq"] * self.awq + ["scales"] * self.scale_estimation
        if not is_ort:
            parts.append(f"kv-{self.kv_cache}")
        if self.arithmetic != "auto":
            parts.append("act-int8" if self.arithmetic == "int8" else self.arithmetic)
        return " ".join(parts)


def _ascending(levels: tuple[int, ...]) -> tuple[int, ...]:
    """ValueError unless there are levels, each larger than the one before."""
    if not levels or list(levels) != sorted(set(levels)):
        raise ValueError(f"expected ascending numbers such as [1, 4], got {list(levels)}")
    return levels


Level = Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)]
Levels = Annotated[
    tuple[Level, ...],
    BeforeValidator(as_tuple, json_schema_input_type=Level | tuple[Level, ...]),
    AfterValidator(_ascending),
]


class LanguageBenchmark(Frozen):
    """The request that is timed, and how long."""

    prompt_tokens: int = Field(default=128, ge=1, description="Length of the prompts.")
    output_tokens: int = Field(default=32, ge=2, description="Length of the answers.")
    concurrency: Levels = Field(
        default=(1,),
        description=(
            "Requests that are sent at once and served together: a number, or a list of them. All"
            " are in the report; the first one decides which candidate is fastest."
        ),
    )
    budget_s: float = Field(
        default=180.0,
        gt=0,
        description=(
            "Time of the whole benchmark, s. It ends earlier once the verdict rests on narrow"
            " intervals, and may take twice as long for the four processes that a ratio needs."
        ),
    )
    threads: int = Field(
        default=0, ge=0, description="Threads per engine. 0: all cores that this process may use."
    )


class Goodput(Frozen):
    """The objective `{max_first_token_s: 1, max_next_token_s: 0.1}`: the most answers per second
    within both limits, at the best of the levels of `benchmark.concurrency`.
    """

    max_first_token_s: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="Longest time from a request to its first token, s.",
    )
    max_next_token_s: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="Longest time between tokens, s, in the mean over those of one answer.",
    )


def _word_or_limits(value: object) -> str:
    """Choose the form of `objective`, so that only the errors of this form are reported."""
    return "(limits)" if isinstance(value, Mapping | Goodput) else "(word)"


def _known_objective(value: object) -> object:
    if value != "latency":
        raise ValueError(
            "expected latency or {max_first_token_s: 1, max_next_token_s: 0.1}, got"
            f" {str(value)[:40]!r}"
        )
    return value


_Word = Annotated[Literal["latency"], BeforeValidator(_known_objective), Tag("(word)")]
LanguageObjective = Annotated[
    _Word | Annotated[Goodput, Tag("(limits)")], Discriminator(_word_or_limits)
]


class LanguagePlan(Frozen):
    """All settings of `crucible compile` for a language model."""

    name: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*)?$",
        description="Names the report and its folder. Default: the plan's file name.",
    )
    language_model: LanguageModelConfig = Field(description="The trained model.")
    device: Device = Field(
        default="cpu",
        description="Where it is to run: `cpu`, or `gpu`, the first GPU of this host.",
    )
    texts: Texts = Field(description="Your texts, on which the answers must stay right.")
    accuracy: LanguageAccuracy = Field(
        default=LanguageAccuracy(), description="The limits of the gate."
    )
    candidates: tuple[LanguageCandidate, ...] = Field(
        default=(), description="What to build and compare. Default: by model and `effort`."
    )
    effort: Effort = Field(
        default="normal",
        description=(
            "`high`: on a CPU int4 by AWQ and scale estimation, on a GPU int4_sym and fp8, too. It"
            " takes minutes more."
        ),
    )
    benchmark: LanguageBenchmark = Field(
        default=LanguageBenchmark(), description="The request that decides about speed."
    )
    objective: LanguageObjective = Field(
        default="latency",
        description=(
            "What decides: `latency`, the time of a whole answer; or `{max_first_token_s: ...,"
            " max_next_token_s: ...}`, the most answers per second within both limits."
        ),
    )
    context: int = Field(
        default=2048, ge=16, description="Longest prompt and answer together, in tokens."
    )


AnyPlan = Plan | LanguagePlan


def load_any_plan(file: Path) -> AnyPlan:
    """Read a plan of engines or of a language model; relative paths are taken from its folder."""
    document = read_document(file)
    if isinstance(document, dict) and is_language_plan(document):
        return language_plan_from_document(document, file.resolve().parent, file.stem)
    return plan_from_document(document, file.resolve().parent, file.stem)


def any_plan_from_json(text: str) -> AnyPlan:
    """Parse a checked plan that was written as JSON. ValueError if it is damaged."""
    kind: type[AnyPlan] = LanguagePlan if is_language_plan(json.loads(text)) else Plan
    return kind.model_validate_json(text)


def is_language_plan(document: object) -> bool:
    """Return True if a parsed plan is one of a language model."""
    return isinstance(document, Mapping) and KEY in document


def language_plan_from_document(
    document: Mapping[str, object], base: Path, name: str = "", overrides: Iterable[str] = ()
) -> LanguagePlan:
    """Check a parsed plan; relative paths are taken from `base`. PlanError names the faulty key."""
    written = dict(document)
    for override in overrides:
        apply_override(written, override, LanguagePlan, KEYS)
    written.setdefault("name", safe_name(name))
    try:
        plan = LanguagePlan.model_validate(written)
    except ValidationError as error:
        raise PlanError(
            explain(error, LanguagePlan),
            f"correct the plan; {KEYS} lists every key",
        ) from error
    _check_lengths(plan)
    return _with_absolute_paths(plan, base)


def _check_lengths(plan: LanguagePlan) -> None:
    benchmark = plan.benchmark
    asked = benchmark.prompt_tokens + benchmark.output_tokens
    longest = max(asked, plan.texts.max_tokens, GREEDY_PROMPT_TOKENS + GREEDY_TOKENS)
    if longest > plan.context:
        raise PlanError(
            f"context: {plan.context} tokens, but texts and answers take up to {longest}",
            "raise `context`, or lower `texts.max_tokens` or the lengths in `benchmark`",
        )
    if plan.texts.cached_tokens >= plan.texts.max_tokens:
        raise PlanError(
            f"texts.cached_tokens: expected below max_tokens, {plan.texts.max_tokens}, got"
            f" {plan.texts.cached_tokens}",
            "lower it",
        )
    known = LIBRARIES_ON[plan.device]
    for candidate in plan.candidates:
        if candidate.library not in known:
            raise PlanError(
                f"candidates: '{candidate.label}' is of {candidate.library}, expected"
                f" {' or '.join(known)} with `device: {plan.device}`",
                f"write `library: {known[0]}`, or set another `device`",
            )
        if candidate.weights == "fp8" and plan.device == "cpu":
            raise PlanError(
                f"candidates: '{candidate.label}' needs a GPU that has fp8, got `device: cpu`",
                "take int8 instead, or set `device: gpu`",
            )
    labels = [candidate.label for candidate in plan.candidates]
    if twice := next((label for label in labels if labels.count(label) > 1), ""):
        raise PlanError(f"candidates: '{twice}' is listed twice", "remove one")
    asks = any(candidate.awq or candidate.scale_estimation for candidate in plan.candidates)
    asks = asks or (not plan.candidates and plan.effort == "high" and plan.device == "cpu")
    if asks and plan.texts.calibration is None:
        raise PlanError(
            "expected texts.calibration, because a candidate has awq or scale_estimation",
            "name a file of texts, or set `effort: normal`",
        )


def _with_absolute_paths(plan: LanguagePlan, base: Path) -> LanguagePlan:
    path = plan.language_model.path
    if not path.startswith(PACKAGE):
        path = str((base / Path(path).expanduser()).resolve())
    sets = {
        role: None if value is None else (base / value.expanduser()).resolve()
        for role, value in (
            ("calibration", plan.texts.calibration),
            ("selection", plan.texts.selection),
            ("validation", plan.texts.validation),
        )
    }
    return plan.model_copy(
        update={
            "language_model": LanguageModelConfig(path=path),
            "texts": plan.texts.model_copy(update=sets),
        }
    )
