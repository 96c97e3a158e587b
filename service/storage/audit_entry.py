"""Entries of the audit, as they are written and read. Without the database."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.core.frozen import Frozen

Action = Literal[
    "job.submitted",
    "job.retried",
    "job.cancelled",
    "job.removed",
    "model.promoted",
    "model.rolled_back",
    "model.deployed",
    "model.unloaded",
    "version.removed",
    "key.created",
    "session.begun",
    "session.ended",
    "key.revoked",
    "report.read",
    "upload.refused",
    "access.refused",
    "authentication.refused",
    "audit.expired",
]
ACTIONS: tuple[Action, ...] = get_args(Action)
Details = dict[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts. Empty: not known, or not over the network."""

    owner: str
    key: str = ""  # the key's prefix
    address: str = ""
    request: str = ""  # id of the request


SERVICE = Actor("service")
"""The service itself, such as its daily garbage collection."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One action, or one refusal."""

    actor: Actor
    action: Action
    object: str  # `job/ID`, `model/NAME`, `key/PREFIX`, or the method and path of a request
    details: Details = field(default_factory=dict)


class StoredEntry(Frozen):
    """An entry as it is read."""

    seq: int
    at: str  # UTC
    action: str
    object: str
    owner: str
    key: str
    address: str
    request: str
    details: Details


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries to read. Empty: all."""

    since: dt.datetime | None = None
    action: str = ""  # `job.cancelled`, or `job` for all of jobs
    owner: str = ""
    object: str = ""
