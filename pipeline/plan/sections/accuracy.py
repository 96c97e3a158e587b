"""The section `accuracy`: the metric and its limits."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, model_validator

from pipeline.core.frozen import Frozen

METRICS = (
    "top1",
    "top5",
    "f1",
    "map",
    "wer",
    "spearman",
    "sts",
    "perplexity",
    "cosine",
    "agreement",
)
MAX_TOKENS = 8000
TOP_K = re.compile(r"top(?P<k>[1-9][0-9]{0,3})")

DECODERS_OF = {
    "f1": ("argmax",),
    "map": ("boxes_xyxy",),
    "wer": ("ctc_greedy",),
    "sts": ("mean_pool",),
    "spearman": (),
}
"""The built-in decoders of each metric that also takes a decoder of the user."""

WITH_CLASSES = ("auto", "f1", "map")  # besides top-k, and functions with one score per sample


def is_built_in(metric: str) -> bool:
    """Return True for the name of a built-in metric: one of METRICS, or `top` and a number."""
    return metric in METRICS or TOP_K.fullmatch(metric) is not None


def needs_labels(metric: str) -> bool:
    """Return True for a built-in metric that compares outputs with labels."""
    return is_built_in(metric) and metric not in ("cosine", "agreement")


class Thresholds(Frozen):
    """Limits of the tensor error against the reference; null: not checked."""

    max_abs: float | None = Field(default=None, description="Largest absolute error of an element.")
    mean_abs: float | None = Field(default=None, description="Largest mean absolute error.")
    min_cosine: float | None = Field(
        default=0.99, description="Smallest cosine of an output and the reference's, of any sample."
    )
    min_snr_db: float | None = Field(
        default=None, description="Smallest ratio of signal to noise, dB."
    )
    min_agreement: float | None = Field(
        default=0.99,
        description=(
            "Smallest agreement of an output of indices. The other limits do not apply to indices."
        ),
    )


class AccuracyConfig(Frozen):
    """The accuracy gate: the metric and its limits."""

    metric: str = Field(
        default="auto",
        description=(
            "`top1`, `top5` or another number, `f1` (the mean over classes), `map` (boxes), `wer`"
            " (texts), `spearman`, `sts` (pairs of embeddings), `perplexity`, `cosine`,"
            " `agreement` (of indices from `postprocess`), `module:function`, or `auto`: top-1 with"
            " labels, else agreement for indices and cosine for other outputs."
        ),
    )
    decode: str | None = Field(
        default=None,
        description=(
            "How the output becomes what the metric compares: `argmax` (of `f1`), `boxes_xyxy`"
            " (of `map`), `ctc_greedy` (of `wer`), `mean_pool` (for `sts`), or `module:function`."
            " Default: the one of the metric; `sts` takes vectors as they are."
        ),
    )
    tokens: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_TOKENS,
        description=(
            "For `ctc_greedy`: the text of each class of the output. Classes without a text, such"
            " as the blank, are empty."
        ),
    )
    mask: str | None = Field(
        default=None,
        description=(
            "For `mean_pool`: the input that is 1 where a position counts, such as"
            " `attention_mask`. Default: all positions count."
        ),
    )
    output: str | None = Field(
        default=None, description="The output that the metric reads. Default: the first."
    )
    python_path: Path = Field(
        default=Path(),
        description=(
            "Folder from which the metric's module is imported. Default: the plan's folder."
        ),
    )
    max_drop: float = Field(
        default=0.01,
        ge=0,
        description=(
            "Largest allowed drop of the metric against the reference, in units of the metric."
        ),
    )
    max_class_drop: float | None = Field(
        default=None,
        ge=0,
        description=(
            "Largest allowed drop of the worst class, of those with 20 samples or more. For top-k,"
            " `f1`, `map`, and functions that score each sample."
        ),
    )
    thresholds: Thresholds = Field(
        default=Thresholds(), description="Limits of the tensor error, for every output."
    )
    per_output: dict[str, Thresholds] = Field(
        default_factory=dict, description="Other thresholds for single outputs, by name."
    )

    @model_validator(mode="after")
    def _known_metric(self) -> AccuracyConfig:
        if self.metric != "auto" and not is_built_in(self.metric) and not is_function(self.metric):
            raise ValueError(
                f"expected metric auto, {', '.join(METRICS)} or module:function, got"
                f" '{self.metric}'"
            )
        built_in = is_built_in(self.metric) and not TOP_K.fullmatch(self.metric)
        if self.max_class_drop is not None and built_in and self.metric not in WITH_CLASSES:
            raise ValueError(
                f"max_class_drop is given, and {self.metric} has no classes; top-k, f1 and map have"
            )
        return self

    @model_validator(mode="after")
    def _fitting_decoder(self) -> AccuracyConfig:
        decoders = DECODERS_OF.get(self.metric)
        if self.decode is not None and decoders is None:
            raise ValueError(
                f"decode is given, and {self.metric} decodes nothing; {', '.join(DECODERS_OF)} do"
            )
        if self.decode not in (None, *(decoders or ())) and not is_function(self.decode or ""):
            raise ValueError(
                f"expected decode {', '.join((*(decoders or ()), 'module:function'))} for"
                f" {self.metric}, got '{self.decode}'"
            )
        if bool(self.tokens) != (self.decoder == "ctc_greedy"):
            raise ValueError(
                "tokens are missing: ctc_greedy needs the text of each class"
                if not self.tokens
                else "tokens are given, and only ctc_greedy reads them"
            )
        if self.mask is not None and self.decoder != "mean_pool":
            raise ValueError("mask is given, and only `decode: mean_pool` reads it")
        return self

    @property
    def decoder(self) -> str | None:
        """The decoder of the metric: the given one, or the default of a metric that needs one."""
        if self.decode is not None or self.metric == "sts":
            return self.decode
        return next(iter(DECODERS_OF.get(self.metric, ())), None)

    @property
    def functions(self) -> dict[str, str]:
        """The functions of the user, `module:function`, by the key that names each."""
        named = {"accuracy.metric": self.metric, "accuracy.decode": self.decode or ""}
        return {key: name for key, name in named.items() if is_function(name)}


def is_function(name: str) -> bool:
    """Return True for the form `module:function`."""
    return name.count(":") == 1
