"""An API key as it is known without its secret, and the form of its text. Without the database."""

from __future__ import annotations

import re
from typing import Literal, get_args

from pipeline.core.frozen import Frozen

Scope = Literal["compile", "infer", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
FORM = re.compile(r"cru_([0-9a-f]{10})_([A-Za-z0-9_-]{43})")


class Key(Frozen):
    """The stored properties of a key, without its secret."""

    prefix: str
    name: str
    owner: str  # the key may see this owner's jobs and models
    scopes: tuple[Scope, ...]
    created: str  # UTC
    revoked: str | None = None
