"""Sample sets: what streams out, what is refused, what counts as the same sample."""

import math
import pickle
import re
import tracemalloc
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.data.batch import batch_sizes
from pipeline.data.samples import (
    CalibrationSet,
    SampleSet,
    SelectionSet,
    ValidationSet,
    check_disjoint,
    open_set,
)
from pipeline.errors import DataError
from pipeline.plan.schema import GeneratedData

IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 2, 2))
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence"))
MASK = TensorSpec(name="mask", dtype="int64", shape=("batch", "sequence"))
BATCHES = (Profile(dims={"batch": DimRange(min=1, opt=4, max=8)}),)
Array = NDArray[np.generic]


def images(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, 1, 2, 2), np.float32)


def save(path: Path, **arrays: Array) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def open_images(
    path: Path, spec: TensorSpec = IMAGE, profiles: tuple[Profile, ...] = BATCHES
) -> CalibrationSet:
    return open_set(CalibrationSet, (path,), (spec,), profiles)


def random_data(samples: int, seed: int = 0) -> GeneratedData:
    return GeneratedData(generate="random", samples=samples, seed=seed, because="a test")


# -- streaming ---------------------------------------------------------------


@pytest.mark.parametrize("writer", [np.savez, np.savez_compressed])
def test_batches_hold_every_sample_once_and_the_short_one_counts(
    tmp_path: Path, writer: object
) -> None:
    data, labels = images(10), np.arange(10)
    writer(tmp_path / "a.npz", image=data, labels=labels)  # type: ignore[operator]
    samples = open_images(tmp_path / "a.npz")
    batches = list(samples.batches(4))
    assert [(batch.first, batch.samples) for batch in batches] == [(0, 4), (4, 4), (8, 2)]
    np.testing.assert_array_equal(np.concatenate([batch.feeds["image"] for batch in batches]), data)
    np.testing.assert_array_equal(
        np.concatenate([batch.labels for batch in batches if batch.labels is not None]), labels
    )
    assert (samples.samples, samples.has_labels, samples.role) == (10, True, "calibration")
    assert all(
        array.flags.writeable for array in batches[0].feeds.values()
    )  # torch.from_numpy warns of read-only arrays


def test_batches_never_cross_files_nor_a_profile(tmp_path: Path) -> None:
    paths = []
    for length, count in ((4, 7), (16, 5)):
        ids = np.arange(count * length, dtype=np.int64).reshape(count, length)
        paths.append(save(tmp_path / f"{length}.npz", ids=ids, mask=np.ones_like(ids)))
    short = Profile(
        dims={"batch": DimRange(min=1, opt=4, max=8), "sequence": DimRange(min=1, opt=4, max=8)}
    )
    long = Profile(
        dims={"batch": DimRange(min=1, opt=2, max=3), "sequence": DimRange(min=9, opt=16, max=32)}
    )
    samples = open_set(ValidationSet, tuple(paths), (IDS, MASK), (short, long))
    assert [(batch.first, batch.feeds["ids"].shape) for batch in samples.batches(5)] == [
        (0, (5, 4)),
        (5, (2, 4)),
        (7, (3, 16)),
        (10, (2, 16)),
    ]
    assert not samples.has_labels
    assert [feeds["mask"].shape for feeds in samples.first(3)] == [(1, 4), (1, 16), (1, 4)]


def test_one_more_axis_makes_each_row_a_whole_input(tmp_path: Path) -> None:
    spec, scale = (
        TensorSpec(name="x", dtype="float32", shape=(3, 2)),
        TensorSpec(name="scale", dtype="float32", shape=()),
    )
    data = np.random.default_rng(0).random((4, 3, 2), np.float32)
    samples = open_set(
        SelectionSet, (save(tmp_path / "a.npz", x=data, scale=data[:, 0, 0]),), (spec, scale)
    )
    batches = list(samples.batches(16))
    assert [batch.samples for batch in batches] == [1, 1, 1, 1]
    np.testing.assert_array_equal(batches[2].feeds["x"], data[2])
    assert batches[2].feeds["scale"].shape == ()


def test_a_fixed_batch_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", image=images(6))
    assert [
        batch.samples
        for batch in open_images(
            path, IMAGE.model_copy(update={"shape": (3, 1, 2, 2)}), ()
        ).batches(1)
    ] == [3, 3]
    with pytest.raises(DataError, match="6 samples, which is no multiple of the batch of 4"):
        open_images(path, IMAGE.model_copy(update={"shape": (4, 1, 2, 2)}), ())


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9), st.integers(0, 30))
def test_cutting_keeps_to_the_range_and_to_the_size_asked_for(
    samples: int, size: int, fewest: int, more: int
) -> None:
    most = fewest + more
    if math.ceil(samples / most) > samples // fewest:
        return  # cannot be cut; open_set refuses it
    counts = list(batch_sizes(samples, size, (fewest, most)))
    assert sum(counts) == samples
    assert all(fewest <= count <= most for count in counts)
    if fewest == 1:
        assert all(count == min(size, most) for count in counts[:-1])


def test_streaming_and_checking_hold_blocks_not_files(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 1 << 18))  # 1 MiB a row
    path = save(tmp_path / "big.npz", x=np.ones((64, 1 << 18), np.float32))
    tracemalloc.start()
    samples = open_set(CalibrationSet, (path,), (spec,), BATCHES)
    assert sum(batch.samples for batch in samples.batches(2)) == 64
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20  # of 64 MiB


def test_an_opened_set_crosses_process_boundaries(tmp_path: Path) -> None:
    samples = open_images(save(tmp_path / "a.npz", image=images(5)))
    twin = pickle.loads(pickle.dumps(samples))
    assert twin == samples
    np.testing.assert_array_equal(next(twin.batches(5)).feeds["image"], images(5))


# -- generated ---------------------------------------------------------------


def test_generated_samples_depend_on_seed_and_index_only() -> None:
    all_images = next(open_set(CalibrationSet, random_data(7), (IMAGE,), BATCHES).batches(7)).feeds[
        "image"
    ]
    parts = [
        batch.feeds["image"]
        for batch in open_set(SelectionSet, random_data(7), (IMAGE,), BATCHES).batches(3)
    ]
    other = next(
        open_set(CalibrationSet, random_data(7, seed=1), (IMAGE,), BATCHES).batches(7)
    ).feeds["image"]
    assert [len(part) for part in parts] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(parts), all_images)
    assert not np.array_equal(all_images, other)


def test_generated_samples_cover_every_profile_and_dtype() -> None:
    specs = (
        IDS,
        TensorSpec(name="pixels", dtype="uint8", shape=("batch", 5)),
        TensorSpec(name="flag", dtype="bool", shape=("batch",)),
    )
    profiles = tuple(
        Profile(
            dims={"batch": DimRange(min=1, opt=2, max=4), "sequence": DimRange(min=n, opt=n, max=n)}
        )
        for n in (3, 9)
    )
    batches = list(open_set(CalibrationSet, random_data(5), specs, profiles).batches(2))
    assert [batch.feeds["ids"].shape for batch in batches] == [(2, 3), (2, 9), (1, 9)]
    assert {str(array.dtype) for array in batches[0].feeds.values()} == {"int64", "uint8", "bool"}
    assert all(batch.feeds["ids"].min() >= 0 and batch.feeds["ids"].max() <= 1 for batch in batches)
    assert all(batch.feeds["ids"][:, 0].all() for batch in batches), (
        "a mask that hides all of a row is of no text"
    )
    assert not batches[1].feeds["ids"][:, 1:].all()


VALUED = Profile.model_validate(
    {"dims": {"batch": [1, 4, 8]}, "values": {"k": [1, 3, 5], "target": [[1, 2], [4, 2], [8, 2]]}}
)
SIZES = (
    TensorSpec(name="k", dtype="int64", shape=()),
    TensorSpec(name="target", dtype="int32", shape=(2,)),
)


def test_generated_values_that_decide_a_shape_are_the_usual_ones_of_their_profile() -> None:
    samples = open_set(SelectionSet, random_data(3), (IMAGE, *SIZES), (VALUED,))
    for batch in samples.batches(8):
        assert batch.feeds["image"].shape == (4, 1, 2, 2)
        assert (batch.feeds["k"].shape, int(batch.feeds["k"]), batch.feeds["target"].tolist()) == (
            (),
            3,
            [4, 2],
        )
    without = open_set(
        SelectionSet, random_data(3), (IMAGE, *SIZES), (VALUED.model_copy(update={"values": {}}),)
    )
    assert samples.digest != without.digest


def test_values_outside_all_profiles_are_found_before_anything_runs(tmp_path: Path) -> None:
    arrays = {
        "image": images(3)[:, None],
        "k": np.array([1, 5, 3]),
        "target": np.array([[1, 2], [8, 2], [3, 2]], np.int32),
    }
    opened = open_set(
        SelectionSet, (save(tmp_path / "good.npz", **arrays),), (IMAGE, *SIZES), (VALUED,)
    )
    assert [int(batch.feeds["k"]) for batch in opened.batches(8)] == [1, 5, 3]
    arrays["k"] = np.array([1, 6, 3])
    with pytest.raises(
        DataError, match=re.escape("sample 1 has k = [6], target = [8, 2], outside all profiles")
    ):
        open_set(SelectionSet, (save(tmp_path / "bad.npz", **arrays),), (IMAGE, *SIZES), (VALUED,))


def test_a_million_generated_samples_cost_nothing_until_read() -> None:
    samples = open_set(CalibrationSet, random_data(1_000_000), (IMAGE,), BATCHES)
    assert samples.samples == 1_000_000
    assert len(pickle.dumps(samples)) < 10_000
    assert next(samples.batches(4)).feeds["image"].shape == (4, 1, 2, 2)


def test_without_a_batch_axis_each_generated_sample_is_a_whole_input() -> None:
    specs = (
        TensorSpec(name="x", dtype="float16", shape=(3,)),
        TensorSpec(name="scale", dtype="float32", shape=()),
    )
    batch = next(open_set(CalibrationSet, random_data(4), specs).batches(4))
    assert {name: array.shape for name, array in batch.feeds.items()} == {"x": (3,), "scale": ()}
    assert batch.samples == 1


# -- identity ----------------------------------------------------------------


def test_the_digest_follows_content_not_names(tmp_path: Path) -> None:
    data, labels = images(4), np.arange(4)
    here = open_images(save(tmp_path / "a.npz", image=data, labels=labels))
    there = open_images(save(tmp_path / "b.npz", labels=labels, image=data))
    relabelled = open_images(save(tmp_path / "c.npz", image=data, labels=labels[::-1].copy()))
    assert here.digest == there.digest
    assert here.digest != relabelled.digest
    assert here.sample_digests == relabelled.sample_digests


def test_shared_samples_are_found_whatever_the_file(tmp_path: Path) -> None:
    data = images(10)
    left = open_set(CalibrationSet, (save(tmp_path / "a.npz", image=data[:6]),), (IMAGE,), BATCHES)
    right = open_set(ValidationSet, (save(tmp_path / "b.npz", image=data[4:]),), (IMAGE,), BATCHES)
    apart = open_set(
        SelectionSet, (save(tmp_path / "c.npz", image=images(5, seed=1)),), (IMAGE,), BATCHES
    )
    check_disjoint(left, apart)
    with pytest.raises(
        DataError,
        match=(
            r"calibration and validation share 2 samples: calibration 4 = validation 0, calibration"
            r" 5 = validation 1"
        ),
    ):
        check_disjoint(left, apart, right)


def test_generated_sets_need_seeds_of_their_own(tmp_path: Path) -> None:
    one, same, other = (
        open_set(kind, random_data(8, seed), (IMAGE,), BATCHES) for kind, seed in KINDS_AND_SEEDS
    )
    real = open_images(save(tmp_path / "a.npz", image=images(3)))
    check_disjoint(one, other, real)
    with pytest.raises(
        DataError,
        match=r"calibration and selection share 8 samples: both are generated from seed 3",
    ):
        check_disjoint(one, same)


KINDS_AND_SEEDS: tuple[tuple[type[SampleSet], int], ...] = (
    (CalibrationSet, 3),
    (SelectionSet, 3),
    (ValidationSet, 4),
)


# -- bad input ---------------------------------------------------------------


def with_value(value: float) -> NDArray[np.float32]:
    data = images(9)
    data[7, 0, 1, 1] = value
    return data


BAD: dict[str, tuple[dict[str, Array], str]] = {
    "missing": ({"labels": np.arange(3)}, "input 'image' is missing"),
    "misspelt": (
        {"imgae": images(3)},
        r"'imgae' is none of the model's inputs \(did you mean 'image'\?\)",
    ),
    "unknown": (
        {"image": images(3), "zzz": images(3)},
        "array 'zzz' is none of the model's inputs",
    ),
    "misspelt labels": ({"image": images(3), "label": np.arange(3)}, r"did you mean 'labels'\?"),
    "dtype": (
        {"image": images(3).astype(np.float64)},
        "'image' is float64, the model's input is float32",
    ),
    "byte order": (
        {"image": images(3).astype(">f4")},
        "'image' is >f4, the model's input is float32",
    ),
    "shape": (
        {"image": np.zeros((3, 1, 2, 3), np.float32)},
        r"input 'image' has shape \(1, 2, 3\), expected \(1, 2, 2\)",
    ),
    "rank": (
        {"image": np.zeros((3, 4), np.float32)},
        r"'image' has shape \(3, 4\), the model's input is image float32 \[batch, 1, 2, 2\]",
    ),
    "scalar": ({"image": np.float32(1)}, r"'image' has shape \(\)"),
    "counts": (
        {"image": images(3), "labels": np.arange(4)},
        "'image' holds 3 samples, 'labels' holds 4",
    ),
    "empty": ({"image": images(0)}, "holds no samples"),
    "nan": ({"image": with_value(np.nan)}, "'image' has NaN in sample 7"),
    "inf": ({"image": with_value(-np.inf)}, "'image' has an infinity in sample 7"),
    "nan label": (
        {"image": images(2), "labels": np.array([0.0, np.nan])},
        "'labels' has NaN in sample 1",
    ),
    "text labels": (
        {"image": images(2), "labels": np.array(["cat", "dog"])},
        "expected one number per sample",
    ),
    "pickle": (
        {"image": np.array([images(1), None], object)},
        "pickled Python objects, which are never loaded",
    ),
    "by columns": (
        {"image": np.asfortranarray(np.random.default_rng(0).random((3, 1, 2, 2), np.float32))},
        "stored by columns",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_refused_with_the_next_step(tmp_path: Path, case: str) -> None:
    arrays, message = BAD[case]
    with pytest.raises(DataError, match=message) as error:
        open_images(save(tmp_path / "bad.npz", **arrays))
    assert "bad.npz" in error.value.message
    assert error.value.next_step


def test_large_finite_values_are_no_infinity(tmp_path: Path) -> None:
    samples = open_images(
        save(tmp_path / "a.npz", image=np.full((4, 1, 2, 2), 3e38, np.float32))
    )  # their sum overflows
    assert samples.samples == 4


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    good = save(tmp_path / "good.npz", image=images(100)).read_bytes()
    np.save(tmp_path / "array.npy", images(2))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(good[: len(good) // 2])
    (tmp_path / "flipped.npz").write_bytes(good[:400] + bytes([good[400] ^ 255]) + good[401:])
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("image.npy", b"no array")
    with zipfile.ZipFile(tmp_path / "suffix.npz", "w") as archive:
        archive.writestr("image", (tmp_path / "array.npy").read_bytes())
    with zipfile.ZipFile(tmp_path / "negative.npz", "w") as archive:
        negative = (tmp_path / "array.npy").read_bytes().replace(b"(2, ", b"(2,-")
        archive.writestr("image.npy", negative)
    with zipfile.ZipFile(tmp_path / "name.npz", "w") as archive:
        archive.writestr("é.npy", (tmp_path / "array.npy").read_bytes())
    # the name before the data is no UTF-8, unlike that in the directory
    named = (tmp_path / "name.npz").read_bytes().replace("é".encode(), b"\x90\x90", 1)
    (tmp_path / "name.npz").write_bytes(named)
    with zipfile.ZipFile(tmp_path / "short.npz", "w") as archive:
        archive.writestr("image.npy", (tmp_path / "array.npy").read_bytes()[:-4])
    with zipfile.ZipFile(tmp_path / "nested.npz", "w") as archive:
        head = b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little")
        archive.writestr("image.npy", head + b"(" * 9000)
    messages = {
        "absent.npz": "no data file at",
        "array.npy": "not a readable .npz file",
        "text.npz": "not a readable .npz file",
        "cut.npz": "not a readable .npz file",
        "flipped.npz": "Bad CRC-32",
        "other.npz": "not a numpy array",
        "suffix.npz": "'image' is not a numpy array: expected a name that ends in .npy",
        "nested.npz": "not a numpy array",
        "negative.npz": "has a negative size",
        "name.npz": "not a readable .npz file",
        "short.npz": "'image' ends before its last row",
    }
    for name, message in messages.items():
        with pytest.raises(DataError, match=re.escape(message)) as error:
            open_images(tmp_path / name)
        assert error.value.next_step


def test_shapes_must_fit_a_profile_and_each_other(tmp_path: Path) -> None:
    profile = Profile(
        dims={"batch": DimRange(min=1, opt=1, max=8), "sequence": DimRange(min=1, opt=4, max=8)}
    )
    long = np.zeros((2, 9), np.int64)
    with pytest.raises(
        DataError, match=r"sequence = 9 lies outside all profiles \(batch 1 to 8, sequence 1 to 8\)"
    ):
        open_set(
            CalibrationSet,
            (save(tmp_path / "a.npz", ids=long, mask=long),),
            (IDS, MASK),
            (profile,),
        )
    with pytest.raises(DataError, match="'sequence' = 4, another input gives 9"):
        open_set(
            CalibrationSet,
            (save(tmp_path / "b.npz", ids=long, mask=long[:, :4].copy()),),
            (IDS, MASK),
            (profile,),
        )
    wide = Profile(dims={"batch": DimRange(min=4, opt=4, max=5)})
    with pytest.raises(
        DataError, match="holds 7 samples, which cannot be cut into batches of 4 to 5"
    ):
        open_images(save(tmp_path / "c.npz", image=images(7)), profiles=(wide,))


def test_a_set_needs_files_and_labels_everywhere_or_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="selection: expected at least one"):
        open_set(SelectionSet, (), (IMAGE,), BATCHES)
    paths = (
        save(tmp_path / "a.npz", image=images(2), labels=np.arange(2)),
        save(tmp_path / "b.npz", image=images(2, seed=1)),
    )
    with pytest.raises(DataError, match=r"b\.npz' has no 'labels'"):
        open_set(SelectionSet, paths, (IMAGE,), BATCHES)


def test_bfloat16_inputs_have_no_npz_form(tmp_path: Path) -> None:
    spec = IMAGE.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(DataError, match="'image' is bfloat16"):
        open_set(CalibrationSet, random_data(2), (spec,), BATCHES)
    with pytest.raises(DataError, match="'image' is bfloat16"):
        open_images(save(tmp_path / "a.npz", image=images(2)), spec)


def test_abandoned_streams_close_their_file(tmp_path: Path) -> None:
    samples = open_images(save(tmp_path / "a.npz", image=images(8)))
    stream = samples.batches(1)
    assert [batch.first for batch in islice(stream, 2)] == [0, 1]
    stream.close()  # type: ignore[attr-defined]
    (tmp_path / "a.npz").unlink()
    with pytest.raises(DataError, match="not a readable"):
        next(samples.batches(1))
