"""The caller of a request and the caller's permissions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from service.errors import Forbidden
from service.settings import Settings
from service.storage.audit_entry import Actor
from service.storage.key import SCOPES, Key, Scope


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request comes from."""

    address: str = ""  # IP address of the client, which may be behind a trusted proxy
    request: str = ""  # id of the request


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner and the scopes of a request."""

    owner: str
    scopes: tuple[Scope, ...]
    key: str = ""  # the key's prefix; empty if no key is required
    source: Source = field(default=Source(), compare=False)

    @property
    def sees(self) -> str | None:
        """The owner of the jobs, reports and models that this caller may see; None: all owners."""
        return None if "admin" in self.scopes else self.owner

    @property
    def actor(self) -> Actor:
        """The caller as the audit names it."""
        return Actor(self.owner, self.key, self.source.address, self.source.request)

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has this scope. The scope admin includes all others."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: Scope) -> None:
        """Raise Forbidden without this scope."""
        if not self.may(scope):
            raise Forbidden(
                f"this key has no scope '{scope}', it has {', '.join(self.scopes) or 'none'}",
                f"use a key that was created with `--scope {scope}`",
            )


LOCAL = Caller("local", SCOPES)
"""Without required keys, all callers on this machine's loopback count as one person."""

NOBODY = Caller("", ())


Verify = Callable[[str, Source], Awaitable[Key]]
"""Return the key of a text, which is empty if there was none. Unauthorized if it is not valid;
TooMany if too many were not, from this source.
"""


SessionKey = Callable[[str, Source], Awaitable[Key | None]]
"""Return the key of a browser's session; None if there is none. TooMany as for a key."""


async def caller_from(
    authorization: str, source: Source, settings: Settings, verify: Verify
) -> Caller:
    """Return the caller of a request. Unauthorized or TooMany without a valid key, if keys are
    required.
    """
    if not settings.needs_keys:
        return Caller(LOCAL.owner, LOCAL.scopes, source=source)
    kind, _, text = authorization.partition(" ")
    key = await verify(text.strip() if kind.lower() == "bearer" else "", source)
    return Caller(key.owner, key.scopes, key.prefix, source)


async def caller_from_session(
    token: str, source: Source, settings: Settings, key_of: SessionKey
) -> Caller:
    """Return the caller of a web page's request; NOBODY without a session, if keys are required."""
    if not settings.needs_keys:
        return Caller(LOCAL.owner, LOCAL.scopes, source=source)
    key = await key_of(token, source) if token else None
    return Caller(key.owner, key.scopes, key.prefix, source) if key else NOBODY
