"""Ranges come from all samples, in any order, by ONNX Runtime's searches."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from pipeline.core.artifacts import CalibrationTable, OnnxModel
from pipeline.core.recipe import CalibrationMethod
from pipeline.core.shapes import Tensors
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.onnx_graph import activations
from pipeline.onnx_graph.activations import observe, open_probe, rows_per_run
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.schema import CalibrationConfig
from pipeline.stages.calibrate import BINS, Tally, bin_counts, calibrate
from tests.builders.convert import RESIDUAL, images, model_from_text, proto_from_text

DEFAULTS = CalibrationConfig()


def set_of(folder: Path, model: OnnxModel, files: Sequence[Tensors]) -> CalibrationSet:
    paths = []
    for index, arrays in enumerate(files):
        paths.append(folder / f"set{index}.npz")
        np.savez(paths[-1], **arrays)  # type: ignore[arg-type]
    return open_set(CalibrationSet, tuple(paths), model.inputs)


def table_of(
    folder: Path,
    model: OnnxModel,
    feeds: Tensors,
    method: CalibrationMethod = CalibrationMethod.MINMAX,
    options: CalibrationConfig = DEFAULTS,
) -> CalibrationTable:
    return calibrate(model, set_of(folder, model, [feeds]), method, options, folder)


def every_value(model: OnnxModel, feeds: Tensors, tensor: str, folder: Path) -> NDArray[np.generic]:
    """One activation for all samples at once."""
    proto = onnx.load(str(model.path))
    proto.graph.output.append(onnx.ValueInfoProto(name=tensor))
    onnx.save(proto, str(folder / "exposed.onnx"))
    return open_reference(folder / "exposed.onnx")(feeds)[tensor]


def test_bounds_are_signed_and_count_the_last_short_batch(tmp_path: Path) -> None:
    model = model_from_text(tmp_path, RESIDUAL)
    feeds = images(37)
    feeds["x"][36, 0, 0, 0] = 50.0  # in the last, short batch
    table = table_of(tmp_path, model, feeds)
    assert table.samples == 37
    assert table.ranges["x"].maximum == table.ranges["x"].high == 50.0
    for tensor in ("c1", "r1", "s", "y"):
        values = every_value(model, feeds, tensor, tmp_path)
        bounds = table.ranges[tensor]
        assert (bounds.minimum, bounds.maximum) == pytest.approx(
            (values.min(), values.max()), rel=1e-4
        )
        assert bounds.count == values.size == sum(bounds.histogram)
    assert table.ranges["f"] == table.ranges["p"]  # a Flatten holds the same values
    assert set(table.ranges) == {"x", "c1", "r1", "c2", "s", "r2", "c3", "p", "f", "y"}


@pytest.mark.parametrize("method", [CalibrationMethod.ENTROPY, CalibrationMethod.PERCENTILE])
def test_searches_agree_with_onnxruntime_on_all_the_data_at_once(
    tmp_path: Path, method: CalibrationMethod
) -> None:
    from onnxruntime.quantization.calibrate import HistogramCollector

    model = model_from_text(tmp_path, RESIDUAL)
    feeds = images(120)
    table = table_of(tmp_path, model, feeds, method, CalibrationConfig(percentile=99.0, batch=7))
    for tensor in ("x", "r1", "c3"):
        values = every_value(model, feeds, tensor, tmp_path)
        collector = HistogramCollector(
            str(method),
            symmetric=False,
            num_bins=BINS,
            num_quantized_bins=128,
            percentile=99.0,
            scenario="same",
        )
        collector.collect({tensor: [values]})
        low, high, *_ = collector.compute_collection_result()[tensor]
        bounds = table.ranges[tensor]
        bin_width = 2 * max(-bounds.minimum, bounds.maximum) / BINS
        allowed = bin_width * (
            3 if method is CalibrationMethod.PERCENTILE else BINS / 20
        )  # neighbours of the least divergence are nearly as good
        assert (bounds.low, bounds.high) == pytest.approx((float(low), float(high)), abs=allowed)
        assert bounds.minimum <= bounds.low < bounds.high <= bounds.maximum


def test_percentile_cuts_an_outlier_that_minmax_keeps(tmp_path: Path) -> None:
    model = model_from_text(tmp_path, RESIDUAL)
    feeds = images(100)
    feeds["x"][0, 0, 0, 0] = -300.0
    cut = table_of(
        tmp_path, model, feeds, CalibrationMethod.PERCENTILE, CalibrationConfig(percentile=99.9)
    ).ranges["x"]
    assert cut.minimum == -300.0
    assert -8 < cut.low < -2
    assert 2 < cut.high < 8
    assert table_of(tmp_path, model, feeds, CalibrationMethod.MINMAX).ranges["x"].low == -300.0


def test_counts_do_not_depend_on_the_order_of_the_batches() -> None:
    batches = [
        (np.random.default_rng(i).standard_normal(1000) * 10.0 ** (i - 3)).astype(np.float32)
        for i in range(7)
    ]
    forward, backward, total = Tally(), Tally(), Tally()
    for batch in batches:
        forward.add(batch)
    for batch in reversed(batches):
        backward.add(batch)
    total.add(np.concatenate(batches))
    assert forward.limit == backward.limit == total.limit
    assert np.array_equal(forward.counts, total.counts)
    assert np.array_equal(backward.counts, total.counts)


def test_bins_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).uniform(-8, 7.99, 200_000).astype(np.float32)
    expected, _ = np.histogram(values, BINS, (-8, 8))
    assert np.array_equal(bin_counts(values, 8.0), expected)
    assert bin_counts(np.array([-8, 0, np.nextafter(np.float32(8), 0)], np.float32), 8.0).nonzero()[
        0
    ].tolist() == [0, BINS // 2, BINS - 1]


@pytest.mark.parametrize("value", [0.0, 1e-30, 3.4e38])
def test_extreme_magnitudes_are_ranges_like_any_other(tmp_path: Path, value: float) -> None:
    model = model_from_text(
        tmp_path,
        '<ir_version: 9, opset_import: ["" : 20]> net (float[N] x) => (float[N] y) { y = Neg (x) }',
    )
    table = table_of(
        tmp_path, model, {"x": np.full(10, value, np.float32)}, CalibrationMethod.ENTROPY
    )
    assert table.ranges["y"].minimum == -np.float32(value)
    assert table.ranges["y"].low <= table.ranges["y"].high


def test_nonfinite_values_are_counted_named_and_left_out(tmp_path: Path) -> None:
    model = model_from_text(
        tmp_path,
        '<ir_version: 9, opset_import: ["" : 20]> net (float[N] x) => (float[N] y) { y = Log (x) }',
    )
    table = table_of(
        tmp_path,
        model,
        {"x": np.array([-1.0, 0.0, 1.0, np.e], np.float32)},
        CalibrationMethod.ENTROPY,
    )
    assert table.ranges["y"].nonfinite == 2
    assert (table.ranges["y"].minimum, table.ranges["y"].maximum) == pytest.approx((0.0, 1.0))
    assert any("2 NaN or infinite values in 1 tensors ('y')" in note.text for note in table.notes)


@pytest.mark.parametrize(("count", "level"), [(20, "warning"), (150, "info"), (500, "")])
def test_few_samples_are_said(tmp_path: Path, count: int, level: str) -> None:
    model = model_from_text(
        tmp_path,
        '<ir_version: 9, opset_import: ["" : 20]> net (float[N] x) => (float[N] y) { y = Neg (x) }',
    )
    notes = table_of(tmp_path, model, {"x": np.arange(count, dtype=np.float32)}).notes
    assert [note.level for note in notes] == ([level] if level else [])
    assert all("about 500" in note.text for note in notes)


def test_samples_are_limited_by_the_plan(tmp_path: Path) -> None:
    model = model_from_text(tmp_path, RESIDUAL)
    assert (
        table_of(
            tmp_path, model, images(40), options=CalibrationConfig(samples=20, batch=8)
        ).samples
        == 24
    )  # whole batches


def test_samples_of_several_shapes_calibrate_together(tmp_path: Path) -> None:
    model = model_from_text(
        tmp_path,
        '<ir_version: 9, opset_import: ["" : 20]> net (float[N, T] x) => (float[N, T] y) { y = Neg'
        " (x) }",
    )
    samples = set_of(
        tmp_path,
        model,
        [{"x": np.full((3, 4), 2.0, np.float32)}, {"x": np.full((5, 9), -7.0, np.float32)}],
    )
    table = calibrate(model, samples, CalibrationMethod.MINMAX, CalibrationConfig(), tmp_path)
    assert (table.ranges["y"].minimum, table.ranges["y"].maximum, table.ranges["y"].count) == (
        -2.0,
        7.0,
        57,
    )


def test_the_table_is_written_for_people_one_line_per_tensor(tmp_path: Path) -> None:
    table = table_of(tmp_path, model_from_text(tmp_path, RESIDUAL), images(10))
    text = table.path.read_text()
    document = json.loads(text)
    assert document["method"] == "minmax"
    assert document["ranges"]["r1"]["minimum"] == 0.0
    assert len(text.splitlines()) < len(table.ranges) + 15


def test_one_run_holds_few_samples(tmp_path: Path) -> None:
    model = model_from_text(tmp_path, RESIDUAL)
    probe = open_probe(model)
    per_sample = sum(array.nbytes for array in probe.run(images(1)).values())
    assert rows_per_run(probe, images(4), 4) == activations.RUN_BYTES // per_sample


def test_weights_in_external_data_are_found(tmp_path: Path) -> None:
    onnx.save_model(
        proto_from_text(RESIDUAL),
        str(tmp_path / "big.onnx"),
        save_as_external_data=True,
        location="big.data",
        size_threshold=0,
    )
    inside = observe(open_probe(model_from_text(tmp_path, RESIDUAL)), [images(2)])
    assert observe(open_probe(onnx_model(tmp_path, "big.onnx")), [images(2)]) == inside
