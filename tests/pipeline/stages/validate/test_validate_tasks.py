"""Each metric on its demo: a real engine, labels as a user has them, and a damaged engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from scipy.stats import spearmanr

from calibration_data.tasks.make_tasks import LETTERS, TASKS, write_task
from pipeline.accuracy.gate import gate_points
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.data.samples import SampleSet, SelectionSet, open_set
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from pipeline.plan.schema import Plan
from pipeline.results.accuracy import ValidationReport
from pipeline.stages.validate import run_reference, validate

BATCH = 8


@dataclass(frozen=True)
class Demo:
    folder: Path
    plan: Plan
    engine: Engine
    samples: SampleSet

    def damaged(self, amount: float) -> Engine:
        """Build the model with noise in its weights."""
        model = onnx.load(self.folder / "model.onnx")
        random = np.random.default_rng(0)
        for weight in model.graph.initializer:
            array = numpy_helper.to_array(weight)
            if array.dtype == np.float32 and array.ndim > 1 and array.size > 2:
                noisy = array + random.normal(0, amount, array.shape) * np.abs(array).max()
                changed = numpy_helper.from_array(noisy.astype(np.float32), weight.name)
                weight.CopyFrom(changed)
        onnx.save(model, self.folder / "damaged.onnx")
        return built(self.folder, "damaged.onnx", self.plan)

    def report(self, engine: Engine, plan: Plan | None = None) -> ValidationReport:
        plan = plan or self.plan
        out = self.folder / f"reference{len(list(self.folder.iterdir()))}"
        out.mkdir()
        points = gate_points(self.samples, plan.profiles, BATCH)
        expected = run_reference(self.engine, self.samples, {}, BATCH, points, out)
        return validate(engine, expected, self.samples, plan.accuracy, {}, BATCH)

    def outputs(self) -> np.ndarray:
        session = onnxruntime.InferenceSession(
            self.folder / "model.onnx", providers=["CPUExecutionProvider"]
        )
        return np.asarray(session.run(None, self.inputs())[0])

    def inputs(self) -> dict[str, np.ndarray]:
        batches = [batch.feeds for batch in self.samples.batches(32)]
        names = batches[0]
        return {name: np.concatenate([feeds[name] for feeds in batches]) for name in names}

    def labels(self) -> np.ndarray:
        labels = [batch.labels for batch in self.samples.batches(32) if batch.labels is not None]
        return np.concatenate(labels)


def built(folder: Path, name: str, plan: Plan) -> Engine:
    out = folder / f"engine{len(list(folder.iterdir()))}"
    out.mkdir()
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    options = BuildOptions(profiles=plan.profiles, threads=1)
    return onnxruntime_.build(onnx_model(folder, name), recipe, options, out)


def opened(metric: str, folder: Path) -> Demo:
    plan = load_plan(write_task(folder, metric))
    engine = built(folder / metric, "model.onnx", plan)
    assert isinstance(plan.data.selection, tuple)
    labels = plan.data.labels.selection
    samples = open_set(SelectionSet, plan.data.selection, engine.inputs, plan.profiles, labels)
    return Demo(folder / metric, plan, engine, samples)


@pytest.mark.parametrize("metric", TASKS)
def test_the_same_engine_drops_nothing_and_a_damaged_one_fails(tmp_path: Path, metric: str) -> None:
    demo = opened(metric, tmp_path)
    same = demo.report(demo.engine)
    assert same.passed, same.failures
    assert same.metric is not None
    assert (same.metric.name, same.metric.drop, same.metric.interval.high) == (metric, 0, 0)
    checked = [check for check in same.sizes if check.drop is not None]
    assert [check.drop for check in checked] == [0] * len(checked)
    damaged = demo.report(demo.damaged(0.3))
    result = damaged.metric
    assert result is not None
    assert result.reference == same.metric.reference
    assert result.interval.low < result.drop < result.interval.high
    assert result.drop > result.max_drop
    worse = result.candidate - result.reference
    assert result.drop == pytest.approx(worse if result.lower_is_better else -worse)
    verb = "rises" if metric in ("wer", "perplexity") else "drops"
    assert damaged.failures[0].startswith(f"{metric} {verb} by {result.drop:.4f}")


def test_shuffled_texts_are_chance(tmp_path: Path) -> None:
    demo = opened("wer", tmp_path)
    path = demo.plan.data.labels.selection
    assert path is not None
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[7:] + lines[:7]))
    files = demo.plan.data.selection
    assert isinstance(files, tuple)
    samples = open_set(SelectionSet, files, demo.engine.inputs, demo.plan.profiles, path)
    wrong = Demo(demo.folder, demo.plan, demo.engine, samples)
    failures = wrong.report(demo.engine).failures
    assert failures[0].startswith("the reference itself scores at chance: wer 0.")
    assert "down to" in failures[0]


# -- the values, computed otherwise ------------------------------------------


def test_the_mask_reaches_the_pooling_in_joined_batches(tmp_path: Path) -> None:
    demo = opened("sts", tmp_path)
    vectors, mask = demo.outputs(), demo.inputs()["mask"]
    lengths = mask.sum(axis=1).tolist()
    pooled = [row[:length].mean(axis=0) for row, length in zip(vectors, lengths, strict=True)]
    unit = [row / np.linalg.norm(row) for row in pooled]
    cosines = [float(unit[n] @ unit[n + 1]) for n in range(0, len(unit), 2)]
    expected = spearmanr(cosines, demo.labels()[::2]).statistic
    report = demo.report(demo.engine)
    assert report.metric is not None
    # equal texts have a cosine of 1 but for the last bits, which decide their ranks
    assert report.metric.reference == pytest.approx(expected, abs=0.005)
    without = demo.plan.accuracy.model_copy(update={"mask": None})
    unmasked = demo.report(demo.engine, demo.plan.model_copy(update={"accuracy": without}))
    assert unmasked.metric is not None
    assert unmasked.metric.reference < expected - 0.01


def test_texts_are_those_of_a_plain_search(tmp_path: Path) -> None:
    demo = opened("wer", tmp_path)
    errors = words = 0
    for scores, label in zip(demo.outputs(), demo.labels().tolist(), strict=True):
        text, last = "", 0
        for number in scores.argmax(axis=1).tolist():
            text += LETTERS[number - 1] if number and number != last else ""
            last = number
        errors += _distance(text.split(), label.split())
        words += len(label.split())
    report = demo.report(demo.engine)
    assert report.metric is not None
    assert report.metric.reference == pytest.approx(errors / words)


def _distance(found: list[str], expected: list[str]) -> int:
    """The edit distance, by its definition."""

    @functools.cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        change = int(found[i - 1] != expected[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + change)

    return distance(len(found), len(expected))


def test_the_perplexity_is_near_that_of_the_chain_itself(tmp_path: Path) -> None:
    demo = opened("perplexity", tmp_path)
    logits, labels = demo.outputs(), demo.labels()
    odds = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    counted = labels >= 0
    likelihoods = np.take_along_axis(odds, np.maximum(labels, 0)[..., None], -1)[..., 0][counted]
    report = demo.report(demo.engine)
    assert report.metric is not None
    assert report.metric.reference == pytest.approx(np.exp(-np.log(likelihoods).mean()), rel=1e-5)
