"""Ways in which a plan may write a value: by an older name, or without a list."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field


def renamed(old: str, new: str, description: str) -> Any:
    """Return the field of a key that was called `old`.

    Both names are read. Stored plans and reports are written with the old one.
    """
    return Field(
        validation_alias=AliasChoices(new, old), serialization_alias=old, description=description
    )


def as_tuple(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


def as_written(values: tuple[Any, ...]) -> Any:
    return values if len(values) > 1 else values[0]
