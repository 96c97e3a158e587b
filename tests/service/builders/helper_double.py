"""A helper that answers each request with bytes that a helper must not send: the work names them.

Imports nothing of ours, so that it starts at once.
"""

import json
import os
import struct
import sys

LENGTHS = struct.Struct("<QQ")


def framed(**message: object) -> bytes:
    head = json.dumps(message).encode()
    return LENGTHS.pack(len(head), 2) + head + b"{}"


ANSWERS = {
    "huge_head": LENGTHS.pack(2**63, 0),
    "huge_body": LENGTHS.pack(2, 2**63) + b"{}",
    "half": framed(kind="result", header_length=2)[:-1],
    "rubbish": LENGTHS.pack(5, 0) + b"hello",
    "negative": framed(kind="result", header_length=-1),
    "unknown": framed(kind="done"),
    "right": framed(kind="result", header_length=2),
    "refuse": framed(kind="failed", code="service.too_large", message="much", next_step="less"),
    "refuse_strangely": framed(kind="failed", code="host.store", message="no"),
}


def main() -> None:
    while lengths := sys.stdin.buffer.read(LENGTHS.size):
        head, _ = (sys.stdin.buffer.read(length) for length in LENGTHS.unpack(lengths))
        work = json.loads(head)["work"]
        os.write(1, ANSWERS[work])
        if work == "half":
            return


if __name__ == "__main__":
    main()
