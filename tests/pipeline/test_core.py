"""The vocabulary: ranges that hold sizes and values, and targets that accept hosts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.core.artifacts import Target
from pipeline.core.shapes import Profile, ValueRange

PROFILE = Profile.model_validate(
    {
        "dims": {"batch": [1, 8, 64]},
        "values": {"k": [1, 5, 10], "target": [[1, 3], [8, 3], [64, 3]]},
    }
)


def test_a_profile_gives_sizes_and_values_at_its_points() -> None:
    assert PROFILE.sizes("opt") == {"batch": 8}
    assert [PROFILE.values_at(point) for point in ("min", "max")] == [
        {"k": (1,), "target": (1, 3)},
        {"k": (10,), "target": (64, 3)},
    ]


def test_odd_values_go_with_odd_sizes() -> None:
    """A target that begins with the batch stays one."""
    assert PROFILE.odd_values()["target"] == (PROFILE.odd_sizes()["batch"], 3)
    assert PROFILE.odd_values()["k"] not in ((1,), (5,), (10,))
    assert PROFILE.holds(PROFILE.odd_sizes(), PROFILE.odd_values())


def test_a_profile_holds_sizes_and_the_values_that_are_given() -> None:
    assert PROFILE.holds({"batch": 64})
    assert PROFILE.holds({"batch": 64}, {"k": [10]})
    assert PROFILE.holds({"batch": 64}, {"another": [99]})
    assert not PROFILE.holds({"batch": 65}, {"k": [10]})
    for values in ([0], [11], [], [1, 1]):
        assert not PROFILE.holds({"batch": 64}, {"k": values})
    assert not PROFILE.holds({"batch": 64}, {"target": [64, 4]})


def test_a_profile_survives_being_stored() -> None:
    assert Profile.model_validate_json(PROFILE.model_dump_json()) == PROFILE


@pytest.mark.parametrize(
    "value",
    [
        [1, 5, 10],
        [[1], [5], [10]],
        {"min": 1, "opt": 5, "max": 10},
        {"min": [1], "opt": [5], "max": [10]},
    ],
)
def test_a_range_of_values_may_be_written_in_several_ways(value: object) -> None:
    assert ValueRange.model_validate(value) == ValueRange(min=(1,), opt=(5,), max=(10,))


def test_one_number_is_a_range_too() -> None:
    assert ValueRange.model_validate(-1) == ValueRange(min=(-1,), opt=(-1,), max=(-1,))


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        [3, 2, 5],
        [[1, 2], [2, 1], [3, 3]],
        [[1], [2], [3, 4]],
        [[1, 1], [2], [3, 3]],
        ["1.5", 2, 3],
        "a",
    ],
)
def test_a_range_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        ValueRange.model_validate(value)


# --- targets ---


def gpu(compute_capability: str | None, version: str = "10.6.0.26") -> Target:
    return Target(
        backend="tensorrt", version=version, device="a GPU", compute_capability=compute_capability
    )


@pytest.mark.parametrize("host", ["8.0", "8.9", "9.0", "10.0", "12.1"])
def test_a_hardware_compatible_engine_runs_on_its_generation_and_later_ones(host: str) -> None:
    assert gpu("8.0+").accepts(gpu(host)) == ()


@pytest.mark.parametrize(("host", "has"), [("7.5", "7.5"), (None, "none")])
def test_a_hardware_compatible_engine_says_what_it_needs_elsewhere(
    host: str | None, has: str
) -> None:
    assert gpu("8.0+").accepts(gpu(host)) == (
        f"engine needs compute capability 8.0 or later, this host has {has}",
    )


def test_any_other_engine_runs_on_its_own_generation_only() -> None:
    assert gpu("8.9").accepts(gpu("8.9")) == ()
    assert gpu("8.9").accepts(gpu("9.0")) == (
        "engine needs compute capability 8.9, this host has 9.0",
    )


def test_a_version_compatible_engine_runs_on_later_versions_only() -> None:
    assert gpu("9.0", "10.6.0.26+").accepts(gpu("9.0", "10.13.2.6")) == ()
    assert gpu("9.0", "10.6.0.26+").accepts(gpu("9.0", "10.3.0.26")) == (
        "engine needs version 10.6.0.26 or later, this host has 10.3.0.26",
    )
    assert gpu("9.0", "10.6.0.26+").accepts(gpu("9.0", "11.0.0.1")) == (
        "engine needs version 10.6.0.26 or later, this host has 11.0.0.1",
    )  # another major


def test_all_reasons_are_given_at_once() -> None:
    cpu = Target(backend="onnxruntime", version="1", device="a CPU", cpu_flags=("avx2", "fma"))
    reasons = cpu.accepts(
        Target(backend="openvino", version="2", device="a CPU", cpu_flags=("fma",))
    )
    assert [reason.split(",")[0] for reason in reasons] == [
        "engine needs backend onnxruntime",
        "engine needs version 1",
        "engine was built for CPU flags avx2",
    ]
