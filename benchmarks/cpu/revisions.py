"""Whether this checkout is slower than another one, in one interleaved run.

    python -m benchmarks revisions OTHER

OTHER is a checkout of another revision; both run with this Python. Measured: requests of 1 KB and
of 602 KB, one connection, to a real server whose models are doubles (so that the wire is what
counts); and compiles of configs/digits.yaml, once from an empty store, and then with everything in
it. Each figure is the ratio of medians, this over other, with the range over rounds.
"""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson

from benchmarks.common import ROOT, Row, argument_parser, publish

DOUBLES = ("tests.service.builders.serving_models", "tests.service.serving_models")
BODIES = {"request of 1 KB": ("same_float32", (1, 256)), "request of 602 KB": ("wide", None)}
WIDE_SHAPE = (1, 3, 224, 224)
STARTS, ROUNDS, REQUESTS, COMPILES = 8, 4, 150, 9  # two starts of one revision differ by 10 %
MAX_RATIO = 1.05  # more is slower than noise between two runs of one revision


def main(words: Sequence[str]) -> None:
    options = argument_parser("revisions", __doc__)
    options.add_argument("other", type=Path, help="a checkout of another revision")
    arguments = options.parse_args(words)
    if not (arguments.other / "pipeline").is_dir() or not (arguments.other / ".git").exists():
        options.error(f"expected a git checkout of Crucible, got '{arguments.other}'")
    checkouts = {"this": ROOT, "other": arguments.other.resolve()}
    rows = [*wire_rows(checkouts), *compile_rows(checkouts)]
    for row in rows:
        row["this revision"], row["other revision"] = map(revision_of, checkouts.values())
    publish("revisions", rows, targets_of(rows))


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    return {
        f"{row['measured']}: at most {MAX_RATIO:g} times (got {row['ratio']})": float(
            str(row["ratio"])
        )
        <= MAX_RATIO
        for row in rows
    }


def revision_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def row_of(measured: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, str | float]:
    """The ratio of two medians; and the smallest and largest ratio of the rounds' values."""
    this, other = seconds["this"], seconds["other"]
    ratios = [one / two for one, two in zip(this, other, strict=True)]
    return {
        "measured": measured,
        "this ms": round(1e3 * statistics.median(this), 3),
        "other ms": round(1e3 * statistics.median(other), 3),
        "ratio": round(statistics.median(this) / statistics.median(other), 3),
        "rounds": len(ratios),
        "range of rounds": f"{min(ratios):.3f} to {max(ratios):.3f}",
    }


# -- the wire ----------------------------------------------------------------


def wire_rows(checkouts: Mapping[str, Path]) -> Iterator[dict[str, str | float]]:
    """One row per body, over several starts of both servers."""
    starts = [medians_of_start(checkouts) for _ in range(STARTS)]
    for measured in BODIES:
        yield row_of(
            measured, {name: [start[measured][name] for start in starts] for name in checkouts}
        )


def medians_of_start(checkouts: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Start a server per checkout, which answer in turn, a round of requests each.

    Return the median of the rounds in seconds, by body and checkout.
    """
    medians: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        connections = {
            name: http.client.HTTPConnection(stack.enter_context(served(checkout)))
            for name, checkout in checkouts.items()
        }
        for measured, (model, shape) in BODIES.items():
            rounds: dict[str, list[float]] = {name: [] for name in checkouts}
            for number in range(ROUNDS + 1):
                for name in turns(checkouts, number):
                    median_s = median_of_requests(connections[name], model, shape or WIDE_SHAPE)
                    if number:  # the first round warms up
                        rounds[name].append(median_s)
            medians[measured] = {name: statistics.median(rounds[name]) for name in checkouts}
    return medians


def turns(checkouts: Mapping[str, Path], number: int) -> list[str]:
    """The order of a round: who is first changes."""
    names = list(checkouts)
    return names if number % 2 else names[::-1]


@contextmanager
def served(checkout: Path) -> Iterator[str]:
    """A server of a checkout with the doubles' models; its host and port."""
    module = next(each for each in DOUBLES if (checkout / f"{each.replace('.', '/')}.py").is_file())
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, "-m", module, home],
            cwd=checkout,
            env=environment_of(checkout),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().split("http://")[1].strip()
            finally:
                process.terminate()


def environment_of(checkout: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout), **more}


def median_of_requests(
    connection: http.client.HTTPConnection, model: str, shape: tuple[int, ...]
) -> float:
    """Seconds from the first byte sent to the last one read."""
    size = 4
    for dimension in shape:
        size *= dimension
    tensor = {
        "name": "x",
        "shape": shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": size},
    }
    header = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(header))}
    body, seconds = header + bytes(size), []
    for _ in range(REQUESTS):
        begin = time.perf_counter()
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        seconds.append(time.perf_counter() - begin)
        assert answer.status == 200, content
    return statistics.median(seconds)


# -- compiles ----------------------------------------------------------------


def compile_rows(checkouts: Mapping[str, Path]) -> Iterator[dict[str, str | float]]:
    """The demo, from an empty store and from a full one."""
    with tempfile.TemporaryDirectory() as folder:
        first: dict[str, list[float]] = {
            name: [compile_s(checkout, f"{folder}/{name}")] for name, checkout in checkouts.items()
        }
        again: dict[str, list[float]] = {name: [] for name in checkouts}
        for number in range(COMPILES):
            for name in turns(checkouts, number):
                again[name].append(compile_s(checkouts[name], f"{folder}/{name}"))
    yield row_of("compile of the demo, empty store", first)
    yield row_of("compile of the demo, full store", again)


def compile_s(checkout: Path, home: str) -> float:
    """Seconds of one process."""
    plan = checkout / "configs" / "digits.yaml"
    command = [sys.executable, "-m", "pipeline.cli", "compile", str(plan), "--json"]
    begin = time.perf_counter()
    subprocess.run(
        [*command, "--out", f"{home}-out"],
        cwd=checkout,
        env=environment_of(checkout, CRUCIBLE_HOME=home),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - begin
