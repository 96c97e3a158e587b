from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.benchmark.batch_sweep import (
    Sweep,
    batch_symbol,
    conclusion,
    sweep_of,
    sweep_sizes,
    write_sweep,
)
from pipeline.cli.terminal import console, sweep_table
from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.errors import PlanError
from tests.builders.report import latency_row

MS = {1: 1.0, 2: 1.2, 4: 2.0, 8: 4.5}


def swept(limit_ms: float | None, values: int = 1500) -> Sweep:
    rows = [latency_row(ms, batch, None, values) for batch, ms in MS.items()]
    return sweep_of("onnxruntime int8", "batch", rows, None if limit_ms is None else limit_ms / 1e3)


@pytest.mark.parametrize(
    ("limit_ms", "best"), [(None, 4), (100, 4), (1.8, 2), (1.25, 1), (0.1, None)]
)
def test_the_best_batch_is_the_fastest_within_the_limit(
    limit_ms: float | None, best: int | None
) -> None:
    sweep = swept(limit_ms)
    assert sweep.best == best
    assert [point.batch for point in sweep.points] == [1, 2, 4, 8]
    assert all(point.tail_s > point.median_s for point in sweep.points)


@pytest.mark.parametrize(("values", "percentile"), [(1500, 99), (300, 95), (120, 90), (40, 50)])
def test_the_limit_is_on_the_highest_percentile_that_all_can_give(
    values: int, percentile: int
) -> None:
    assert swept(None, values).percentile == percentile


def test_the_conclusion_is_a_sentence() -> None:
    assert conclusion(swept(None)).startswith("best batch: 4, ")
    assert conclusion(swept(1.8)).startswith("best batch with p99 within 1.8 ms: 2, ")
    assert conclusion(swept(0.1)).startswith(
        "no batch has its p99 within 0.1 ms: the fastest, 1, takes 1."
    )


def test_sizes_are_each_batch_once_with_the_usual_rest() -> None:
    profile = Profile(
        dims={"n": DimRange(min=1, opt=2, max=8), "length": DimRange(min=1, opt=128, max=512)}
    )
    assert sweep_sizes("n", [profile], [4, 1, 4]) == (
        {"n": 1, "length": 128},
        {"n": 4, "length": 128},
    )


def test_the_batch_is_the_first_symbolic_dimension() -> None:
    ids, fixed = (
        TensorSpec(name="ids", dtype="int64", shape=("n", "length")),
        TensorSpec(name="x", dtype="float32", shape=(3, "n")),
    )
    assert batch_symbol([fixed, ids]) == "n"
    with pytest.raises(PlanError, match=r"symbolic first dimension, got x \[3, 'n'\]"):
        batch_symbol([fixed])


def test_json_and_plot_are_written(tmp_path: Path) -> None:
    sweep = swept(1.8)
    document, plot = write_sweep(sweep, tmp_path / "out")
    assert Sweep.model_validate(json.loads(document.read_text())) == sweep
    drawn = plot.read_text()
    assert drawn.startswith("<svg")
    for text in ("limit, 1.8 ms", "best", "samples per second", ">8<"):
        assert text in drawn


def test_the_table_has_a_line_per_batch(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(sweep_table(swept(1.8)))
    out = capsys.readouterr().out
    assert "p99" in out
    assert len([line for line in out.splitlines() if " ms " in line]) == 4
