"""Limits of each key: requests per second, uploaded bytes per hour, tokens, open streams.

await limits.take_request(key)            TooMany at more than `max_requests_per_s`
await limits.take_upload(key, count)      TooMany at more than `max_upload_bytes_per_hour`
async with limits.tokens(key, ...): ...   TooMany at more than `max_tokens_per_minute` or `..._day`
async with limits.stream(key): ...        TooMany at more than `max_streams`

`key` is the prefix of a key. It is empty where no key is required: then all callers are one. One
event loop uses the limits. `KeyLimits` counts for one server: each decision is a few operations on
integers in memory, and the counts begin again when the server starts. Servers that share a database
count together: see service.limits.shared.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from service.errors import TooMany
from service.limits import tokens
from service.limits.tokens import TokenCount
from service.settings import Settings

SECOND_NS = 10**9
HOUR_NS = 3600 * SECOND_NS
BURST_NS = SECOND_NS  # a second's requests may come at once


@dataclass(frozen=True, slots=True)
class Usage:
    """What a key has used of its limits."""

    requests: int  # of the last second
    uploaded_bytes: int  # in its hour
    streams: int  # open now
    tokens: Mapping[str, int] = field(default_factory=dict)  # by the setting of their limit


class Limits(Protocol):
    """The limits of all keys, as requests use them."""

    async def take_request(self, key: str) -> None:
        """Count a request. TooMany if the key sends them faster than it may."""

    async def check_upload(self, key: str, count: int) -> None:
        """TooMany if the key may not upload `count` more bytes in this hour."""

    async def take_upload(self, key: str, count: int) -> None:
        """Count uploaded bytes. An hour begins with the first upload after the hour before."""

    def stream(self, key: str) -> AbstractAsyncContextManager[None]:
        """Count an open stream until it ends. TooMany if the key has too many."""

    async def check_tokens(self, key: str) -> None:
        """TooMany if the key has no tokens of language models left."""

    def tokens(
        self, key: str, most: int, used: Callable[[], int]
    ) -> AbstractAsyncContextManager[None]:
        """Take the `most` tokens that a request may use, until it ends; then `used()` count.
        TooMany if the key has not so many left.
        """

    async def usage(self, key: str) -> Usage:
        """Return what the key has used."""

    async def close(self) -> None:
        """End what runs beside the requests."""


class KeyLimits:
    """The limits of each key at one server."""

    def __init__(self, settings: Settings, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._settings, self._clock_ns = settings, clock_ns
        rate = settings.max_requests_per_s
        self._interval_ns = SECOND_NS // rate if rate else 0  # 0: no limit
        # Until when the requests so far are allowed, at one in each interval. At most BURST_NS
        # ahead of the clock, as in the generic cell rate algorithm.
        self._allowed_until_ns: dict[str, int] = {}
        self._uploads: dict[str, tuple[int, int]] = {}  # begin of the hour, bytes since
        self._streams: Counter[str] = Counter()
        # by key and seconds of the window
        self._tokens: defaultdict[tuple[str, int], TokenCount] = defaultdict(TokenCount)

    async def take_request(self, key: str) -> None:
        self.take_share_of_requests(key, 1)

    def take_share_of_requests(self, key: str, servers: int) -> None:
        """Count a request of a key that may send each of these servers an equal share."""
        if not self._interval_ns:
            return
        now_ns = self._clock_ns()
        until_ns = max(now_ns, self._allowed_until_ns.get(key, 0)) + self._interval_ns * servers
        if until_ns > now_ns + max(BURST_NS, self._interval_ns * servers):
            raise too_many_requests(self._settings)
        self._allowed_until_ns[key] = until_ns

    async def check_upload(self, key: str, count: int) -> None:
        used = self._uploaded_bytes(key)
        if used + count > self._settings.max_upload_bytes_per_hour:
            left_s = (self._uploads[key][0] + HOUR_NS - self._clock_ns()) // SECOND_NS + 1
            raise too_many_bytes(self._settings, used, count, left_s)

    async def take_upload(self, key: str, count: int) -> None:
        await self.check_upload(key, count)
        used = self._uploaded_bytes(key)
        begin_ns = self._uploads[key][0] if used else self._clock_ns()
        self._uploads[key] = (begin_ns, used + count)

    @asynccontextmanager
    async def stream(self, key: str) -> AsyncIterator[None]:
        check_streams(self._settings, self._streams[key])
        self._streams[key] += 1
        try:
            yield
        finally:
            self._streams[key] -= 1

    async def check_tokens(self, key: str) -> None:
        self.take_share_of_tokens(key, 0, 1)

    @asynccontextmanager
    async def tokens(self, key: str, most: int, used: Callable[[], int]) -> AsyncIterator[None]:
        return_unused = self.take_share_of_tokens(key, most, 1)
        try:
            yield
        finally:
            return_unused(most - used())

    def take_share_of_tokens(self, key: str, most: int, servers: int) -> Callable[[int], None]:
        """Take tokens of a key that may use an equal share at each of these servers. Return what
        gives some of them back.
        """
        windows = tokens.windows_of(self._settings, servers)
        counts = [self._tokens[key, window.seconds] for window in windows]
        begins_s = tokens.take(windows, counts, self._clock_ns() / SECOND_NS, most)
        return partial(tokens.give_back, counts, begins_s)

    async def usage(self, key: str) -> Usage:
        now_s = self._clock_ns() / SECOND_NS
        used_tokens = {
            window.setting: tokens.used(window, self._tokens[key, window.seconds], now_s)
            for window in tokens.windows_of(self._settings)
        }
        requests, uploaded = self._requests(key), self._uploaded_bytes(key)
        return Usage(requests, uploaded, self._streams[key], used_tokens)

    async def close(self) -> None:
        pass

    def _requests(self, key: str) -> int:
        if not self._interval_ns:
            return 0
        ahead_ns = self._allowed_until_ns.get(key, 0) - self._clock_ns()
        return max(0, -(-ahead_ns // self._interval_ns))

    def _uploaded_bytes(self, key: str) -> int:
        begin_ns, used = self._uploads.get(key, (0, 0))
        return used if self._clock_ns() - begin_ns < HOUR_NS else 0


def raised_by(setting: str) -> str:
    """Return the end of a refusal's next step, with the setting that raises the limit."""
    return f"GET /limits shows your limits; the operator of this service can raise `{setting}`"


def too_many_requests(settings: Settings) -> TooMany:
    """Return the refusal of a request."""
    rate = settings.max_requests_per_s
    return TooMany(
        f"this key sent more than {rate} requests in a second, expected at most {rate}"
        " (`max_requests_per_s`)",
        f"send fewer, or put more rows into each; {raised_by('max_requests_per_s')}",
        1,
    )


def too_many_bytes(settings: Settings, used: int, count: int, left_s: int) -> TooMany:
    """Return the refusal of an upload, `left_s` before the hour of the key ends."""
    return TooMany(
        f"this key uploaded {used} bytes in this hour, and {count} more come; expected at"
        f" most {settings.max_upload_bytes_per_hour} (`max_upload_bytes_per_hour`)",
        f"send it again in {left_s} s; {raised_by('max_upload_bytes_per_hour')}",
        left_s,
    )


def check_streams(settings: Settings, count: int) -> None:
    """TooMany if a key that has `count` open streams may open no more."""
    most = settings.max_streams
    if count >= most:
        raise TooMany(
            f"this key has {count} open streams, expected at most {most} (`max_streams`)",
            f"close one, or share one between requests; {raised_by('max_streams')}",
        )
