"""The profiles that traffic suggests: they hold what the current ones hold, and their opts are near
to what runs.
"""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as some

from pipeline.core.shapes import DimRange, Profile, ValueRange
from pipeline.plan.schema import Plan
from service.registry.traffic import (
    MAX_PROFILES,
    SymbolSizes,
    plan_text,
    profiles_from_runs,
    suggestion_from_runs,
)


def profile(**dims: tuple[int, int, int]) -> Profile:
    return Profile(
        dims={name: DimRange(min=low, opt=opt, max=high) for name, (low, opt, high) in dims.items()}
    )


def batches(**runs: int) -> dict[SymbolSizes, int]:
    """Runs by the batch: batches(b4=7) is seven runs of four rows."""
    return {(("batch", int(name[1:])),): count for name, count in runs.items()}


WIDE = profile(batch=(1, 8, 64))
TEXT = profile(batch=(1, 8, 32), length=(1, 128, 512))


def test_one_group_moves_the_opt_and_keeps_the_range() -> None:
    assert profiles_from_runs(batches(b1=1, b2=90, b3=9), [WIDE]) == (profile(batch=(1, 2, 64)),)


def test_separate_groups_get_profiles_of_their_own_and_the_largest_keeps_the_range() -> None:
    runs = batches(b1=50, b2=5, b30=3, b32=40)
    assert profiles_from_runs(runs, [WIDE]) == (
        profile(batch=(1, 1, 2)),
        profile(batch=(1, 32, 64)),
    )


def test_a_few_runs_far_away_get_none() -> None:
    """They would lower the mean distance by 0.25."""
    assert profiles_from_runs(batches(b1=95, b32=5), [WIDE]) == (profile(batch=(1, 1, 64)),)


def test_sizes_of_all_symbols_count_together() -> None:
    runs: dict[SymbolSizes, int] = {
        (("batch", 1), ("length", 400)): 30,
        (("batch", 1), ("length", 500)): 31,
        (("batch", 32), ("length", 16)): 39,
    }
    assert profiles_from_runs(runs, [TEXT]) == (
        profile(batch=(1, 1, 1), length=(400, 500, 500)),
        profile(batch=(1, 32, 32), length=(1, 16, 512)),
    )


def test_a_suggestion_says_how_near_the_opts_are_and_where_to_measure() -> None:
    suggestion = suggestion_from_runs(batches(b1=50, b32=50), [WIDE])
    assert suggestion is not None
    assert suggestion.current_distance == 0.5 * 3 + 0.5 * 2
    assert suggestion.distance == 0
    assert suggestion.sizes == ({"batch": 1}, {"batch": 32})
    mostly_large = suggestion_from_runs(batches(b1=30, b32=70), [WIDE])
    assert mostly_large is not None
    assert mostly_large.sizes == ({"batch": 32}, {"batch": 1})
    assert suggestion_from_runs({}, [WIDE]) is None
    assert suggestion_from_runs({(): 5}, []) is None


def test_what_would_hardly_change_stays() -> None:
    """An opt of 9 would lower the mean distance by 0.04."""
    suggestion = suggestion_from_runs(batches(b8=60, b9=50, b10=40), [WIDE])
    assert suggestion is not None
    assert suggestion.profiles == (WIDE,)
    assert suggestion.distance == suggestion.current_distance > 0


def test_profiles_from_earlier_traffic_do_not_pile_up() -> None:
    first = profiles_from_runs(batches(b1=50, b32=50), [WIDE])
    assert profiles_from_runs(batches(b1=50, b32=50), first) == first
    assert profiles_from_runs(batches(b8=1), first) == (profile(batch=(1, 8, 64)),)
    assert profiles_from_runs(batches(b8=1), [WIDE, WIDE]) == (profile(batch=(1, 8, 64)),)


def test_every_profile_of_the_author_stays_and_one_without_runs_is_unchanged() -> None:
    short, long = profile(batch=(1, 4, 8)), profile(batch=(16, 32, 64))
    assert profiles_from_runs(batches(b2=3), [short, long]) == (profile(batch=(1, 2, 8)), long)


def test_a_batch_below_the_smallest_size_ran_at_that_size() -> None:
    assert profiles_from_runs(batches(b1=9), [profile(batch=(4, 8, 16))]) == (
        profile(batch=(4, 4, 16)),
    )


def test_a_size_of_zero_is_no_opt() -> None:
    empty = profile(past=(0, 4, 8))
    assert profiles_from_runs({(("past", 0),): 9}, [empty]) == (profile(past=(0, 1, 8)),)


@given(
    some.dictionaries(
        some.tuples(some.integers(1, 32), some.integers(1, 512)),
        some.integers(1, 1000),
        min_size=1,
        max_size=40,
    )
)
def test_nothing_that_ran_is_refused_and_nothing_new_is_taken(
    runs: dict[tuple[int, int], int],
) -> None:
    shapes: dict[SymbolSizes, int] = {
        (("batch", rows), ("length", length)): n for (rows, length), n in runs.items()
    }
    profiles = profiles_from_runs(shapes, [TEXT])
    assert len(profiles) <= MAX_PROFILES
    ends = [profile.sizes(point) for profile in profiles for point in ("min", "opt", "max")]
    assert all(TEXT.holds(sizes) for sizes in ends)
    assert all(profiles[-1].holds(TEXT.sizes(point)) for point in ("min", "max"))
    suggestion = suggestion_from_runs(shapes, [TEXT])
    assert suggestion is not None
    assert suggestion.distance <= suggestion.current_distance
    opts = [profile.sizes("opt") for profile in suggestion.profiles]
    assert all(sizes in opts for sizes in suggestion.sizes)


def test_a_plan_reads_the_text_of_profiles() -> None:
    profiles = (
        profile(batch=(1, 8, 64)),
        profile(batch=(1, 1, 1)).model_copy(
            update={"values": {"k": ValueRange(min=(1,), opt=(2,), max=(3,))}}
        ),
    )
    text = plan_text(profiles)
    assert text == "[{batch: [1, 8, 64]}, {batch: [1, 1, 1], values: {k: [[1], [2], [3]]}}]"
    plan = yaml.safe_load(f"{{model: {{path: a.onnx}}, profiles: {text}}}")
    assert Plan.model_validate(plan).profiles == profiles
