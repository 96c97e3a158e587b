"""The gate on outputs of indices: equal scores may change places, wrong answers fail."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.processing import Postprocess
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import DataError, PlanError
from pipeline.plan.schema import AccuracyConfig, Thresholds
from pipeline.results.accuracy import ValidationReport
from tests.builders.convert import model_from_text
from tests.builders.validate import CLASSES, PROFILES, Bench

TOP = {"logits": Postprocess(top_k=2)}
BEST = {"logits": Postprocess(argmax=True)}
TOP_ENGINE = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 4] x) => (int64[batch, 2] logits_indices, float[batch, 2] logits_values)
<int64[1] k = {{2}}, float[4] tiny = {{0, 1e-6, 2e-6, 3e-6}}, int64 four = {{4}}>
{{ {nodes} }}
"""
BEST_ENGINE = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 4] x) => (int64[batch] logits_indices)
{{ {nodes} }}
"""
RIGHT = "logits_values, logits_indices = TopK (x, k)"
OTHER_TIES = "y = Add (x, tiny) logits_values, logits_indices = TopK (y, k)"
WRONG_INDICES = "y = Neg (x) other, logits_indices = TopK (y, k) logits_values, i = TopK (x, k)"
WRONG_VALUES = "v, logits_indices = TopK (x, k) logits_values = Neg (v)"
NO_CLASSES = "logits_values, i = TopK (x, k) logits_indices = Add (i, four)"
WORST = "y = Neg (x) logits_indices = ArgMax <axis = 1, keepdims = 0> (y)"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def engine_of(bench: Bench, nodes: str, graph: str = TOP_ENGINE) -> Engine:
    folder = bench.folder / f"engine{len(list(bench.folder.iterdir()))}"
    folder.mkdir()
    model = model_from_text(folder, graph.format(nodes=nodes))
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    options = BuildOptions(profiles=PROFILES, threads=1)
    (folder / "engine").mkdir()
    return onnxruntime_.build(model, recipe, options, folder / "engine")


def scores(ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Scores of 40 samples, whose labels are the highest ones. `ties`: two are the highest."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (40, CLASSES)).astype(np.float32)
    best = np.arange(40) % CLASSES
    x[np.arange(40), best] = 3
    if ties:
        x[np.arange(40), (best + 1) % CLASSES] = 3
    return x, best


def check(
    bench: Bench, nodes: str, options: AccuracyConfig | None = None, ties: bool = False
) -> ValidationReport:
    x, labels = scores(ties)
    options = options or AccuracyConfig()
    samples = bench.samples(x, labels if options.metric.startswith("top") else None)
    return bench.validate(engine_of(bench, nodes), samples, options, steps=TOP)


def test_equal_scores_may_change_places(bench: Bench) -> None:
    report = check(bench, OTHER_TIES, ties=True)
    assert report.passed, report.failures
    indices, values = report.outputs
    assert (indices.output, values.output) == ("logits_indices", "logits_values")
    assert indices.agreement == pytest.approx(1, abs=1e-5)
    assert values.agreement is None
    assert report.metric is not None
    assert (report.metric.name, report.metric.reference) == ("agreement", 1)
    assert report.metric.candidate == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("nodes", "failure"),
    [
        (WRONG_INDICES, "output 'logits_indices': agreement of the indices 0."),
        (WRONG_VALUES, "output 'logits_values': smallest cosine -1.0000 is under the limit 0.99"),
        (
            NO_CLASSES,
            "output 'logits_indices' has indices from 4 to 7 for samples 0 to 7",
        ),
    ],
)
def test_wrong_answers_fail(bench: Bench, nodes: str, failure: str) -> None:
    report = check(bench, nodes)
    assert any(each.startswith(failure) for each in report.failures), report.failures


def test_top1_reads_the_first_index(bench: Bench) -> None:
    options = AccuracyConfig(metric="top1", thresholds=Thresholds(min_agreement=None))
    right, wrong = check(bench, RIGHT, options), check(bench, WRONG_INDICES, options)
    assert right.metric is not None
    assert (right.metric.reference, right.metric.candidate, right.passed) == (1, 1, True)
    assert wrong.metric is not None
    assert (wrong.metric.reference, wrong.metric.candidate, wrong.passed) == (1, 0, False)


def test_an_argmax_is_compared_by_the_scores_of_the_reference(bench: Bench) -> None:
    x, labels = scores()
    right = engine_of(
        bench, "logits_indices = ArgMax <axis = 1, keepdims = 0> (x)", graph=BEST_ENGINE
    )
    wrong = engine_of(bench, WORST, graph=BEST_ENGINE)
    samples = bench.samples(x, labels)
    passed = bench.validate(right, samples, steps=BEST)
    assert passed.passed, passed.failures
    failed = bench.validate(wrong, samples, steps=BEST)
    (error,) = failed.outputs
    assert error.agreement == 0
    assert failed.metric is not None
    assert (failed.metric.name, failed.metric.candidate) == ("top1", 0)


def test_samples_of_one_answer_prove_nothing(bench: Bench) -> None:
    samples = bench.samples(scores()[0][::CLASSES])
    with pytest.raises(DataError, match="metric 'agreement' cannot tell right answers from wrong"):
        bench.validate(
            engine_of(bench, "logits_indices = ArgMax <axis = 1, keepdims = 0> (x)", BEST_ENGINE),
            samples,
            steps=BEST,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "cosine"}, "accuracy.metric is cosine, and 'logits_indices' holds indices"),
        ({"metric": "top5"}, "accuracy.metric is top5, and 'logits_indices' holds 2 indices"),
        (
            {"metric": "agreement", "output": "logits_values"},
            "'logits_values' holds no indices of `postprocess`; outputs that do: logits_indices",
        ),
        ({"output": "logits"}, "accuracy.output names 'logits', which is no output"),
        (
            {"per_output": {"logits_indices": {"min_cosine": 0.9}}},
            "accuracy.per_output.logits_indices has min_cosine",
        ),
        (
            {"per_output": {"logits_values": {"min_agreement": 0.9}}},
            "accuracy.per_output.logits_values has min_agreement",
        ),
    ],
)
def test_metrics_and_limits_that_an_output_cannot_have_are_errors(
    bench: Bench, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check(bench, RIGHT, AccuracyConfig.model_validate(options))
