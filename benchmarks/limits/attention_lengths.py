"""Time and memory of attention in one kernel and in three steps, at 512 to 16,384 tokens.

Plain attention multiplies queries by keys, takes the softmax and multiplies by the values, and so
writes and reads scores of tokens x tokens. One kernel keeps them where it computes. Both are
PyTorch's, of 12 heads of 64 values, without a mask: in fp16 on a GPU, in fp32 on a CPU. They run in
turn, ROUNDS times. `memory_mb` is the most that a run holds besides its inputs.

    python -m benchmarks attention_lengths [--device cuda|cpu] [--tokens N,N,...] [--into DIR]

A length whose scores do not fit into half of the free memory has no plain row.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil
import torch
from torch.nn import functional

from benchmarks.common import RESULTS, Row, argument_parser, publish
from pipeline.measurement.clock import monotonic

NAME = "attention_lengths"
HEADS, HEAD = 12, 64
TOKENS = (512, 2048, 8192, 16384)
ROUNDS = 7
COPIES_OF_SCORES = 2
"""The products, and the softmax of them."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
    return scores.softmax(-1) @ values


WAYS: Mapping[str, Attention] = {
    "plain": plain,
    "one kernel": functional.scaled_dot_product_attention,
}


def main(words: Sequence[str]) -> None:
    parser = argument_parser(NAME, __doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), metavar="N,N")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args(words)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.tokens):
        parser.error(f"--tokens: expected numbers such as 512,2048, got '{arguments.tokens}'")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("expected a GPU that torch can use, found none\n  next: --device cpu")
    with torch.no_grad():
        rows = [
            row
            for tokens in arguments.tokens.split(",")
            for row in measured(int(tokens), arguments.device)
        ]
    run: Row = {
        "heads": HEADS,
        "head": HEAD,
        "rounds": ROUNDS,
        "device": arguments.device,
        "dtype": str(dtype_of(arguments.device)).removeprefix("torch."),
        "torch": torch.__version__,
    }
    name = f"{NAME}_gpu" if arguments.device == "cuda" else NAME
    publish(name, rows, targets_of(rows), arguments.into, run)


def measured(tokens: int, device: str) -> list[Row]:
    """A row for each way; one that does not fit says so."""
    torch.manual_seed(0)
    shape, dtype = (1, HEADS, tokens, HEAD), dtype_of(device)
    given = tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    scores_bytes = COPIES_OF_SCORES * HEADS * tokens**2 * dtype.itemsize
    ways = dict(WAYS)
    rows = list[Row]()
    if scores_bytes > free_bytes(device) / 2:
        del ways["plain"]
        note = f"its scores take {scores_bytes / 1e9:.0f} GB, more than half of the free memory"
        rows.append(row_of(tokens, "plain", note=note))
    memory = {way: memory_of(attend, given) for way, attend in ways.items()}  # and warms up
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, attend in ways.items():
            times[way].append(seconds_of(attend, given))
    plain_s = median(times["plain"]) if "plain" in ways else None
    for way, found in times.items():
        middle_s = median(found)
        rows.append(
            row_of(
                tokens,
                way,
                ms=1e3 * middle_s,
                fastest_ms=1e3 * min(found),
                slowest_ms=1e3 * max(found),
                memory_mb=memory[way] / 1e6,
                times_plain=plain_s / middle_s if plain_s else None,
            )
        )
    return rows


def row_of(tokens: int, way: str, note: str | None = None, **figures: float | None) -> Row:
    names = ("ms", "fastest_ms", "slowest_ms", "memory_mb", "times_plain")
    return {
        "tokens": tokens,
        "attention": way,
        **{name: figures.get(name) for name in names},
        "note": note,
    }


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """One kernel holds no scores: its memory grows with the tokens, not with their square."""
    held = {row["tokens"]: row["memory_mb"] for row in rows if row["attention"] == "one kernel"}
    lengths = sorted(held, key=lambda tokens: int(tokens or 0))
    if len(lengths) < 2:
        return {}
    first, last = (float(held[tokens] or 0) for tokens in (lengths[0], lengths[-1]))
    growth = float(lengths[-1] or 0) / float(lengths[0] or 1)
    name = f"memory of one kernel grows at most twice as fast as tokens (x {growth:g})"
    return {f"{name} (got x {last / first:.1f})": last <= 2 * growth * first}


# -- the device --------------------------------------------------------------


def dtype_of(device: str) -> torch.dtype:
    return torch.float16 if device == "cuda" else torch.float32


def free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


def seconds_of(attend: Attention, given: tuple[torch.Tensor, ...]) -> float:
    """The time of one run: on a GPU, by its clock."""
    if given[0].device.type == "cpu":
        begin = monotonic()
        attend(*given)
        return monotonic() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    attend(*given)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def memory_of(attend: Attention, given: tuple[torch.Tensor, ...]) -> int:
    """The most bytes that one run holds besides its inputs: of the GPU's allocator, or of the pages
    of this process.
    """
    attend(*given)  # what the first run loads counts for no other
    if given[0].device.type == "cuda":
        before = int(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        attend(*given)
        return int(torch.cuda.max_memory_allocated()) - before
    ctypes.CDLL(None).malloc_trim(0)  # what is kept for later runs would hide what this one takes
    before = int(psutil.Process().memory_info().rss)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    attend(*given)
    status = Path("/proc/self/status").read_text()
    highest = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert highest is not None
    return max(int(highest[1]) * 1024 - before, 0)
