"""The Python API: compile a plan, open the delivered engine and run it, read the report."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import pipeline
from pipeline.core.artifacts import Engine, Target
from pipeline.core.shapes import TensorSpec
from pipeline.errors import DamagedError, DataError, ModelError, PlanError, UserError
from pipeline.execution.stage_event import StageEvent
from tests.builders.cli import environment, write_task

ROOT = Path(__file__).parents[2]
CANDIDATES = [{"backend": "onnxruntime", "precision": "fp32"}]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.yaml and model.onnx, and what the API compiled in `out`."""
    folder = tmp_path_factory.mktemp("api")
    events: list[StageEvent] = []
    plan = write_task(folder, candidates=CANDIDATES)
    report = pipeline.compile(plan, folder / "out", ["accuracy.max_drop=0.02"], events.append)
    assert report.plan.accuracy.max_drop == 0.02
    assert report.command == (
        f"crucible compile {plan} --set accuracy.max_drop=0.02 --out {folder / 'out'}"
    )
    assert {"simplify", "build", "benchmark"} <= {event.stage for event in events}
    figures = [event.figures for event in events if event.figures]
    checked = [event.subject for event in events if event.figures and event.figures.accuracy]
    assert checked == ["onnxruntime fp32 on selection"], "the validation set chooses no winner"
    latencies = [each.latency.median_s for each in figures if each.latency]
    assert latencies
    (baseline,) = {each.label for each in figures if each.is_baseline}
    assert report.baseline
    assert baseline == report.baseline.label
    assert latencies[-1] in [
        each.rows[0].end_to_end.median_s
        for each in (report.baseline, report.candidates[0].benchmark)
        if each
    ]
    return folder


def test_the_delivered_engine_answers_as_onnx_runtime_does(task: Path) -> None:
    session = onnxruntime.InferenceSession(
        str(task / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    with pipeline.open_engine(task / "out") as engine:
        assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in engine.inputs] == [
            ("x", "float32", ("batch", 16))
        ]
        assert [tensor.name for tensor in engine.outputs] == ["y"]
        for rows in (1, 3, 16):
            x = np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)
            outputs = engine.run({"x": x})
            assert list(outputs) == ["y"]
            assert outputs["y"].dtype == np.float32
            expected = session.run(None, {"x": x})[0]
            np.testing.assert_allclose(outputs["y"], expected, rtol=1e-5, atol=1e-5)


def test_the_report_is_read_from_its_folder_or_its_file(task: Path) -> None:
    report = pipeline.read_report(task / "out")
    assert report == pipeline.read_report(task / "out" / "report.json")
    assert report.name == "tiny"
    assert report.has_engine
    assert report.verdict == "unproven"  # measured in one process only


def test_one_text_in_the_place_of_overrides_is_refused(task: Path, tmp_path: Path) -> None:
    expected = "expected overrides as a list of texts, got the text 'a.b=1'"
    with pytest.raises(PlanError, match=re.escape(expected)):
        pipeline.read_plan(task, "a.b=1")
    with pytest.raises(PlanError, match=re.escape(expected)):
        pipeline.compile(task, tmp_path / "out", "a.b=1")
    assert not (tmp_path / "out").exists()


def test_a_plan_that_was_read_compiles_with_overrides(task: Path, tmp_path: Path) -> None:
    plan = pipeline.read_plan(task / "plan.yaml")
    report = pipeline.compile(plan, tmp_path / "again", ["name=other"])
    assert report.name == "other"
    assert report.command == "pipeline.compile(plan, out)"
    assert (tmp_path / "again" / "engine" / "engine.json").is_file()


def test_an_onnx_file_is_a_plan_with_all_defaults(task: Path) -> None:
    plan = pipeline.read_plan(str(task / "model.onnx"), ["benchmark.budget_s=7"])
    assert plan.model.path == task / "model.onnx"
    assert plan.benchmark.budget_s == 7


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"z": np.zeros((1, 16), np.float32)}, "expected inputs 'x', got 'z'"),
        ({}, "expected inputs 'x', got none"),
        ({"x": np.zeros((1, 16), np.float64)}, "'x' has dtype float64, expected float32"),
        ({"x": [[0.0] * 16]}, "'x' is a list, expected a numpy array"),
        ({"x": np.zeros((1, 17), np.float32)}, "17"),
        ({"x": np.zeros((17, 16), np.float32)}, "no profile of this engine holds batch = 17"),
        ({"x": np.zeros((1, 16), np.float32), "y": [0]}, "expected inputs 'x', got 'x', 'y'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    task: Path, inputs: dict[str, object], message: str
) -> None:
    with (
        pipeline.open_engine(task / "out") as engine,
        pytest.raises(DataError, match=re.escape(message)) as refusal,
    ):
        engine.run(inputs)  # type: ignore[arg-type]
    assert refusal.value.next_step


def test_a_closed_engine_says_so(task: Path) -> None:
    with pipeline.open_engine(task / "out" / "engine") as engine:
        engine.run({"x": np.zeros((1, 16), np.float32)})
    engine.close()
    with pytest.raises(UserError, match="this engine is closed") as refusal:
        engine.run({"x": np.zeros((1, 16), np.float32)})
    assert "pipeline.open_engine" in refusal.value.next_step


def test_a_folder_without_a_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"no engine in '{tmp_path}'")):
        pipeline.open_engine(tmp_path)
    with pytest.raises(UserError, match=re.escape(f"no report at '{tmp_path / 'report.json'}'")):
        pipeline.read_report(tmp_path)
    with pytest.raises(PlanError, match="no plan at"):
        pipeline.compile(tmp_path / "plan.yaml", tmp_path / "out")


def test_an_out_folder_that_cannot_be_written_is_refused_before_the_work(
    task: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="is a file"):
        pipeline.compile(task / "plan.yaml", tmp_path / "file" / "out")


def test_a_changed_engine_is_refused(task: Path, tmp_path: Path) -> None:
    shutil.copytree(task / "out", tmp_path / "out")
    model = next((tmp_path / "out" / "engine").glob("*.onnx"))
    model.write_bytes(model.read_bytes() + b"\0")
    with pytest.raises(DamagedError, match="is damaged"):
        pipeline.open_engine(tmp_path / "out")


def test_one_session_runs_everything_and_closes_before_its_engine() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3))
    target = Target(backend="onnxruntime", version="1", device="cpu")
    engine = Engine.model_construct(inputs=(spec,), outputs=(), profiles=(), target=target)
    loaded = Loaded()
    opened = pipeline.OpenEngine(engine, loaded)  # type: ignore[arg-type]
    opened.run({})
    assert opened.input_buffer("x", (2, 3)).dtype == np.float32
    with pytest.raises(DataError, match=r"input 'x' has shape \(2, 4\), expected"):
        opened.input_buffer("x", (2, 4))
    opened.run({})
    opened.close()
    opened.close()
    assert loaded.log == ["open", "run", "run", "close session", "close engine"]
    for use in (lambda: opened.run({}), lambda: opened.input_buffer("x", (2, 3))):
        with pytest.raises(UserError, match="this engine is closed"):
            use()


class Loaded:
    """An engine that notes which sessions are opened, run and closed."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def session(self, profile: int | None = None) -> "Session":
        self.log.append("open")
        return Session(self.log)

    def close(self) -> None:
        self.log.append("close engine")


class Session:
    def __init__(self, log: list[str]) -> None:
        self.inputs = self.outputs = ()
        self._log = log

    def bind(self, feeds: object) -> None: ...
    def upload(self) -> None: ...
    def execute(self) -> None:
        self._log.append("run")

    def download(self) -> None: ...
    def synchronize(self) -> None: ...
    def fetch(self) -> dict[str, np.ndarray]:
        return {}

    def timer(self) -> None: ...
    def close(self) -> None:
        self._log.append("close session")


def test_what_the_package_exports_is_documented() -> None:
    assert pipeline.__all__ == [
        "compile",
        "open_engine",
        "OpenEngine",
        "quantize_aware",
        "read_plan",
        "read_report",
        "CrucibleError",
    ]
    for name in pipeline.__all__:
        assert getattr(pipeline, name).__doc__, name
        assert f"pipeline.{name}" in (ROOT / "README.md").read_text(), name


def test_importing_the_package_is_light() -> None:
    code = "import sys, pipeline; print(sorted({'numpy', 'onnx', 'pydantic'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_lines_of_the_readme_run(tmp_path: Path) -> None:
    """On the result of a compile whose outputs lie where the README's do."""
    section = (ROOT / "README.md").read_text().split("## From Python\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    plan = write_task(tmp_path, candidates=CANDIDATES)
    report = pipeline.compile(plan, out=tmp_path / "crucible-out" / "model")
    assert report.verdict == "unproven"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["{'y': (1, 4)}"]
