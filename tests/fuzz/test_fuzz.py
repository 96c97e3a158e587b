"""Some hundred mutated messages for every parser, and proof that a fault and a leak are found."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from pipeline.core.progress import Progress
from pipeline.execution.child_process import call_in_child
from tests.fuzz import openapi
from tests.fuzz.__main__ import parse_arguments, replay, shares, write_results
from tests.fuzz.mutation import bytes_from, json_from
from tests.fuzz.parsers import PARSERS
from tests.fuzz.running import (
    MAX_GROWTH_BYTES,
    MIN_WINDOW,
    WINDOWS,
    Outcome,
    Read,
    Target,
    case_of,
    reader,
    run,
)
from tests.fuzz.targets import TARGETS

SEED = 0
OF_PARSER, OF_APPLICATION = 400, 800  # cases
RESULTS = Path(__file__).with_name("results.json")


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warnings of libraries: pytest would keep the lines of the log."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of numpy and zipfile, about odd files
@pytest.mark.parametrize("name", TARGETS)
def test_no_case_crashes(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    outcome = run(target, SEED, OF_PARSER if target in PARSERS else OF_APPLICATION, tmp_path)
    assert outcome.failures == {}
    assert outcome.accepted > 0  # else the mutations reach nothing behind the first check
    assert outcome.refused > 0


def test_a_seed_gives_the_same_cases_again() -> None:
    first = {name: [case_of(target, 5, n) for n in range(20)] for name, target in TARGETS.items()}
    for name, target in reversed(TARGETS.items()):
        assert [case_of(target, 5, n) for n in range(20)] == first[name]
        assert [case_of(target, 6, n) for n in range(20)] != first[name]


KEPT: list[bytes] = []


def leaking(case: bytes) -> None:
    KEPT.append(bytes(1024))


def leaks_of_readers(folder: Path, progress: Progress) -> None:
    cases = WINDOWS * MIN_WINDOW

    def outcome(read: Read, cases: int, settles: int) -> Outcome:
        target = Target("any", bytes_from(b"x"), reader(read), (), settles=settles)
        return run(target, SEED, cases, folder)

    assert not outcome(len, cases, 0).leaks
    assert outcome(leaking, cases, 0).leaks
    assert outcome(leaking, cases, cases).growth_bytes is None  # not settled
    assert outcome(leaking, cases - WINDOWS, 0).growth_bytes is None  # too few


def test_a_leak_of_a_kilobyte_is_found(tmp_path: Path) -> None:
    """In a process of its own: in one that freed much, a leak first fills the gaps."""
    call_in_child(leaks_of_readers, tmp_path, name="leaks")


def test_a_fault_is_kept_with_its_bytes(tmp_path: Path) -> None:
    def read(case: bytes) -> None:
        if b"1e999" in case:
            raise KeyError("1e999")
        int(case)

    faulty = Target("faulty", bytes_from(b"123"), reader(read), (ValueError,))
    outcome = run(faulty, SEED, 2000, tmp_path)
    ((problem, file),) = outcome.failures.items()  # one for each place, not for each case
    assert problem.startswith("KeyError at test_fuzz.py")
    assert b"1e999" in file.read_bytes()
    assert file.read_bytes() == case_of(faulty, SEED, int(file.name.rpartition("-")[2]))
    assert outcome.refused > 0


def test_a_process_that_dies_leaves_its_case(tmp_path: Path) -> None:
    @contextmanager
    def dying(folder: Path) -> Iterator[Read]:
        def read(case: bytes) -> None:
            if len(case) < 3:
                raise KeyboardInterrupt

        yield read

    with pytest.raises(KeyboardInterrupt):
        run(Target("dying", bytes_from(b"123"), dying, ()), SEED, 2000, tmp_path)
    assert len((tmp_path / "dying.current").read_bytes()) < 3


def test_values_are_changed_and_never_shared() -> None:
    document = {"inputs": [{"name": "x", "shape": [1, 4]}]}
    make = json_from(document)
    cases = {make(Random(number)) for number in range(200)}
    assert len(cases) > 100
    assert document == {"inputs": [{"name": "x", "shape": [1, 4]}]}


def test_the_command_writes_what_it_counted(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    words = ["--cases", "60", "--seed", "2", "--target", "json", "--into", str(results)]
    command = [sys.executable, "-m", "tests.fuzz", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(results.read_text())
    (row,) = document["rows"]
    assert (row["seed"], row["cases"], row["target"]) == (2, 60, "json")
    assert row["accepted"] + row["refused"] == 60


def test_the_rows_of_other_targets_are_kept(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = parse_arguments(["--into", str(results), "--seed", "4"])
    write_results(arguments, [Outcome("npz", 5, 2, 3, 1.0), Outcome("npy", 1, 0, 1, 1.0)])
    write_results(arguments, [Outcome("npz", 7, 3, 4, 1.0)])
    document = json.loads(results.read_text())
    assert [(row["target"], row["cases"]) for row in document["rows"]] == [("npy", 1), ("npz", 7)]
    assert document["cases"] == 8


def test_a_case_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tmp_path / "case"
    case.write_bytes(b"{}")
    replay(TARGETS["json"], case)
    assert capsys.readouterr().out.startswith("refused: expected `inputs`")
    for words, message in (
        (["--replay", str(case)], "--replay needs one --target"),
        (["--target", "jsn"], "invalid choice: 'jsn'"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(words)
        assert message in capsys.readouterr().err


def test_the_openapi_document_gets_its_share() -> None:
    divided = shares([*TARGETS, openapi.NAME], 1_000_000)
    assert divided[openapi.NAME] == 10_000
    assert sum(divided.values()) == pytest.approx(1_010_000, abs=len(TARGETS))
    assert shares([openapi.NAME], 500) == {openapi.NAME: 500}


def test_the_kept_run_had_all_targets_and_no_failure() -> None:
    document = json.loads(RESULTS.read_text())
    assert [row["target"] for row in document["rows"]] == [*TARGETS, openapi.NAME]
    assert [row["failures"] for row in document["rows"]] == [0] * len(document["rows"])
    growths = [row["growth_bytes_per_case"] for row in document["rows"][: len(TARGETS)]]
    assert max(growth for growth in growths if growth is not None) <= MAX_GROWTH_BYTES
