"""The bytes of all unfinished requests together, over HTTP and gRPC, and their limit."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from service.errors import Unavailable


class BytesInFlight:
    """The budget of one server. `refused` is called for each request that does not fit."""

    def __init__(self, limit: int, refused: Callable[[], None] = lambda: None) -> None:
        self.limit, self.held = limit, 0
        self._refused = refused
        self._lock = Lock()  # bodies are unpacked in threads

    def share(self) -> Share:
        """Return the empty share of a new request."""
        return Share(self)

    def take(self, count: int) -> None:
        """Take `count` bytes. Unavailable, and nothing is taken, if they do not fit."""
        with self._lock:
            if count <= self.limit - self.held:
                self.held += count
                return
        self._refused()
        raise Unavailable(
            f"the unfinished requests would hold more than {self.limit} bytes together",
            "send the request again in a moment, or ask the operator to raise"
            " `max_bytes_in_flight` of the service",
        )

    def give_back(self, count: int) -> None:
        """Give back bytes that were taken."""
        with self._lock:
            self.held -= count


class Share:
    """The bytes of one request. Use it with `with`, which gives all of them back."""

    def __init__(self, budget: BytesInFlight) -> None:
        self._budget, self.count = budget, 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.count:
            self._budget.give_back(self.count)

    def grow(self, count: int) -> None:
        """Hold `count` more bytes. Unavailable if the budget does not have them."""
        if count:
            self._budget.take(count)
            self.count += count
