"""Which requests run together, and when. Pure: a value in, a value out, and `now` is given.

    queue = offer(queue, waiting)              a request has come
    queue = drop(queue, number)                its client has gone
    queue, batch = take(queue, now, idle)      some worker has room: what it is to run; None:
                                               nothing yet
    deadline(queue)                            when `take` gives something although nothing more
                                               comes

Requests of one kind run together, in the order of their coming. A batch is closed when no more rows
fit, when its first request has waited `max_delay_s`, or at once where a worker is idle. Of several
that could be closed, the one with the oldest request goes first, so that a kind which always fills
its batches keeps no other waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

CALM = 8  # batches in a row that would fit a smaller profile before it is gone back to
MAX_CAPTURED = 8  # sizes: a session keeps so many CUDA graphs


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a batch that one profile of an engine takes."""

    profile: int
    low: int
    high: int
    captured: tuple[int, ...] = ()  # those that are run, rising; empty: any

    def holding(self, rows: int) -> int:
        """The smallest size for so many rows, at most `high`."""
        return next((size for size in self.captured if size >= rows), max(rows, self.low))


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What requests that run together have in common; compared by identity."""

    sizes: tuple[
        Sizes,
        ...,
        # of the profiles that take these shapes; empty: rows are run as they come, and never with
        # others
    ] = ()
    lengths: tuple[
        int, ...
    ] = ()  # to which the declared axes are padded; empty: to the longest of a batch

    @property
    def most(self) -> int:
        """Rows of the largest batch."""
        return max((sizes.high for sizes in self.sizes), default=0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits."""

    number: int
    rows: int
    since: float
    kind: Kind
    alone: bool = False  # whoever it ran with would be judged by its inputs


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests are batched."""

    maximum: int = 1  # rows that several requests may have together
    max_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Queue:
    """All that wait, in the order of their coming, and the profile of the last batch."""

    rules: Rules
    waiting: tuple[Waiting, ...] = ()
    profile: int = 0
    calm: int = 0  # batches in a row for which a smaller profile would have done


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs together."""

    requests: tuple[Waiting, ...]
    rows: int
    size: int  # rows with padding


def offer(queue: Queue, waiting: Waiting) -> Queue:
    """With one more request."""
    return Queue(
        queue.rules, (*queue.waiting, waiting), queue.profile, queue.calm
    )  # of every request: `replace` takes three times as long


def drop(queue: Queue, number: int) -> Queue:
    """Without this request; the same queue if it is not there."""
    left = tuple(each for each in queue.waiting if each.number != number)
    return queue if len(left) == len(queue.waiting) else replace(queue, waiting=left)


def put_back(queue: Queue, requests: Iterable[Waiting]) -> Queue:
    """With requests of a batch that failed, each to run alone, before all others."""
    return replace(
        queue, waiting=(*(replace(each, alone=True) for each in requests), *queue.waiting)
    )


def deadline(queue: Queue) -> float | None:
    """When the first request will have waited long enough; None: nothing waits."""
    return queue.waiting[0].since + queue.rules.max_delay_s if queue.waiting else None


def take(queue: Queue, now: float, idle: bool) -> tuple[Queue, Batch | None]:
    """The batch that is to run now on a worker with room, which may be idle; None if it is better
    to wait for more requests.
    """
    for requests, is_full in _groups(queue):
        if is_full or idle or now >= requests[0].since + queue.rules.max_delay_s:
            return _closed(queue, requests)
    return queue, None


def _groups(queue: Queue) -> Iterator[tuple[list[Waiting], bool]]:
    """The next batch of each kind, the one with the oldest request first, and whether no more fits
    in.
    """
    seen: set[Kind] = set()
    for index, head in enumerate(queue.waiting):
        if head.alone or not head.kind.sizes:
            yield [head], True
        elif head.kind not in seen:
            seen.add(head.kind)
            yield _together(queue, index)


def _together(queue: Queue, first: int) -> tuple[list[Waiting], bool]:
    head = queue.waiting[first]
    most = min(queue.rules.maximum, head.kind.most)
    requests, rows = [head], head.rows
    if rows >= most:
        return requests, True
    for each in queue.waiting[first + 1 :]:
        if each.kind is not head.kind or each.alone:
            continue
        if rows + each.rows > most:
            return requests, True
        requests.append(each)
        rows += each.rows
        if rows == most:
            return requests, True
    return requests, False


def _closed(queue: Queue, requests: list[Waiting]) -> tuple[Queue, Batch]:
    taken = {each.number for each in requests}
    left = tuple(each for each in queue.waiting if each.number not in taken)
    rows = sum(each.rows for each in requests)
    kind = requests[0].kind
    if not kind.sizes:
        return replace(queue, waiting=left), Batch(tuple(requests), rows, rows)
    sizes, calm = _profile_for(kind, rows, queue)
    return Queue(queue.rules, left, sizes.profile, calm), Batch(
        tuple(requests), rows, sizes.holding(rows)
    )


def _profile_for(kind: Kind, rows: int, queue: Queue) -> tuple[Sizes, int]:
    """The profile that pads least; for a while the last one, unless it takes over twice the rows: a
    change in load does not flip it each time.
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
    """The sizes that are run where each is captured: the ends, the usual one, and the largest
    powers of two between them.
    """
    ends = {max(low, 1), min(max(usual, low, 1), high), high}
    powers = [2**n for n in range(high.bit_length()) if low < 2**n < high and 2**n not in ends]
    kept = powers[max(0, len(powers) - max(0, most - len(ends))) :]
    return tuple(sorted(ends | set(kept)))
