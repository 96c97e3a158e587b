"""Decides which requests run together, and when. Pure: the caller passes `now`.

    queue = offer(queue, request)              add a request
    queue = drop(queue, number)                remove the request of a client that has left
    queue, batch = take(queue, now, idle)      take the batch that a worker is to run now; None:
                                               wait
    deadline(queue)                            the time at which `take` returns a batch even if no
                                               request is added

Requests of one kind run together, in the order of their arrival. A batch is closed when no more
rows fit, when its first request has waited `max_delay_s`, or at once if a worker is idle. If
several batches could be closed, the one with the oldest request goes first: a kind that always
fills its batches does not starve the others.

Where requests may share rows, each goes to the first row with room, in the order of arrival. A
request that does not fit waits, and later ones may still fill the batch. It is not starved: the
oldest request is always in the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

CALM = 8  # batches in a row that fit a smaller profile, before that profile is used
MAX_CAPTURED = 8  # sizes: the number of CUDA graphs that a session keeps


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch sizes that one profile of an engine takes."""

    profile: int
    low: int
    high: int
    captured: tuple[int, ...] = ()  # the sizes that are run, ascending; empty: any

    def holding(self, rows: int) -> int:
        """The smallest size that holds these rows, at most `high`."""
        return next((size for size in self.captured if size >= rows), max(rows, self.low))


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The common properties of requests that run together; compared by identity."""

    # of the profiles that take these shapes; empty: the request runs alone and unchanged
    sizes: tuple[Sizes, ...] = ()
    # to which the declared axes are padded; empty: to the longest request of a batch
    lengths: tuple[int, ...] = ()
    room: int = 0  # tokens of a row that several requests may share; 0: no row is shared
    shortest: int = 0  # a row with fewer tokens is padded to so many

    @property
    def most(self) -> int:
        """Rows of the largest batch."""
        return max((sizes.high for sizes in self.sizes), default=0)


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """One request in the queue."""

    number: int
    rows: int
    since: float
    kind: Kind
    length: int = 0  # tokens of each row, where rows are shared
    alone: bool = False  # its inputs made a batch fail: no other request runs with it


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits for a batch."""

    maximum: int = 1  # rows of several requests together
    max_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Queue:
    """All waiting requests in the order of their arrival, and the profile of the last batch."""

    rules: Rules
    waiting: tuple[WaitingRequest, ...] = ()
    profile: int = 0
    calm: int = 0  # batches in a row for which a smaller profile would have been enough


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a request in a batch: its first row, and the first of its tokens there."""

    row: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run together."""

    requests: tuple[WaitingRequest, ...]
    rows: int
    size: int  # rows with padding
    places: tuple[Place, ...] = ()  # of the requests


class Rows:
    """The rows of a batch of one kind, as requests are placed in them.

    A request of one row goes to the first row with room for it. Any other request gets new rows,
    and leaves the rest of them to others.
    """

    def __init__(self, room: int, most: int) -> None:
        self._room, self._most = room, most
        self._used: list[int] = []  # tokens of each row

    def __len__(self) -> int:
        return len(self._used)

    @property
    def is_full(self) -> bool:
        """True if nothing more can be placed."""
        return len(self._used) >= self._most and all(used >= self._room for used in self._used)

    def place(self, request: WaitingRequest) -> Place | None:
        """Place a request; None if it does not fit."""
        if self._room and request.rows == 1:
            for row, used in enumerate(self._used):
                if used + request.length <= self._room:
                    self._used[row] += request.length
                    return Place(row, used)
        row = len(self._used)
        if row and row + request.rows > self._most:
            return None
        self._used += [request.length] * request.rows
        return Place(row)


def offer(queue: Queue, request: WaitingRequest) -> Queue:
    """Return the queue with one more request."""
    # This runs for every request: `replace` takes three times as long.
    return Queue(queue.rules, (*queue.waiting, request), queue.profile, queue.calm)


def drop(queue: Queue, number: int) -> Queue:
    """Return the queue without this request; the same queue if the request is not in it."""
    remaining = tuple(request for request in queue.waiting if request.number != number)
    return queue if len(remaining) == len(queue.waiting) else replace(queue, waiting=remaining)


def put_back(queue: Queue, requests: Iterable[WaitingRequest]) -> Queue:
    """Return the queue with the requests of a batch in front."""
    return replace(queue, waiting=(*requests, *queue.waiting))


def deadline(queue: Queue) -> float | None:
    """The time at which the first request has waited `max_delay_s`; None: the queue is empty."""
    return queue.waiting[0].since + queue.rules.max_delay_s if queue.waiting else None


def take(queue: Queue, now: float, idle: bool) -> tuple[Queue, Batch | None]:
    """Take the batch to run now on a worker that has room.

    `idle` says that this worker has no batch. None if it is better to wait for more requests.
    """
    for requests, is_full in _groups(queue):
        if is_full or idle or now >= requests[0].since + queue.rules.max_delay_s:
            return _closed(queue, requests)
    return queue, None


def _groups(queue: Queue) -> Iterator[tuple[list[WaitingRequest], bool]]:
    """Yield the next batch of each kind, and whether it is full; the oldest request first."""
    seen: set[Kind] = set()
    for index, head in enumerate(queue.waiting):
        if head.alone or not head.kind.sizes:
            yield [head], True
        elif head.kind not in seen:
            seen.add(head.kind)
            yield _together(queue, index)


def _together(queue: Queue, first: int) -> tuple[list[WaitingRequest], bool]:
    """The requests that run with the one at index `first`, and whether the batch is full."""
    head = queue.waiting[first]
    most = min(queue.rules.maximum, head.kind.most)
    requests, rows, all_fit = [head], Rows(head.kind.room, most), True
    rows.place(head)
    for request in queue.waiting[first + 1 :]:
        if rows.is_full or not (all_fit or head.kind.room):
            break
        if request.kind is not head.kind or request.alone:
            continue
        if rows.place(request) is None:
            all_fit = False  # a shorter request may still fit into a shared row
        else:
            requests.append(request)
    return requests, rows.is_full or not all_fit


def _closed(queue: Queue, requests: list[WaitingRequest]) -> tuple[Queue, Batch]:
    """Take these requests out of the queue as one batch."""
    numbers = {request.number for request in requests}
    remaining = tuple(request for request in queue.waiting if request.number not in numbers)
    kind = requests[0].kind
    filled = Rows(kind.room, sum(request.rows for request in requests))
    places = tuple(place for request in requests if (place := filled.place(request)))
    rows = len(filled)
    if not kind.sizes:
        return replace(queue, waiting=remaining), Batch(tuple(requests), rows, rows, places)
    sizes, calm = _profile_for(kind, rows, queue)
    batch = Batch(tuple(requests), rows, sizes.holding(rows), places)
    return Queue(queue.rules, remaining, sizes.profile, calm), batch


def _profile_for(kind: Kind, rows: int, queue: Queue) -> tuple[Sizes, int]:
    """Choose the profile that pads least.

    The last profile stays for CALM batches, unless it takes more than twice the rows: so a change
    in load does not switch the profile each time.
    """
    fitting = [sizes for sizes in kind.sizes if rows <= sizes.high]
    best = min(fitting, key=lambda sizes: sizes.holding(rows))
    last = next((sizes for sizes in fitting if sizes.profile == queue.profile), best)
    if last.holding(rows) == best.holding(rows):
        return last, 0
    if queue.calm + 1 >= CALM or last.holding(rows) > 2 * best.holding(rows):
        return best, 0
    return last, queue.calm + 1


def captured_sizes(low: int, usual: int, high: int, most: int = MAX_CAPTURED) -> tuple[int, ...]:
    """The sizes that are run if each is captured as a CUDA graph.

    These are both ends, the usual size, and the largest powers of two between the ends.
    """
    ends = {max(low, 1), min(max(usual, low, 1), high), high}
    powers = [2**n for n in range(high.bit_length()) if low < 2**n < high and 2**n not in ends]
    room = max(0, most - len(ends))
    largest_powers = powers[max(0, len(powers) - room) :]
    return tuple(sorted(ends | set(largest_powers)))
