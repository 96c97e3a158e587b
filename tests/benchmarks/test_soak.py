"""The soak: what it takes for right and for wrong, against a double; and, slow, one minute of it
against the real service.
"""

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.pages.render import load_results, render
from tests.benchmarks.http_double import CLOSE, Answer, answering

ROOT = Path(__file__).parents[2]
Bench = dict[str, ModuleType]


def right_answers(bench: Bench) -> dict[tuple[int, int], frozenset[bytes]]:
    """For input k: ten times k."""
    soak = bench["soak"]
    return {
        (k, rows): frozenset([np.full(10, k, np.float32).tobytes()])
        for k in range(soak.INPUTS)
        for rows in range(1, soak.MAX_ROWS + 1)
    }


def answer_to(
    bench: Bench, body: bytes, rows: int = 1, add: float = 0.0, other_id: bool = False
) -> Answer:
    """What a right server gives for one of the soak's requests."""
    length = body.index(b'{"binary_data_output": true}}') + len(b'{"binary_data_output": true}}')
    request = json.loads(body[:length])
    number = int(request["id"])
    values = np.full(10, number % bench["soak"].INPUTS, np.float32) + np.float32(add)
    head = json.dumps(
        {"id": f"{number + other_id:012d}", "parameters": {"batch_size": rows}}
    ).encode()
    return 200, {"Inference-Header-Content-Length": str(len(head))}, head + values.tobytes()


def soaked(bench: Bench, requests: int, **answer: Any) -> Any:
    with answering(lambda path, body: answer_to(bench, body, **answer)) as port:
        soak = bench["soak"].Soak(port, right_answers(bench), 0.0, requests)
        bench["client"].drive(port, 4, soak)
    return soak


def test_right_answers_are_right(bench: Bench) -> None:
    soak = soaked(bench, 40)
    assert (soak.asked, soak.got, soak.identical, soak.faults) == (40, 40, 40, [])
    assert soak.rows == {1: 40}


def test_answers_alone_are_bit_identical_and_batched_within_the_tolerance(bench: Bench) -> None:
    little = bench["soak"].TOLERANCE / 10
    together = soaked(bench, 8, rows=4, add=little)
    assert together.faults == []
    assert 0 < together.largest <= bench["soak"].TOLERANCE
    assert "from what a direct Session gives" in soaked(bench, 8, add=little).faults[0]
    assert len(soaked(bench, 8, rows=4, add=0.1).faults) == 8


@pytest.mark.parametrize("add", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong(bench: Bench, add: float) -> None:
    assert len(soaked(bench, 4, rows=4, add=add).faults) == 4


def test_another_requests_answer_is_a_fault(bench: Bench) -> None:
    assert "got the answer of" in soaked(bench, 4, other_id=True).faults[0]


def test_errors_and_lost_requests_are_faults(bench: Bench) -> None:
    turns = itertools.count()
    with answering(
        lambda path, body: [CLOSE, (503, {}, b"not now"), answer_to(bench, body)][
            min(next(turns), 2)
        ]
    ) as port:
        soak = bench["soak"].Soak(port, right_answers(bench), 0.0, 10)
        bench["client"].drive(port, 1, soak)
    assert len(soak.faults) == 2
    assert "is lost" in soak.faults[0]
    assert "503 not now" in soak.faults[1]
    assert (soak.asked, soak.got) == (10, 9)


def test_the_mean_batch_is_rows_by_run(bench: Bench) -> None:
    mean = bench["soak"].mean_batch
    assert mean({1: 4, 4: 4}) == 8 / 5  # four runs of one row and one of four
    assert mean({}) == 0


def test_targets_tell_growth_jobs_and_lost_requests(bench: Bench) -> None:
    module = bench["soak"]
    soak = module.Soak(0, {}, 0.0, 100, asked=100, got=100, rows=Counter({4: 100}))
    soak.settled = module.Held(100, 100, 100)
    soak.end = module.Held(104, 90, 100)
    met = module.targets_of(soak, {"succeeded": 2}, 0.0, 100)
    assert all(met.values()), met
    soak.got, soak.end = 99, module.Held(106, 100, 110)
    missed = module.targets_of(soak, {"failed": 1}, 0.0, 100)
    assert sum(not holds for holds in missed.values()) == 5
    soak.end = None
    assert sum(not holds for holds in module.targets_of(soak, {}, 0.0, 100).values()) == 6


def test_the_page_shows_the_soak(bench: Bench, tmp_path: Path) -> None:
    module = bench["soak"]
    soak = soaked(bench, 40)
    soak.begun -= 60
    soak.settled = soak.end = module.Held(10_000_000, 20_000_000, 30)
    bench["common"].publish(
        "soak", [module.row_of(soak, {"succeeded": 3})], {"a target": True}, tmp_path
    )
    text = render("sections/soak.md.j2", load_results(tmp_path))
    assert "| requests | 40 |" in text
    assert "| jobs | 3 succeeded |" in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_minute_of_the_real_service(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "soak",
        "--minutes",
        "1",
        "--requests",
        "5000",
        "--into",
        str(tmp_path),
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    document = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    assert all(document["targets"].values()), document["targets"]
