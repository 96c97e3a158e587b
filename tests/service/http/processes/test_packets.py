"""Packets between two ends, and the memory that they lend each other."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pipeline.errors import HostError
from service.http.processes.packets import (
    MAX_PACKET_BYTES,
    Borrower,
    Head,
    Lender,
    Packet,
    Packets,
)
from service.serving.shared_memory import KEPT_BUFFERS

WITHIN_S = 60.0


class Side:
    """One end, and what arrived there."""

    def __init__(self, end: socket.socket) -> None:
        self.packets = Packets(end, self._received, self._closed)
        self.lender, self.borrower = Lender(self.packets), Borrower(self.packets)
        self.arrived: asyncio.Queue[Packet] = asyncio.Queue()
        self.is_closed = False

    def _received(self, packet: Packet) -> None:
        kind = packet.head["kind"]
        if kind == "released":
            self.lender.released(packet.head["buffers"])
        elif kind == "forget":
            self.borrower.forget(packet.head["buffer"])
        else:
            self.arrived.put_nowait(packet)

    def _closed(self) -> None:
        self.is_closed = True

    def lend(self, content: bytes) -> int:
        """Send a body in shared memory; return the number of its buffer."""
        lent = self.lender.shared(len(content))
        lent.data[:] = content
        place, descriptors = self.lender.lend(lent)
        self.packets.send({"kind": "body", **place}, b"", descriptors)
        return lent.buffer.number

    async def body(self) -> memoryview:
        packet = await asyncio.wait_for(self.arrived.get(), WITHIN_S)
        return self.borrower.body(packet.head, iter(packet.descriptors))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def between(story: Callable[[Side, Side], Awaitable[None]]) -> None:
    """Run `story` with two ends; then close one, which closes the other."""

    async def run() -> None:
        one, other = map(Side, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        await story(one, other)
        one.packets.close()
        await until(lambda: other.is_closed)

    asyncio.run(run())


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not reached():
            await asyncio.sleep(0.005)


def test_packets_of_every_length_arrive_in_order_with_their_descriptors() -> None:
    async def story(one: Side, other: Side) -> None:
        text = "\xe9" * MAX_PACKET_BYTES
        heads: list[Head] = [{"kind": "a", "text": text[:length]} for length in (0, 10**4, None)]
        gc.collect()
        before = open_descriptors()
        files = []
        for head in heads * 20:  # more than the kernel takes at once
            read, write = os.pipe()
            files.append(os.fdopen(read, "rb"))
            one.packets.send(head, b"body", (write,))
        for head, file in zip(heads * 20, files, strict=True):
            packet = await asyncio.wait_for(other.arrived.get(), WITHIN_S)
            assert (packet.head, packet.body) == (head, b"body")
            os.write(packet.descriptors[0], b"through")
            os.close(packet.descriptors[0])
            with file:
                assert file.read() == b"through"
        assert open_descriptors() == before

    between(story)


def test_what_is_sent_in_one_turn_is_one_packet() -> None:
    async def story() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        packets = Packets(ours, lambda packet: None, lambda: None)
        with theirs:
            theirs.setblocking(False)
            for number in range(3):
                packets.send({"number": number}, b"body")
            await asyncio.sleep(0)
            packet = theirs.recv(MAX_PACKET_BYTES)
            assert [packet.count(text) for text in (b'"number"', b"body")] == [3, 3]
            with pytest.raises(BlockingIOError):
                theirs.recv(MAX_PACKET_BYTES)
            packets.close()

    asyncio.run(story())


def test_a_turn_that_sends_more_than_a_packet_holds_sends_several() -> None:
    async def story(one: Side, other: Side) -> None:
        body = b"b" * (MAX_PACKET_BYTES // 3)
        for number in range(10):
            one.packets.send({"kind": "a", "number": number}, body)
        for number in range(10):
            packet = await asyncio.wait_for(other.arrived.get(), WITHIN_S)
            assert (packet.head["number"], packet.body) == (number, body)

    between(story)


def test_memory_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    async def story(one: Side, other: Side) -> None:
        number = one.lend(b"1" * 10**5)
        body = await other.body()
        part = body[10:20]
        del body
        second = one.lend(b"2" * 10**5)
        assert second != number
        del part
        assert await other.body() == b"2" * 10**5
        await until(lambda: len(one.lender._returned) == 2)
        assert one.lend(b"3" * 10**5) in (number, second)
        assert await other.body() == b"3" * 10**5

    between(story)


def test_memory_that_is_freed_in_another_thread_is_used_again() -> None:
    async def story(one: Side, other: Side) -> None:
        used = set()
        for value in (b"1", b"2", b"3"):
            used.add(one.lend(value * 10**5))
            held = [await other.body()]
            assert held[0] == value * 10**5
            await asyncio.to_thread(held.clear)
            await until(lambda: bool(one.lender._returned))
        assert len(used) == 1

    between(story)


def test_few_free_buffers_are_kept_and_the_rest_is_unmapped_on_both_sides() -> None:
    async def story(one: Side, other: Side) -> None:
        count = KEPT_BUFFERS + 10
        for _ in range(count):
            one.lend(b"1" * 10**5)
        held = [await other.body() for _ in range(count)]
        assert len(other.borrower._buffers) == count
        held.clear()
        await until(lambda: len(one.lender._returned) == count)
        next_one = one.lender.shared(10**5)
        await until(lambda: len(other.borrower._buffers) == KEPT_BUFFERS)
        assert next_one.buffer.number in other.borrower._buffers

    between(story)


def test_the_end_of_one_side_gives_the_other_its_memory_back() -> None:
    async def story(one: Side, other: Side) -> None:
        gc.collect()
        before = open_descriptors()
        one.lend(b"1" * 10**5)
        other.packets.close()
        await until(lambda: one.is_closed)
        one.packets.send({"kind": "a"}, b"", (os.dup(0),))
        one.lender.close()
        one.lender = Lender(one.packets)
        await asyncio.sleep(0)
        gc.collect()
        assert open_descriptors() == before - 2  # the two ends

    between(story)


def test_a_packet_that_cannot_be_handled_ends_the_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def story(one: Side, other: Side) -> None:
        one.packets.send({"no": "kind"})
        await until(lambda: other.is_closed and one.is_closed)

    between(story)
    assert "KeyError: 'kind'" in capsys.readouterr().out


def test_a_message_that_cannot_be_handled_leaves_no_descriptors_of_later_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def story(one: Side, other: Side) -> None:
        gc.collect()
        before = open_descriptors()
        one.packets.send({"no": "kind"})
        one.packets.send({"kind": "a"}, b"", (os.dup(0), os.dup(0)))
        await until(lambda: other.is_closed and one.is_closed)
        assert open_descriptors() == before - 2  # the two ends

    between(story)
    assert "KeyError: 'kind'" in capsys.readouterr().out


def test_a_descriptor_that_does_not_arrive_ends_the_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def story(one: Side, other: Side) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        one.packets.send({"kind": "a"}, b"", (os.dup(0),))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            await until(lambda: other.is_closed and one.is_closed)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert other.arrived.empty()

    between(story)
    assert "Too many open files" in capsys.readouterr().out


def test_memory_that_is_not_there_is_an_error_of_the_host() -> None:
    async def story(one: Side, other: Side) -> None:
        with pytest.raises(HostError, match="shared memory"):
            one.lender.shared(1 << 60)

    between(story)
