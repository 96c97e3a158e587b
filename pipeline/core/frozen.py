"""The base of all values that are written to disk."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of all values that are written to disk: immutable, and unknown keys are errors."""

    # by alias: a renamed key of the plan is written with its old name, which programs read
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=False,
        serialize_by_alias=True,
        defer_build=True,
    )
