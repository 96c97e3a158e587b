"""The benchmark of serving: its client, its processes, its figures. The servers themselves run in
the benchmark only.
"""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest

from benchmarks.pages.render import load_results, render
from pipeline.execution import child_process as process
from tests.benchmarks.http_double import CLOSE, Answer, answering

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "serving" / "peers"
Bench = dict[str, ModuleType]


class Counted:
    """Traffic of so many requests, whose answers are kept."""

    def __init__(self, bench: Bench, port: int, bodies: list[bytes]) -> None:
        self.requests = enumerate(
            bench["client"].http_request(port, "/infer", body) for body in bodies
        )
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.whys: dict[int, str] = {}

    def next(self) -> tuple[int, bytes] | None:
        return next(self.requests, None)

    def answered(
        self, number: int, status: int, head: bytes, body: memoryview, seconds: float
    ) -> None:
        assert head.endswith(b"\r\n\r\n")
        assert seconds > 0
        self.answers[number] = (status, bytes(body))

    def lost(self, number: int, why: str) -> None:
        self.whys[number] = why


# -- the client --------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [0, 1, 5_000_000], ids=["empty", "small", "larger than its buffer"]
)
def test_every_request_gets_its_own_answer(bench: Bench, size: int) -> None:
    bodies = [bytes([number]) * size for number in range(20)]
    with answering(lambda path, body: (200, {}, body)) as port:
        traffic = Counted(bench, port, bodies)
        bench["client"].drive(port, 4, traffic)
    assert traffic.answers == {number: (200, body) for number, body in enumerate(bodies)}
    assert traffic.whys == {}


def test_a_lost_connection_loses_its_request_only(bench: Bench) -> None:
    with answering(
        lambda path, body: CLOSE if body == b"3" else (503 if body == b"5" else 200, {}, body)
    ) as port:
        traffic = Counted(bench, port, [b"%d" % number for number in range(9)])
        bench["client"].drive(port, 2, traffic)
    assert list(traffic.whys) == [3]
    assert "closed" in traffic.whys[3]
    expected = {number: 200 for number in range(9) if number != 3} | {5: 503}
    assert {number: status for number, (status, _) in traffic.answers.items()} == expected


def test_an_answer_of_unknown_length_is_a_fault(bench: Bench) -> None:
    client = bench["client"]
    connection = client.Connection(0)
    connection.buffer[:] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.got = len(connection.buffer)
    with pytest.raises(client.Fault, match="Content-Length"):
        connection._read_head()


def test_a_steady_load_counts_wrong_answers(bench: Bench, tmp_path: Path) -> None:
    right, turns = np.arange(32, dtype=np.float32), itertools.count()

    def answer(path: str, body: bytes) -> Answer:
        number = next(turns)
        wrong = [right.tobytes(), (right + 1).tobytes(), b"short"][min(number, 2)]
        return 200, {}, wrong if number < 3 else right.tobytes()

    with answering(answer) as port:
        traffic = bench["client"].Steady(
            bench["client"].http_request(port, "/", b""),
            right.tobytes(),
            1e-3,
            time.perf_counter() + 0.3,
        )
        bench["client"].drive(port, 1, traffic)
    assert len(traffic.faults) == 2
    assert len(traffic.latencies_s) == traffic.asked - 2 > 0


def test_the_client_is_a_process_that_prints_what_it_found(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "expected").write_bytes(b"\0" * 8)
    with answering(lambda path, body: (200, {}, body)) as port:
        (tmp_path / "request").write_bytes(bench["client"].http_request(port, "/", b"\0" * 8))
        up = bench["rounds"].Up(psutil.Process(), port, "/", oip=False)
        load = bench["rounds"].Load("wire", "echo", 8, b"", 0.0)
        assert bench["rounds"].answers(up, load)
        words = [str(tmp_path / "request"), str(tmp_path / "expected"), "0", str(port), "2", "0.2"]
        printed = subprocess.run(
            [sys.executable, str(bench["client"].__file__), *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    assert '"faults": 0' in printed
    assert not bench["rounds"].answers(up, load)


# -- processes ---------------------------------------------------------------


def test_a_server_is_ended_with_all_that_it_started(bench: Bench, tmp_path: Path) -> None:
    processes = bench["processes"]
    with processes.running(
        ["sh", "-c", "trap '' TERM; sleep 100 & echo up; wait; wait"],
        tmp_path / "log",
        {"PATH": "/usr/bin:/bin"},
    ) as process:
        processes.wait_until(lambda: bool(process.children()), process, tmp_path / "log")
        (child,) = process.children()
    assert not child.is_running()
    assert not process.is_running()


def test_a_server_that_does_not_start_says_why(bench: Bench, tmp_path: Path) -> None:
    processes = bench["processes"]
    with (
        pytest.raises(processes.NotStarted, match="no such model"),
        processes.running(
            ["sh", "-c", "echo no such model; exit 1"], tmp_path / "log", {"PATH": "/usr/bin:/bin"}
        ) as process,
    ):
        processes.wait_until(lambda: False, process, tmp_path / "log")


def test_cpu_of_whoever_listens_is_told_apart(bench: Bench) -> None:
    with answering(lambda path, body: (200, {}, body)) as port:
        listening = bench["processes"].cpu_of(psutil.Process(), port)
    other = bench["processes"].cpu_of(psutil.Process(), port)
    assert listening.api_s > 0
    assert other.api_s == 0
    assert (other - listening).rest_s > 0


def test_crucible_gets_the_packages_of_this_process_and_peers_get_none_of_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU host, whose packages lie in folders that PYTHONPATH names."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    ours = bench["crucible"].own_environment()["PYTHONPATH"].split(os.pathsep)
    assert ours == [str(ROOT), *process.IMPORT_PATH.split(os.pathsep)]
    assert "PYTHONPATH" not in bench["processes"].clean_environment(Path("/peer/bin"))


# -- peers and models --------------------------------------------------------


def test_every_peer_has_a_script_and_exact_versions(bench: Bench) -> None:
    peers = bench["peers_list"].PEERS
    assert {peer.script for peer in peers} | {"shapes.py"} == {
        file.name for file in PEERS.glob("*.py")
    }
    for peer in peers:
        compile((PEERS / peer.script).read_text(encoding="utf-8"), peer.script, "exec")
        assert all("==" in package for package in peer.packages)
    assert {*bench["figures"].TO_BEAT, bench["peers_list"].FASTAPI, "mosec"} == {
        peer.name for peer in peers
    }


def test_the_echo_gives_back_what_it_gets_and_seeds_make_other_models(
    bench: Bench, tmp_path: Path
) -> None:
    models, rounds = bench["models"], bench["rounds"]
    assert (
        rounds.expected_of(models.write_echo(tmp_path / "echo.onnx", 8), 8)
        == models.image(8).tobytes()
    )
    one, other = (
        rounds.expected_of(models.write_small(tmp_path / f"{seed}.onnx", seed), 16)
        for seed in (1, 2)
    )
    assert len(one) == len(other) == 40
    assert one != other


# -- figures -----------------------------------------------------------------


def turn(bench: Bench, single_ms: float, per_s: float, faults: tuple[str, ...] = ()) -> object:
    cpu = bench["processes"].Cpu(api_s=0.5, rest_s=1.0)
    return bench["rounds"].Turn(
        (single_ms / 1e3,) * 500,
        {"queue": 0.1, "copy_in": 0.2, "compute": single_ms / 2, "copy_out": 0.0},
        {"queue": 9.0, "copy_in": 0.3, "compute": single_ms, "copy_out": 0.1, "batch": 8.0},
        per_s,
        int(per_s * 2),
        0.2,
        0.1,
        cpu,
        faults,
    )


def rows(bench: Bench, crucible: float = 80.0) -> list[dict[str, object]]:
    """Two rounds: FastAPI 100/s, Crucible as given, all others 50/s; an engine of 100 rows/s at
    batch 8.
    """
    serving, peers = bench["serving"], bench["peers_list"]
    rates = {peer.name: 50.0 for peer in peers.PEERS} | {
        "FastAPI": 100.0,
        "Crucible": crucible,
        "mosec": 70.0,
    }
    turns = {
        ("wire", name): [turn(bench, 2.0, rate), turn(bench, 4.0, 2 * rate)]
        for name, rate in rates.items()
    }
    turns |= {
        ("CNN", name): [turn(bench, 9.0, rate)] * 2
        for name, rate in ({**rates, "FastAPI": 40.0}).items()
    }
    engine = {"latencies_s": [0.008] * 500, "per_s": {"1": 60.0, "8": 100.0}, "wall_s": 1.0}
    why = {"Ray Serve": "CNN: it ended:\nout of | memory"}
    return list(serving.rows_from(turns, why, [engine, engine], serving.NAMES))


def test_rows_hold_medians_over_rounds_and_ratios_within_them(bench: Bench) -> None:
    by_load = {(row["load"], row["server"]): row for row in rows(bench)}
    ours = by_load["wire", "Crucible"]
    assert (ours["per_s"], ours["per_s_low"], ours["per_s_high"]) == (120.0, 80.0, 160.0)
    assert (ours["p50_ratio"], ours["per_s_ratio"], ours["p50_ms"]) == (
        1.0,
        0.8,
        pytest.approx(3.0),
    )
    assert ours["api_full_at_per_s"] == (160 + 320) / 1.0
    assert ours["p99_ms"] == pytest.approx(4.0)
    assert (ours["compute_ms"], ours["queue_ms"]) == (1.5, 0.1)
    assert (ours["compute_of_many_ms"], ours["queue_of_many_ms"]) == (3.0, 9.0)
    assert ours["batch_of_many"] == 8.0
    engine = by_load["CNN", "direct Session"]
    assert (engine["version"], engine["per_s"]) == ("batch 8", 100.0)
    assert by_load["CNN", "Crucible"]["per_s_ratio"] == 0.8
    assert by_load["CNN", "Ray Serve"]["per_s"] is None
    assert "out of | memory" in str(by_load["CNN", "Ray Serve"]["note"])


def test_stages_are_medians_of_what_answers_say(bench: Bench) -> None:
    message = (
        "HTTP/1.1 200 OK\r\nServer-Timing: queue;dur=0.5, compute;dur={}\r\nCrucible-Batch-Size:"
        " {}\r\nX: y\r\n\r\n"
    )
    heads = [message.format(ms, 2 * ms).encode() for ms in (1, 2, 9)]
    assert bench["client"].stages_ms([*heads, b"HTTP/1.1 200 OK\r\n\r\n"]) == {
        "queue": 0.5,
        "compute": 2.0,
        "batch": 4.0,
    }
    assert bench["client"].stages_ms([b"HTTP/1.1 200 OK\r\n\r\n"]) == {}


def test_targets_are_met_missed_and_missed_without_figures(bench: Bench) -> None:
    figures = bench["figures"]
    limits = figures.Wanted.on(2)
    met = figures.targets_of(rows(bench), limits)
    missed = [target for target, holds in met.items() if not holds]
    assert all("Ray Serve" in target and "nan" in target for target in missed), missed
    assert len(missed) == 2
    assert not any(figures.targets_of([], limits).values())
    slow = figures.targets_of(rows(bench, crucible=40.0), limits)
    assert [holds for target, holds in slow.items() if "connections: at least" in target] == [
        False,
        False,
    ]
    assert figures.Wanted.on(16).share > limits.share


def test_a_peer_that_had_faults_is_no_peer_that_was_beaten(bench: Bench) -> None:
    figures, entries = bench["figures"], rows(bench)
    wire = next(row for row in entries if (row["load"], row["server"]) == ("wire", "BentoML"))
    wire["note"] = figures.row_of(
        "wire", "BentoML", "1", [turn(bench, 1.0, 1.0, ("500: out of order",))], []
    )["note"]
    of_bentoml = {
        target: met
        for target, met in figures.targets_of(entries, figures.Wanted.on(2)).items()
        if "above BentoML" in target
    }
    assert list(of_bentoml.values()) == [False, True]  # the wire's, and the CNN's
    assert "(120 against 75 requests/s, but it had faults: no comparison)" in next(iter(of_bentoml))


def test_a_p99_needs_a_thousand_values(bench: Bench) -> None:
    percentile_99 = bench["figures"].percentile_99
    assert percentile_99([1.0] * 999) is None
    assert percentile_99([float(value) for value in range(10_000)]) == pytest.approx(9900, rel=1e-3)


def test_faults_and_a_busy_client_are_noted(bench: Bench) -> None:
    row_of = bench["figures"].row_of
    idle = bench["processes"].Cpu(0.0, 0.0)
    figures = {
        "single_s": (1.0,),
        "stages_ms": {},
        "stages_of_many_ms": {},
        "per_s": 1.0,
        "requests": 1,
    }
    busy = SimpleNamespace(**figures, client_s=1.0, client_share=0.95, cpu=idle, faults=("503",))
    row = row_of("wire", "x", "1", [busy], [])
    assert "503" in row["note"]
    assert "95%" in row["note"]
    assert (row["api_full_at_per_s"], row["p50_ratio"]) == (None, None)


def test_the_page_has_both_tables_and_tells_how_near_python_comes(
    bench: Bench, tmp_path: Path
) -> None:
    common = bench["common"]
    common.publish(
        "serving",
        rows(bench),
        {"a target": True, "another": False},
        tmp_path,
        {"rounds": 3, "seconds": 4.0},
    )
    text = render("sections/serving.md.j2", load_results(tmp_path))
    for load in ("### A model that does almost nothing", "### A CNN"):
        assert load in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in lines} == {11}
    assert "| direct Session batch 8 |" in text
    assert (
        "mosec, whose server is written in Rust, reaches 0.70x FastAPI's requests/s, Crucible"
        " 0.80x." in text
    )
    assert "One API process of Crucible is full at 480 requests/s" in text
    assert (
        "On 16, in batches of 8: queue 9.000, copy in 0.300, compute 3.000, copy out 0.100." in text
    )
    assert "- **missed**: another" in text
    version = common.environment().packages["onnxruntime"]
    assert (
        f" onnxruntime {version} in the rows of the engine and of Crucible. 3 rounds, 4 s of each"
        " measured stretch." in text
    )
