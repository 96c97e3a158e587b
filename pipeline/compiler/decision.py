"""Choose the winner and the verdict. Pure: candidates and validations in, a decision out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.benchmark.elimination import NEAR
from pipeline.compiler.next_steps import RAISE_LIMIT, after_none, fix_data, next_steps
from pipeline.compiler.speed import (
    curve_of,
    is_faster,
    is_slower_or_equal,
    level_s,
    ratio_missing,
    ratio_of,
    speed_ratio,
)
from pipeline.core.recipe import Recipe
from pipeline.formatting import time_text
from pipeline.results.accuracy import ValidationReport
from pipeline.results.benchmarks import LoadCurve
from pipeline.results.candidates import Candidate
from pipeline.results.report import Verdict

NO_DATA = "no data: accuracy not proven"
SELECTION_ONLY = "no validation set: accuracy was checked on the selection set only"

MEASURE_AGAIN = "measure again on an idle host: `crucible bench DIR --set benchmark.budget_s=120`"
MEASURE_LOAD_AGAIN = (
    "compile again on an idle host, with a larger `benchmark.budget_s`: what is built is reused"
)
DELIVER_BASELINE = (
    "keep your present deployment, or change what stopped the baseline and compile again"
)
OTHER_CANDIDATES = (
    "for a faster engine give other candidates, or other shapes under `benchmark.sizes`"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict with its reasons, and what to try next."""

    verdict: Verdict
    # with `keep` the fastest accurate candidate, which lost to the baseline
    winner: Candidate | None
    reasons: tuple[str, ...]
    next_steps: tuple[str, ...] = ()
    nearest_miss: Candidate | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """The fastest baseline, for the reasons of a verdict."""

    label: str = "the baseline"
    call: str = ""  # Python call of a PyTorch module that is as fast; empty for any other model
    undelivered: str = ""  # with `keep`: why it is not delivered as an engine; empty if it is
    load: LoadCurve | None = None  # None: latency decides


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the winner: the most accurate of the fastest candidates.

    Only candidates that keep their accuracy on the selection set count. See `contenders`.
    """
    return min(contenders(candidates), key=loss, default=None)


def contenders(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the fastest accurate candidate and all that are as fast, in the order of the plan.

    If some candidates are measurably faster than the baseline, only those count. Each candidate is
    compared with the fastest one only, so that no chain of small differences leads to a slow one.
    """
    accurate = [candidate for candidate in candidates if candidate.state == "measured"]
    fit = [candidate for candidate in accurate if is_faster(candidate)] or accurate
    fastest = min(fit, key=level_s, default=None)
    return tuple(
        candidate
        for candidate in fit
        if fastest and (candidate is fastest or _is_as_fast(candidate, fastest))
    )


def _is_as_fast(candidate: Candidate, fastest: Candidate) -> bool:
    ratio = speed_ratio(fastest, candidate)
    if ratio is None:  # too few processes, or a busy host: only the medians are known
        return level_s(candidate) < NEAR * level_s(fastest)
    same_work = _without_ranges(candidate) == _without_ranges(fastest)
    return not ratio.excludes(1.0) and (same_work or ratio.value > 1 / NEAR)


def _without_ranges(candidate: Candidate) -> Recipe:
    """Return the recipe without its calibration method.

    Graphs that differ only in their scales run equally fast.
    """
    return candidate.recipe.model_copy(update={"method": None})


def loss(candidate: Candidate) -> tuple[float, float]:
    """Return the loss on the selection set as a sort key; smaller is better.

    First the drop of the metric, then the smallest cosine, negated.
    """
    report = candidate.selection
    if report is None:
        return math.inf, 1.0
    drop = report.metric.drop if report.metric else 0.0
    return drop, 1.0 if report.cosine is None else -report.cosine


def decide(
    candidates: Sequence[Candidate],
    winner: Candidate | None,
    validation: ValidationReport | None,
    baseline: Baseline = Baseline(),
) -> Decision:
    """Return the verdict on the winner that `choose` returned, or on its absence.

    accepted   measurably faster than the baseline, and accurate on the validation set
    keep       compared with the baseline, and not measurably faster: the baseline is kept
    unproven   no data to prove the accuracy, or the speed could not be measured on this host, or
               the p99 over all processes is over the limit
    rejected   failed on the validation set, or no candidate kept its accuracy within the limit
    """
    if winner is None and has_waited(candidates):
        return Decision("unproven", None, _why_none(candidates), (MEASURE_LOAD_AGAIN,))
    if winner is None and only_baseline_is_within(candidates, baseline.load):
        steps = (DELIVER_BASELINE,) if baseline.undelivered else ()
        return Decision("keep", None, _why_alone(candidates, baseline), (*steps, RAISE_LIMIT))
    if winner is None:
        miss = _nearest_miss(candidates)
        return Decision("rejected", None, _why_none(candidates), after_none(candidates, miss), miss)
    if is_slower_or_equal(winner):
        steps = (DELIVER_BASELINE,) if baseline.undelivered else ()
        return Decision("keep", winner, _why_kept(winner, baseline), (*steps, OTHER_CANDIDATES))
    if validation is not None and not validation.passed:
        reasons = tuple(f"validation: {failure}" for failure in validation.failures)
        return Decision(
            "rejected",
            winner,
            reasons,
            (*fix_data(validation.data_faults), *next_steps(winner)),
            winner,
        )
    missing = _missing_proof(winner, validation, baseline)
    reasons = (
        *_why_right(winner, validation),
        *_why_fast(winner, baseline),
        *_why_chosen(candidates, winner),
    )
    if missing:
        return Decision("unproven", winner, (*missing.reasons, *reasons), missing.next_steps)
    return Decision("accepted", winner, reasons)


@dataclass(frozen=True, slots=True)
class _Missing:
    """Missing evidence, which makes a verdict `unproven`."""

    reasons: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasons)


def only_baseline_is_within(candidates: Sequence[Candidate], baseline: LoadCurve | None) -> bool:
    """Return whether the baseline has a point within the limit, and no accurate candidate has."""
    is_within = baseline is not None and baseline.best is not None
    return is_within and bool(_over_limit(candidates)) and not has_waited(candidates)


def has_waited(candidates: Sequence[Candidate]) -> bool:
    """Return whether a candidate over the limit waited for a CPU: its own p99 is not known."""
    curves = [curve_of(candidate) for candidate in _over_limit(candidates)]
    return any(curve and curve.nearest.has_waited for curve in curves)


def _over_limit(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.state == "over the limit"]


def _missing_proof(
    winner: Candidate, validation: ValidationReport | None, baseline: Baseline
) -> _Missing:
    reasons, steps = [], []
    curve = curve_of(winner)
    if over := curve and curve.over_limit():
        reasons.append(over)
        steps.append(MEASURE_LOAD_AGAIN)
    if ratio_of(winner) is None and not _is_over_limit(baseline):
        reasons.append(f"not measurable: {ratio_missing(winner)}")
        steps.append(MEASURE_AGAIN if curve is None else MEASURE_LOAD_AGAIN)
    if validation is None or validation.role != "validation":
        has_metric = winner.selection is not None and winner.selection.metric is not None
        reasons.append(SELECTION_ONLY if has_metric else NO_DATA)
        steps.append("give data.selection and data.validation in the plan")
    return _Missing(tuple(reasons), tuple(steps))


def _why_kept(best: Candidate, baseline: Baseline) -> tuple[str, ...]:
    ratio = ratio_of(best)
    assert ratio is not None
    comparison = "is slower" if ratio.high < 1.0 else "is not measurably faster"
    reasons = [
        f"no candidate that kept its accuracy is faster than {baseline.label}",
        (
            f"the fastest of them, {best.title}, {comparison}: {ratio.value:.2f} times"
            f" {_unit(best)} (95 % {ratio.low:.2f} to {ratio.high:.2f})"
        ),
        *_best_points(best, baseline),
    ]
    return (*reasons, *_how_kept(baseline))


def _how_kept(baseline: Baseline) -> tuple[str, ...]:
    """Return how a baseline that is kept is called and delivered."""
    reasons = []
    if baseline.call:
        reasons.append(f"{baseline.label} is the call `{baseline.call}`")
    if baseline.undelivered:
        reasons.append(
            f"the baseline could not be delivered as an engine, because {baseline.undelivered}"
        )
    else:
        reasons.append("the baseline is delivered as an engine")
    return tuple(reasons)


def _why_alone(candidates: Sequence[Candidate], baseline: Baseline) -> tuple[str, ...]:
    """Return the reasons to keep a baseline that alone is within the limit."""
    best = baseline.load.best if baseline.load else None
    assert best is not None
    within = f"only {baseline.label} is within the limit: {best.in_words()}"
    return (within, *_why_none(candidates), *_how_kept(baseline))


def _unit(candidate: Candidate) -> str:
    return "as fast" if curve_of(candidate) is None else "the throughput"


def _best_points(candidate: Candidate, baseline: Baseline) -> tuple[str, ...]:
    """Describe the best points of a candidate and the baseline under load."""
    curve = curve_of(candidate)
    if curve is None or curve.best is None:
        return ()
    limit = "" if curve.limit_s is None else f" within {time_text(curve.limit_s)}"
    points = [f"best point{limit}: {curve.best.in_words()}"]
    if curve.untried:
        points.append(f"not tried: {'; '.join(curve.untried)}")
    if baseline.load and baseline.load.best:
        points.append(f"best point of {baseline.label}: {baseline.load.best.in_words()}")
    elif baseline.load:
        points.append(f"{baseline.label}: {baseline.load.why_over_limit()}")
    return tuple(points)


def _is_over_limit(baseline: Baseline) -> bool:
    """Return True if the baseline has no point within the limit: there is no ratio to it."""
    return baseline.load is not None and baseline.load.best is None


def why_undelivered(kept: Candidate | None) -> str:
    """Return why a baseline cannot be delivered; empty if it can. `kept`: its deliverable form."""
    if kept is None:
        return "no engine was built from it"
    return "" if kept.engine else f"{kept.title} {kept.state}: {kept.reason}"


def _why_right(winner: Candidate, validation: ValidationReport | None) -> tuple[str, ...]:
    metric = validation.metric if validation and validation.role == "validation" else None
    if metric is None or validation is None:
        return ()
    return (
        (
            f"{metric.name} {metric.candidate:.4f} against {metric.reference:.4f} on"
            f" {validation.samples} validation samples: drop {metric.drop:+.4f} (95 %"
            f" {metric.interval.low:+.4f} to {metric.interval.high:+.4f}), limit"
            f" {metric.max_drop:g}"
        ),
    )


def _why_fast(winner: Candidate, baseline: Baseline) -> tuple[str, ...]:
    ratio, points = ratio_of(winner), _best_points(winner, baseline)
    if ratio is None:
        return points
    unit = "as fast as" if curve_of(winner) is None else "the throughput of"
    return (
        (f"{ratio.value:.2f} times {unit} the baseline (95 % {ratio.low:.2f} to {ratio.high:.2f})"),
        *points,
    )


def _why_chosen(candidates: Sequence[Candidate], winner: Candidate) -> tuple[str, ...]:
    """Return why the winner was chosen among equally fast candidates; empty if it is alone."""
    others = [candidate for candidate in contenders(candidates) if candidate is not winner]
    if not others:
        return ()
    drop, negative_cosine = loss(winner)
    losses = [loss(candidate) for candidate in others]
    if (drop, negative_cosine) in losses:
        advantage = "none is more accurate, and it comes first in the plan"
    elif drop in [other_drop for other_drop, _ in losses]:
        advantage = f"it has the highest cosine, {-negative_cosine:.5f}"
    else:
        advantage = f"it has the smallest drop on the selection set, {drop:+.4f}"
    titles = ", ".join(candidate.title for candidate in others)
    return (
        (
            f"of {len(others) + 1} candidates whose speeds cannot be told apart {advantage}; the"
            f" others: {titles}"
        ),
    )


def _why_none(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    if not candidates:
        return ("no candidate can be built and run on this host",)
    return tuple(
        f"{candidate.title}: {candidate.state}: {candidate.reason}" for candidate in candidates
    )


def _nearest_miss(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the accurate candidate that is nearest to the limit of the objective.

    Without one, it is the most accurate candidate of those that failed their accuracy.
    """
    if over := _over_limit(candidates):
        return min(over, key=_nearest_s)
    return min(
        (
            candidate
            for candidate in candidates
            if candidate.state == "failed accuracy" and candidate.selection
        ),
        key=loss,
        default=None,
    )


def _nearest_s(candidate: Candidate) -> float:
    curve = curve_of(candidate)
    return curve.nearest.p99_s or curve.nearest.p50_s if curve else math.inf
