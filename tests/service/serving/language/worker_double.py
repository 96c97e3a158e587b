"""A worker that speaks the messages as the worker of a language model does, and does what it is
told: `python worker_double.py BEHAVIOUR FD`. Imports nothing of ours, as a stranger's would not.

It answers each request with three tokens. Told to `linger`, it begins each answer with a token, and
ends them all with another one when some answer is cancelled.
"""

import json
import os
import socket
import struct
import sys
import time
from typing import Any

LENGTHS = struct.Struct("<QQ")


def token_of(number: int, finish: str | None) -> dict[str, object]:
    """One token of an answer."""
    return {
        "number": number,
        "text": "abc",
        "ids": [5],
        "texts": ["abc"],
        "log_probs": [None],
        "prompt": 0,
        "finish": finish,
    }


class Double:
    def __init__(self, behaviour: str, descriptor: int) -> None:
        self.what = behaviour
        self.server = socket.socket(fileno=descriptor)
        self.stream = self.server.makefile("rb")
        self.running: set[int] = set()

    def say(self, body: object = None, **message: object) -> None:
        head = json.dumps(message).encode()
        tail = b"" if body is None else json.dumps(body).encode()
        self.server.sendall(LENGTHS.pack(len(head), len(tail)) + head + tail)

    def hear(self) -> dict[str, Any]:
        head, body = LENGTHS.unpack(self.stream.read(LENGTHS.size))
        message: dict[str, Any] = json.loads(self.stream.read(head))
        self.stream.read(body)
        return message

    def main(self) -> None:
        self.hear()
        if self.what == "mute":
            time.sleep(600)
        if self.what == "unloadable":
            self.say(kind="failed", code="host.store", message="its files are bad", next_step="")
            return
        self.say(kind="ready", memory_bytes=1000)
        while True:
            message = self.hear()
            if message["kind"] == "generate":
                self.answer(message["number"])
            elif self.what == "linger":
                self.finish(message["number"])

    def finish(self, left: int) -> None:
        """End all answers, now that one of them was cancelled."""
        for number in self.running - {left}:
            self.say([token_of(number, "length")], kind="step", cache_usage=0.5, began=[])
        self.running = set()

    def answer(self, number: int) -> None:
        if self.what == "silent":
            return
        if self.what == "crash":
            os.abort()
        if self.what == "rubbish":
            self.server.sendall(b"rubbish, which is no frame of lengths that could be")
            return
        self.say(kind="accepted", number=number, prompt_tokens=10**6 if self.what == "long" else 2)
        if self.what == "unbegun":
            return
        if self.what != "eager":
            self.say([], kind="step", cache_usage=0.0, began=[number])
        if self.what == "hang":
            return
        if self.what == "linger":
            self.running.add(number)
            self.say([token_of(number, None)], kind="step", cache_usage=0.5, began=[])
            return
        count = 300 if self.what == "chatty" else 3
        piece: dict[str, object] = {
            "number": number + 7 if self.what == "other" else number,
            "text": "abc",
            "ids": [10**6 if self.what == "unknown" else 5] * count,
            "texts": ["a"] * (2 if self.what == "short" else count),
            "log_probs": [-1.0 if self.what == "scored" else None] * count,
            "prompt": 3 if self.what == "echoes" else 0,
            "finish": "whatever" if self.what == "finish" else "length",
        }
        self.say([piece], kind="step", cache_usage=0.5, began=[])
        if self.what == "twice":
            self.say([], kind="step", cache_usage=0.5, began=[number + 1])


if __name__ == "__main__":
    try:
        Double(sys.argv[1], int(sys.argv[2])).main()
    except struct.error:  # the server is gone
        os._exit(0)
