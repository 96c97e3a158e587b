"""The caller of a request and the caller's permissions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from service.errors import Forbidden, Unauthorized
from service.settings import Settings
from service.storage.keys import NEXT, SCOPES, Key, Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner and the scopes of a request."""

    owner: str
    scopes: tuple[Scope, ...]
    key: str = ""  # the key's prefix; empty if no key is required

    @property
    def sees(self) -> str | None:
        """The owner of the jobs, reports and models that this caller may see; None: all owners."""
        return None if "admin" in self.scopes else self.owner

    def require(self, scope: Scope) -> None:
        """Raise Forbidden without this scope. The scope admin includes all others."""
        if scope not in self.scopes and "admin" not in self.scopes:
            raise Forbidden(
                f"this key has no scope '{scope}', it has {', '.join(self.scopes) or 'none'}",
                f"use a key that was created with `--scope {scope}`",
            )


LOCAL = Caller("local", SCOPES)
"""Without required keys, all callers on this machine's loopback count as one person."""

NOBODY = Caller("", ())


Verify = Callable[[str], Awaitable[Key]]
"""Return the key of a text; Unauthorized if it is not valid."""


async def caller_from(authorization: str, settings: Settings, verify: Verify) -> Caller:
    """Return the caller of a request. Unauthorized without a valid key, if keys are required."""
    if not settings.needs_keys:
        return LOCAL
    kind, _, text = authorization.partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthorized("this service needs a key", NEXT)
    key = await verify(text.strip())
    return Caller(key.owner, key.scopes, key.prefix)
