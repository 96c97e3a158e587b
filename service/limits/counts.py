"""What all servers of a database together have allowed each key. All times are the database's.

counts.take_requests(key, 100, 10)    up to 10 requests of a key that may send 100 in a second
counts.take_bytes(key, 100, 10, 20)   10 to 20 bytes of a key that may upload 100 in an hour
counts.set_streams(key, 2, 100)       this server has 2 open streams of a key that may have 100

Each is one transaction, and they run one after another for a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from service.limits.tokens import TokenCount, Window, used
from service.storage.database import Database
from service.storage.tables import (
    database_clock_s,
    key_counts,
    key_streams,
    key_tokens,
    nodes,
)

HOUR_S = 3600.0
BURST_S = 1.0  # a second's requests may come at once
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a server may let a key do, out of the limit over all servers."""

    count: int
    left_s: float  # until more is free: of bytes, to the end of the hour
    used: int = 0  # by all servers, before


@dataclass(slots=True)
class _Row:
    """The counts of one key, at a moment."""

    now_s: float
    requests_until_s: float
    hour_begin_s: float
    uploaded_bytes: int


class Counts:
    """The counts of all keys, for one server. Safe for threads."""

    def __init__(self, database: Database, server: str, silent_s: float) -> None:
        """`silent_s`: how long a server may send no heartbeat before it counts as gone."""
        self._database, self._server, self._silent_s = database, server, silent_s

    def take_requests(self, key: str, rate: int, most: int) -> Grant:
        """Take up to `most` requests of a key. None are free for a key that has used up its rate.

        As in the generic cell rate algorithm, `requests_until` is at most BURST_S ahead.
        """
        with self._row(key) as row:
            begin_s = max(row.now_s, row.requests_until_s)
            free = math.floor((row.now_s + BURST_S - begin_s) * rate + 1e-3)  # doubles: 0.2 us
            count = max(0, min(most, free))
            row.requests_until_s = begin_s + count / rate
            left_s = row.requests_until_s + 1 / rate - row.now_s - BURST_S
        return Grant(count, max(0.0, left_s))

    def take_bytes(self, key: str, limit: int, least: int, most: int) -> Grant:
        """Take `least` to `most` bytes of an upload; none if `least` is more than is free."""
        with self._row(key) as row:
            used, left_s = _uploaded(row)
            count = min(most, limit - used)
            count = 0 if count < least else count
            if count and not used:
                row.hour_begin_s, row.uploaded_bytes, left_s = row.now_s, 0, HOUR_S
            row.uploaded_bytes += count
        return Grant(count, left_s, used)

    def set_streams(self, key: str, count: int, limit: int) -> int:
        """Store how many streams this server has open, and return those of the other servers. More
        than before are stored only if all together are at most `limit`.
        """
        of_key, here = key_streams.c.key == key, key_streams.c.server == self._server
        known = sa.select(nodes.c.id)
        with self._database.write() as rows:
            self._database.lock(rows, f"streams {key}")
            # of servers that are gone for so long that they have no row
            rows.execute(sa.delete(key_streams).where(~here, key_streams.c.server.not_in(known)))
            live = known.where(self._is_live())
            others = sa.select(sa.func.sum(key_streams.c.count)).where(
                of_key, ~here, key_streams.c.server.in_(live)
            )
            elsewhere = int(rows.scalar(others) or 0)
            before = rows.scalar(sa.select(key_streams.c.count).where(of_key, here)) or 0
            if count > before and count + elsewhere > limit:
                return elsewhere
            rows.execute(sa.delete(key_streams).where(of_key, here))
            if count:
                values = {"key": key, "server": self._server, "count": count}
                rows.execute(sa.insert(key_streams).values(values))
        return elsewhere

    def forget_streams(self) -> None:
        """Remove the streams of this server, which ends."""
        with self._database.write() as rows:
            rows.execute(sa.delete(key_streams).where(key_streams.c.server == self._server))

    def change_tokens(
        self, key: str, windows: Sequence[Window], change: Callable[[list[TokenCount], float], T]
    ) -> T:
        """Change the tokens of a key in these windows, and store them, unless `change` raises. It
        takes the counts and the time.
        """
        with self._database.write() as rows:
            self._database.lock(rows, f"tokens {key}")  # there may be no row to lock
            known = _tokens(rows, key)
            counts = [known.get(window.seconds, TokenCount()) for window in windows]
            result = change(counts, float(rows.scalar(sa.select(database_clock_s())) or 0.0))
            for window, count in zip(windows, counts, strict=True):
                at = (key_tokens.c.key == key, key_tokens.c.seconds == window.seconds)
                rows.execute(sa.delete(key_tokens).where(*at))
                if count.tokens:
                    values = {"key": key, "seconds": window.seconds}
                    values |= {"begin": count.begin_s, "tokens": count.tokens}
                    rows.execute(sa.insert(key_tokens).values(values))
        return result

    def used_tokens(self, key: str, windows: Sequence[Window]) -> dict[str, int]:
        """Return the tokens of a key by the setting of their limit."""
        with self._database.read() as rows:
            known = _tokens(rows, key)
            now_s = float(rows.scalar(sa.select(database_clock_s())) or 0.0)
        return {
            window.setting: used(window, known.get(window.seconds, TokenCount()), now_s)
            for window in windows
        }

    def usage(self, key: str, rate: int | None) -> tuple[int, int, int]:
        """Return the requests of the last second, the bytes of the hour, and the open streams."""
        live = sa.select(nodes.c.id).where(self._is_live())
        streams = sa.select(sa.func.sum(key_streams.c.count)).where(
            key_streams.c.key == key,
            key_streams.c.server.in_(live) | (key_streams.c.server == self._server),
        )
        with self._database.read() as rows:
            row = _read(rows, key)
            open_streams = int(rows.scalar(streams) or 0)
        ahead = math.ceil((row.requests_until_s - row.now_s) * (rate or 0) - 1e-3)
        return max(0, ahead), _uploaded(row)[0], open_streams

    def servers(self) -> int:
        """Return how many servers are live; at least this one."""
        live = sa.select(sa.func.count()).select_from(nodes)
        live = live.where(self._is_live(), nodes.c.kind == "server", nodes.c.id != self._server)
        with self._database.read() as rows:
            return 1 + int(rows.scalar(live) or 0)

    def close(self) -> None:
        """Close the database for the calling thread."""
        self._database.close()

    def _is_live(self) -> sa.ColumnElement[bool]:
        return nodes.c.heartbeat_at > database_clock_s() - self._silent_s

    @contextmanager
    def _row(self, key: str) -> Iterator[_Row]:
        """Provide the counts of a key to change. They are stored at the end."""
        with self._database.write() as rows:
            self._database.lock(rows, f"counts {key}")  # there may be no row to lock
            row = _read(rows, key)
            yield row
            values: dict[str, Any] = {
                "requests_until": row.requests_until_s,
                "hour_begin": row.hour_begin_s,
                "uploaded_bytes": row.uploaded_bytes,
            }
            change = sa.update(key_counts).where(key_counts.c.key == key).values(values)
            if rows.execute(change).rowcount == 0:
                rows.execute(sa.insert(key_counts).values({"key": key, **values}))


def _read(rows: sa.Connection, key: str) -> _Row:
    query = sa.select(database_clock_s().label("now"), key_counts).where(key_counts.c.key == key)
    row = rows.execute(query).first()
    if row is None:
        return _Row(float(rows.scalar(sa.select(database_clock_s())) or 0.0), 0.0, 0.0, 0)
    return _Row(row.now, row.requests_until, row.hour_begin, row.uploaded_bytes)


def _tokens(rows: sa.Connection, key: str) -> dict[int, TokenCount]:
    query = sa.select(key_tokens).where(key_tokens.c.key == key)
    return {row.seconds: TokenCount(row.begin, row.tokens) for row in rows.execute(query)}


def _uploaded(row: _Row) -> tuple[int, float]:
    """Return the bytes uploaded in the hour of a key, and how much of that hour is left."""
    left_s = row.hour_begin_s + HOUR_S - row.now_s
    return (row.uploaded_bytes, left_s) if left_s > 0 else (0, 0.0)
