"""Tables for a terminal."""

import pytest

from pipeline.measure import Samples
from pipeline.report import BenchmarkReport, LatencyRow
from pipeline.terminal import benchmark_table, console


def test_a_percentile_that_too_few_values_do_not_give_is_a_gap() -> None:
    part = Samples(values_s=(0.002,) * 600)  # enough for p90, too few for p99
    row = LatencyRow(
        sizes={"batch": 1}, end_to_end=part, upload=part, compute=part, download=part, throughput_per_s=500.0, flops_per_s=None, bytes_per_s=None
    )
    columns = benchmark_table([BenchmarkReport(label="engine", rows=(row,))]).columns
    assert [list(column.cells) for column in columns[2:5]] == [["2.000 ms"], ["2.000 ms"], ["-"]]


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("metric:a:b")
    assert capsys.readouterr().out == "metric:a:b\n"
