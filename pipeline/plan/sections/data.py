"""The section `data`: the three sets of samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from pipeline.core.frozen import Frozen


class GeneratedData(Frozen):
    """Random samples: for speed only, never for accuracy."""

    generate: Literal["random"] = Field(description="The only kind of generated data.")
    samples: int = Field(gt=0, description="Number of samples.")
    because: str = Field(
        min_length=1, description="Why random data is good enough here. The report repeats it."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the samples.")


DataPaths = tuple[Path, ...] | GeneratedData


def _paths(value: object) -> object:
    return (value,) if isinstance(value, str | Path) else value


def _files_or_generated(value: object) -> str:
    """Choose the form of a data source, so that only the errors of this form are reported.

    A mapping is generated data, anything else is files.
    """
    return "(generated)" if isinstance(value, Mapping | GeneratedData) else "(files)"


_EitherSource = (
    Annotated[tuple[Path, ...], Tag("(files)")] | Annotated[GeneratedData, Tag("(generated)")]
)
DataSource = Annotated[
    _EitherSource,
    Discriminator(_files_or_generated),
    BeforeValidator(_paths, json_schema_input_type=Path | tuple[Path, ...] | GeneratedData),
]


ROLES = ("calibration", "selection", "validation")


class LabelFiles(Frozen):
    """Labels in files beside the sets, with one entry per sample, in the order of the samples."""

    selection: Path | None = Field(
        default=None,
        description=(
            "The labels of the selection set: `.json` in the format of COCO holds boxes, and"
            ' `.jsonl` a line for each sample: `{"text": "..."}` or `{"label": 3}`.'
        ),
    )
    validation: Path | None = Field(
        default=None, description="The labels of the validation set, likewise."
    )


class DataConfig(Frozen):
    """Three disjoint sets: each a .npz file, a list of .npz files, or `generate: random`.

    Samples of different shapes can be given as several files.
    """

    calibration: DataSource | None = Field(
        default=None, description="Chooses the int8 ranges. A model with its own Q/DQ needs none."
    )
    selection: DataSource | None = Field(default=None, description="Chooses the winner.")
    validation: DataSource | None = Field(
        default=None, description="Read once, for the winner and the reference."
    )
    labels: LabelFiles = Field(
        default=LabelFiles(),
        description="Files of labels, for sets whose .npz files have no array `labels`.",
    )

    @model_validator(mode="after")
    def _labels_of_files(self) -> DataConfig:
        for role in LabelFiles.model_fields:
            if getattr(self.labels, role) and not isinstance(getattr(self, role), tuple):
                raise ValueError(
                    f"labels.{role} names a file, and `data.{role}` names no .npz files"
                )
        return self
