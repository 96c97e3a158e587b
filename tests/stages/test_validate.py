"""Engines against a reference, both real ONNX Runtime engines of small graphs whose errors are known by construction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends import onnxruntime_
from pipeline.config import AccuracyConfig, GeneratedData, Thresholds
from pipeline.core import BuildOptions, DimRange, Engine, Precision, Profile, Progress, Recipe
from pipeline.data import SampleSet, SelectionSet, ValidationSet, open_set
from pipeline.errors import DataError, InternalError, PlanError
from pipeline.graph import onnx_model
from pipeline.process import call_in_child
from pipeline.report import ValidationReport
from pipeline.stages.validate import ReferenceOutputs, run_reference, validate

CLASSES = 4
PROFILES = (Profile(dims={"batch": DimRange(min=1, opt=4, max=64)}),)
LOGITS = (("logits", TensorProto.FLOAT, ["batch", CLASSES]),)
LENIENT = Thresholds(min_cosine=None)

Node = tuple[str, Sequence[str], str]
"""Operator, inputs (names or numbers, which become constants), output."""


@dataclass(frozen=True)
class Bench:
    """A folder in which engines are built and sets written."""

    folder: Path

    def engine(self, nodes: Sequence[Node], outputs: Sequence[tuple[str, int, list[str | int] | None]] = LOGITS, name: str = "") -> Engine:
        graph_nodes, constants = [], {}
        for operator, inputs, output in nodes:
            names = []
            for item in inputs:
                if not item.isidentifier():
                    constants[f"c{item}"] = numpy_helper.from_array(np.array(float(item), np.float32), f"c{item}")
                names.append(item if item.isidentifier() else f"c{item}")
            attributes = {"to": TensorProto.INT64} if operator == "Cast" else {}
            graph_nodes.append(helper.make_node(operator, names, [output], **attributes))
        values = [helper.make_tensor_value_info(*output) for output in outputs]
        inputs_info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", CLASSES])]
        graph = helper.make_graph(graph_nodes, "g", inputs_info, values, list(constants.values()))
        source = self.folder / f"model{len(list(self.folder.iterdir()))}{name}"
        out = source / "engine"
        out.mkdir(parents=True)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), source / "model.onnx")
        recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
        return onnxruntime_.build(onnx_model(source, "model.onnx"), recipe, BuildOptions(profiles=PROFILES, threads=1), out)

    def samples(self, x: np.ndarray, labels: np.ndarray | None = None, kind: type[SampleSet] = SelectionSet) -> SampleSet:
        path = self.folder / f"set{len(list(self.folder.iterdir()))}.npz"
        np.savez(path, x=x.astype(np.float32), **({} if labels is None else {"labels": labels}))
        return open_set(kind, (path,), self.engine(SAME).inputs, PROFILES)

    def validate(
        self, candidate: Engine, samples: SampleSet, options: AccuracyConfig | None = None, reference: Engine | None = None, batch: int = 8
    ) -> ValidationReport:
        out = self.folder / f"reference{len(list(self.folder.iterdir()))}"
        out.mkdir()
        expected = run_reference(reference or self.engine(SAME), samples, batch, out)
        return validate(candidate, expected, samples, options or AccuracyConfig(), batch)


SAME: tuple[Node, ...] = (("Identity", ["x"], "logits"),)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def one_hot(labels: np.ndarray) -> np.ndarray:
    return np.eye(CLASSES, dtype=np.float32)[labels] * 2


def labelled(samples: int = 20) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(samples) % CLASSES
    noise = np.linspace(0, 0.1, samples, dtype=np.float32)[:, None] * np.arange(CLASSES, dtype=np.float32)
    return one_hot(labels) + noise, labels  # all samples differ, and argmax is the label


# -- tensor errors ----------------------------------------------------------------------------------------------------


def test_an_equal_engine_passes_with_no_error(bench: Bench) -> None:
    x, labels = labelled()
    report = bench.validate(bench.engine(SAME), bench.samples(x, labels))
    (error,) = report.outputs
    assert report.passed
    assert (error.max_abs, error.mean_abs, error.max_rel, error.snr_db, error.nan, error.inf) == (0, 0, 0, 200, 0, 0)
    assert error.cosine == pytest.approx(1)
    assert report.metric is not None
    assert (report.metric.name, report.metric.reference, report.metric.candidate, report.metric.drop) == ("top1", 1, 1, 0)
    assert (report.role, report.samples) == ("selection", 20)


@pytest.mark.parametrize("batch", [1, 3, 8, 64])
def test_errors_are_those_worked_out_by_hand_whatever_the_batch(bench: Bench, batch: int) -> None:
    x = np.ones((10, CLASSES), np.float32)
    x[:, 0] = np.arange(10)  # all samples differ
    x[7, 1] = 4.0
    clipped = bench.engine((("Min", ["x", "3.0"], "logits"),))  # wrong from 3 up
    report = bench.validate(clipped, bench.samples(x), AccuracyConfig(thresholds=LENIENT, max_drop=1), batch=batch)
    (error,) = report.outputs
    wrong = np.minimum(x, 3)
    assert error.max_abs == 6  # 9 became 3
    assert error.mean_abs == pytest.approx(np.abs(wrong - x).mean())
    assert error.max_rel == pytest.approx(6 / 9)
    assert error.worst_sample == 9
    assert error.snr_db == pytest.approx(10 * np.log10(np.square(x).sum() / np.square(wrong - x).sum()))
    cosines = (wrong * x).sum(1) / np.linalg.norm(wrong, axis=1) / np.linalg.norm(x, axis=1)
    assert error.cosine == pytest.approx(cosines.min())
    assert report.metric is not None
    assert report.metric.candidate == pytest.approx(cosines.mean())


def test_each_broken_threshold_is_a_sentence_and_thresholds_can_differ_by_output(bench: Bench) -> None:
    outputs = (("a", TensorProto.FLOAT, ["batch", CLASSES]), ("b", TensorProto.FLOAT, ["batch", CLASSES]))
    reference = bench.engine((("Identity", ["x"], "a"), ("Identity", ["x"], "b")), outputs)
    candidate = bench.engine((("Add", ["x", "0.5"], "a"), ("Add", ["x", "0.5"], "b")), outputs)
    strict = Thresholds(max_abs=0.1, mean_abs=0.1, min_cosine=0.9999, min_snr_db=60)
    options = AccuracyConfig(thresholds=LENIENT, per_output={"b": strict}, max_drop=1)
    report = bench.validate(candidate, bench.samples(labelled()[0]), options, reference)
    assert [error.passed for error in report.outputs] == [True, False]
    assert [failure.split(" is ")[0] for failure in report.failures] == [
        "output 'b': largest absolute error 0.5",
        "output 'b': mean absolute error 0.5",
        f"output 'b': smallest cosine {report.outputs[1].cosine:.4f}",
        f"output 'b': signal to noise in dB {report.outputs[1].snr_db:.4f}",
    ]


def test_nan_and_infinity_fail_and_are_counted_and_name_the_sample(bench: Bench) -> None:
    x = np.arange(40, dtype=np.float32).reshape(10, CLASSES) - 3.5
    samples = bench.samples(x)
    options = AccuracyConfig(thresholds=LENIENT, max_drop=2)
    square = bench.engine((("Sqrt", ["x"], "logits"),))  # NaN below 0: four values of the first sample
    report = bench.validate(square, samples, options)
    assert (report.outputs[0].nan, report.outputs[0].inf, report.outputs[0].worst_sample) == (4, 0, 0)
    assert any("4 values are NaN on one side only" in failure for failure in report.failures)
    assert report.metric is None
    assert any("cosine is not a number on 1 of 10 samples (first: 0)" in failure for failure in report.failures)

    blown = bench.engine((("Sub", ["x", "30.5"], "d"), ("Abs", ["d"], "e"), ("Reciprocal", ["e"], "logits")))  # infinite at 30.5
    report = bench.validate(blown, samples, options)
    assert (report.outputs[0].nan, report.outputs[0].inf, report.outputs[0].worst_sample) == (0, 1, 8)
    assert not report.passed
    assert ValidationReport.model_validate_json(report.model_dump_json()) == report  # no figure is lost on its way through JSON


def test_infinities_on_which_both_agree_are_no_error(bench: Bench) -> None:
    masked = bench.engine((("Log", ["x"], "logits"),))  # -inf at 0
    x = np.abs(labelled()[0])
    assert (x == 0).any()
    report = bench.validate(masked, bench.samples(x), reference=masked)
    assert report.passed
    assert report.outputs[0].inf == 0


def test_outputs_of_every_kind_compare(bench: Bench) -> None:
    outputs = (
        ("logits", TensorProto.FLOAT, ["batch", CLASSES]),
        ("flags", TensorProto.BOOL, ["batch", CLASSES]),
        ("whole", TensorProto.INT64, ["batch", CLASSES]),
        ("places", TensorProto.INT64, [2, "found"]),
        ("total", TensorProto.FLOAT, []),
        ("none", TensorProto.INT64, [2, "n"]),
    )

    def nodes(shift: str) -> list[Node]:
        return [
            ("Add", ["x", shift], "logits"),
            ("Greater", ["logits", "1.0"], "flags"),
            ("Cast", ["logits"], "whole"),
            ("NonZero", ["x"], "places"),
            ("ReduceMax", ["logits"], "peaks"),
            ("ReduceMax", ["peaks"], "kept"),
            ("Squeeze", ["kept"], "total"),
            ("Greater", ["x", "99.0"], "far"),
            ("NonZero", ["far"], "none"),
        ]

    report = bench.validate(
        bench.engine(nodes("0.0"), outputs), bench.samples(labelled()[0]), AccuracyConfig(), bench.engine(nodes("0.0"), outputs), batch=3
    )
    assert report.passed
    assert [error.output for error in report.outputs] == [name for name, _, _ in outputs]
    shifted = bench.validate(
        bench.engine(nodes("1.0"), outputs),
        bench.samples(labelled()[0]),
        AccuracyConfig(thresholds=LENIENT),
        bench.engine(nodes("0.0"), outputs),
        batch=3,
    )
    errors = {error.output: error.max_abs for error in shifted.outputs}
    assert errors == pytest.approx({"logits": 1, "flags": 1, "whole": 1, "places": 0, "total": 1, "none": 0}, abs=1e-6)


def test_the_comparison_prints_nothing(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.validate(bench.engine((("Neg", ["x"], "logits"),)), bench.samples(labelled()[0]))
    assert capfd.readouterr() == ("", "")


# -- the interface ----------------------------------------------------------------------------------------------------


TWO = (("a", TensorProto.FLOAT, ["batch", CLASSES]), ("b", TensorProto.FLOAT, ["batch", CLASSES]))
BOTH: tuple[Node, ...] = (("Identity", ["x"], "a"), ("Neg", ["x"], "b"))


@pytest.mark.parametrize(
    ("nodes", "outputs", "failures"),
    [
        (BOTH[:1], TWO[:1], ("output 'b' is missing; the engine has a",)),
        (
            (*BOTH, ("Abs", ["x"], "c")),
            (*TWO, ("c", TensorProto.FLOAT, ["batch", CLASSES])),
            ("output 'c' is not an output of the reference, which has a, b",),
        ),
        (
            (BOTH[0], ("Neg", ["x"], "renamed")),
            (TWO[0], ("renamed", TensorProto.FLOAT, ["batch", CLASSES])),
            ("output 'b' is missing; the engine has a, renamed", "output 'renamed' is not an output of the reference, which has a, b"),
        ),
        (
            (BOTH[0], ("Cast", ["x"], "b")),
            (TWO[0], ("b", TensorProto.INT64, ["batch", CLASSES])),
            ("output 'b' is int64, the reference gives float32",),
        ),
        (BOTH, TWO[::-1], ("outputs come in the order b, a, the reference has a, b",)),
    ],
)
def test_another_interface_fails_with_a_sentence(
    bench: Bench, nodes: Sequence[Node], outputs: Sequence[tuple[str, int, list[str | int]]], failures: tuple[str, ...]
) -> None:
    report = bench.validate(bench.engine(nodes, outputs), bench.samples(labelled()[0]), reference=bench.engine(BOTH, TWO))
    assert report.failures == failures
    assert not report.passed
    assert report.outputs == ()
    assert report.metric is None


def test_another_shape_fails_and_names_the_samples(bench: Bench) -> None:
    places = (("logits", TensorProto.INT64, [2, "found"]),)
    reference = bench.engine((("NonZero", ["x"], "logits"),), places)
    above = bench.engine((("Sub", ["x", "16.0"], "d"), ("NonZero", ["d"], "logits")), places)
    x = np.arange(1, 41, dtype=np.float32).reshape(10, CLASSES)
    report = bench.validate(above, bench.samples(x), reference=reference, batch=3)
    assert report.failures == ("output 'logits' has shape (2, 11) for samples 3 to 5, the reference (2, 12)",)


# -- the task metric --------------------------------------------------------------------------------------------------


def test_the_drop_is_a_gate_on_its_point_estimate_and_the_limit_itself_passes(bench: Bench) -> None:
    x, labels = labelled(300)
    x[:3] = -x[:3]  # the candidate takes the absolute value: three answers turn right for it, and wrong for the reference
    samples = bench.samples(x, labels, ValidationSet)
    absolute = bench.engine((("Abs", ["x"], "logits"),))
    exact = AccuracyConfig(max_drop=0.01, thresholds=LENIENT)
    passed = bench.validate(bench.engine(SAME), samples, exact, reference=absolute)
    assert passed.metric is not None
    assert passed.metric.drop == pytest.approx(3 / 300)
    assert passed.passed
    assert passed.metric.interval.low <= passed.metric.drop <= passed.metric.interval.high
    assert passed.metric.interval.low < passed.metric.interval.high
    assert passed.notes == ()
    failed = bench.validate(bench.engine(SAME), samples, AccuracyConfig(max_drop=0.009, thresholds=LENIENT), reference=absolute)
    assert failed.failures == ("top1 drops by 0.0100 (1.0000 to 0.9900), over max_drop 0.009",)


def test_few_samples_are_a_warning_and_one_is_an_error(bench: Bench) -> None:
    x, labels = labelled(20)
    report = bench.validate(bench.engine(SAME), bench.samples(x, labels))
    assert [note.text for note in report.notes] == ["selection: 20 samples leave the drop uncertain; 200 or more narrow its interval"]
    with pytest.raises(DataError, match="holds one sample"):
        bench.validate(bench.engine(SAME), bench.samples(x[:1], labels[:1]))


def test_without_labels_auto_is_cosine_and_top1_is_refused(bench: Bench) -> None:
    samples = bench.samples(labelled()[0])
    report = bench.validate(bench.engine(SAME), samples)
    assert report.metric is not None
    assert (report.metric.name, report.metric.reference, report.metric.max_drop) == ("cosine", 1, 0.01)
    with pytest.raises(DataError) as raised:
        bench.validate(bench.engine(SAME), samples, AccuracyConfig(metric="top5"))
    assert raised.value.message == "accuracy.metric is top5, but the set has no labels"
    assert "`labels`" in raised.value.next_step


def test_on_generated_inputs_there_are_tensor_errors_and_no_metric(bench: Bench) -> None:
    nothing = GeneratedData(generate="random", samples=8, because="a test")
    samples = open_set(SelectionSet, nothing, bench.engine(SAME).inputs, PROFILES)
    report = bench.validate(bench.engine((("Add", ["x", "0.001"], "logits"),)), samples, AccuracyConfig(metric="top1"))
    assert (report.role, report.metric, report.notes) == ("generated", None, ())
    assert report.outputs[0].max_abs == pytest.approx(0.001, rel=1e-2)


def test_the_metric_reads_the_output_it_is_told_to(bench: Bench) -> None:
    x, labels = labelled()
    both = bench.engine(BOTH, TWO)
    report = bench.validate(both, bench.samples(x, labels), AccuracyConfig(output="b"), both)
    assert report.metric is not None
    assert report.metric.reference < 0.5  # b is -x


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (AccuracyConfig(output="nope"), "accuracy.output names 'nope', which is no output; the model has logits"),
        (AccuracyConfig(per_output={"nope": LENIENT}), "accuracy.per_output names 'nope'"),
        (AccuracyConfig(metric="f1"), "accuracy.metric is 'f1', expected auto, top1, top5, cosine or module:function"),
        (AccuracyConfig(metric="no_such_module:f"), "accuracy.metric 'no_such_module:f' cannot be imported"),
    ],
)
def test_a_plan_that_names_what_is_not_there(bench: Bench, options: AccuracyConfig, said: str) -> None:
    x, labels = labelled()
    with pytest.raises(PlanError) as raised:
        bench.validate(bench.engine(SAME), bench.samples(x, labels), options)
    assert said in raised.value.message
    assert raised.value.next_step


USER_METRICS = """
import numpy as np

def per_sample(outputs, labels, reference):
    return (outputs.argmax(1) == labels).astype(float)

def for_the_set(outputs, labels, reference):
    return float((outputs.argmax(1) == labels).mean())

def without_labels(outputs, labels, reference):
    assert labels is None
    return -np.abs(outputs - reference).mean(axis=1)

def nan(outputs, labels, reference):
    return np.where(outputs[:, 0] == reference[:, 0], 1.0, np.nan)

def nan_for_the_set(outputs, labels, reference):
    return float(nan(outputs, labels, reference).mean())

def wrong_shape(outputs, labels, reference):
    return np.zeros((2, 2))

def raises(outputs, labels, reference):
    return 1 / 0

number = 3
"""


def user_options(bench: Bench, function: str, max_drop: float = 0.3) -> AccuracyConfig:
    name = f"user_metric_{bench.folder.name.replace('-', '_')}"  # a module is imported once per process
    (bench.folder / f"{name}.py").write_text(USER_METRICS)
    return AccuracyConfig(metric=f"{name}:{function}", python_path=bench.folder, max_drop=max_drop, thresholds=LENIENT)


def test_a_users_metric_gives_scores_per_sample_or_one_number(bench: Bench) -> None:
    x, labels = labelled(40)
    x[:10] = -x[:10]
    samples, absolute = bench.samples(x, labels), bench.engine((("Abs", ["x"], "logits"),))
    results = [
        bench.validate(bench.engine(SAME), samples, user_options(bench, name), absolute, batch=7).metric for name in ("per_sample", "for_the_set")
    ]
    for result in results:
        assert result is not None
        assert (result.reference, result.candidate, result.drop) == (1, 0.75, 0.25)
        assert 0.05 < result.interval.low < 0.25 < result.interval.high < 0.45
    no_labels = bench.validate(bench.engine(SAME), bench.samples(x), user_options(bench, "without_labels", 0), absolute)
    assert no_labels.metric is not None
    assert no_labels.metric.reference == 0
    assert not no_labels.passed


@pytest.mark.parametrize(
    ("function", "said"), [("nan", "is not a number on 40 of 40 samples"), ("nan_for_the_set", "is nan where the reference has 1.0")]
)
def test_a_users_metric_that_is_nan_fails(bench: Bench, function: str, said: str) -> None:
    x, labels = labelled(40)
    shifted = bench.engine((("Add", ["x", "1.0"], "logits"),))
    report = bench.validate(shifted, bench.samples(x, labels), user_options(bench, function))
    assert report.metric is None
    assert any(said in failure for failure in report.failures)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("wrong_shape", DataError, "returned shape (2, 2) for 20 samples"),
        ("raises", DataError, "failed: ZeroDivisionError: division by zero"),
        ("missing", PlanError, "cannot be imported"),
        ("number", PlanError, "is a int, expected a function"),
    ],
)
def test_a_users_metric_that_cannot_be_used_is_named(bench: Bench, function: str, error: type[Exception], said: str) -> None:
    x, labels = labelled()
    with pytest.raises(error) as raised:
        bench.validate(bench.engine(SAME), bench.samples(x, labels), user_options(bench, function))
    assert said in str(raised.value)
    assert "next:" in str(raised.value)


# -- where it runs ----------------------------------------------------------------------------------------------------


def test_both_run_in_children_and_tell_how_far_they_are(bench: Bench) -> None:
    x, labels = labelled()
    samples, engine, told = bench.samples(x, labels), bench.engine(SAME), []
    out = bench.folder / "expected"
    out.mkdir()
    reference = call_in_child(run_reference, engine, samples, 8, out, name="reference", progress=lambda part, text: told.append((part, text)))
    assert told[-1] == (1.0, "20 of 20 samples")
    assert [Path(reference.root, file).is_file() for file in reference.files] == [True, True, True]
    report = call_in_child(validate, engine, reference, samples, AccuracyConfig(), 8, name="candidate")
    assert report.passed


def validate_and_list_modules(
    engine: Engine, reference: ReferenceOutputs, samples: SampleSet, options: AccuracyConfig, batch: int, progress: Progress
) -> tuple[bool, bool]:
    return validate(engine, reference, samples, options, batch, progress).passed, "torch" in sys.modules


def test_no_torch_beside_the_candidate(bench: Bench) -> None:
    """Polygraphy imports it wherever it is installed, which costs seconds and brings a second pool of threads."""
    samples, engine = bench.samples(labelled()[0]), bench.engine(SAME)
    out = bench.folder / "expected"
    out.mkdir()
    reference = run_reference(engine, samples, 8, out)
    assert call_in_child(validate_and_list_modules, engine, reference, samples, AccuracyConfig(), 8, name="candidate") == (True, False)


def test_reference_outputs_of_another_set_or_batch_are_our_bug(bench: Bench) -> None:
    x, labels = labelled()
    samples, engine = bench.samples(x, labels), bench.engine(SAME)
    out = bench.folder / "expected"
    out.mkdir()
    reference = run_reference(engine, samples, 8, out)
    with pytest.raises(InternalError):
        validate(engine, reference, samples, AccuracyConfig(), 4)
    with pytest.raises(InternalError):
        validate(engine, reference, bench.samples(x[:10], labels[:10]), AccuracyConfig(), 8)


def test_reference_digests_tell_contents_apart(bench: Bench) -> None:
    samples, digests = bench.samples(labelled()[0]), []
    for index, engine in enumerate((bench.engine(SAME), bench.engine(SAME), bench.engine((("Neg", ["x"], "logits"),)))):
        out = bench.folder / f"expected{index}"
        out.mkdir()
        digests.append(run_reference(engine, samples, 8, out).digest)
    assert digests[0] == digests[1] != digests[2]
