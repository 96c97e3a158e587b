"""How the parts of an answer come to the socket."""

from __future__ import annotations

import asyncio

from service.http.protocol import FLUSH_FROM_BYTES, GatheringTransport

MUCH = b"x" * FLUSH_FROM_BYTES


class Wire(asyncio.Transport):
    """Keeps what each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.lost = False

    def writelines(self, parts: list[bytes | memoryview]) -> None:  # type: ignore[override]
        assert not self.lost
        self.writes.append(b"".join(parts))

    def is_closing(self) -> bool:
        return self.lost

    def close(self) -> None:
        self.lost = True


def writes_of(*parts: bytes, flush: bool = False, close: bool = False, lost: bool = False) -> Wire:
    """The wire after these parts were written in one turn of the event loop."""
    wire = Wire()

    async def turn() -> None:
        transport = GatheringTransport(wire, asyncio.get_running_loop())
        for part in parts:
            transport.write(part)
        wire.lost = lost
        if flush:
            transport.flush()
            assert wire.writes
        if close:
            transport.close()
        await asyncio.sleep(0)

    asyncio.run(turn())
    return wire


def test_the_parts_of_one_turn_are_one_write() -> None:
    assert writes_of(b"head", b"body").writes == [b"headbody"]


def test_a_complete_answer_does_not_wait_for_the_end_of_the_turn() -> None:
    assert writes_of(b"head", b"body", flush=True).writes == [b"headbody"]


def test_much_is_written_at_once_so_that_the_transport_can_pause_the_writer() -> None:
    assert writes_of(b"head", MUCH, b"end").writes == [b"head" + MUCH, b"end"]


def test_a_connection_closes_behind_what_was_written() -> None:
    wire = writes_of(b"head", b"body", close=True)
    assert (wire.writes, wire.lost) == ([b"headbody"], True)


def test_nothing_is_written_to_a_lost_connection() -> None:
    assert writes_of(b"head", lost=True).writes == []
