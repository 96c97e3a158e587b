"""The content of a value as JSON, for cache keys."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from pipeline.core.artifacts import Artifact
from pipeline.errors import InternalError


def content_of(value: object) -> Any:
    """Return the content of a stage's argument: the digest if it has one, else its fields.

    Files are identified by their digests, never by their paths. An artifact without a digest is
    identified by its key, which is the name of its folder. Fields that a model excludes from its
    JSON are left out. InternalError for a value of another type.
    """
    digest = getattr(value, "digest", None)
    if isinstance(digest, str) and digest:
        return digest
    if isinstance(value, Artifact):
        return value.root.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _content_of_array(np.asarray(value))
    if isinstance(value, Mapping):
        return {str(key): content_of(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [content_of(item) for item in value]
    return _content_of_fields(value)


def _content_of_array(array: np.ndarray[Any, Any]) -> list[Any]:
    data = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return [str(array.dtype), list(array.shape), data]


def _content_of_fields(value: object) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        names = [name for name, info in type(value).model_fields.items() if not info.exclude]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        raise InternalError(f"a {type(value).__name__} has no content for a cache key")
    return {name: content_of(getattr(value, name)) for name in names}


def text_of_content(value: object) -> str:
    """Return the content as one text. Equal texts mean equal content."""
    return json.dumps(content_of(value), sort_keys=True)
