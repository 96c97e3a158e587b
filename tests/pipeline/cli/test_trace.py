"""`crucible bench --trace`, run as a user runs it, and with files that it must not touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.trace import longest_layer, save_traces, trace_lines, trace_summary
from pipeline.errors import HostError
from pipeline.results.timeline import EngineTrace, Span, TraceFailure, Window
from tests.builders.cli import ONE_PROCESS, Result, crucible, crucible_here, write_model
from tests.pipeline.benchmark.timeline import names_of_row, read_trace, run_from, trace_of

QUICK = [f"--set=benchmark.{key}={value}" for key, value in ONE_PROCESS.items()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "new.onnx")
    return tmp_path / "new.onnx"


def bench(*arguments: str | Path) -> Result:
    return crucible("bench", *arguments, "--profile=batch=2", *QUICK)


def test_two_files_are_traced_after_they_were_measured(model: Path, tmp_path: Path) -> None:
    old, file = tmp_path / "old.onnx", tmp_path / "made" / "trace.json"
    write_model(old)
    result = bench(model, "--against", old, "--trace", file)
    assert result.code == 0, result.err
    document = read_trace(file)
    labels = ["onnxruntime old fp32", "onnxruntime new fp32"]
    assert [engine["engine"] for engine in document["otherData"]["engines"]] == labels
    assert names_of_row(document, "layers", 1)
    assert names_of_row(document, "layers", 2)
    assert [engine["engine"] for engine in result.summary["trace"]["engines"]] == labels
    assert result.summary["trace"]["file"] == str(file)
    assert f"trace: {file} (open it in https://ui.perfetto.dev)" in result.out
    assert "times as long as without tracing; longest: " in result.out
    order = [line.strip() for line in result.err.splitlines() if line.strip().startswith("done")]
    assert [line.split()[3] for line in order][-3:] == ["benchmark", "trace", "trace"]
    assert len(result.summary["engines"]) == 2

    again = bench(model, "--trace", file, "--json")
    assert again.code == 0, again.err
    assert len(read_trace(file)["otherData"]["engines"]) == 1, "an old trace is replaced"
    assert again.out.count("\n") == 1, "one JSON document, no other line"


@pytest.mark.parametrize(
    ("file", "more", "sentence"),
    [
        ("trace.txt", (), "expected --trace as a file that ends in .json, got"),
        (".", (), "expected --trace as a file that ends in .json, got"),
        ("folder.json", (), "expected --trace as a file that ends in .json, got"),
        ("report.json", (), "which is no trace"),
        ("report.json/trace.json", (), "is a file"),
        ("trace.json", ("--batch=1,2",), "--trace is for one shape, and --batch measures several"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused_before_any_work(
    model: Path, tmp_path: Path, file: str, more: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "folder.json").mkdir()
    report = tmp_path / "report.json"
    report.write_text("{}")
    result = crucible_here("bench", model, "--trace", tmp_path / file, *more, cwd=tmp_path)
    assert result.code == 1
    assert sentence in result.err.replace("\n", ""), result.err
    assert report.read_text() == "{}"


def test_an_engine_that_cannot_be_traced_is_named_beside_the_others(tmp_path: Path) -> None:
    layers = [
        Span("layers", "short", Window(2, 3)),
        Span("layers", "long", Window(3, 9)),
        Span("kernels, stream 7", "a kernel", Window(2, 11)),
    ]
    trace = trace_of(run_from(0.0), run_from(20.0), run_from(40.0), spans=layers)
    assert longest_layer(trace) == ("short", 0.0), "of the median run, which has no layers"
    alone = trace_of(run_from(0.0), spans=layers)
    assert longest_layer(alone) == ("long", 6.0)
    found: list[EngineTrace | TraceFailure] = [alone, TraceFailure("broken fp32", "it crashed")]
    file = tmp_path / "trace.json"
    save_traces(found, "", file)
    assert read_trace(file)["otherData"]["engines"][0]["engine"] == "double fp32"
    assert trace_lines(found, file) == [
        "double fp32: a traced run takes 15.0 s, 3.00 times as long as without tracing; longest:"
        " long, 6.00 s per run",
        "broken fp32 cannot be traced: it crashed",
        f"trace: {file} (open it in https://ui.perfetto.dev)",
    ]
    assert trace_summary(found, file)["engines"] == [
        {
            "engine": "double fp32",
            "traced_ms": 15e3,
            "untraced_ms": 5e3,
            "traced_over_untraced": 3.0,
        },
        {"engine": "broken fp32", "failure": "it crashed"},
    ]


def test_without_any_trace_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no engine could be traced: it crashed"):
        save_traces([TraceFailure("broken fp32", "it crashed")], "", tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    file = tmp_path / "taken" / "trace.json"
    with pytest.raises(HostError, match=f"cannot write '{file}': File exists"):
        save_traces([trace_of(run_from(0.0))], "", file)
