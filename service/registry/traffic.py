"""The shapes that a model has run, and the profiles that they suggest for its next compile. Pure.

The kernels of a profile are tuned at its opt. So the cost of a run at other sizes is taken as its
distance from the opt, in doublings: the sum of |log2(size / opt)| over the symbols. A run at half
or at twice the opt costs 1.

Runs are divided into groups, each around the size with the smallest mean distance to its runs. One
more group is worth a profile if it lowers the mean distance of all runs by SEPARATION.

The group of the largest sizes keeps the whole range of the profile that its runs had, with its own
opt. So the next version takes all that this one takes. Each other group gets a profile of its own,
as wide as its runs. An engine runs the profile that holds the sizes and is tuned nearest to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import DimRange, Profile, ValueRange, nearest_profile

SymbolSizes = tuple[tuple[str, int], ...]
"""The size of each symbol, by name."""

MAX_SHAPES = 500  # different shapes that are counted, of requests and of batches
MAX_PROFILES = 3
SEPARATION = 0.5  # doublings
WORTHWHILE = 0.1  # doublings; less is within what traffic varies from day to day
MAX_OPTS = 16  # the most frequent sizes, among which the opts are chosen


class SeenShape(Frozen):
    """Sizes of the symbols in requests, and the number of these requests."""

    sizes: dict[str, int]
    requests: int


class SeenBatch(Frozen):
    """Sizes of the symbols in batches that ran, without padding."""

    sizes: dict[str, int]
    runs: int = Field(description="Runs of the engine")
    requests: int = Field(description="Requests in these runs")
    padding: float = Field(description="Share of the input values that was padding")


class Suggestion(Frozen):
    """Profiles for the next compile, beside those of the version that counted."""

    current: tuple[Profile, ...]
    profiles: tuple[Profile, ...] = Field(description="For `profiles` of a plan")
    sizes: tuple[dict[str, int], ...] = Field(
        description="For `benchmark.sizes`: the opts, the most frequent first"
    )
    current_distance: float = Field(
        description="Mean distance of a run from the opt of its profile now, in doublings"
    )
    distance: float = Field(description="The same with the suggested profiles")


class ShapesView(Frozen):
    """What a version has run since it was loaded, and profiles for the next compile."""

    version: int
    since: str = Field(description="UTC. The counts are not kept when a model is loaded again")
    shapes: tuple[SeenShape, ...] = Field(description="Of requests, the most frequent first")
    other_requests: int = Field(description=f"Requests of other shapes, after {MAX_SHAPES}")
    batches: tuple[SeenBatch, ...] = Field(description="Batches, the most frequent first")
    other_runs: int = Field(description=f"Runs of other shapes, after {MAX_SHAPES}")
    answered: int = Field(description="Requests in all runs")
    padding: float = Field(description="Share of all input values that was padding")
    padding_at_max: float = Field(
        description="The same share if padded axes always had their largest length"
    )
    suggestion: Suggestion | None = Field(
        description="Null without a run, and if the model has no profiles"
    )


def plan_text(profiles: Sequence[Profile]) -> str:
    """Return profiles as a plan writes them: [{batch: [1, 8, 64]}]."""
    return f"[{', '.join(map(profile_text, profiles))}]"


def profile_text(profile: Profile) -> str:
    """Return one profile as a plan writes it: {batch: [1, 8, 64]}."""
    ranges = [f"{name}: {_triple(dim)}" for name, dim in profile.dims.items()]
    if profile.values:
        values = [f"{name}: {_triple(value)}" for name, value in profile.values.items()]
        ranges.append(f"values: {{{', '.join(values)}}}")
    return f"{{{', '.join(ranges)}}}"


def _triple(span: DimRange | ValueRange) -> str:
    points = (span.min, span.opt, span.max)
    return str([list(point) if isinstance(point, tuple) else point for point in points])


# -- decisions ---------------------------------------------------------------


def suggestion_from_runs(
    runs: Mapping[SymbolSizes, int], current: Sequence[Profile]
) -> Suggestion | None:
    """Suggest profiles for these runs; None without a run or a profile.

    The current ones are suggested if others lower the mean distance by less than WORTHWHILE.
    """
    if not runs or not current:
        return None
    profiles = profiles_from_runs(runs, current)
    if _mean_distance(runs, current) - _mean_distance(runs, profiles) < WORTHWHILE:
        profiles = tuple(current)
    return Suggestion(
        current=tuple(current),
        profiles=profiles,
        sizes=_opts_by_runs(runs, profiles),
        current_distance=_mean_distance(runs, current),
        distance=_mean_distance(runs, profiles),
    )


def profiles_from_runs(
    runs: Mapping[SymbolSizes, int], current: Sequence[Profile]
) -> tuple[Profile, ...]:
    """Return at most MAX_PROFILES profiles, or one for each of `current` that lies in no other.

    They hold exactly the sizes that `current` holds. A profile without runs stays as it is.
    """
    limits = _outermost(current)
    most = max(1, MAX_PROFILES // len(limits))
    narrow, wide = [], []
    for limit, points in zip(limits, _points_by_profile(runs, limits), strict=True):
        groups = _groups(points, most)
        narrow += [_profile_of_group(group, limit) for group in groups[:-1]]
        wide += [_with_opt(limit, group.opt) for group in groups[-1:]] or [limit]
    return (*narrow, *wide)


Point = tuple[int, ...]
"""The sizes of a profile's symbols, in their order."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sizes that run in one profile."""

    opt: Point
    points: tuple[Point, ...]


def _outermost(profiles: Sequence[Profile]) -> list[Profile]:
    """Return the profiles whose ranges lie in no other's; of equal ranges, the last."""
    return [
        profile
        for index, profile in enumerate(profiles)
        if not any(
            _contains(other, profile) and (number > index or not _contains(profile, other))
            for number, other in enumerate(profiles)
            if number != index
        )
    ]


def _contains(outer: Profile, inner: Profile) -> bool:
    return outer.values == inner.values and all(
        dim.min <= inner.dims[symbol].min and inner.dims[symbol].max <= dim.max
        for symbol, dim in outer.dims.items()
    )


def _points_by_profile(
    runs: Mapping[SymbolSizes, int], profiles: Sequence[Profile]
) -> list[dict[Point, int]]:
    """Count the runs at each point of each profile, in the profile that ran them.

    A batch with fewer rows than every profile holds ran at the smallest size of the first one.
    """
    points: list[dict[Point, int]] = [{} for _ in profiles]
    for shape, count in runs.items():
        sizes = dict(shape)
        index = nearest_profile(profiles, sizes) or 0
        dims = profiles[index].dims.items()
        point = tuple(min(max(sizes[symbol], dim.min), dim.max) for symbol, dim in dims)
        points[index][point] = points[index].get(point, 0) + count
    return points


def _groups(points: Mapping[Point, int], most: int) -> list[_Group]:
    """Divide points into at most `most` groups, the one of the largest opt last."""
    if not points:
        return []
    frequent = sorted(points, key=lambda point: (-points[point], point))[:MAX_OPTS]
    distances = _distances(list(points), frequent)  # [points, opts]
    weights = np.array(list(points.values())) / sum(points.values())
    chosen, cost = _best(distances, weights, 1)
    for count in range(2, min(most, len(frequent)) + 1):
        more, more_cost = _best(distances, weights, count)
        if cost - more_cost < SEPARATION:
            break
        chosen, cost = more, more_cost
    nearest = distances[:, chosen].argmin(axis=1)
    groups = [
        _Group(
            frequent[opt],
            tuple(point for point, near in zip(points, nearest, strict=True) if near == number),
        )
        for number, opt in enumerate(chosen)
    ]
    return sorted(groups, key=lambda group: (np.log2(_positive([group.opt])).sum(), group.opt))


def _best(
    distances: NDArray[np.float64], weights: NDArray[np.float64], count: int
) -> tuple[list[int], float]:
    """Choose the `count` opts with the smallest mean distance. Among equals, the most frequent."""
    choices = np.array(list(itertools.combinations(range(distances.shape[1]), count)))
    costs = weights @ distances[:, choices].min(axis=2)  # [choices]
    best = int(np.argmin(np.round(costs, 9)))
    return choices[best].tolist(), float(costs[best])


def _distances(points: Sequence[Point], opts: Sequence[Point]) -> NDArray[np.float64]:
    """Return the distance of each point from each opt, in doublings: [points, opts]."""
    a, b = np.log2(_positive(points)), np.log2(_positive(opts))
    distances: NDArray[np.float64] = np.abs(a[:, None] - b[None]).sum(axis=2)
    return distances


def _positive(points: Sequence[Point]) -> NDArray[np.int64]:
    return np.maximum(np.array(points, np.int64).reshape(len(points), -1), 1)


def _profile_of_group(group: _Group, limit: Profile) -> Profile:
    """Return the smallest profile that holds a group."""
    dims = {}
    for number, symbol in enumerate(limit.dims):
        sizes = [point[number] for point in group.points]
        opt = max(group.opt[number], 1)
        dims[symbol] = DimRange(min=min(sizes), opt=opt, max=max(opt, *sizes))
    return limit.model_copy(update={"dims": dims})


def _with_opt(limit: Profile, opt: Point) -> Profile:
    """Return a profile of the same ranges with another opt."""
    sizes = zip(limit.dims.items(), opt, strict=True)
    dims = {symbol: dim.model_copy(update={"opt": max(size, 1)}) for (symbol, dim), size in sizes}
    return limit.model_copy(update={"dims": dims})


def _opts_by_runs(
    runs: Mapping[SymbolSizes, int], profiles: Sequence[Profile]
) -> tuple[dict[str, int], ...]:
    """Return the opts of the profiles that had runs, the most frequent first."""
    counts = [sum(points.values()) for points in _points_by_profile(runs, profiles)]
    order = sorted(range(len(profiles)), key=lambda index: -counts[index])
    return tuple(profiles[index].sizes("opt") for index in order if counts[index])


def _mean_distance(runs: Mapping[SymbolSizes, int], profiles: Sequence[Profile]) -> float:
    """Return the mean distance of a run from the opt of its profile, in doublings."""
    total = sum(
        count * profile.distance(dict(zip(profile.dims, point, strict=True)))
        for profile, points in zip(profiles, _points_by_profile(runs, profiles), strict=True)
        for point, count in points.items()
    )
    return total / sum(runs.values())
