"""Samples that are whole feeds: of models without a batch axis in front, each with shapes of its
own.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.data.samples import (
    CalibrationSet,
    SelectionSet,
    ValidationSet,
    check_disjoint,
    open_set,
)
from pipeline.errors import DataError
from pipeline.report.files import load_report
from tests.builders.cli import crucible
from tests.builders.lstm import tagger_samples, write_tagger_task

Array = NDArray[np.generic]
X = TensorSpec(name="x", dtype="float32", shape=("time", "batch", 3))
H0 = TensorSpec(name="h0", dtype="float32", shape=(2, "batch", 4))
PROFILE = Profile(
    dims={"time": DimRange(min=1, opt=4, max=8), "batch": DimRange(min=1, opt=1, max=2)}
)


def feed(time: int, batch: int = 1, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng([time, batch, seed])
    return {
        "x": random.random((time, batch, 3), np.float32),
        "h0": random.random((2, batch, 4), np.float32),
    }


def numbered(*samples: dict[str, Array]) -> dict[str, Array]:
    return {
        f"{number}/{name}": array
        for number, sample in enumerate(samples)
        for name, array in sample.items()
    }


def save(path: Path, arrays: dict[str, Array], compress: bool = False) -> Path:
    (np.savez_compressed if compress else np.savez)(path, **arrays)  # type: ignore[arg-type]
    return path


def open_feeds(path: Path, profiles: tuple[Profile, ...] = (PROFILE,)) -> SelectionSet:
    return open_set(SelectionSet, (path,), (X, H0), profiles)


@pytest.mark.parametrize("compress", [False, True])
def test_each_sample_is_a_feed_of_its_own_shape(tmp_path: Path, compress: bool) -> None:
    feeds = [feed(5), feed(3), feed(8, batch=2)]
    samples = open_feeds(save(tmp_path / "a.npz", numbered(*feeds), compress))
    batches = list(samples.batches(16))
    assert [(batch.first, batch.samples, batch.whole, batch.labels) for batch in batches] == [
        (index, 1, True, None) for index in range(3)
    ]
    for batch, sample in zip(batches, feeds, strict=True):
        assert list(batch.feeds) == ["x", "h0"]
        for name, array in sample.items():
            np.testing.assert_array_equal(batch.feeds[name], array)
            assert batch.feeds[name].flags.writeable
    assert (samples.samples, samples.whole, samples.has_labels) == (3, True, False)
    assert [feed["x"].shape for feed in samples.first(2)] == [(5, 1, 3), (3, 1, 3)]
    assert pickle.loads(pickle.dumps(samples)) == samples


def test_labels_are_of_any_shape_and_belong_to_one_sample(tmp_path: Path) -> None:
    arrays = numbered({**feed(5), "labels": np.arange(5)}, {**feed(3), "labels": np.arange(3)})
    samples = open_feeds(save(tmp_path / "a.npz", arrays))
    assert samples.has_labels
    assert [batch.labels.tolist() for batch in samples.batches(1) if batch.labels is not None] == [
        [[0, 1, 2, 3, 4]],
        [[0, 1, 2]],
    ]
    scalars = numbered({**feed(5), "labels": np.array(7)})
    (batch,) = open_feeds(save(tmp_path / "b.npz", scalars)).batches(1)
    assert batch.labels is not None
    assert batch.labels.tolist() == [7]


def test_caches_may_be_empty_and_differ_in_length(tmp_path: Path) -> None:
    ids = TensorSpec(name="ids", dtype="int64", shape=("batch", 1))
    past = TensorSpec(name="past", dtype="float32", shape=("batch", 2, "past", 4))
    profile = Profile(
        dims={"batch": DimRange(min=1, opt=1, max=1), "past": DimRange(min=0, opt=4, max=9)}
    )
    feeds = [
        {"ids": np.array([[index]]), "past": np.ones((1, 2, length, 4), np.float32)}
        for index, length in enumerate((0, 7, 2))
    ]
    samples = open_set(
        SelectionSet, (save(tmp_path / "a.npz", numbered(*feeds)),), (ids, past), (profile,)
    )
    assert [batch.feeds["past"].shape for batch in samples.batches(4)] == [
        (1, 2, 0, 4),
        (1, 2, 7, 4),
        (1, 2, 2, 4),
    ]


def test_an_axis_of_samples_in_front_makes_the_same_samples(tmp_path: Path) -> None:
    """Where all shapes are alike; so a sample is found in two sets, whichever form each has."""
    feeds = [feed(4, seed=seed) for seed in range(3)]
    stacked = {name: np.stack([feed[name] for feed in feeds]) for name in ("x", "h0")}
    one = open_set(
        CalibrationSet, (save(tmp_path / "a.npz", numbered(*feeds)),), (X, H0), (PROFILE,)
    )
    other = open_set(ValidationSet, (save(tmp_path / "b.npz", stacked),), (X, H0), (PROFILE,))
    assert one.whole
    assert other.whole
    assert one.sample_digests == other.sample_digests
    with pytest.raises(DataError, match="calibration and validation share 3 samples"):
        check_disjoint(one, other)


def test_the_digest_follows_numbers_and_values(tmp_path: Path) -> None:
    feeds = [feed(4), feed(6)]
    same = open_feeds(save(tmp_path / "a.npz", numbered(*feeds)))
    assert (
        open_feeds(
            save(
                tmp_path / "b.npz", {f"00{name}": array for name, array in numbered(*feeds).items()}
            )
        ).digest
        == same.digest
    )
    assert open_feeds(save(tmp_path / "c.npz", numbered(*reversed(feeds)))).digest != same.digest


def test_an_input_may_be_called_like_an_array_of_a_sample(tmp_path: Path) -> None:
    spec = TensorSpec(name="0/x", dtype="float32", shape=("batch", 3))
    samples = open_set(
        SelectionSet, (save(tmp_path / "a.npz", {"0/x": np.ones((5, 3), np.float32)}),), (spec,)
    )
    assert (samples.samples, samples.whole) == (5, False)


def with_nan(time: int) -> dict[str, Array]:
    sample = feed(time)
    sample["h0"][1, 0, 2] = np.nan
    return sample


GOOD = feed(5)
BAD: dict[str, tuple[dict[str, Array], str]] = {
    "plain": (
        {"x": GOOD["x"], "h0": GOOD["h0"]},
        r"'x' holds 5 samples, 'h0' holds 2.*next: .*number the samples.*'0/x', '1/x', \.\.\.",
    ),
    "both forms": (
        {**numbered(GOOD), "x": GOOD["x"]},
        "holds 'x' beside '0/x': an array of all samples beside one of a single sample",
    ),
    "common labels": ({**numbered(GOOD), "labels": np.arange(1)}, "holds 'labels' beside '0/x'"),
    "gap": (
        {f"{2 * n}/{name}": array for n in range(2) for name, array in feed(n + 3).items()},
        "2 samples, numbered up to 2, and none with number 1",
    ),
    "from one": (
        {f"1/{name}": array for name, array in GOOD.items()},
        "numbered up to 1, and none with number 0",
    ),
    "twice": ({**numbered(GOOD), "00/x": GOOD["x"]}, "holds '0/x' and '00/x', one array twice"),
    "missing": ({**numbered(GOOD, feed(3)), "2/x": GOOD["x"]}, "sample 2: input 'h0' is missing"),
    "misspelt": (
        numbered({"x": GOOD["x"], "ho": GOOD["h0"]}),
        r"sample 0: .*'ho' is none of the model's inputs \(did you mean 'h0'\?\)",
    ),
    "dtype": (
        numbered(GOOD, {**GOOD, "x": GOOD["x"].astype(np.float64)}),
        "sample 1: 'x' is float64, the model's input is float32",
    ),
    "rank": (
        numbered({**GOOD, "x": GOOD["x"][:, 0]}),
        r"sample 0: input 'x' has rank 2 \(5, 3\).*without an axis of samples",
    ),
    "shape": (
        numbered(GOOD, {**GOOD, "h0": np.ones((3, 1, 4), np.float32)}),
        r"sample 1: input 'h0' has shape \(3, 1, 4\)",
    ),
    "batch": (
        numbered({**GOOD, "h0": np.ones((2, 2, 4), np.float32)}),
        "sample 0: input 'h0' gives 'batch' = 2, another input gives 1",
    ),
    "profile": (
        numbered(GOOD, feed(9)),
        r"sample 1: time = 9, batch = 1 lies outside all profiles \(time 1 to 8, batch 1 to 2\)",
    ),
    "nan": (numbered(GOOD, with_nan(4)), "'h0' has NaN in sample 1"),
    "some labels": (
        numbered({**GOOD, "labels": np.array(1)}, feed(3)),
        "sample 0 has 'labels', sample 1 has none",
    ),
    "late labels": (
        numbered(GOOD, {**feed(3), "labels": np.array(1)}),
        "sample 1 has 'labels', sample 0 has none",
    ),
    "text labels": (
        numbered({**GOOD, "labels": np.array("cat")}),
        "sample 0: 'labels' is <U3, expected numbers",
    ),
    "nan label": (numbered({**GOOD, "labels": np.array(np.nan)}), "'labels' has NaN in sample 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_feeds_are_refused_with_the_next_step(tmp_path: Path, case: str) -> None:
    arrays, message = BAD[case]
    with pytest.raises(DataError) as error:
        open_feeds(save(tmp_path / "bad.npz", arrays))
    assert "bad.npz" in error.value.message
    assert error.value.next_step
    assert re.search(message, f"{error.value.message} next: {error.value.next_step}"), (
        error.value.message,
        error.value.next_step,
    )


def test_time_steps_are_not_taken_for_samples(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", {"x": np.ones((20, 1, 3), np.float32)})
    message = (
        r"axis 0 of 'x' would count samples, but x float32 \[time, batch, 3\] has 'batch' on axis 1"
    )
    with pytest.raises(DataError, match=message) as error:
        open_set(SelectionSet, (path,), (X,), (PROFILE,))
    assert "number the samples" in error.value.next_step


def test_values_that_decide_a_shape_are_looked_at(tmp_path: Path) -> None:
    k = TensorSpec(name="k", dtype="int64", shape=())
    profile = Profile.model_validate(
        {"dims": {"time": [1, 4, 8], "batch": [1, 1, 2]}, "values": {"k": [1, 3, 5]}}
    )
    path = save(
        tmp_path / "a.npz", numbered({**GOOD, "k": np.array(5)}, {**GOOD, "k": np.array(6)})
    )
    with pytest.raises(DataError, match=r"sample 1 has k = \[6\], outside all profiles"):
        open_set(SelectionSet, (path,), (X, H0, k), (profile,))


def test_files_of_a_set_agree_in_what_a_sample_is(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3))
    rows = save(tmp_path / "rows.npz", {"x": np.ones((4, 3), np.float32)})
    feeds = save(tmp_path / "feeds.npz", numbered({"x": np.zeros((2, 3), np.float32)}))
    for paths in ((rows, feeds), (feeds, rows)):
        with pytest.raises(
            DataError,
            match=(
                r"in '.*rows\.npz' a sample is a row of the batch, in '.*feeds\.npz' it is a whole"
                r" feed"
            ),
        ):
            open_set(SelectionSet, paths, (spec,))


# --- a whole compile ---


def test_a_time_major_lstm_with_states_is_judged_on_its_data(tmp_path: Path) -> None:
    plan = write_tagger_task(tmp_path)
    result = crucible(
        "compile", plan, "--out", tmp_path / "out", env={"CRUCIBLE_HOME": str(tmp_path / "home")}
    )
    assert result.code == 0, result.err
    assert result.summary["verdict"] in ("accepted", "keep", "unproven"), result.out
    report = load_report(tmp_path / "out")
    states = {
        candidate.label: (candidate.state, candidate.reason) for candidate in report.candidates
    }
    assert all(state == "measured" for state, _ in states.values()), states
    int8 = next(
        candidate for candidate in report.candidates if candidate.recipe.precision == "int8"
    )
    assert int8.selection is not None
    assert int8.selection.samples == 60
    assert int8.selection.metric is not None
    assert (int8.selection.metric.name, int8.selection.metric.reference) == ("top1", 1.0)

    checked = crucible("validate", tmp_path / "out", env={"CRUCIBLE_HOME": str(tmp_path / "home")})
    assert checked.code == 0, checked.err
    assert checked.summary["samples"] == 60


def test_the_command_refuses_what_it_cannot_read_as_samples(tmp_path: Path) -> None:
    plan = write_tagger_task(tmp_path)
    first, *_ = tagger_samples("selection")
    np.savez(tmp_path / "selection.npz", **first)  # type: ignore[arg-type]
    result = crucible(
        "compile", plan, "--out", tmp_path / "out", env={"CRUCIBLE_HOME": str(tmp_path / "home")}
    )
    assert result.code == 1
    assert "'x' holds 5 samples, 'h0' holds 2" in result.err
    assert "number the samples" in result.err
    assert "Traceback" not in result.err
