"""What an engine takes, which requests run together, and how they are joined and cut apart."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, TensorSpec, ValueRange
from pipeline.errors import InternalError
from pipeline.serving_inputs import BatchSpec, Padding
from service.errors import Unprocessable
from service.regions import Region, RegionTensor, array_of
from service.registry.traffic import SymbolSizes, profiles_from_runs
from service.serving.batch_assembly import BatchAssembler, BatchPart, JoinedBatch
from service.serving.batching import Kind, Place
from service.serving.request_shapes import MAX_KNOWN, Axes, ShapeMatcher
from tests.service.builders.regions import shared_file


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def engine(
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *profiles: Profile,
    backend: str = "onnxruntime",
) -> Engine:
    target = Target(backend=backend, version="1", device="d")
    recipe = Recipe(backend=backend, precision=Precision.FP32)
    return Engine(
        root=Path("/e"),
        file="m",
        digest="d",
        target=target,
        recipe=recipe,
        inputs=inputs,
        outputs=outputs,
        profiles=profiles,
        threads=0,
        size_bytes=1,
    )


def profile(**dims: tuple[int, int, int]) -> Profile:
    return Profile(
        dims={
            name: DimRange(min=low, opt=usual, max=high)
            for name, (low, usual, high) in dims.items()
        }
    )


PLAIN = engine((spec("x", "batch", 4),), (spec("y", "batch", 4),), profile(batch=(1, 4, 16)))
PROVED = BatchSpec(axes={"x": 0, "y": 0}, maximum=8, proved=True)


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def test_requests_of_one_shape_are_of_one_kind() -> None:
    matcher = ShapeMatcher(PLAIN, PROVED)
    one, two = matcher.match({"x": zeros(1, 4)}), matcher.match({"x": zeros(3, 4)})
    assert (one.rows, two.rows, one.kind is two.kind) == (1, 3, True)
    assert (matcher.maximum, one.kind.most, two.sizes) == (8, 16, (("batch", 3),))
    assert ShapeMatcher(PLAIN, PROVED, 2).maximum == 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "expected inputs 'x', got none"),
        ({"z": zeros(1, 4)}, "expected inputs 'x', got 'z'"),
        ({"x": zeros(1, 4), "z": zeros(1)}, "expected inputs 'x', got 'x', 'z'"),
        ({"x": zeros(1, 4, dtype=np.float64)}, "dtype float64, expected float32"),
        ({"x": zeros(1, 4, dtype=">f4")}, "dtype >f4, expected float32"),
        ({"x": zeros(4)}, "rank 1"),
        ({"x": zeros(1, 5)}, "expected ('batch', 4)"),
        (
            {"x": zeros(17, 4)},
            "no profile of this model holds batch = 17; it takes batch from 1 to 16",
        ),
        ({"x": zeros(0, 4)}, "batch = 0"),
    ],
)
@pytest.mark.parametrize("proved", [True, False])
def test_what_does_not_fit_is_refused_with_both_sides(
    inputs: Any, message: str, proved: bool
) -> None:
    matcher = ShapeMatcher(PLAIN, PROVED.model_copy(update={"proved": proved}))
    for _ in range(2):  # the second time as the first
        with pytest.raises(Unprocessable) as error:
            matcher.match(inputs)
        assert message in error.value.message
        assert error.value.next_step


def test_without_proof_every_request_runs_alone_and_as_it_is() -> None:
    matcher = ShapeMatcher(PLAIN, PROVED.model_copy(update={"proved": False}))
    fit = matcher.match({"x": zeros(3, 4)})
    assert (fit.kind.sizes, matcher.maximum) == ((), 1)


def test_a_profile_that_begins_higher_is_padded_up_to_where_batching_is_proved() -> None:
    high = engine(PLAIN.inputs, PLAIN.outputs, profile(batch=(4, 8, 16)))
    (sizes,) = ShapeMatcher(high, PROVED).match({"x": zeros(1, 4)}).kind.sizes
    assert sizes.holding(1) == 4
    with pytest.raises(Unprocessable, match="no profile"):
        ShapeMatcher(high, PROVED.model_copy(update={"proved": False})).match({"x": zeros(1, 4)})


def test_sizes_that_are_captured_are_few_and_run_before_the_first_request() -> None:
    captured = ShapeMatcher(
        engine(PLAIN.inputs, PLAIN.outputs, profile(batch=(1, 4, 16)), backend="tensorrt"), PROVED
    )
    (sizes,) = captured.match({"x": zeros(3, 4)}).kind.sizes
    assert (sizes.captured, sizes.holding(3)) == ((1, 2, 4, 8), 4)
    assert captured.warm_sizes() == ({"batch": 1}, {"batch": 2}, {"batch": 4}, {"batch": 8})
    assert ShapeMatcher(PLAIN, PROVED).warm_sizes() == ({"batch": 1}, {"batch": 4}, {"batch": 16})
    assert ShapeMatcher(
        engine((spec("x", 2),), (spec("y", 2),)), BatchSpec(axes={})
    ).warm_sizes() == ({},)


def test_a_batch_of_fixed_size_takes_no_other_rows() -> None:
    fixed = ShapeMatcher(engine((spec("x", 1, 4),), (spec("y", 1, 4),)), PROVED)
    assert fixed.match({"x": zeros(1, 4)}).kind.most == 1
    with pytest.raises(Unprocessable):
        fixed.match({"x": zeros(2, 4)})


SCALED = engine(
    (spec("x", "batch", 4), spec("scale")), (spec("y", "batch", 4),), profile(batch=(1, 4, 16))
)


SCALED_SPEC = BatchSpec(axes={"x": 0, "scale": None, "y": 0}, maximum=8, proved=True)


def test_requests_that_differ_in_an_input_without_rows_run_apart() -> None:
    matcher = ShapeMatcher(SCALED, SCALED_SPEC)
    kinds = [
        matcher.match({"x": zeros(1, 4), "scale": np.array(scale, np.float32)}).kind
        for scale in (1, 2, 1)
    ]
    assert kinds[0] is kinds[2]
    assert kinds[0] is not kinds[1]


def test_a_value_that_decides_is_read_once_from_a_region() -> None:
    """Its client could change it between the match and the batch."""
    matcher = ShapeMatcher(SCALED, SCALED_SPEC)
    with shared_file(np.float32(1).tobytes()) as file:
        scale = RegionTensor(Region("r", file.name, 0, 4), np.dtype(np.float32), ())
        x = RegionTensor(Region("s", "/no-such-file", 0, 16), np.dtype(np.float32), (1, 4))
        inputs = matcher.settled({"x": x, "scale": scale})
        file.write_bytes(np.float32(2).tobytes())
        assert (inputs["x"], float(array_of(inputs["scale"]))) == (x, 1)
        one = matcher.match({"x": zeros(1, 4), "scale": np.array(1, np.float32)})
        assert matcher.match(inputs).kind is one.kind
    sent = {"x": zeros(1, 4), "scale": np.array(1, np.float32)}
    assert matcher.settled(sent) is sent


def test_a_value_that_decides_a_shape_must_lie_in_a_profile() -> None:
    limits = Profile(
        dims={"batch": DimRange(min=1, opt=1, max=4)},
        values={"k": ValueRange(min=(1,), opt=(2,), max=(5,))},
    )
    matcher = ShapeMatcher(
        engine(
            (spec("x", "batch", 9), spec("k", 1, dtype="int64")), (spec("y", "batch", "k"),), limits
        ),
        PROVED,
    )
    assert matcher.match({"x": zeros(1, 9), "k": np.array([5])}).rows == 1
    with pytest.raises(Unprocessable, match=r"k = \[6\]"):
        matcher.match({"x": zeros(1, 9), "k": np.array([6])})


def test_inputs_with_different_rows_are_refused() -> None:
    two = engine(
        (spec("a", "n", 2), spec("b", "m", 2)),
        (spec("y", "n", 2),),
        profile(n=(1, 1, 8), m=(1, 1, 8)),
    )
    matcher = ShapeMatcher(two, BatchSpec(axes={"a": 0, "b": 0, "y": 0}, maximum=8, proved=True))
    with pytest.raises(Unprocessable, match="1, 2 rows"):
        matcher.match({"a": zeros(1, 2), "b": zeros(2, 2)})


def test_only_so_many_shapes_are_remembered() -> None:
    matcher = ShapeMatcher(
        engine(
            (spec("x", "batch", "n"),),
            (spec("y", "batch"),),
            profile(batch=(1, 1, 8), n=(1, 1, 9999)),
        ),
        PROVED,
    )
    for n in range(1, MAX_KNOWN + 10):
        matcher.match({"x": zeros(1, n)})
    assert len(matcher._known) <= MAX_KNOWN
    assert len(matcher._kinds) <= MAX_KNOWN


# -- joined and cut apart ----------------------------------------------------

TEXT = engine(
    (
        spec("ids", "batch", "sequence", dtype="int64"),
        spec("mask", "batch", "sequence", dtype="int64"),
    ),
    (spec("tokens", "batch", "sequence", 2), spec("pooled", "batch", 2)),
    profile(batch=(1, 4, 16), sequence=(2, 8, 100)),
)
PADDING = (Padding(input="ids", axis=1, value=7), Padding(input="mask", axis=1))
TEXT_SPEC = BatchSpec(
    axes={"ids": 0, "mask": 0, "tokens": 0, "pooled": 0}, maximum=8, padding=PADDING, proved=True
)


def tokens(length: int, rows: int = 1) -> Any:
    return {"ids": np.full((rows, length), length), "mask": np.ones((rows, length), np.int64)}


def test_declared_axes_are_padded_within_buckets() -> None:
    matcher = ShapeMatcher(TEXT, TEXT_SPEC)
    kinds = [matcher.match(tokens(length)).kind for length in (5, 8, 9, 70, 100)]
    assert kinds[0] is kinds[1]
    assert kinds[1] is not kinds[2]
    assert kinds[3] is kinds[4]
    with pytest.raises(Unprocessable, match="sequence = 101"):
        matcher.match(tokens(101))


def padded_lengths(*profiles: Profile, lengths: tuple[int, ...]) -> list[int]:
    """The lengths at which requests of these lengths run alone, on an engine that captures."""
    captured = engine(TEXT.inputs, TEXT.outputs, *profiles, backend="tensorrt")
    matcher = ShapeMatcher(captured, TEXT_SPEC)
    return [matcher.match(tokens(length)).kind.lengths[0] for length in lengths]


def test_lengths_are_padded_to_what_the_profiles_are_tuned_for() -> None:
    wide = profile(batch=(1, 4, 16), sequence=(16, 100, 128))
    assert padded_lengths(wide, lengths=(16, 33, 65, 100, 101)) == [16, 64, 100, 100, 128]
    narrow = profile(batch=(1, 1, 16), sequence=(16, 24, 40))
    lengths = (16, 17, 25, 33, 40, 41, 65, 128)
    assert padded_lengths(narrow, wide, lengths=lengths) == [16, 24, 32, 40, 40, 64, 100, 128]


def test_lengths_in_a_profile_from_traffic_stay_in_it_when_they_are_padded() -> None:
    wide = profile(batch=(1, 4, 16), sequence=(2, 8, 100))
    runs: dict[SymbolSizes, int] = {
        (("batch", 1), ("sequence", length)): 2 for length in (5, 6, 7, 70, 75, 80)
    }
    profiles = profiles_from_runs(runs, [wide])
    assert [each.dims["sequence"].max for each in profiles] == [7, 100]
    assert padded_lengths(*profiles, lengths=(5, 6, 7, 70, 75, 80)) == [6, 6, 7, 75, 75, 100]


def test_padding_is_compared_with_the_largest_length_of_all_profiles() -> None:
    short, long = profile(batch=(1, 1, 4), sequence=(1, 8, 10)), TEXT.profiles[0]
    matcher = ShapeMatcher(engine(TEXT.inputs, TEXT.outputs, short, long), TEXT_SPEC)
    assert matcher.values_at_max(((3, 7), (3, 7)), 2) == 2 * 3 * 100
    assert matcher.values_at_max(((3, 7), (3, 7)), 5) == 2 * 5 * 100  # some share a row
    undeclared = ShapeMatcher(TEXT, TEXT_SPEC.model_copy(update={"padding": ()}))
    assert undeclared.values_at_max(((3, 7), (3, 7)), 3) == 2 * 3 * 7


def test_an_axis_is_padded_only_if_that_is_declared_of_every_input() -> None:
    matcher = ShapeMatcher(TEXT, TEXT_SPEC.model_copy(update={"padding": PADDING[:1]}))
    assert matcher.match(tokens(5)).kind is not matcher.match(tokens(6)).kind


def joined_by(
    engine: Engine, batch: BatchSpec, requests: list[Any], size: int
) -> tuple[list[Any], Any]:
    matcher = ShapeMatcher(engine, batch)
    rows = BatchAssembler(engine.inputs, engine.outputs, matcher.axes)
    shapes = [matcher.match(request) for request in requests]
    first_rows = itertools.accumulate((each.rows for each in shapes), initial=0)
    parts = [
        BatchPart(request, each, Place(row))
        for request, each, row in zip(requests, shapes, first_rows, strict=False)
    ]
    joined = rows.join(parts[0].shapes.kind, parts, size)
    targets = [
        np.full(shape, 99, spec.dtype)
        for shape, spec in zip(joined.shapes, engine.inputs, strict=True)
    ]
    rows.fill(joined, targets)
    return targets, lambda outputs, names=None: rows.cut(
        joined, outputs, names or [None] * len(parts)
    )


def test_shorter_requests_are_filled_up_and_their_outputs_cut() -> None:
    (ids, mask), cut = joined_by(TEXT, TEXT_SPEC, [tokens(5), tokens(7, rows=2)], 4)
    assert ids.tolist() == [[5] * 5 + [7] * 2, [7] * 7, [7] * 7, [0] * 7]
    assert mask.tolist() == [[1] * 5 + [0] * 2, [1] * 7, [1] * 7, [0] * 7]
    first, second = cut([np.stack([ids, ids], axis=2), ids[:, :2]])
    assert first["tokens"].shape == (1, 5, 2)
    assert (first["tokens"] == 5).all()
    assert (second["tokens"].shape, second["pooled"].shape) == ((2, 7, 2), (2, 2))
    assert (second["tokens"] == 7).all()


def test_tensors_in_regions_are_read_into_their_rows_of_a_batch() -> None:
    ids = np.arange(12, dtype=np.int64).reshape(2, 6)
    with shared_file(ids.tobytes()) as file:
        region = Region("r", file.name, 0, ids.nbytes)
        shared = {**tokens(6, rows=2), "ids": RegionTensor(region, ids.dtype, ids.shape)}
        (joined, _), _ = joined_by(TEXT, TEXT_SPEC, [tokens(6), shared], 4)
        assert joined.tolist() == [[6] * 6, *ids.tolist(), [0] * 6]
        (joined, _), _ = joined_by(TEXT, TEXT_SPEC, [tokens(7), shared], 3)
        assert joined.tolist() == [[7] * 7, *([*row, 7] for row in ids.tolist())]


def test_where_graphs_are_captured_lengths_are_those_of_the_buckets() -> None:
    captured = TEXT.model_copy(
        update={"target": Target(backend="tensorrt", version="1", device="d")}
    )
    (ids, _), _ = joined_by(captured, TEXT_SPEC, [tokens(5)], 1)
    assert ids.tolist() == [[5] * 5 + [7] * 3]


SHARED = engine(
    (spec("ids", "batch", "sequence", dtype="int64"), spec("bias", 1, "sequence")),
    (spec("y", "batch"),),
    profile(batch=(1, 4, 16), sequence=(2, 8, 100)),
    backend="tensorrt",
)
SHARED_SPEC = BatchSpec(
    axes={"ids": 0, "bias": None, "y": 0},
    maximum=8,
    padding=(Padding(input="ids", axis=1), Padding(input="bias", axis=1, value=-1)),
    proved=True,
)


def test_an_input_without_rows_is_padded_too() -> None:
    """It was left as it lay in the slot: with what an earlier request had sent."""
    request = {"ids": np.full((2, 5), 3), "bias": np.arange(5, dtype=np.float32)[None]}
    (ids, bias), _ = joined_by(SHARED, SHARED_SPEC, [request], 2)
    assert ids.tolist() == [[3] * 5 + [0] * 3] * 2
    assert bias.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]


def test_an_input_that_does_not_fit_its_place_is_our_fault() -> None:
    matcher = ShapeMatcher(SHARED, SHARED_SPEC)
    rows = BatchAssembler(SHARED.inputs, SHARED.outputs, Axes(SHARED_SPEC.axes, (), {}))
    request = {"ids": np.full((2, 5), 3), "bias": np.arange(5, dtype=np.float32)[None]}
    part = BatchPart(request, matcher.match(request), Place(0))
    joined = JoinedBatch([part], 2, ((2, 5), (1, 8)), (), (), (), 15, False)
    with pytest.raises(InternalError, match=r"has shape \(1, 5\), its buffer has shape \(1, 8\)"):
        rows.fill(joined, [np.zeros((2, 5), np.int64), np.zeros((1, 8), np.float32)])


def test_only_outputs_that_are_asked_for_are_copied() -> None:
    (x,), cut = joined_by(PLAIN, PROVED, [{"x": zeros(1, 4)}, {"x": zeros(1, 4)}], 2)
    first, second = cut([x], [frozenset(), frozenset({"y"})])
    assert (first, list(second)) == ({}, ["y"])
    x[:] = 5
    assert not second["y"].any(), "the answer lies in the slot"


def test_an_output_without_rows_is_everybodys() -> None:
    odd = engine(PLAIN.inputs, (spec("version", 1),), profile(batch=(1, 4, 16)))
    _, cut = joined_by(
        odd,
        BatchSpec(axes={"x": 0, "version": None}, maximum=8, proved=True),
        [{"x": zeros(1, 4)}] * 2,
        2,
    )
    assert [each["version"].tolist() for each in cut([np.array([3.0])])] == [[3.0], [3.0]]


def test_an_output_without_the_rows_that_were_proved_is_our_fault() -> None:
    _, cut = joined_by(PLAIN, PROVED, [{"x": zeros(1, 4)}] * 2, 2)
    with pytest.raises(InternalError, match="expected 2 rows along axis 0"):
        cut([zeros(1, 4)])


@given(
    some.lists(some.integers(1, 3), min_size=1, max_size=4),
    some.integers(0, 3),
    some.integers(0, 2),
)
def test_every_request_gets_its_own_rows_along_any_axis(
    rows: list[int], extra: int, axis: int
) -> None:
    shape: list[int | str] = [2, 3]
    shape.insert(axis, "batch")
    served_engine = engine((spec("x", *shape),), (spec("y", *shape),), profile(batch=(1, 4, 16)))
    batch = BatchSpec(axes={"x": axis, "y": axis}, maximum=16, proved=True)
    requests = []
    for number, count in enumerate(rows):
        array = np.full((2, 3, count), number, np.float32)
        requests.append({"x": np.moveaxis(array, 2, axis)})
    (x,), cut = joined_by(served_engine, batch, requests, sum(rows) + extra)
    for request, answer in zip(requests, cut([x]), strict=True):
        assert np.array_equal(answer["y"], request["x"])
    assert not np.moveaxis(x, axis, 0)[sum(rows) :].any()


def test_kinds_are_told_apart_by_identity() -> None:
    assert Kind() != Kind()
