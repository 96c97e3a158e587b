"""Failed authentications, counted by address: at one server, or over all servers of a database.

    wait_s = await failures.add(address)     count one; how long the address must wait for the next

An address may fail MAX_FAILURES times in WINDOW_S. Servers that share a database count together, by
its clock. An address that must wait is not counted there again: so each server writes at most
MAX_FAILURES + 1 times for it in a window. Without the database, or if it takes more than ANSWER_S,
each server counts for itself, and asks again after RETRY_S.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import sqlalchemy as sa

from pipeline.errors import HostError
from service import logs
from service.storage.database import Database, delete_unlocked
from service.storage.tables import database_clock_s, failed_sign_ins

WINDOW_S = 60.0
MAX_FAILURES = 20  # of one address in WINDOW_S; further ones are answered with 429
MAX_ADDRESSES = 10_000  # remembered; the one that failed longest ago is forgotten first
ANSWER_S, RETRY_S = 1.0, 2.0

log = logs.get("service.failures")


class FailedAttempts:
    """Counts failed authentications by address. Pure: it takes the time."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()  # begin, failures

    def add(self, address: str, now_s: float) -> float:
        """Count a failure. Return the seconds until the address may fail again; 0: it may now."""
        network = network_of(address)
        begin_s, count = self._windows.pop(network, (now_s, 0))
        if now_s >= begin_s + WINDOW_S:
            begin_s, count = now_s, 0
        self._windows[network] = (begin_s, count + 1)
        self._shorten()
        return begin_s + WINDOW_S - now_s if count >= MAX_FAILURES else 0.0

    def refuse(self, address: str, wait_s: float, now_s: float) -> None:
        """Let an address wait, because of its failures at other servers."""
        self._windows[network_of(address)] = (now_s + wait_s - WINDOW_S, MAX_FAILURES)
        self._shorten()

    def _shorten(self) -> None:
        if len(self._windows) > MAX_ADDRESSES:
            self._windows.popitem(last=False)

    def __len__(self) -> int:
        return len(self._windows)


class SharedAttempts:
    """Counts failed authentications over all servers of a database. Safe for threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, address: str) -> float:
        """Count a failure, as `FailedAttempts.add` does, by the database's clock."""
        network, table = network_of(address), failed_sign_ins
        with self._database.write() as rows:
            now_s = float(rows.scalar(sa.select(database_clock_s())) or 0.0)
            rows.execute(delete_unlocked(table, table.c.begin <= now_s - WINDOW_S))
            self._database.lock(rows, f"failures {network}")  # there may be no row to lock
            this, is_new = table.c.network == network, table.c.begin > now_s - WINDOW_S
            row = rows.execute(sa.select(table).where(this, is_new)).mappings().first()
            if row is None:
                rows.execute(sa.delete(table).where(this))
                rows.execute(sa.insert(table).values(network=network, begin=now_s, count=1))
                return 0.0
            if row["count"] >= MAX_FAILURES:
                return max(0.0, float(row["begin"]) + WINDOW_S - now_s)
            rows.execute(sa.update(table).where(this).values(count=row["count"] + 1))
        return 0.0

    def close(self) -> None:
        """Close the database for the calling thread."""
        self._database.close()


class Failures:
    """The failed authentications that one server knows of. Lives in one event loop."""

    def __init__(
        self, shared: SharedAttempts | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`shared`: those of all servers; None: there is no other server."""
        self._here, self._shared, self._clock = FailedAttempts(), shared, clock
        self._retry_s = float("-inf")
        self._thread = ThreadPoolExecutor(1, "crucible-failures")

    async def add(self, address: str) -> float:
        """Count a failure. Return the seconds until the address may fail again; 0: it may now."""
        wait_s = self._here.add(address, self._clock())
        if wait_s or self._shared is None or self._clock() < self._retry_s:
            return wait_s
        loop, add = asyncio.get_running_loop(), partial(self._shared.add, address)
        try:
            async with asyncio.timeout(ANSWER_S):
                wait_s = await loop.run_in_executor(self._thread, add)
        except (HostError, TimeoutError) as error:
            log.error("failures.apart", error=str(error))
            self._retry_s = self._clock() + RETRY_S
            return 0.0
        if wait_s:
            self._here.refuse(address, wait_s, self._clock())
        return wait_s

    async def close(self) -> None:
        """Close the database."""
        if self._shared is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._shared.close)
        self._thread.shutdown()


def network_of(address: str) -> str:
    """Return what one client can choose its addresses from: of IPv6, the first 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed.packed, 64), strict=False))
