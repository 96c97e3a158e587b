"""Triton's perf_analyzer as it is, against `crucible serve`: HTTP and gRPC, calls that wait and
calls that do not, a stream, batches, a rate.

    python -m benchmarks perf_analyzer [--command WORD ...] [--into DIR]

`pip install perf-analyzer` brings the command where glibc is 2.38 or newer. Elsewhere `--command`
may name another way to start it, for example the loader and libraries of a newer Debian unpacked
beside it: `--command LIB/ld-linux-x86-64.so.2 --library-path LIB BIN/perf_analyzer`.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, argument_parser, publish
from benchmarks.serving.crucible import MODEL, Served, deploy, plan_of, serving
from benchmarks.serving.models import INPUT, write_small
from service.client import Client

SIDE, MAX_ROWS = 16, 16
JSON = ("--input-data", "zero", "--input-tensor-format", "json", "--output-tensor-format", "json")
MODES: Mapping[str, tuple[str, ...]] = {
    "HTTP, 1 connection": ("-i", "http", "--concurrency-range", "1"),
    "HTTP, 8 connections": ("-i", "http", "--concurrency-range", "8"),
    "HTTP, 8 at once, asynchronous": ("-i", "http", "--async", "--concurrency-range", "8"),
    "HTTP, batches of 4": ("-i", "http", "-b", "4", "--concurrency-range", "4"),
    "HTTP, 200 requests/s": ("-i", "http", "--request-rate-range", "200"),
    "HTTP, JSON": ("-i", "http", "--concurrency-range", "4", *JSON),
    "gRPC, 8 connections": ("-i", "grpc", "--concurrency-range", "8"),
    "gRPC, asynchronous": ("-i", "grpc", "--async", "--concurrency-range", "8"),
    "gRPC, stream": ("-i", "grpc", "--streaming", "--concurrency-range", "8"),
}
"""What perf_analyzer is asked for. As JSON it gets zeros: it fills random tensors with every
pattern of bits, and writes NaN, which JSON has not.
"""
SETTINGS = (
    "--measurement-interval",
    "3000",
    "--stability-percentage",
    "50",
    "--shape",
    f"{INPUT}:3,{SIDE},{SIDE}",
)
MODE_S = 180.0
COLUMNS = {
    "rows/s": "Inferences/Second",
    "queue us": "Server Queue",
    "compute us": "Server Compute Infer",
    "p50 us": "p50 latency",
    "p99 us": "p99 latency",
}
"""Ours by perf_analyzer's. The stages are what it reads from the server's statistics."""


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    version = version_of(arguments.command)
    with tempfile.TemporaryDirectory(prefix="crucible-perf-") as text:
        folder = Path(text)
        model = write_small(folder / "small.onnx", seed=0, side=SIDE)
        with serving(folder / "home") as served, Client(served.url) as client:
            deploy(client, model, plan_of("small", MAX_ROWS))
            rows = [measured(arguments.command, name, served, folder / "out.csv") for name in MODES]
    publish("perf_analyzer", rows, targets_of(rows), arguments.into, {"perf_analyzer": version})


def version_of(command: Sequence[str]) -> str:
    """What it calls itself; ends with a sentence where it does not start."""
    try:
        done = subprocess.run(
            [*command, "--version"],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        message = (
            f": {error.stdout.strip()}" if isinstance(error, subprocess.CalledProcessError) else ""
        )
        sys.exit(
            f"'{command[0]}' does not start: {error}{message}\n  next: pip install perf-analyzer,"
            " or see --help for a host with an older glibc"
        )
    return done.stdout.strip()


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("perf_analyzer", __doc__)
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the result goes"
    )
    parser.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        default=["perf_analyzer"],
        metavar="WORD",
        help="that starts it; comes last",
    )
    return parser.parse_args(words)


def measured(command: Sequence[str], name: str, served: Served, out: Path) -> dict[str, Any]:
    """One run of perf_analyzer: its figures, or what it said where it gave none."""
    out.unlink(missing_ok=True)
    port = grpc_port(served) if "grpc" in MODES[name] else served.port
    words = [
        *command,
        "-m",
        MODEL,
        "-u",
        f"127.0.0.1:{port}",
        *MODES[name],
        *SETTINGS,
        "-f",
        str(out),
    ]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MODE_S,
        check=False,
    )
    print(f"{name}: exit code {done.returncode}", file=sys.stderr, flush=True)
    said = "" if done.returncode == 0 else " ".join(done.stdout.split())[-300:]
    found = next(csv.DictReader(out.read_text().splitlines()), None) if out.is_file() else None
    return {
        "mode": name,
        **{ours: float(found[theirs]) if found else None for ours, theirs in COLUMNS.items()},
        "note": said,
    }


def grpc_port(served: Served) -> int:
    """The other port that the server listens on."""
    listening = {
        each.laddr.port
        for each in served.process.net_connections()
        if each.status == psutil.CONN_LISTEN
    }
    return next(port for port in listening if port != served.port)


def targets_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Every mode ran to its end, with figures."""
    return {
        f"{row['mode']}: perf_analyzer ended without an error": (
            not row["note"] and bool(row["rows/s"])
        )
        for row in rows
    }
