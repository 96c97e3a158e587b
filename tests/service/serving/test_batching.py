"""Which requests run together, and when: decided by values alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from service.serving.batching import (
    CALM,
    Batch,
    Kind,
    Queue,
    Rules,
    Sizes,
    WaitingRequest,
    captured_sizes,
    deadline,
    drop,
    offer,
    put_back,
    take,
)

DELAY = 0.01
ONE = Kind((Sizes(0, 1, 8),))


def queue_of(*rows: int, maximum: int = 8, kind: Kind = ONE, since: float = 0.0) -> Queue:
    queue = Queue(Rules(maximum, DELAY))
    for number, row in enumerate(rows):
        queue = offer(queue, WaitingRequest(number, row, since + number / 1000, kind))
    return queue


def numbers(batch: Batch | None) -> list[int] | None:
    return None if batch is None else [request.number for request in batch.requests]


def test_nothing_waits_while_a_worker_is_idle() -> None:
    queue, batch = take(queue_of(1, 1), now=0.002, idle=True)
    assert (numbers(batch), queue.waiting) == ([0, 1], ())


def test_a_batch_closes_when_full_or_when_its_first_request_has_waited() -> None:
    queue = queue_of(1, 1)
    assert deadline(queue) == DELAY
    assert take(queue, now=0.009, idle=False) == (queue, None)
    assert numbers(take(queue, now=DELAY, idle=False)[1]) == [0, 1]
    left, batch = take(queue_of(3, 3, 3), now=0.003, idle=False)
    assert (numbers(batch), batch.rows if batch else 0, numbers(Batch(left.waiting, 0, 0))) == (
        [0, 1],
        6,
        [2],
    )


def test_an_empty_queue_gives_nothing() -> None:
    queue = queue_of()
    assert (deadline(queue), take(queue, 5.0, idle=True)) == (None, (queue, None))


def test_a_kind_that_fills_its_batches_does_not_keep_another_waiting() -> None:
    other = Kind((Sizes(0, 1, 8),))
    queue = offer(Queue(Rules(2, DELAY)), WaitingRequest(0, 1, 0.0, other))
    for number in range(1, 5):
        queue = offer(queue, WaitingRequest(number, 1, 0.001, ONE))
    queue, first = take(queue, now=0.002, idle=False)
    assert numbers(first) == [1, 2]
    queue, second = take(queue, now=DELAY, idle=False)
    assert numbers(second) == [0]


def test_who_does_not_fit_keeps_later_ones_of_its_kind_behind_it() -> None:
    _, batch = take(queue_of(5, 4, 1), now=0.0, idle=True)
    assert numbers(batch) == [0]


def test_a_request_larger_than_batches_of_several_runs_alone() -> None:
    _, batch = take(queue_of(8, 1, maximum=4), now=0.0, idle=False)
    assert (numbers(batch), batch and batch.size) == ([0], 8)


def test_what_cannot_be_joined_runs_as_it_is_at_once() -> None:
    queue, batch = take(queue_of(3, 3, kind=Kind()), now=0.0, idle=False)
    assert (numbers(batch), batch and batch.size) == ([0], 3)
    assert len(queue.waiting) == 1


def test_a_client_that_went_leaves_no_gap() -> None:
    queue = drop(queue_of(1, 1, 1), 1)
    assert numbers(take(queue, 0.0, idle=True)[1]) == [0, 2]
    assert drop(queue, 7) is queue


def test_requests_that_are_put_back_run_first_and_alone_if_their_batch_failed() -> None:
    queue = queue_of(1, 1, 1, 1)
    queue, batch = take(replace(queue, rules=Rules(2, DELAY)), now=0.0, idle=True)
    assert batch is not None
    assert numbers(take(put_back(queue, batch.requests), now=0.0, idle=True)[1]) == [0, 1]
    queue = put_back(queue, (replace(request, alone=True) for request in batch.requests))
    taken = []
    while queue.waiting:
        queue, batch = take(queue, now=0.0, idle=True)
        taken.append(numbers(batch))
    assert taken == [[0], [1], [2, 3]]


def test_a_batch_is_padded_to_the_next_captured_size() -> None:
    kind = Kind((Sizes(0, 1, 16, (1, 4, 16)),))
    for rows, size in ((1, 1), (2, 4), (4, 4), (5, 16)):
        _, batch = take(queue_of(*[1] * rows, maximum=16, kind=kind), now=0.0, idle=True)
        assert (batch and batch.rows, batch and batch.size) == (rows, size)


@pytest.mark.parametrize(
    ("low", "usual", "high", "expected"),
    [
        (1, 8, 64, (1, 2, 4, 8, 16, 32, 64)),
        (1, 8, 500, (1, 8, 16, 32, 64, 128, 256, 500)),
        (4, 4, 4, (4,)),
        (0, 1, 3, (1, 2, 3)),
        (3, 40, 20, (3, 4, 8, 16, 20)),
    ],
)
def test_few_sizes_are_captured(low: int, usual: int, high: int, expected: tuple[int, ...]) -> None:
    assert captured_sizes(low, usual, high) == expected


SMALL_AND_LARGE = Kind((Sizes(0, 1, 8), Sizes(1, 6, 64)))


def after(queue: Queue, rows: int) -> tuple[Queue, int]:
    """The queue after a batch of one request, and the size of that."""
    queue, batch = take(offer(queue, WaitingRequest(0, rows, 0.0, SMALL_AND_LARGE)), 0.0, idle=True)
    assert batch is not None
    return queue, batch.size


def test_a_profile_is_left_downwards_only_after_a_while() -> None:
    queue = Queue(Rules(64, DELAY))
    queue, size = after(queue, 20)
    assert (queue.profile, size) == (1, 20)
    for _ in range(CALM - 1):
        queue, size = after(queue, 5)
        assert (queue.profile, size) == (1, 6)
    queue, size = after(queue, 5)
    assert (queue.profile, size) == (0, 5)
    queue, size = after(queue, 20)
    assert (queue.profile, size) == (1, 20)


def test_a_profile_is_left_at_once_where_staying_takes_over_twice_the_rows() -> None:
    queue, _ = after(Queue(Rules(64, DELAY)), 20)
    queue, size = after(queue, 2)
    assert (queue.profile, size) == (0, 2)


# -- whatever happens --------------------------------------------------------

KINDS = (ONE, Kind((Sizes(0, 2, 6, (2, 6)),)), Kind())
EVENTS = some.lists(
    some.one_of(
        some.tuples(some.just("come"), some.integers(1, 6), some.sampled_from(KINDS)),
        some.tuples(some.just("go"), some.integers(0, 40)),
        some.tuples(some.just("answer")),
        some.tuples(some.just("time"), some.floats(0, 0.02)),
    ),
    max_size=60,
)


class World:
    """A worker with two slots, as the deployment runs it."""

    def __init__(self, maximum: int) -> None:
        self.queue, self.now, self.busy = Queue(Rules(maximum, DELAY)), 0.0, 0
        self.batches: list[Batch] = []
        self.gone: set[int] = set()
        self.count = 0

    def pump(self) -> None:
        while self.queue.waiting and self.busy < 2:
            self.queue, batch = take(self.queue, self.now, self.busy == 0)
            if batch is None:
                break
            self.batches.append(batch)
            self.busy += 1

    def play(self, event: tuple[object, ...]) -> None:
        match event:
            case ("come", int(rows), Kind() as kind):
                self.queue = offer(self.queue, WaitingRequest(self.count, rows, self.now, kind))
                self.count += 1
            case ("go", int(number)):
                before, self.queue = self.queue, drop(self.queue, number)
                if before is not self.queue:
                    self.gone.add(number)
            case ("answer",):
                self.busy = max(0, self.busy - 1)
            case ("time", float(seconds)):
                self.now += seconds
        self.pump()


@given(EVENTS, some.integers(1, 8))
def test_whatever_comes_each_request_runs_once_in_order_and_in_time(
    events: list[tuple[object, ...]], maximum: int
) -> None:
    world = World(maximum)
    for event in events:
        world.play(event)
        if world.busy < 2:
            assert all(world.now < request.since + DELAY for request in world.queue.waiting), (
                "waits past its deadline while a slot is free"
            )
        assert world.busy > 0 or not world.queue.waiting, "waits while the worker is idle"
    while world.queue.waiting:
        world.play(("answer",))
    ran = [request.number for batch in world.batches for request in batch.requests]
    assert sorted(ran) == sorted(set(range(world.count)) - world.gone)
    for kind in KINDS:
        of_kind = [
            each.number for batch in world.batches for each in batch.requests if each.kind is kind
        ]
        assert of_kind == sorted(of_kind)
    for batch in world.batches:
        kind = batch.requests[0].kind
        assert {request.kind for request in batch.requests} == {kind}
        assert batch.rows == sum(request.rows for request in batch.requests) <= batch.size
        assert len(batch.requests) == 1 or batch.rows <= min(maximum, kind.most)
        if kind.sizes:
            assert any(
                size.low <= batch.size <= size.high
                and (not size.captured or batch.size in size.captured)
                for size in kind.sizes
            )
