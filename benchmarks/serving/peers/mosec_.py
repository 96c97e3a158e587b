"""mosec with one worker. Its server is written in Rust."""

import os
import sys

from shapes import MAX_ROWS, MODEL, PORT, WAIT_S, batches, load, row_from

MODEL = MODEL or os.environ["BENCH_MODEL"]  # workers are processes of their own
sys.argv[1:] = [
    "--port",
    str(PORT),
    "--address",
    "127.0.0.1",
    "--timeout",
    "60000",
    "--log-level",
    "warning",
]

import numpy as np  # noqa: E402
from mosec import Server, Worker  # noqa: E402


class Api(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self):
        super().__init__()
        self.model = load(MODEL)

    def deserialize(self, data):
        return row_from(data)

    def serialize(self, data):
        return data.tobytes()

    def forward(self, data):
        return list(self.model(np.stack(data))) if batches(MODEL) else self.model(data[None])


if __name__ == "__main__":
    os.environ["BENCH_MODEL"] = MODEL
    server = Server()
    server.append_worker(
        Api,
        num=1,
        max_batch_size=MAX_ROWS if batches(MODEL) else 1,
        max_wait_time=int(WAIT_S * 1e3),
    )
    server.run()
