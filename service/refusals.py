"""Refused requests: failed authentications are counted by address, and the audit records refusals.

Neither lets strangers fill the memory or the disk: few addresses are remembered, and few refusals
are recorded. The log has a line for every request anyway.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from pipeline.errors import CrucibleError
from service import logs
from service.auth import Caller, Source
from service.errors import Forbidden, NotOwned, TooMany, Unauthorized
from service.limits.failures import MAX_FAILURES, WINDOW_S, Failures, SharedAttempts
from service.storage.audit import Audit
from service.storage.audit_entry import Actor, Entry
from service.storage.database import Database
from service.storage.key import FORM

QUOTA_S = 3600.0
MAX_ENTRIES_EACH, MAX_ENTRIES = 60, 1000  # of one key or address, and of all, in QUOTA_S
MAX_OBJECT = 200  # characters of a path
UPLOAD = "POST /compile"

log = logs.get("service.refusals")


class Quota:
    """Limits how many refusals are recorded. Pure: it takes the time."""

    def __init__(self) -> None:
        self._begin_s = float("-inf")
        self._counts: dict[str, int] = {}
        self._left_out = 0  # since the last recorded one

    def take(self, who: str, now_s: float) -> int | None:
        """Return how many were left out before this refusal; None: leave this one out, too."""
        if now_s >= self._begin_s + QUOTA_S:
            self._begin_s, self._counts = now_s, {}
        count = self._counts.get(who, 0)
        if count >= MAX_ENTRIES_EACH or sum(self._counts.values()) >= MAX_ENTRIES:
            self._left_out += 1
            return None
        self._counts[who] = count + 1
        left_out, self._left_out = self._left_out, 0
        return left_out


class Refusals:
    """Counts and records the refusals of one server. Lives in one event loop; a thread writes."""

    def __init__(self, database: Database, is_shared: bool = False) -> None:
        """`is_shared`: other servers use the database, too, and count failures together."""
        self._database, self._audit = database, Audit(database)
        self._failures = Failures(SharedAttempts(database) if is_shared else None)
        self._quotas = {True: Quota(), False: Quota()}  # with a key; without one
        self._thread = ThreadPoolExecutor(1, "crucible-audit")

    async def of_authentication(
        self, error: Unauthorized, text: str, source: Source
    ) -> Unauthorized | TooMany:
        """Count a failed authentication, and return the error for its client.

        A valid key is never refused for the failures of others at its address: only requests that
        failed come here.
        """
        wait_s = await self._failures.add(source.address)
        match = FORM.fullmatch(text)
        actor = Actor("", "", source.address, source.request)
        key = f"key/{match[1]}" if match else ""
        self._record(Entry(actor, "authentication.refused", key, {"reason": error.message}))
        if not wait_s:
            return error
        return TooMany(
            f"{MAX_FAILURES} requests from this address had no valid key within {WINDOW_S:g} s",
            error.next_step,
            int(wait_s) + 1,
        )

    def of_request(
        self, caller: Caller, request: str, status: int, error: Exception | None
    ) -> None:
        """Record a refused request, if it concerns what the caller may do, or an upload."""
        entry = entry_of_refusal(caller, request, status, error)
        if entry is not None:
            self._record(entry)

    def _record(self, entry: Entry) -> None:
        """Store an entry, but not before the request is answered: it is refused either way."""
        actor = entry.actor
        left_out = self._quotas[bool(actor.key)].take(actor.key or actor.address, time.monotonic())
        if left_out is not None:
            if left_out:
                entry.details["left_out"] = left_out
            self._thread.submit(self._store, entry)

    def _store(self, entry: Entry) -> None:
        try:
            self._audit.record(entry)
        except CrucibleError as error:
            log.error("audit.failed", action=entry.action, object=entry.object, error=error.message)

    async def close(self) -> None:
        """Store the entries that wait, and close the database."""
        await self._failures.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._database.close)
        self._thread.shutdown()


def entry_of_refusal(
    caller: Caller, request: str, status: int, error: Exception | None
) -> Entry | None:
    """Return the entry of a refused request; None for a refusal that is not recorded.

    A refused authentication has an entry of its own.
    """
    details: dict[str, str | int | bool] = {"status": status}
    if isinstance(error, CrucibleError):
        details["reason"] = error.message
    if isinstance(error, Forbidden | NotOwned):
        return Entry(caller.actor, "access.refused", request[:MAX_OBJECT], details)
    if request == UPLOAD and caller.owner:
        return Entry(caller.actor, "upload.refused", request, details)
    return None
