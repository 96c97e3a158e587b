"""The benchmark of decoding on a GPU, with small models on the CPU."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import Row
from benchmarks.language import language_gpu
from benchmarks.language.language_gpu import divergence, equal_tokens, reasons, targets_of
from benchmarks.limits.part_results import LimitReached, ended_after

WAYS = "transformers eager,ours eager,transformers static"


def test_a_small_run_on_the_cpu(tmp_path: Path) -> None:
    words = f"--device cpu --tiny --rounds 1 --prompt-tokens 20 --output-tokens 6 --into {tmp_path}"
    with pytest.raises(SystemExit) as ended:
        language_gpu.main([*words.split(), "--parts", "1b_b1,1b_b8", "--ways", WAYS])
    assert ended.value.code == 0
    assert torch.is_grad_enabled(), "the process stays as it was"
    document = json.loads((tmp_path / "language_gpu.json").read_text(encoding="utf-8"))
    rows = {(row["part"], row["way"]): row for row in document["rows"]}
    assert list(rows) == [
        *(("1b_b1", way) for way in WAYS.split(",")),
        *(("1b_b8", way) for way in WAYS.split(",")[:2]),
    ]
    for row in rows.values():
        assert row["next_ms"] > 0
        assert row["first_ms"] > 0
        assert row["roofline_%"] > 0
    ours = rows["1b_b8", "ours eager"]
    assert ours["kl"] < 1e-5
    assert {(row["part"], row["way"]) for row in document["facts"]} == set(rows)
    assert document["run"]["device"] == "cpu"


def test_a_way_that_fails_is_kept_with_its_reason() -> None:
    def fail(error: BaseException) -> None:
        raise error

    failures = dict[str, str]()
    with reasons("one", failures):
        fail(ValueError("no such kernel\nand more"))
    with reasons("other", failures):
        fail(LimitReached("the time is over"))
    assert failures == {
        "one": "ValueError: no such kernel",
        "other": "LimitReached: the time is over",
    }
    with pytest.raises(KeyboardInterrupt), reasons("third", failures):
        fail(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--parts 3b_b1", "expected some of 1b_b1"),
        ("--ways eager", "got 'eager'"),
        ("--output-tokens 1", "at least 2 tokens"),
    ],
)
def test_wrong_words_are_refused(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        language_gpu.main(words.split())
    assert reason in capsys.readouterr().err


def test_the_divergence_of_scores() -> None:
    scores = torch.randn(1, 3, 50)
    assert divergence(scores, scores) == pytest.approx(0, abs=1e-6)
    assert divergence(scores, scores.flip(-1)) > language_gpu.MAX_DIVERGENCE
    assert divergence(scores, scores + 1) == pytest.approx(0, abs=1e-5), "a constant says nothing"


def test_equal_tokens_end_at_the_first_difference() -> None:
    assert equal_tokens(np.array([[1, 2, 3]]), np.array([[1, 9, 3]])) == 1
    assert equal_tokens(np.array([[1, 2, 3]]), np.array([[1, 2, 3]])) == 3


def test_the_goals_are_of_ours_in_bf16() -> None:
    def row(part: str, way: str, share: float, kl: float | None) -> Row:
        return {"part": part, "way": way, "next_ms": 1.0, "roofline_%": share, "kl": kl}

    rows = [
        row("1b_b1", "transformers static", 90.0, None),
        row("1b_b1", "ours fused", 56.0, 0.001),
        row("1b_b1", "ours fused int8", 99.0, 0.02),
        row("8b_b1", "ours fused", 69.0, 0.001),
        {"part": "8b_b1", "way": "ours compiled", "next_ms": None, "note": "failed"},
    ]
    goals = targets_of(rows)
    assert goals["1b_b1: at least 55 % of the roofline (ours fused: 56.0 %)"]
    assert not goals["8b_b1: at least 70 % of the roofline (ours fused: 69.0 %)"]
    assert not goals["1b_b1 ours fused int8: divergence of at most 0.01 nats (0.02)"]
    assert len(goals) == 5


def test_a_limit_inside_a_limit_leaves_the_outer_one_set() -> None:
    left_s = list[float]()

    def wait() -> None:
        with ended_after(30.0):
            pass
        left_s.append(signal.getitimer(signal.ITIMER_REAL)[0])
        time.sleep(30)

    with pytest.raises(LimitReached), ended_after(0.3):
        wait()
    assert 0 < left_s[0] <= 0.3
