"""The command as a user meets it: the good way, every bad input, and what the exit code says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pipeline.benchmark.cpu_peaks import load_peaks
from pipeline.core.recipe import Precision
from pipeline.host.environment import usable_cores
from pipeline.onnx_graph.files import read_proto
from tests.builders.cli import (
    ONE_PROCESS,
    crucible,
    crucible_here,
    environment,
    write_model,
    write_task,
)
from tests.pipeline.benchmark.timeline import names_of_row, read_trace


def test_compile_ends_with_table_verdict_report_and_json(compiled: tuple[Path, Path]) -> None:
    folder, home = compiled
    result = crucible(
        "compile", folder / "plan.yaml", "--out", folder / "again", env={"CRUCIBLE_HOME": str(home)}
    )
    assert result.code == 0
    assert "onnxruntime int8 minmax" in result.out
    assert "UNPROVEN" in result.out
    assert (result.summary["verdict"], result.summary["ratio"]) == ("unproven", None)
    assert "`benchmark.budget_s`) was over after" in str(result.summary["ratio_missing"])
    for file in result.summary["reports"].values():
        assert Path(file).is_file()
    assert (Path(str(result.summary["engine"])) / "engine.json").is_file()
    assert "reused" in result.err
    assert "done" not in result.err  # nothing was made again


def test_json_alone_goes_to_stdout_with_json(compiled: tuple[Path, Path]) -> None:
    folder, home = compiled
    result = crucible(
        "compile",
        folder / "plan.yaml",
        "--json",
        "--out",
        folder / "again",
        env={"CRUCIBLE_HOME": str(home)},
    )
    assert json.loads(result.out)["verdict"] == "unproven"
    assert result.err == ""


@pytest.mark.parametrize(
    "command",
    [
        ("validate",),
        ("validate", "--set", "data.validation=selection.npz", "--set", "data.selection=null"),
    ],
)
def test_validate_checks_the_delivered_engine_again(
    compiled: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    folder, home = compiled
    result = crucible(*command, folder / "out", cwd=folder, env={"CRUCIBLE_HOME": str(home)})
    assert result.code == 0, result.err
    assert "passed" in result.out
    assert result.summary["samples"] == 220


def test_validate_reads_the_engine_that_lies_there(compiled: tuple[Path, Path]) -> None:
    folder, home = compiled
    shutil.copytree(folder / "out", folder / "damaged")
    for file in (folder / "damaged" / "engine").glob("model.*"):
        file.write_bytes(b"junk")
    result = crucible("validate", folder / "damaged", env={"CRUCIBLE_HOME": str(home)})
    assert result.code == 1, result.out
    assert "'model.onnx' has another digest than when it was written" in result.err


def test_out_that_cannot_be_a_folder_is_said_before_the_work(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, _ = compiled
    (tmp_path / "file").write_text("mine")
    result = crucible(
        "compile",
        folder / "plan.yaml",
        "--out",
        tmp_path / "file" / "sub",
        env={"CRUCIBLE_HOME": str(tmp_path / "home")},
    )
    assert result.code == 1
    assert "is a file" in result.err
    assert not (tmp_path / "home").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_reader_that_leaves_is_no_error(compiled: tuple[Path, Path]) -> None:
    folder, _ = compiled
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pipeline.cli", "report", str(folder / "out")]
    result = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment(), check=False
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_model_without_inputs_is_refused(tmp_path: Path) -> None:
    value = helper.make_node("Constant", [], ["c"], value_floats=[1.0])
    graph = helper.make_graph(
        [value], "g", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1])]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "constant.onnx",
    )
    result = crucible("compile", tmp_path / "constant.onnx", cwd=tmp_path)
    assert result.code == 1, result.err
    assert "has no inputs" in result.err


def test_inspect_names_nodes_of_an_operator_set_that_the_file_does_not_declare(
    tmp_path: Path,
) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Frobnicate", ["x"], ["y"], domain="my.own", name="odd")],
        "g",
        ends[:1],
        ends[1:],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "own.onnx",
    )
    result = crucible("inspect", tmp_path / "own.onnx", "--backend", "onnxruntime")
    assert result.code == 1, result.err
    assert "my.own::Frobnicate" in result.out


def test_an_engine_whose_source_has_changed_is_not_judged_by_the_new_one(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, home = compiled
    proto = onnx.load(folder / "model.onnx")
    proto.graph.doc_string = "another file"
    onnx.save(proto, tmp_path / "model.onnx")
    for command in ("validate", "bench"):
        result = crucible(
            command,
            folder / "out",
            "--set",
            f"model.path={tmp_path / 'model.onnx'}",
            env={"CRUCIBLE_HOME": str(home)},
        )
        assert result.code == 1, result.out + result.err
        assert "have changed since this engine was compiled" in result.err


def test_an_engine_over_its_budget_is_rejected_and_no_earlier_engine_stays(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(compiled[0] / "out", tmp_path / "crucible-out" / "tiny")
    candidates = [
        {"backend": "onnxruntime", "precision": "int8", "placement": {"last_layer": True}}
    ]
    plan = write_task(
        tmp_path,
        candidates=candidates,
        accuracy={"metric": "top1", "max_drop": 0.0, "thresholds": {"max_abs": 1e-6}},
    )
    result = crucible("compile", plan, cwd=tmp_path, env={"CRUCIBLE_HOME": str(compiled[1])})
    assert result.code == 2, result.err
    assert result.summary["verdict"] == "rejected"
    assert result.summary["engine"] is None
    assert "next: the worst layers unquantised" in result.out
    assert "another calibration method" not in result.out, "`method: auto` has tried the others"
    assert not (tmp_path / "crucible-out" / "tiny" / "engine").exists()


def test_bench_measures_again_and_traces(compiled: tuple[Path, Path], tmp_path: Path) -> None:
    folder, home = compiled
    result = crucible(
        "bench",
        folder / "out",
        "--set",
        "benchmark.duration_s=0.2",
        "--trace",
        tmp_path / "trace.json",
        env={"CRUCIBLE_HOME": str(home)},
    )
    assert result.code == 0, result.err
    assert "times baseline" in result.out
    assert len(result.summary["engines"]) == 2
    assert "end to end, host" in result.out
    assert "mean latency" in result.out
    assert "on a quiet host measures the peaks" in result.out, "this budget is too small for it"
    assert "expected at least 0.2 s and 3 s" in result.out
    (summary,) = result.summary["summary"]
    assert summary["queries"] > 0
    document = read_trace(tmp_path / "trace.json")
    labels = [engine["label"] for engine in result.summary["engines"]]
    assert [engine["engine"] for engine in document["otherData"]["engines"]] == labels
    assert names_of_row(document, "layers", 1)
    assert names_of_row(document, "layers", 2)


def test_bench_sweeps_over_the_batch(compiled: tuple[Path, Path], tmp_path: Path) -> None:
    folder, home = compiled
    arguments = (
        "bench",
        folder / "out",
        "--batch",
        "1,16,4",
        "--limit-ms",
        "1000",
        "--out",
        tmp_path / "sweep",
    )
    result = crucible(
        *arguments, "--set", "benchmark.duration_s=0.2", env={"CRUCIBLE_HOME": str(home)}
    )
    assert result.code == 0, result.err
    points = result.summary["points"]
    assert [point["batch"] for point in points] == [1, 4, 16]
    assert result.summary["best"] in (1, 4, 16)
    assert "best batch with" in result.out
    assert (tmp_path / "sweep" / "sweep.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text()) == result.summary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--batch", "1,x"),
            "expected --batch as integers of at least 1, separated by commas",
        ),
        (("--batch", "0"), "expected --batch as integers of at least 1"),
        (("--batch", "17"), "expected batch 1 to 16"),
        (("--limit-ms", "5"), "need --batch"),
    ],
)
def test_a_bad_sweep_is_refused(
    compiled: tuple[Path, Path], options: tuple[str, ...], message: str
) -> None:
    folder, home = compiled
    result = crucible("bench", folder / "out", *options, env={"CRUCIBLE_HOME": str(home)})
    assert result.code == 1, result.out
    assert message in result.err


def test_bench_completes_a_report_that_lacks_a_ratio_if_the_host_can_tell_now(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, home = compiled
    shutil.copytree(folder / "out", tmp_path / "out")
    file = tmp_path / "out" / "report.json"
    report = json.loads(file.read_text())
    assert (report["verdict"], report["ratio"]) == ("unproven", None)
    (advice,) = report["next_steps"]  # a command, between backticks
    _, name, *options = advice.replace("=120", "=60").split("`")[1].split()
    options[options.index("DIR")] = "out"
    result = crucible(name, *options, cwd=tmp_path, env={"CRUCIBLE_HOME": str(home)})
    assert result.code == 0, result.err
    after = json.loads(file.read_text())
    if "verdict" in result.summary:
        assert after["verdict"] == result.summary["verdict"] in ("accepted", "keep")
        assert after["ratio"] == result.summary["ratio"] is not None
        assert after["delivered"] is not None
        assert "replaced the report" in result.out
    else:  # the host is busy
        assert after == report


def test_report_prints_and_writes_again(compiled: tuple[Path, Path]) -> None:
    folder, _ = compiled
    html = folder / "out" / "report.html"
    html.unlink()
    result = crucible("report", folder / "out")
    assert result.code == 0, result.err
    assert "unproven" in result.out.lower()
    assert html.is_file()


def test_inspect_shows_a_model_and_an_engine(compiled: tuple[Path, Path]) -> None:
    folder, _ = compiled
    model = crucible("inspect", folder / "model.onnx")
    assert "input x: float32 [batch, 16]" in model.out
    assert "MatMul 2" in model.out
    engine = crucible("inspect", folder / "out")
    assert "profile 0: batch 1..4..16" in engine.out
    assert crucible("inspect", folder / "model.onnx", "--backend", "onnxruntime").code == 0


def test_export_writes_the_graph_that_candidates_are_made_from(tmp_path: Path) -> None:
    plan = write_task(tmp_path)
    result = crucible("onnx", plan, "--out", tmp_path / "new" / "made.onnx", cwd=tmp_path)
    assert result.code == 0, result.err
    assert "MatMul 2" in result.out
    assert "nodes became" in result.out
    assert result.summary["model"] == str(tmp_path / "new" / "made.onnx")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["made.onnx"]
    plain = crucible(
        "onnx", plan, "--out", tmp_path / "plain.onnx", "--no-simplify", "--json", cwd=tmp_path
    )
    assert json.loads(plain.out)["notes"] == []
    assert read_proto(tmp_path / "plain.onnx") == read_proto(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("made.pt2", "ends in .onnx"),
        ("model.onnx", "would overwrite"),
        ("plan.yaml/x.onnx", "is a file"),
    ],
)
def test_export_refuses_a_file_that_it_must_not_write(tmp_path: Path, out: str, words: str) -> None:
    plan = write_task(tmp_path)
    before = (tmp_path / "model.onnx").read_bytes()
    result = crucible_here("onnx", plan, "--out", tmp_path / out, cwd=tmp_path)
    assert result.code == 1, result.out
    assert words in result.err
    assert (tmp_path / "model.onnx").read_bytes() == before


def test_doctor_names_what_is_here_and_what_to_install() -> None:
    result = crucible("doctor")
    assert result.code == 0, result.err
    assert "onnxruntime" in result.out
    assert json.loads(crucible("doctor", "--json").out)


@pytest.mark.slow
def test_doctor_measures_the_peaks_of_this_cpu_once() -> None:
    assert "CPU peak" in crucible("doctor", "--measure", "--threads", "1").out
    stored = json.loads(crucible("doctor", "--json").out)["cpu_peaks"]
    assert (stored is None) == (usable_cores() > 1), "they are of one thread"
    peaks = load_peaks(1)
    assert peaks is not None
    assert peaks.flops_per_s[Precision.FP32] > 1e8
    assert Precision.INT8 in peaks.flops_per_s


def test_an_onnx_file_alone_compiles_to_unproven(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx")
    settings = [f"--set=benchmark.{key}={value}" for key, value in ONE_PROCESS.items()] + [
        "--set",
        "candidates=[{backend: onnxruntime, precision: fp32}]",
    ]
    result = crucible(
        "compile", tmp_path / "model.onnx", "--profile", "batch=1:2:8", *settings, cwd=tmp_path
    )
    assert result.code == 0, result.err
    assert result.summary["verdict"] == "unproven"
    assert "no data: accuracy not proven" in result.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"acuracy": {}}, "did you mean 'accuracy'"),
        ({"model": {"path": "gone.onnx"}}, "gone.onnx"),
        ({"profiles": [{"batch": [8, 4, 16]}]}, "min <= opt <= max"),
        ({"profiles": []}, "'batch'"),
        ({"profiles": [{"bathc": [1, 4, 16]}]}, "batch"),
        ({"data": {"calibration": "gone.npz"}}, "gone.npz"),
        (
            {"data": {"calibration": "selection.npz", "selection": "selection.npz"}},
            "share 220 samples",
        ),
        ({"data": {"selection": "model.onnx"}}, "npz"),
        ({"candidates": [{"backend": "onnxruntime", "precision": "fp16"}]}, "fp16"),
        ({"candidates": [{"backend": "onnxrutnime", "precision": "fp32"}]}, "onnxruntime"),
        ({"candidates": [{"backend": "tensorrt", "precision": "fp16"}]}, ".[tensorrt]"),
        (
            {"candidates": [{"backend": "onnxruntime", "precision": "int8"}], "data": {}},
            "needs calibration data",
        ),
        ({"accuracy": {"metric": "top9"}}, "top9"),
        ({"benchmark": {"sizes": [{"batch": 99}]}}, "batch"),
        (
            {
                "data": {"selection": []},
                "candidates": [{"backend": "onnxruntime", "precision": "fp32"}],
            },
            "got an empty list",
        ),
        (
            {
                "model": {
                    "path": "model.onnx",
                    "inputs": [{"name": "x", "dtype": "int8", "shape": ["batch", 16]}],
                }
            },
            "the file has x float32 [batch, 16]",
        ),
        ({"model": {"path": "model.onnx", "outputs": ["logits"]}}, "the file has y"),
        (
            {"accuracy": {"metric": "no_such_module:f"}},
            "accuracy.metric: no module 'no_such_module'",
        ),
        (
            {"simplify": {"surgery": "no_such_module:f"}},
            "simplify.surgery: no module 'no_such_module'",
        ),
    ],
)
def test_a_bad_plan_ends_with_exit_code_1_and_a_next_step(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    result = crucible_here("compile", write_task(tmp_path, **change), cwd=tmp_path)
    assert result.code == 1, result.out + result.err
    assert words in result.err
    assert "next" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "crucible-out").exists()


def test_bad_data_is_refused(tmp_path: Path) -> None:
    plan = write_task(tmp_path)
    with np.load(tmp_path / "selection.npz") as good:
        x, labels = good["x"], good["labels"]
    for arrays, words in [
        (
            {
                "x": (
                    np.where(np.arange(x.size).reshape(x.shape) == 37, np.nan, x).astype(np.float32)
                ),
                "labels": labels,
            },
            "nan",
        ),
        ({"x": x.astype(np.float64), "labels": labels}, "float64"),
        ({"x": x[:, :5], "labels": labels}, "shape"),
        ({"x": x[:0], "labels": labels[:0]}, "no samples"),
        ({"X": x, "labels": labels}, "'x'"),
        ({"x": x, "labels": labels[:-1]}, "labels"),
    ]:
        np.savez(tmp_path / "selection.npz", **arrays)
        result = crucible_here("compile", plan, cwd=tmp_path)
        assert result.code == 1, result.out + result.err
        assert words.lower() in result.err.lower()


def test_a_corrupt_model_is_refused(tmp_path: Path) -> None:
    plan = write_task(tmp_path)
    model = (tmp_path / "model.onnx").read_bytes()
    for content in (b"", b"rubbish", model[: len(model) // 2]):
        (tmp_path / "model.onnx").write_bytes(content)
        result = crucible_here("compile", plan, cwd=tmp_path)
        assert result.code == 1, result.out + result.err
        assert "model.onnx" in result.err


def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path) -> None:
    plan = write_task(tmp_path / "inner")
    proto = onnx.load(tmp_path / "inner" / "model.onnx")
    (tmp_path / "secret").write_bytes(bytes(100_000))
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "inner" / "model.onnx").write_bytes(proto.SerializeToString())
    result = crucible_here("compile", plan, cwd=tmp_path)
    assert result.code == 1
    assert "../secret" in result.err


def test_unsupported_tensor_kinds_are_named(tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["words"], ["same"], name="copy")
    ends = [
        helper.make_tensor_value_info(name, TensorProto.STRING, [2]) for name in ("words", "same")
    ]
    onnx.save(
        helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:])),
        tmp_path / "words.onnx",
    )
    result = crucible_here("compile", tmp_path / "words.onnx", cwd=tmp_path)
    assert result.code == 1
    assert "words" in result.err
    assert "string" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("compile",),
        ("compile", "--nope"),
        ("nope",),
        ("compile", "gone.yaml"),
        ("report", "."),
        ("bench", "."),
    ],
)
def test_usage_errors_end_with_exit_code_1(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = crucible_here(*arguments, cwd=tmp_path)
    assert result.code == (0 if not arguments else 1)
    assert "Traceback" not in result.err


def test_help_names_every_command() -> None:
    text = crucible("--help").out
    for command in (
        "record",
        "compile",
        "validate",
        "bench",
        "inspect",
        "onnx",
        "export",
        "lint",
        "doctor",
        "report",
    ):
        assert command in text


def test_help_shows_defaults_as_people_write_them() -> None:
    text = " ".join(crucible("compile", "--help").out.replace("│", " ").split())
    assert "crucible-out/NAME if left out" in text
    assert "<class" not in text
