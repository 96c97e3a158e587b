"""What long JSON does to everybody else: p99 of a 1 KB binary request alone, and while four clients
send 150,528 numbers as JSON.

The server is the real one, its models a double that copies its input: what is measured is the wire.
Every client is a process of its own, with one connection and a body made beforehand. `--client URL
KIND SECONDS` is such a process.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import orjson

from benchmarks.common import ROOT, publish, takes_no_arguments

SECONDS, ROUNDS, CLIENTS, MAX_RISE_MS = 10.0, 3, 4, 5.0


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--client"]:
        print(json.dumps(ask(words[1], words[2], float(words[3]))))
        return
    takes_no_arguments("json_beside_binary", __doc__, words)
    with tempfile.TemporaryDirectory() as home, served(home) as place:
        rows = []
        for number in range(ROUNDS):
            alone = result(client(place, "binary", SECONDS))
            others = [client(place, "json", SECONDS + 2) for _ in range(CLIENTS)]
            time.sleep(1)  # their connections, and the server's helpers
            beside = result(client(place, "binary", SECONDS))
            sent = sum(len(result(each)) for each in others)
            rows.append(
                {
                    "round": number,
                    **figures("alone", alone),
                    **figures("beside JSON", beside),
                    "JSON requests/s": round(sent / (SECONDS + 2), 1),
                }
            )
    publish("json_beside_binary", rows, targets_of(rows))


def targets_of(rows: Sequence[Mapping[str, float]]) -> dict[str, bool]:
    rise = statistics.median(row["p99 beside JSON ms"] - row["p99 alone ms"] for row in rows)
    return {
        f"p99 rises by at most {MAX_RISE_MS:g} ms (got {rise:.2f} ms in the median round)": rise
        <= MAX_RISE_MS
    }


@contextmanager
def served(home: str) -> Iterator[str]:
    """A server with the double's models; its host and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.builders.serving_models", home],
        cwd=ROOT,
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


def client(place: str, kind: str, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks",
            "json_beside_binary",
            "--client",
            place,
            kind,
            str(seconds),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> list[float]:
    """Every request's time."""
    times: list[float] = json.loads(process.communicate()[0])
    assert process.returncode == 0
    return times


def figures(name: str, times: list[float]) -> dict[str, float]:
    return {
        f"p50 {name} ms": round(float(np.median(times)) * 1e3, 3),
        f"p99 {name} ms": round(float(np.percentile(times, 99)) * 1e3, 3),
    }


def ask(place: str, kind: str, seconds: float) -> list[float]:
    """Send one request after the other for so long."""
    connection = http.client.HTTPConnection(place)
    call = binary(connection) if kind == "binary" else long_json(connection)
    end, times = time.perf_counter() + seconds, []
    while (begin := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - begin)
    return times


def binary(connection: http.client.HTTPConnection) -> Callable[[], None]:
    item = {
        "name": "x",
        "shape": [1, 256],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 1024},
    }
    header = orjson.dumps({"inputs": [item], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return lambda: _sent(connection, "/v2/models/same_float32/infer", header + bytes(1024), headers)


def long_json(connection: http.client.HTTPConnection) -> Callable[[], None]:
    values = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    body = orjson.dumps({"inputs": {"x": values}}, option=orjson.OPT_SERIALIZE_NUMPY)
    return lambda: _sent(
        connection, "/models/wide/infer", body, {"Content-Type": "application/json"}
    )


def _sent(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]
) -> None:
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    said = answer.read()
    assert answer.status == 200, said
