"""A worker that speaks the messages as model_worker does, and does what it is told: `python
engine_double.py BEHAVIOUR[@GPU] FD`. With a GPU, it does so there alone.

It answers y = x for one input and one output of the same dtype and shape. Imports nothing of ours,
as a stranger's worker would not.
"""

import array
import json
import mmap
import os
import signal
import socket
import sys
import time
from typing import Any


class Double:
    def __init__(self, behaviour: str, descriptor: int) -> None:
        behaviour, _, gpu = behaviour.partition("@")
        if gpu and os.environ["CUDA_VISIBLE_DEVICES"] != gpu:
            behaviour = "echo"
        self.what, _, argument = behaviour.partition("-")
        self.argument = float(argument or 0)
        self.server = socket.socket(fileno=descriptor)
        self.slots: dict[tuple[int, str], mmap.mmap] = {}

    def say(self, **message: object) -> None:
        self.server.send(json.dumps(message).encode())

    def main(self) -> None:
        json.loads(self.server.recv(1 << 17))
        if self.what == "unloadable":
            self.say(
                kind="failed",
                code="host.store",
                message="its files are damaged",
                next_step="compile the model again",
            )
            sys.exit(1)
        if self.what == "mute":
            time.sleep(600)
        if self.what == "stillborn":
            os._exit(3)
        self.say(kind="ready", memory_bytes=1000)
        if self.what == "twice":
            self.say(kind="ready", memory_bytes=1000)
        if self.what == "rubbish":
            self.server.send(b"hello")
        if self.what == "unasked":
            self.say(kind="done", number=7, outputs=[], copy_in_s=0, compute_s=0, copy_out_s=0)
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self.server, 1 << 17, 2)
            if not packet:
                os._exit(0)
            self.run(json.loads(packet), descriptors)

    def run(self, message, descriptors) -> None:  # type: ignore[no-untyped-def]
        slot, (x,) = message["slot"], message["inputs"]
        for name, descriptor in zip(message["new"], descriptors, strict=True):
            self.slots[slot, name] = mmap.mmap(descriptor, 0)
            os.close(descriptor)
        inputs, outputs = self.slots[slot, "inputs"], self.slots[slot, "outputs"]
        size = 4
        for dim in x["shape"]:
            size *= dim
        first = array.array("f", inputs[x["offset"] : x["offset"] + 4])[0] if size else 0.0
        y = dict(x)
        if self.what == "slow":
            time.sleep(self.argument)
        elif self.what == "short" and message["new"] == ["inputs", "outputs"] and first != 666:
            self.say(kind="short", number=message["number"], output_bytes=1 << 20)
            return
        elif first == 666:  # of behaviours that strike when asked
            y = self.strike(y, outputs)
        outputs[y["offset"] : y["offset"] + size] = inputs[x["offset"] : x["offset"] + size]
        self.say(
            kind="done",
            number=message["number"],
            outputs=[y],
            copy_in_s=0.001,
            compute_s=0.002,
            copy_out_s=0.003,
        )

    def strike(self, y: Any, outputs: Any) -> Any:
        match self.what:
            case "segfault" | "short":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(600)
            case "outside":
                self.say(
                    kind="done",
                    number=0,
                    outputs=[{**y, "offset": 1 << 30}],
                    copy_in_s=0,
                    compute_s=0,
                    copy_out_s=0,
                )
            case "huge":
                self.say(
                    kind="done",
                    number=0,
                    outputs=[{"shape": [1 << 40, 8], "offset": 0}],
                    copy_in_s=0,
                    compute_s=0,
                    copy_out_s=0,
                )
            case "rank":
                self.say(
                    kind="done",
                    number=0,
                    outputs=[{**y, "shape": [8]}],
                    copy_in_s=0,
                    compute_s=0,
                    copy_out_s=0,
                )
            case "rows":
                self.say(
                    kind="done",
                    number=0,
                    outputs=[{**y, "shape": [1, 8]}],
                    copy_in_s=0,
                    compute_s=0,
                    copy_out_s=0,
                )
            case "greedy":
                self.say(kind="short", number=0, output_bytes=1 << 40)
        time.sleep(600)


if __name__ == "__main__":
    Double(sys.argv[1], int(sys.argv[2])).main()
