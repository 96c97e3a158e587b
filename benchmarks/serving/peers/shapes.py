"""What all peers serve, and how they are told: `python PEER.py MODEL PORT`. Imported in each peer's
own environment, so it needs numpy alone.

MODEL is `echo`, which gives back what it gets, or an ONNX file with one image as input and one
output.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable

import numpy as np

Rows = np.ndarray  # [rows, 3, height, width] float32 -> [rows, ...] float32
Model = Callable[[Rows], Rows]

ECHO = "echo"
MAX_ROWS = 16
WAIT_S = 0.005
"""How long a batch waits for more rows, where a peer has such a setting: its default is 10 ms in
two of them and none in the others. Less would leave batches of 16 clients half empty, more only
adds to the latency of one.
"""

MODEL, PORT = (
    (sys.argv[1], int(sys.argv[2]))
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-") and sys.argv[2].isdigit()
    else ("", 0)
)
"""Neither where the benchmark itself imports this."""


def batches(model: str) -> bool:
    """Whether rows are worth joining: a model that does nothing gains nothing by it."""
    return model != ECHO


def load(model: str) -> Model:
    """The model, as ONNX Runtime's documentation runs it, with all cores."""
    if model == ECHO:
        return lambda rows: rows
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda rows: session.run(None, {name: rows})[0]


def row_from(body: bytes) -> Rows:
    """The square image of a raw body, without a batch axis."""
    side = math.isqrt(len(body) // 12)
    return np.frombuffer(body, np.float32).reshape(3, side, side)
