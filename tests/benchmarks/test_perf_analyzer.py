"""What `perf_analyzer` makes of a run: the command is a double, for the real one is not
on every host.
"""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.pages.render import load_results, render

Bench = dict[str, ModuleType]
DOUBLE = """
import sys
words = sys.argv[1:]
if "--streaming" in words:
    sys.exit("Failed to maintain requested inference load.\\nThread [0] had error: no stream")
names = ["Concurrency", "Inferences/Second", "Client Send", "Server Queue", "Server Compute Infer"]
head = ",".join([*names, "p50 latency", "p99 latency"])
row = f"8,{words[words.index('-u') + 1].rpartition(':')[2]},63,1096,228,2866,10218"
open(words[words.index("-f") + 1], "w").write(head + chr(10) + row + chr(10) + chr(10))
"""


@pytest.fixture
def served() -> Iterator[Any]:
    """A process that listens on two ports, as the server does."""
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
    ):
        ours = {http.getsockname()[1], grpc.getsockname()[1]}
        listening = [
            connection
            for connection in psutil.Process().net_connections()
            if connection.laddr and connection.laddr.port in ours
        ]
        yield SimpleNamespace(
            process=SimpleNamespace(net_connections=lambda: listening),
            port=http.getsockname()[1],
            grpc=grpc.getsockname()[1],
        )


def test_each_wire_is_asked_at_its_port_and_a_failure_is_kept(
    bench: Bench, served: Any, tmp_path: Path
) -> None:
    script = bench["perf_analyzer"]
    (tmp_path / "double.py").write_text(DOUBLE)
    rows = {
        name: script.measured(
            [sys.executable, str(tmp_path / "double.py")], name, served, tmp_path / "out.csv"
        )
        for name in script.MODES
    }
    http, stream = rows["HTTP, 8 connections"], rows["gRPC, stream"]
    assert http == {
        "mode": "HTTP, 8 connections",
        "rows/s": served.port,
        "queue us": 1096.0,
        "compute us": 228.0,
        "p50 us": 2866.0,
        "p99 us": 10218.0,
        "note": "",
    }
    assert rows["gRPC, asynchronous"]["rows/s"] == served.grpc
    assert stream["rows/s"] is None
    assert "no stream" in stream["note"]
    targets = script.targets_of(list(rows.values()))
    assert [target for target, met in targets.items() if not met] == [
        "gRPC, stream: perf_analyzer ended without an error"
    ]


def test_the_page_tells_how_many_runs_ended_well(bench: Bench, tmp_path: Path) -> None:
    row = {"mode": "HTTP", "rows/s": 476.5, "note": ""}
    bench["common"].publish(
        "perf_analyzer",
        [row, row | {"rows/s": None, "note": "no stream"}],
        {"a": True, "b": False},
        tmp_path,
        {"perf_analyzer": "2.60"},
    )
    text = render("sections/perf_analyzer.md.j2", load_results(tmp_path))
    assert "| HTTP | 476.5 |  |" in text
    assert "| HTTP | - | no stream |" in text
    assert "1 of 2 runs ended without an error." in text


def test_all_words_behind_command_are_the_command(bench: Bench) -> None:
    arguments = bench["perf_analyzer"].parse_arguments(
        ["--into", "x", "--command", "ld.so", "--library-path", "lib", "bin/perf_analyzer"]
    )
    assert (arguments.command, arguments.into) == (
        ["ld.so", "--library-path", "lib", "bin/perf_analyzer"],
        Path("x"),
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/no/such"], "No such file"),
        (
            [sys.executable, "-c", "print('GLIBC_2.38 not found'); raise SystemExit(1)"],
            "GLIBC_2.38 not found",
        ),
    ],
)
def test_a_command_that_does_not_start_is_told_before_any_work(
    bench: Bench, command: list[str], message: str
) -> None:
    with pytest.raises(
        SystemExit, match=rf"does not start: [\s\S]*{message}[\s\S]*next: pip install perf-analyzer"
    ):
        bench["perf_analyzer"].version_of(command)
