"""`crucible bench` measures ONNX files that it has not built."""

from pathlib import Path

import onnx
import pytest
from onnx import parser

from tests.builders.cli import ONE_PROCESS, Result, crucible, crucible_here, write_model

QUICK = [f"--set=benchmark.{key}={value}" for key, value in ONE_PROCESS.items()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "new.onnx")
    return tmp_path / "new.onnx"


def bench(*arguments: str | Path) -> Result:
    return crucible("bench", *arguments, *QUICK)


def refused(*arguments: str | Path) -> str:
    """The message of a refusal that comes before any stage runs."""
    result = crucible_here("bench", *arguments, *QUICK, cwd=Path.cwd())
    assert result.code == 1
    return result.err


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_file_is_measured_as_it_is(model: Path, backend: str) -> None:
    result = bench(model, "--profile=batch=2", f"--backend={backend}")
    assert result.code == 0, result.err
    (engine,) = result.summary["engines"]
    assert engine["label"] == f"{backend} new fp32"
    assert [row["sizes"] for row in engine["rows"]] == [{"batch": 2}]
    assert "end_to_end" not in engine["rows"][0], "thousands of times, which only --json prints"
    assert "samples/s" in result.out


def test_two_files_are_measured_in_one_run(model: Path) -> None:
    old = model.with_name("old.onnx")
    write_model(old)
    result = bench(model, "--against", old, "--profile=batch=2", "--json")
    assert result.code == 0, result.err
    engines = result.summary["engines"]
    assert [engine["label"] for engine in engines] == [
        "onnxruntime old fp32",
        "onnxruntime new fp32",
    ]
    (row,) = engines[1]["rows"]
    assert row["ratio"] is None
    assert "process of each engine" in row["ratio_missing"], "too short a run for an interval"
    assert len(row["end_to_end"]["values_s"]) > 1


def test_files_with_other_inputs_are_not_compared(model: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[batch, 3] x) => (float[batch, 3] y)'
    other = model.with_name("other.onnx")
    onnx.save(parser.parse_model(text + " { y = Relu(x) }"), other)
    result = bench(model, "--against", other, "--profile=batch=2")
    assert result.code == 1
    assert "expected 'new' to take the inputs of 'other' (x float32 [batch, 3])" in result.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "dimension 'batch' of input 'x'"),
        (("--profile=batch=2", "--backend=pytorch"), "expected --backend onnxruntime, openvino"),
        (("--profile=batch=2", "--against=absent.onnx"), "no file at"),
        (("--batch=1,2",), "are for the output folder of a compile"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(model, *arguments)


def test_a_damaged_file_and_an_engine_file_are_refused(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-40])
    assert "is not a complete ONNX file" in refused(model, "--profile=batch=2")
    engine = model.with_suffix(".plan")
    engine.write_bytes(b"ftrt")
    assert "an engine file of TensorRT" in refused(engine)
    assert "need an ONNX model" in refused(model.parent, "--against", model)
