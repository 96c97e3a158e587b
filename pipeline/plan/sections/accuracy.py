"""The section `accuracy`: the metric and its limits."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from pipeline.core import Frozen

METRICS = ("top1", "top5", "cosine", "agreement")
NEED_LABELS = ("top1", "top5")


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
            "`top1`, `top5`, `cosine`, `agreement` (of indices from `postprocess`),"
            " `module:function`, or `auto`: top-1 with labels, else agreement for indices and"
            " cosine for other outputs."
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
    thresholds: Thresholds = Field(
        default=Thresholds(), description="Limits of the tensor error, for every output."
    )
    per_output: dict[str, Thresholds] = Field(
        default_factory=dict, description="Other thresholds for single outputs, by name."
    )

    @model_validator(mode="after")
    def _known_metric(self) -> AccuracyConfig:
        if self.metric not in ("auto", *METRICS) and self.metric.count(":") != 1:
            raise ValueError(
                f"expected metric auto, {', '.join(METRICS)} or module:function, got"
                f" '{self.metric}'"
            )
        return self
