"""The metric of a plan: what a plan may ask for, of which labels and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.accuracy.metrics.from_plan import (
    check_host,
    check_labels,
    check_metric,
    metric_from_plan,
)
from pipeline.accuracy.metrics.libraries import LIBRARIES
from pipeline.core.shapes import TensorSpec
from pipeline.data.label_file import LabelKind
from pipeline.data.samples import SampleSet, SelectionSet, open_set
from pipeline.errors import BackendUnavailable, DataError, PlanError
from pipeline.plan.files import load_plan
from pipeline.plan.schema import METRICS, AccuracyConfig, DataConfig
from pipeline.plan.source import accuracy_code
from pipeline.postprocess import IndexOutput

X = (TensorSpec(name="x", dtype="float32", shape=("batch", 2)),)
WORDS: dict[str, Any] = {"metric": "wer", "tokens": ["", "a"]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"metric": "top0"}, "expected metric auto, top1"),
        ({"metric": "mAP"}, "expected metric auto, top1"),
        ({"metric": "a:b:c"}, "expected metric auto, top1"),
        ({"metric": "top1", "decode": "argmax"}, "decode is given, and top1 decodes nothing"),
        ({"decode": "argmax"}, "decode is given, and auto decodes nothing"),
        (
            {"metric": "f1", "decode": "boxes_xyxy"},
            "expected decode argmax, module:function for",
        ),
        ({"metric": "spearman", "decode": "x"}, "expected decode module:function for spearman"),
        ({"metric": "wer"}, "tokens are missing: ctc_greedy needs the text of each class"),
        ({"metric": "f1", "tokens": ["a"]}, "tokens are given, and only ctc_greedy reads them"),
        ({**WORDS, "decode": "my:decoder"}, "tokens are given, and only ctc_greedy"),
        ({"metric": "sts", "mask": "m"}, "mask is given, and only `decode: mean_pool` reads it"),
        ({**WORDS, "max_class_drop": 0.1}, "max_class_drop is given, and wer has no classes"),
        ({"metric": "cosine", "max_class_drop": 0.1}, "and cosine has no classes"),
        ({"max_class_drop": -1}, "greater than or equal to 0"),
    ],
)
def test_keys_that_do_not_fit_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AccuracyConfig(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"metric": "top3", "max_class_drop": 0.1},
        {"metric": "mine:f", "max_class_drop": 0.1},
        {"max_class_drop": 0.1},
        {"metric": "wer", "decode": "my:decoder"},
        {"metric": "sts", "decode": "mean_pool", "mask": "m"},
        {"metric": "spearman", "decode": "my:decoder"},
    ],
)
def test_keys_that_fit(keys: dict[str, Any]) -> None:
    assert AccuracyConfig(**keys).model_dump(exclude_defaults=True) == keys


def test_labels_in_a_file_belong_to_a_set_of_files() -> None:
    for selection in (None, {"generate": "random", "samples": 2, "because": "a test"}):
        with pytest.raises(ValidationError, match=r"labels.selection names a file, and `data.sel"):
            DataConfig.model_validate({"selection": selection, "labels": {"selection": "a.json"}})


def test_paths_of_labels_are_relative_to_the_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "model: {path: m.onnx}\ndata: {selection: s.npz, labels: {selection: l.jsonl}}"
    )
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.data.labels.selection == tmp_path / "l.jsonl"
    assert plan.data.labels.validation is None


# -- labels ------------------------------------------------------------------


def options(metric: str) -> AccuracyConfig:
    return AccuracyConfig(metric=metric, tokens=("", "a") if metric == "wer" else ())


@pytest.mark.parametrize(
    ("metric", "kind", "message"),
    [
        ("map", None, "accuracy.metric is map, but the validation set has no labels"),
        ("perplexity", None, "accuracy.metric is perplexity, but the validation set has no labels"),
        ("map", "numbers", "map, which needs boxes as labels, and those of the validation set are"),
        ("wer", "boxes", "wer, which needs texts as labels"),
        ("top3", "texts", "top3, which needs numbers as labels"),
        (
            "auto",
            "boxes",
            "labels of the validation set are boxes, and accuracy.metric is auto",
        ),
    ],
)
def test_labels_of_another_kind(metric: str, kind: LabelKind | None, message: str) -> None:
    with pytest.raises(DataError) as raised:
        check_labels(options(metric), kind, "validation")
    assert message in raised.value.message
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("metric", "kind"),
    [("map", "boxes"), ("wer", "texts"), ("sts", "numbers"), ("cosine", "texts"), ("auto", None)],
)
def test_labels_of_the_right_kind(metric: str, kind: LabelKind | None) -> None:
    check_labels(options(metric), kind)


# -- outputs and host --------------------------------------------------------


INDEX = IndexOutput("i", "y", -1, 3)
OUTPUTS = (TensorSpec(name="i", dtype="int64", shape=("batch", 3)),)


@pytest.mark.parametrize("metric", ["cosine", "map", "sts", "spearman", "perplexity"])
def test_a_metric_of_values_takes_no_indices(metric: str) -> None:
    with pytest.raises(PlanError, match=f"accuracy.metric is {metric}, and 'i' holds indices"):
        check_metric(options(metric), OUTPUTS, (INDEX,))


def test_top_k_needs_as_many_indices() -> None:
    check_metric(options("top3"), OUTPUTS, (INDEX,))
    with pytest.raises(PlanError, match=r"accuracy.metric is top4, and 'i' holds 3 indices"):
        check_metric(options("top4"), OUTPUTS, (INDEX,))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for metric in LIBRARIES:
        check_host(options(metric), X)
    monkeypatch.setitem(LIBRARIES, "map", {"no_such_module": "no-such-package"})
    with pytest.raises(BackendUnavailable) as raised:
        check_host(options("map"), X)
    assert "map, which needs no-such-package: it is not installed" in raised.value.message
    assert "[metrics]" in raised.value.next_step


def test_a_mask_is_an_input() -> None:
    masked = AccuracyConfig(metric="sts", decode="mean_pool", mask="m")
    with pytest.raises(PlanError, match=r"accuracy.mask names 'm', which is no input; the model"):
        check_host(masked, X)
    check_host(masked.model_copy(update={"mask": "x"}), X)


# -- assembly ----------------------------------------------------------------


def samples(folder: Path, labels: bool) -> SampleSet:
    arrays: dict[str, Any] = {"labels": np.zeros(2, np.int64)} if labels else {}
    np.savez(folder / "x.npz", x=np.zeros((2, 2), np.float32), **arrays)
    return open_set(SelectionSet, (folder / "x.npz",), X)


def test_every_metric_has_its_name(tmp_path: Path) -> None:
    labelled = samples(tmp_path, labels=True)
    for name in METRICS:
        if name in ("map", "wer"):  # their labels are in files
            continue
        assert metric_from_plan(options(name), "i", labelled, (INDEX,)).name == name
    assert metric_from_plan(options("top17"), "y", labelled).name == "top17"
    assert metric_from_plan(options("auto"), "y", labelled).name == "top1"


def test_auto_without_labels_has_no_classes(tmp_path: Path) -> None:
    bare = samples(tmp_path, labels=False)
    assert metric_from_plan(options("auto"), "y", bare).name == "cosine"
    assert metric_from_plan(options("auto"), "i", bare, (INDEX,)).name == "agreement"
    limited = AccuracyConfig(max_class_drop=0.1)
    with pytest.raises(PlanError, match="without labels the metric is cosine, which has no class"):
        metric_from_plan(limited, "y", bare)


def test_a_users_decoder_is_found_and_its_code_digested(tmp_path: Path) -> None:
    labelled = samples(tmp_path, labels=True)
    module = tmp_path / "my_decoders.py"
    module.write_text("def sums(outputs):\n    return outputs.sum(axis=1)\n")
    mine = AccuracyConfig(metric="spearman", decode="my_decoders:sums", python_path=tmp_path)
    metric = metric_from_plan(mine, "y", labelled)
    assert metric.decode(np.array([[1, 2], [3, 4]]), None).tolist() == [3, 7]
    before = accuracy_code(mine)
    module.write_text("def sums(outputs):\n    return -outputs.sum(axis=1)\n")
    assert accuracy_code(mine) != before
    missing = mine.model_copy(update={"decode": "my_decoders:none"})
    with pytest.raises(PlanError, match=r"accuracy.decode 'my_decoders:none' cannot be imported"):
        metric_from_plan(missing, "y", labelled)
