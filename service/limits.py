"""Limits of each key: requests per second, uploaded bytes per hour, open streams.

limits = KeyLimits(settings)
limits.take_request(key)            TooMany at more than `max_requests_per_s`
limits.take_upload(key, count)      TooMany at more than `max_upload_bytes_per_hour`
with limits.stream(key): ...        TooMany at more than `max_streams`

`key` is the prefix of a key. It is empty where no key is required: then all callers are one. One
event loop uses the limits, and each decision is a few operations on integers in memory: no locks,
no tasks, no database. So the counts begin again when the server starts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import TooMany
from service.settings import Settings

SECOND_NS = 10**9
HOUR_NS = 3600 * SECOND_NS
BURST_NS = SECOND_NS  # a second's requests may come at once


def raised_by(setting: str) -> str:
    """Return the end of a refusal's next step, with the setting that raises the limit."""
    return f"GET /limits shows your limits; the operator of this service can raise `{setting}`"


class KeyLimits:
    """What each key has used of its limits."""

    def __init__(self, settings: Settings, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._settings, self._clock_ns = settings, clock_ns
        rate = settings.max_requests_per_s
        self._interval_ns = SECOND_NS // rate if rate else 0  # 0: no limit
        # Until when the requests so far are allowed, at one in each interval. At most BURST_NS
        # ahead of the clock, as in the generic cell rate algorithm.
        self._allowed_until_ns: dict[str, int] = {}
        self._uploads: dict[str, tuple[int, int]] = {}  # begin of the hour, bytes since
        self._streams: Counter[str] = Counter()

    def take_request(self, key: str) -> None:
        """Count a request. TooMany if the key sends them faster than it may."""
        if not self._interval_ns:
            return
        now_ns = self._clock_ns()
        until_ns = max(now_ns, self._allowed_until_ns.get(key, 0)) + self._interval_ns
        if until_ns > now_ns + BURST_NS:
            rate = self._settings.max_requests_per_s
            raise TooMany(
                f"this key sent more than {rate} requests in a second, expected at most {rate}"
                " (`max_requests_per_s`)",
                f"send fewer, or put more rows into each; {raised_by('max_requests_per_s')}",
                1,
            )
        self._allowed_until_ns[key] = until_ns

    def requests(self, key: str) -> int:
        """Return how many requests of the last second count."""
        if not self._interval_ns:
            return 0
        ahead_ns = self._allowed_until_ns.get(key, 0) - self._clock_ns()
        return max(0, -(-ahead_ns // self._interval_ns))

    def check_upload(self, key: str, count: int) -> None:
        """TooMany if the key may not upload `count` more bytes in this hour."""
        used, most = self.uploaded_bytes(key), self._settings.max_upload_bytes_per_hour
        if used + count > most:
            left_s = (self._uploads[key][0] + HOUR_NS - self._clock_ns()) // SECOND_NS + 1
            raise TooMany(
                f"this key uploaded {used} bytes in this hour, and {count} more come; expected at"
                f" most {most} (`max_upload_bytes_per_hour`)",
                f"send it again in {left_s} s; {raised_by('max_upload_bytes_per_hour')}",
                left_s,
            )

    def take_upload(self, key: str, count: int) -> None:
        """Count uploaded bytes. An hour begins with the first upload after the hour before."""
        self.check_upload(key, count)
        used = self.uploaded_bytes(key)
        begin_ns = self._uploads[key][0] if used else self._clock_ns()
        self._uploads[key] = (begin_ns, used + count)

    def uploaded_bytes(self, key: str) -> int:
        """Return the bytes that the key has uploaded in its hour."""
        begin_ns, used = self._uploads.get(key, (0, 0))
        return used if self._clock_ns() - begin_ns < HOUR_NS else 0

    @contextmanager
    def stream(self, key: str) -> Iterator[None]:
        """Count an open stream until it ends. TooMany if the key has too many."""
        most = self._settings.max_streams
        if self._streams[key] >= most:
            raise TooMany(
                f"this key has {self._streams[key]} open streams, expected at most {most}"
                " (`max_streams`)",
                f"close one, or share one between requests; {raised_by('max_streams')}",
            )
        self._streams[key] += 1
        try:
            yield
        finally:
            self._streams[key] -= 1

    def streams(self, key: str) -> int:
        """Return how many streams the key has open."""
        return self._streams[key]
