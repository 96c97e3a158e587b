"""Engines against a reference: tensor errors, the interface, and where it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress
from pipeline.data.samples import SampleSet
from pipeline.errors import InternalError
from pipeline.execution.child_process import call_in_child
from pipeline.plan.schema import AccuracyConfig, Thresholds
from pipeline.results.accuracy import ValidationReport
from pipeline.stages.validate import JOINED_SAMPLES, ReferenceOutputs, run_reference, validate
from tests.builders.validate import BOTH, CLASSES, LENIENT, SAME, TWO, Bench, Node, Output, labelled

LOOSE = AccuracyConfig(thresholds=LENIENT, max_drop=1)

# -- tensor errors -----------------------------------------------------------


def test_an_equal_engine_passes_with_no_error(bench: Bench) -> None:
    x, labels = labelled()
    report = bench.validate(bench.engine(SAME), bench.samples(x, labels))
    (error,) = report.outputs
    assert report.passed
    assert (error.max_abs, error.mean_abs, error.max_rel, error.snr_db, error.nan, error.inf) == (
        0,
        0,
        0,
        200,
        0,
        0,
    )
    assert error.cosine == pytest.approx(1)
    assert report.metric is not None
    assert (
        report.metric.name,
        report.metric.reference,
        report.metric.candidate,
        report.metric.drop,
    ) == ("top1", 1, 1, 0)
    assert (report.role, report.samples) == ("selection", 20)


@pytest.mark.parametrize("batch", [1, 3, 8, 64])
def test_errors_are_those_worked_out_by_hand_whatever_the_batch(bench: Bench, batch: int) -> None:
    x = np.ones((10, CLASSES), np.float32)
    x[:, 0] = np.arange(10)  # all samples differ
    x[7, 1] = 4.0
    clipped = bench.engine((("Min", ["x", "3.0"], "logits"),))  # wrong from 3 up
    report = bench.validate(
        clipped, bench.samples(x), AccuracyConfig(thresholds=LENIENT, max_drop=1), batch=batch
    )
    (error,) = report.outputs
    wrong = np.minimum(x, 3)
    assert error.max_abs == 6  # 9 became 3
    assert error.mean_abs == pytest.approx(np.abs(wrong - x).mean())
    assert error.max_rel == pytest.approx(6 / 9)
    assert error.worst_sample == 9
    assert error.snr_db == pytest.approx(
        10 * np.log10(np.square(x).sum() / np.square(wrong - x).sum())
    )
    cosines = (wrong * x).sum(1) / np.linalg.norm(wrong, axis=1) / np.linalg.norm(x, axis=1)
    assert error.cosine == pytest.approx(cosines.min())
    assert report.metric is not None
    assert report.metric.candidate == pytest.approx(cosines.mean())


@pytest.mark.parametrize("batch", [1, 7, 32, 64])
def test_small_batches_together_give_what_one_large_one_gives(bench: Bench, batch: int) -> None:
    """More rows than are compared at once, and one that is wrong in each part."""
    x, labels = labelled(2 * JOINED_SAMPLES + 20)
    for row in (3, JOINED_SAMPLES + 5, 2 * JOINED_SAMPLES + 9):
        x[row] *= -row
    samples = bench.samples(x, labels)
    absolute = bench.engine((("Abs", ["x"], "logits"),))
    at_once = bench.validate(absolute, samples, LOOSE, batch=len(x))
    together = bench.validate(absolute, samples, LOOSE, batch=batch)
    assert together.metric == at_once.metric
    (small,) = together.outputs
    assert small.worst_sample == 2 * JOINED_SAMPLES + 9
    for name in ("max_abs", "mean_abs", "max_rel", "cosine", "snr_db"):
        assert getattr(small, name) == pytest.approx(getattr(at_once.outputs[0], name)), name


def test_each_broken_threshold_is_a_sentence_and_thresholds_can_differ_by_output(
    bench: Bench,
) -> None:
    outputs = (
        ("a", TensorProto.FLOAT, ["batch", CLASSES]),
        ("b", TensorProto.FLOAT, ["batch", CLASSES]),
    )
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
    square = bench.engine(
        (("Sqrt", ["x"], "logits"),)
    )  # NaN below 0: four values of the first sample
    report = bench.validate(square, samples, options)
    assert (report.outputs[0].nan, report.outputs[0].inf, report.outputs[0].worst_sample) == (
        4,
        0,
        0,
    )
    assert any("4 values are NaN on one side only" in failure for failure in report.failures)
    assert report.metric is None
    assert any(
        "cosine is not a number on 1 of 10 samples (first: 0)" in failure
        for failure in report.failures
    )

    blown = bench.engine(
        (("Sub", ["x", "30.5"], "d"), ("Abs", ["d"], "e"), ("Reciprocal", ["e"], "logits"))
    )  # infinite at 30.5
    report = bench.validate(blown, samples, options)
    assert (report.outputs[0].nan, report.outputs[0].inf, report.outputs[0].worst_sample) == (
        0,
        1,
        8,
    )
    assert not report.passed
    assert (
        ValidationReport.model_validate_json(report.model_dump_json()) == report
    )  # no figure is lost on its way through JSON


def test_infinities_on_which_both_agree_are_no_error(bench: Bench) -> None:
    masked = bench.engine((("Log", ["x"], "logits"),))  # -inf at 0
    x = np.abs(labelled()[0])
    assert (x == 0).any()
    report = bench.validate(masked, bench.samples(x), reference=masked)
    assert report.passed
    assert report.outputs[0].inf == 0


def test_outputs_of_every_kind_compare(bench: Bench) -> None:
    outputs: tuple[Output, ...] = (
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
        bench.engine(nodes("0.0"), outputs),
        bench.samples(labelled()[0]),
        AccuracyConfig(),
        bench.engine(nodes("0.0"), outputs),
        batch=3,
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
    assert errors == pytest.approx(
        {"logits": 1, "flags": 1, "whole": 1, "places": 0, "total": 1, "none": 0}, abs=1e-6
    )


def test_the_comparison_prints_nothing(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.validate(bench.engine((("Neg", ["x"], "logits"),)), bench.samples(labelled()[0]))
    assert capfd.readouterr() == ("", "")


# -- the interface -----------------------------------------------------------


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
            (
                "output 'b' is missing; the engine has a, renamed",
                "output 'renamed' is not an output of the reference, which has a, b",
            ),
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
    bench: Bench,
    nodes: Sequence[Node],
    outputs: Sequence[tuple[str, int, list[str | int]]],
    failures: tuple[str, ...],
) -> None:
    report = bench.validate(
        bench.engine(nodes, outputs),
        bench.samples(labelled()[0]),
        reference=bench.engine(BOTH, TWO),
    )
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
    assert report.failures == (
        "output 'logits' has shape (2, 11) for samples 3 to 5, the reference (2, 12)",
    )


# -- where it runs -----------------------------------------------------------


def test_both_run_in_children_and_tell_how_far_they_are(bench: Bench) -> None:
    x, labels = labelled()
    samples, engine, events = bench.samples(x, labels), bench.engine(SAME), []
    out = bench.folder / "expected"
    out.mkdir()
    reference = call_in_child(
        run_reference,
        engine,
        samples,
        {},
        8,
        (),
        out,
        name="reference",
        progress=lambda part, text, figures=None: events.append((part, text)),
    )
    assert events[-1] == (1.0, "20 of 20 samples")
    assert [Path(reference.root, file).is_file() for file in reference.files] == [True, True, True]
    report = call_in_child(
        validate, engine, reference, samples, AccuracyConfig(), {}, 8, name="candidate"
    )
    assert report.passed


def validate_and_list_modules(
    engine: Engine,
    reference: ReferenceOutputs,
    samples: SampleSet,
    options: AccuracyConfig,
    batch: int,
    progress: Progress,
) -> tuple[bool, bool]:
    return (
        validate(engine, reference, samples, options, {}, batch, progress).passed,
        "torch" in sys.modules,
    )


def test_no_torch_beside_the_candidate(bench: Bench) -> None:
    """Polygraphy imports it wherever it is installed, which costs seconds and brings a second pool
    of threads.
    """
    samples, engine = bench.samples(labelled()[0]), bench.engine(SAME)
    out = bench.folder / "expected"
    out.mkdir()
    reference = run_reference(engine, samples, {}, 8, (), out)
    assert call_in_child(
        validate_and_list_modules,
        engine,
        reference,
        samples,
        AccuracyConfig(),
        8,
        name="candidate",
    ) == (True, False)


def test_reference_outputs_of_another_set_or_batch_are_our_bug(bench: Bench) -> None:
    x, labels = labelled()
    samples, engine = bench.samples(x, labels), bench.engine(SAME)
    out = bench.folder / "expected"
    out.mkdir()
    reference = run_reference(engine, samples, {}, 8, (), out)
    with pytest.raises(InternalError):
        validate(engine, reference, samples, AccuracyConfig(), {}, 4)
    with pytest.raises(InternalError):
        validate(engine, reference, bench.samples(x[:10], labels[:10]), AccuracyConfig(), {}, 8)


def test_reference_digests_tell_contents_apart(bench: Bench) -> None:
    samples, digests = bench.samples(labelled()[0]), []
    for index, engine in enumerate(
        (bench.engine(SAME), bench.engine(SAME), bench.engine((("Neg", ["x"], "logits"),)))
    ):
        out = bench.folder / f"expected{index}"
        out.mkdir()
        digests.append(run_reference(engine, samples, {}, 8, (), out).digest)
    assert digests[0] == digests[1] != digests[2]
