"""Limits of each key over all servers of a database.

A server takes requests and bytes from the counts in the database in pieces, and spends a piece
without the database:

requests    A piece is what the key sends in PIECE_S at this server, and lasts LIFE_S. So a server
            asks at most about ten times a second for each key, and an idle one holds nothing. In
            T seconds all servers together let at most `max_requests_per_s` x (T + LIFE_S + 1)
            requests of a key pass.
bytes       A piece is at most MAX_PIECE_BYTES, and 1/256 of the limit. All servers together let
            exactly `max_upload_bytes_per_hour` pass. What is left of a piece counts as used.
tokens      A request takes its tokens from the database, and gives back there what it did not use.
streams     Each stream is counted in the database when it opens. Those of a server that sends no
            heartbeat any more do not count.

Without the database, or if it takes more than ANSWER_S, a server spends the pieces that it has, and
then gives each key 1/n of its requests, tokens and streams: n servers were live when the server
last asked. It asks again every RETRY_S. Uploads wait for UPLOAD_ANSWER_S and then fail, as a job
can be stored nowhere.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pipeline.errors import HostError, StoreError
from service import logs
from service.errors import TooMany
from service.limits import tokens
from service.limits.counts import Counts, Grant
from service.limits.key_limits import (
    KeyLimits,
    Limits,
    Usage,
    check_streams,
    too_many_bytes,
    too_many_requests,
)
from service.limits.tokens import TokenCount, Window
from service.settings import Settings
from service.storage.database import Database

PIECE_S = 0.1
LIFE_S = 1.0
MAX_PIECE_BYTES = 16 * 2**20
ANSWER_S = 1.0
UPLOAD_ANSWER_S = 15.0
RETRY_S = 2.0
COUNT_S = 5.0  # between two counts of the servers

log = logs.get("service.limits")
T = TypeVar("T")


@dataclass(slots=True)
class _Piece:
    """The requests of a key that this server may let pass. Times by the clock."""

    count: int = 0
    ends_s: float = 0.0
    taken_s: float = float("-inf")
    demand: int = 0  # requests since it was taken
    refused_until_s: float = 0.0
    taking: asyncio.Task[None] | None = None

    def spend(self, now_s: float) -> bool:
        """Let one request pass, if any may."""
        if self.count == 0 or now_s >= self.ends_s:
            return False
        self.count -= 1
        return True

    def next_size(self, now_s: float, rate: int) -> int:
        """Return how many requests of a key with this rate come in PIECE_S, by its demand."""
        elapsed_s = max(now_s - self.taken_s, 1e-3)
        return max(1, math.ceil(min(self.demand / elapsed_s, rate) * PIECE_S))


@dataclass(slots=True)
class _Bytes:
    """The bytes of a key that this server may receive."""

    count: int = 0
    ends_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SharedLimits:
    """The limits of each key over all servers of a database. Lives in one event loop."""

    def __init__(
        self, settings: Settings, counts: Counts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._counts, self._clock = settings, counts, clock
        self._pieces: defaultdict[str, _Piece] = defaultdict(_Piece)
        self._bytes: defaultdict[str, _Bytes] = defaultdict(_Bytes)
        self._streams: Counter[str] = Counter()
        self._windows = tokens.windows_of(settings)
        self._here = KeyLimits(settings, lambda: int(clock() * 1e9))  # without the database
        self._servers, self._counted_s = 1, float("-inf")
        self._retry_s: float | None = None  # where the database did not answer
        self._thread = ThreadPoolExecutor(1, "crucible-limits")
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_request(self, key: str) -> None:
        rate = self._settings.max_requests_per_s
        if not rate:
            return
        piece = self._pieces[key]
        piece.demand += 1
        while not piece.spend(now_s := self._clock()):
            if now_s < piece.refused_until_s:
                raise too_many_requests(self._settings)
            if piece.taking is None and (self._retry_s is None or now_s >= self._retry_s):
                piece.taking = self._run(self._take_piece(key, piece, rate))
            if self._retry_s is not None or piece.taking is None:
                self._here.take_share_of_requests(key, self._servers)
                return
            await asyncio.shield(piece.taking)

    async def check_upload(self, key: str, count: int) -> None:
        held = self._held_bytes(key)
        limit = self._settings.max_upload_bytes_per_hour
        if count > held.count:
            take = partial(self._counts.take_bytes, key, limit, 0, 0)
            grant = await self._ask(take, UPLOAD_ANSWER_S)
            if grant.used - held.count + count > limit:
                raise self._too_many_bytes(grant, held, count)

    async def take_upload(self, key: str, count: int) -> None:
        limit = self._settings.max_upload_bytes_per_hour
        async with self._bytes[key].lock:
            held, begin_s = self._held_bytes(key), self._clock()
            if (least := count - held.count) > 0:
                most = max(least, min(MAX_PIECE_BYTES, limit // 256))
                take = partial(self._counts.take_bytes, key, limit, least, most)
                grant = await self._ask(take, UPLOAD_ANSWER_S)
                if not grant.count:
                    raise self._too_many_bytes(grant, held, count)
                held.count, held.ends_s = held.count + grant.count, begin_s + grant.left_s
            held.count -= count

    @asynccontextmanager
    async def stream(self, key: str) -> AsyncIterator[None]:
        check_streams(self._settings, self._streams[key])
        self._streams[key] += 1
        try:
            await self._open_stream(key, self._streams[key])
            yield
        finally:
            self._streams[key] -= 1
            self._run(self._store_streams(key))

    async def check_tokens(self, key: str) -> None:
        await self._take_tokens(key, 0)

    @asynccontextmanager
    async def tokens(self, key: str, most: int, used: Callable[[], int]) -> AsyncIterator[None]:
        return_unused = await self._take_tokens(key, most)
        try:
            yield
        finally:
            return_unused(most - used())

    async def usage(self, key: str) -> Usage:
        rate, windows = self._settings.max_requests_per_s, self._windows

        def read() -> Usage:
            used_tokens = self._counts.used_tokens(key, windows) if windows else {}
            return Usage(*self._counts.usage(key, rate), used_tokens)

        return await self._ask(read)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(HostError):  # they count as gone later
            await self._ask(self._counts.forget_streams)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._counts.close)
        self._thread.shutdown()

    async def _take_piece(self, key: str, piece: _Piece, rate: int) -> None:
        begin_s = self._clock()
        most = piece.next_size(begin_s, rate)
        piece.taken_s, piece.demand = begin_s, 0
        try:
            grant = await self._ask(partial(self._counts.take_requests, key, rate, most))
        except HostError:  # which `_ask` has logged
            return
        finally:
            piece.taking = None
        piece.count, piece.ends_s = grant.count, begin_s + LIFE_S
        if grant.count < most:  # asking again at once would give as little
            wait_s = max(grant.left_s, PIECE_S)
            # at random, so that no server always asks before the others
            piece.refused_until_s = begin_s + random.uniform(0.5, 1.5) * wait_s

    def _held_bytes(self, key: str) -> _Bytes:
        held = self._bytes[key]
        if self._clock() >= held.ends_s:
            held.count = 0
        return held

    def _too_many_bytes(self, grant: Grant, held: _Bytes, count: int) -> TooMany:
        used = grant.used - held.count
        return too_many_bytes(self._settings, used, count, int(grant.left_s) + 1)

    async def _take_tokens(self, key: str, most: int) -> Callable[[int], None]:
        """Take tokens of a key; return what gives some of them back."""
        windows = self._windows
        if not windows:
            return lambda _: None
        change = partial(_take, windows, most)
        try:
            begins_s = await self._ask(partial(self._counts.change_tokens, key, windows, change))
        except HostError:
            return self._here.take_share_of_tokens(key, most, self._servers)

        def return_unused(unused: int) -> None:
            if unused:
                self._run(self._return_tokens(key, partial(_give_back, begins_s, unused)))

        return return_unused

    async def _return_tokens(
        self, key: str, change: Callable[[list[TokenCount], float], None]
    ) -> None:
        """Store tokens that were not used, as soon as the database answers."""
        while True:
            try:
                await self._ask(partial(self._counts.change_tokens, key, self._windows, change))
                return
            except HostError:
                await asyncio.sleep(RETRY_S)

    async def _open_stream(self, key: str, count: int) -> None:
        limit = self._settings.max_streams
        try:
            elsewhere = await self._ask(partial(self._counts.set_streams, key, count, limit))
        except HostError:
            share = max(1, limit // self._servers)
            elsewhere = limit - share
        check_streams(self._settings, count - 1 + elsewhere)

    async def _store_streams(self, key: str) -> None:
        """Store how many streams of a key are open here, as soon as the database answers."""
        limit = self._settings.max_streams
        while True:
            count = self._streams[key]
            try:
                await self._ask(partial(self._counts.set_streams, key, count, limit))
                return
            except HostError:
                await asyncio.sleep(RETRY_S)

    async def _ask(self, call: Callable[[], T], answer_s: float = ANSWER_S) -> T:
        """Ask the database, and count the servers from time to time. StoreError if it does not
        answer in time.
        """
        loop = asyncio.get_running_loop()

        def ask() -> T:
            if self._clock() - self._counted_s > COUNT_S:
                self._servers, self._counted_s = self._counts.servers(), self._clock()
            return call()

        try:
            async with asyncio.timeout(answer_s):
                answer = await loop.run_in_executor(self._thread, ask)
        except (HostError, TimeoutError) as error:
            if self._retry_s is None:
                log.error("limits.apart", error=str(error), servers=self._servers)
            self._retry_s = self._clock() + RETRY_S
            if isinstance(error, TimeoutError):
                message = f"the database of the limits did not answer within {answer_s:g} s"
                raise StoreError(message, "check that it runs, and its load") from error
            raise
        if self._retry_s is not None:
            log.info("limits.together", servers=self._servers)
            self._retry_s = None
        return answer

    def _run(self, task: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        running = asyncio.create_task(task)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        return running


def _take(
    windows: tuple[Window, ...], most: int, counts: list[TokenCount], now_s: float
) -> tuple[float, ...]:
    return tokens.take(windows, counts, now_s, most)


def _give_back(
    begins_s: tuple[float, ...], unused: int, counts: list[TokenCount], _now_s: float
) -> None:
    tokens.give_back(counts, begins_s, unused)


def limits_from(settings: Settings, database: Database, server: str, silent_s: float) -> Limits:
    """Return the limits of a server with this id: over all servers if they share a database, whose
    heartbeats cease for at most `silent_s`.
    """
    if settings.database_url is None:
        return KeyLimits(settings)
    return SharedLimits(settings, Counts(database, server, silent_s))
