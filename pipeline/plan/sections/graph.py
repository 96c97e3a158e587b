"""The sections `export`, `simplify` and `calibration`: how the graph is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.core.frozen import Frozen
from pipeline.onnx_graph.rewrites import Rewrite
from pipeline.plan.sections.written import renamed

DEFAULT_REWRITES = (Rewrite.EARLY_ROWS,)
"""Those that compute the same rows with less work, whatever the device."""


class ExportConfig(Frozen):
    """Export of a PyTorch model to ONNX."""

    opset: int = Field(default=20, ge=13, le=26, description="ONNX opset of the exported graph.")
    exporter: Literal["auto", "dynamo", "torchscript"] = Field(
        default="auto", description="`auto`: dynamo, then torchscript if that fails."
    )


class SimplifyConfig(Frozen):
    """Simplification of the graph, and the user's own surgery before it."""

    enabled: bool = Field(
        default=True,
        description="Make the graph smaller. A change that breaks the graph is rolled back.",
    )
    timeout_s: float = Field(
        default=600, gt=0, description="Time limit of surgery and of simplification, each, s."
    )
    surgery: str | None = Field(
        default=None,
        description=(
            "`module:function` that takes the exported model, an onnx.ModelProto, and returns it"
            " changed. It runs before simplification. `pipeline.folding:fold_strides` is included."
        ),
    )
    python_path: Path = Field(
        default=Path(),
        description=(
            "Folder from which the module of the surgery is imported. Its source text is part of"
            " the cache key. Default: the plan's folder."
        ),
    )
    rewrite_attention: Annotated[
        bool,
        renamed(
            "plain_attention",
            "rewrite_attention",
            "Rewrite attention so that fused kernels recognise it, whether `enabled` or not. If"
            " that would change a result on the samples, the masks, or the whole attention, stay"
            " as they are.",
        ),
    ] = True
    rewrites: tuple[Rewrite, ...] = Field(
        default=DEFAULT_REWRITES,
        description=(
            "Rewrites to apply after simplification, in this order, whether `enabled` or not:"
            " `early_rows` takes rows before the products that compute all of them,"
            " `merged_products` merges adapters into their layers, `aligned_products` pads widths"
            " that matrix units do not fit, `folded_strides` folds the stride of convolutions of"
            " few channels. `crucible advise` measures what each gains. One that would change a"
            " result is left out. An empty list: none."
        ),
    )

    @model_validator(mode="after")
    def _function(self) -> SimplifyConfig:
        if self.surgery is None:
            return self
        parts = self.surgery.split(":")
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"expected surgery `module:function`, got '{self.surgery}'")
        return self


class CalibrationConfig(Frozen):
    """How int8 ranges are chosen."""

    samples: int | None = Field(
        default=None, gt=0, description="How many samples to use, from the first on. Default: all."
    )
    batch: int = Field(
        default=16, gt=0, description="Samples per batch during calibration. It limits the memory."
    )
    percentile: float = Field(
        default=99.99,
        gt=50,
        le=100,
        description="Share of values inside the range, for `method: percentile`.",
    )
    language_model: bool = Field(default=False, description="Makes `method: auto` mean min-max.")
