"""Who makes a request, and what they may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from service.errors import Forbidden, Unauthorized
from service.settings import Settings
from service.storage.keys import NEXT, SCOPES, Key, Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    owner: str
    scopes: tuple[Scope, ...]
    key: str = ""  # its prefix; empty where no keys are needed

    @property
    def sees(self) -> str | None:
        """The owner whose jobs, reports and models this caller may see; None: everyone's."""
        return None if "admin" in self.scopes else self.owner

    def require(self, scope: Scope) -> None:
        """Forbidden without this scope; admin includes the others."""
        if scope not in self.scopes and "admin" not in self.scopes:
            raise Forbidden(
                f"this key has no scope '{scope}', it has {', '.join(self.scopes) or 'none'}",
                f"use a key made with `--scope {scope}`",
            )


LOCAL = Caller("local", SCOPES)
"""Where no keys are needed, all that reach this machine's loopback are one person."""

NOBODY = Caller("", ())


Verify = Callable[[str], Awaitable[Key]]
"""The key of a text; Unauthorized if it does not work."""


async def caller_from(authorization: str, settings: Settings, verify: Verify) -> Caller:
    """Who asks; Unauthorized without a key that works, where one is needed."""
    if not settings.needs_keys:
        return LOCAL
    kind, _, text = authorization.partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthorized("this service needs a key", NEXT)
    key = await verify(text.strip())
    return Caller(key.owner, key.scopes, key.prefix)
