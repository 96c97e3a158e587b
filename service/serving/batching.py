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
class Batch:
    """Requests that run together."""

    requests: tuple[WaitingRequest, ...]
    rows: int
    size: int  # rows with padding


def offer(queue: Queue, request: WaitingRequest) -> Queue:
    """Return the queue with one more request."""
    # This runs for every request: `replace` takes three times as long.
    return Queue(queue.rules, (*queue.waiting, request), queue.profile, queue.calm)


def drop(queue: Queue, number: int) -> Queue:
    """Return the queue without this request; the same queue if the request is not in it."""
    remaining = tuple(request for request in queue.waiting if request.number != number)
    return queue if len(remaining) == len(queue.waiting) else replace(queue, waiting=remaining)


def put_back(queue: Queue, requests: Iterable[WaitingRequest]) -> Queue:
    """Return the queue with the requests of a failed batch in front, each to run alone."""
    retries = (replace(request, alone=True) for request in requests)
    return replace(queue, waiting=(*retries, *queue.waiting))


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
    requests, rows = [head], head.rows
    if rows >= most:
        return requests, True
    for request in queue.waiting[first + 1 :]:
        if request.kind is not head.kind or request.alone:
            continue
        if rows + request.rows > most:
            return requests, True
        requests.append(request)
        rows += request.rows
        if rows == most:
            return requests, True
    return requests, False


def _closed(queue: Queue, requests: list[WaitingRequest]) -> tuple[Queue, Batch]:
    """Take these requests out of the queue as one batch."""
    numbers = {request.number for request in requests}
    remaining = tuple(request for request in queue.waiting if request.number not in numbers)
    rows = sum(request.rows for request in requests)
    kind = requests[0].kind
    if not kind.sizes:
        return replace(queue, waiting=remaining), Batch(tuple(requests), rows, rows)
    sizes, calm = _profile_for(kind, rows, queue)
    batch = Batch(tuple(requests), rows, sizes.holding(rows))
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
