"""The soak with faults: how its clients send again and judge, against a double; what its library
does to a process; and, slow, each fault against the real service.
"""

import itertools
import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common import Row, publish
from benchmarks.faults import load as module
from benchmarks.faults import soak_faults
from benchmarks.faults.fault_list import FAULTS, Fault, NotHeld, flipped
from benchmarks.faults.host import Library, NotRun
from benchmarks.faults.load import Load, retry_after_s
from benchmarks.faults.soak_faults import Outcome, row_of, targets_of
from benchmarks.pages.render import load_results, render
from benchmarks.serving.client import Connection, http_request
from tests.benchmarks.http_double import CLOSE, Answer, answering

ROOT = Path(__file__).parents[2]
RIGHT: Answer = (200, {}, b"right")
WRONG: Answer = (200, {}, b"wrong")
LATER: Answer = (503, {"Retry-After": "0"}, b"not now")


def settled(*answers: Answer) -> Load:
    """One request to a server that gives these answers in turn, the last one again and again."""
    turns = itertools.count()

    def answer(path: str, body: bytes) -> Answer:
        return answers[min(next(turns), len(answers) - 1)]

    def check(head: bytes, body: memoryview) -> None:
        if bytes(body) != b"right":
            raise ValueError("another answer")

    with answering(answer) as port:
        load = Load(port, {})
        recovery = load.watch("binary")
        connection = Connection(port)
        load.settle(connection, "binary", http_request(port, "/", b""), check)
        connection.close()
    assert recovery.answered.is_set() == (load.right == 1)
    assert math.isfinite(recovery.seconds) == (load.right == 1)
    return load


def test_a_request_is_sent_again_until_it_has_a_right_answer() -> None:
    load = settled(CLOSE, LATER, (504, {}, b"late"), RIGHT)
    assert (load.sent, load.right, load.retries) == (1, 1, 3)


def test_a_wrong_answer_and_a_clear_refusal_are_final() -> None:
    assert settled(WRONG, RIGHT).wrong == ["another answer"]
    assert settled((500, {}, b"a bug"), RIGHT).refused == ["500 a bug"]


def test_a_request_without_an_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    (lost,) = settled(LATER).lost
    assert "the last: 503 not now" in lost


def test_retry_after_is_read_from_the_head() -> None:
    assert retry_after_s(b"HTTP/1.1 503 X\r\nRetry-After: 7\r\nA: b\r\n\r\n") == 7
    assert retry_after_s(b"HTTP/1.1 503 X\r\n\r\n") == 0


def test_the_library_makes_writes_fail_and_the_clock_wrong(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    library = Library(tmp_path, home)
    if library.reason:
        pytest.skip(library.reason)

    def run(code: str) -> str:
        command = [sys.executable, "-c", code]
        result = subprocess.run(
            command, env=library.environment, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    def write(folder: Path) -> str:
        return run(
            "import os\n"
            f"file = os.open({str(folder / 'x')!r}, os.O_CREAT | os.O_WRONLY)\n"
            "try: print(os.write(file, b'x'))\n"
            "except OSError as error: print(error.errno)"
        )

    with library.fault(clock_s=10**6, no_space=True):
        assert float(run("import time; print(time.time())")) > time.time() + 10**5
        assert (write(home), write(tmp_path)) == ("28", "1")
    assert write(home) == "1"
    assert float(run("import time; print(time.time())")) < time.time() + 10**5


def test_a_flipped_byte_is_flipped_back(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    with flipped(file):
        assert file.read_bytes() == b"acc"
    assert file.read_bytes() == b"abc"


ARGUMENTS = Namespace(requests=10, faults=2, fault_every=0.0)


def outcomes_of(run: Callable[[object], None]) -> list[Outcome]:
    """Of two kinds of fault: the first is never possible here, `run` is the second."""

    def impossible(host: object) -> None:
        raise NotRun("needs root")

    return [
        Outcome(Fault("one", "it holds", impossible)),
        Outcome(Fault("two", "it holds", run)),
    ]


def test_a_fault_that_cannot_be_had_is_not_run_and_the_others_are() -> None:
    load = Load(0, {}, right=10)

    def answered(host: object) -> None:
        assert load._recovery is not None
        load._recovery.seconds = 0.5
        load._recovery.answered.set()

    outcomes = outcomes_of(answered)
    soak_faults.inject_all(None, load, outcomes, ARGUMENTS)  # type: ignore[arg-type]
    assert row_of(outcomes[0])["result"] == "not run: needs root"
    assert row_of(outcomes[1])["result"] == "held"
    assert (outcomes[0].injected, outcomes[1].recoveries_s) == (0, [0.5, 0.5])
    assert all(targets_of(load, outcomes, {"succeeded": 1}, 1, ARGUMENTS).values())


def test_targets_tell_what_was_lost_wrong_late_or_vanished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(soak_faults, "RECOVERY_S", 0.01)

    def broken(host: object) -> None:
        raise NotHeld("a damaged engine was loaded")

    outcomes = outcomes_of(broken)
    load = Load(0, {}, 7, 0, wrong=["a"], refused=["b"], lost=["c"])
    inject = soak_faults.inject
    inject(None, load, outcomes[0])  # type: ignore[arg-type]
    inject(None, load, outcomes[1])  # type: ignore[arg-type]
    assert outcomes[1].failures == ["a damaged engine was loaded", soak_faults.NO_RECOVERY]
    outcomes[1].recoveries_s.append(6.0)
    targets = targets_of(load, outcomes, {"vanished: 404": 1}, 2, ARGUMENTS)
    assert not any(targets.values())
    run: Row = {"requests": 9, "faults": 1, "minutes": 1.0, "retries": 3, "jobs": "1 succeeded"}
    publish("soak_faults", [row_of(each) for each in outcomes], targets, tmp_path, run=run)
    text = render("sections/soak_faults.md.j2", load_results(tmp_path))
    assert "| one | it holds | 0 | - | - | not run: needs root |" in text
    assert "| two | it holds | 1 | 6 | 6 | failed: a damaged engine was loaded |" in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_fault_against_the_real_service(tmp_path: Path) -> None:
    """Times are not judged: only what was lost, wrong, or did not hold."""
    words = ["--requests", "1000", "--faults", str(len(FAULTS)), "--fault-every", "5"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "soak_faults", *words, "--into", str(tmp_path)],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    document = json.loads((tmp_path / "soak_faults.json").read_text(encoding="utf-8"))
    missed = [target for target, met in document["targets"].items() if not met]
    assert [target for target in missed if not target.startswith("recovered")] == []
