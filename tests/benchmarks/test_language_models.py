"""The benchmark of language models: its rows and goals from made-up times, and llama.cpp's file."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.language import language_models, llamacpp
from benchmarks.language.language_models import COLUMNS, row_of, targets
from pipeline.llm.ort_genai.files import constant_bytes_read
from pipeline.llm.plan import LanguageBenchmark
from pipeline.llm.source import Source
from pipeline.llm.speed.times import AnswerTimes
from tests.pipeline.llm.speed.test_times import contestant, times_of

OPTIONS = LanguageBenchmark(prompt_tokens=16, output_tokens=4)
BASELINE = contestant(None, (1, 0.4, 0.2), (4, 1.6, 0.2))
FAST = times_of(contestant("int8", (1, 0.1, 0.02), (4, 0.4, 0.02)), BASELINE, None)
RIVAL = times_of(contestant("fp16", (1, 0.2, 0.04), (4, 0.4, 0.04)), BASELINE, None)


def test_a_row_has_the_share_of_the_roofline_and_both_ratios() -> None:
    row = row_of(FAST, OPTIONS, 10_000_000, (1e9, 2e9), RIVAL)
    assert row["roofline_%"] == pytest.approx(50, rel=0.02)
    assert row["in_caches_%"] == pytest.approx(25, rel=0.02)
    assert row["ratio"] == pytest.approx(1.2 / 0.18, rel=0.02)
    assert row["to_llamacpp"] == pytest.approx(2, rel=0.02)
    assert set(row) == {"engine", *COLUMNS, "failure"}
    itself = row_of(RIVAL, OPTIONS, None, (1e9, 0.0), RIVAL)
    assert (itself["to_llamacpp"], itself["roofline_%"]) == (None, None)


def test_a_failure_is_a_row_without_figures() -> None:
    row = row_of(AnswerTimes(label="int8 kv-u8", failure="SIGILL"), OPTIONS, 1, (1e9, 1e9), None)
    assert list(row) == ["engine", *COLUMNS, "failure"]
    assert row["failure"] == "SIGILL"
    assert {row[name] for name in COLUMNS} == {None}


def test_the_goals_are_those_of_the_model() -> None:
    rows = [row_of(FAST, OPTIONS, 15_000_000, (1e9, 2e9), RIVAL)]
    small, large = targets(rows, "smollm2"), targets(rows, "random-1b")
    assert list(small.values()) == [True, True]
    assert list(large.values()) == [False, True], "75 % are enough for the small one alone"


def test_rivals_are_left_out_where_they_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source(kind="gguf", path=tmp_path / "m.Q4_1.gguf", digest="")
    assert language_models.rivals_of(source, tmp_path, tmp_path) == ()
    said = capsys.readouterr().out
    assert f"the package llama_cpp is not in {tmp_path}" in said
    assert f"the package onnxruntime_genai is not in {tmp_path}" in said
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    (rival,) = language_models.rivals_of(source, tmp_path, tmp_path)
    assert rival.label == "llama.cpp Q4_1"
    folder = source.model_copy(update={"kind": "huggingface"})
    assert language_models.rivals_of(folder, tmp_path, tmp_path) == ()


def test_constants_of_which_a_row_is_read_do_not_count(tmp_path: Path) -> None:
    float_, int64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["rows"]),
        onnx.helper.make_node("MatMul", ["rows", "weights"], ["y"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.ones((9, 4), np.float32), "table"),
        onnx.numpy_helper.from_array(np.ones((4, 5), np.float32), "weights"),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("ids", int64, [1])],
        [onnx.helper.make_tensor_value_info("y", float_, [1, 5])],
        constants,
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    assert constant_bytes_read(tmp_path / "model.onnx") == 4 * 5 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_which_one_row_is_read_do_not_count(tmp_path: Path, tied: bool) -> None:
    gguf = pytest.importorskip("gguf", reason="language models: no gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    names = ["token_embd.weight", "blk.0.attn_q.weight"]
    for name in names if tied else [*names, "output.weight"]:
        writer.add_tensor(name, np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert llamacpp.file_bytes_read(tmp_path / "m.gguf") == 2 * 4 * 32 * 4
