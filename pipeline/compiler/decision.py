"""Choose the winner and the verdict. Pure: candidates and validations in, a decision out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from pipeline.benchmark.elimination import NEAR
from pipeline.compiler.speed import (
    curve_of,
    is_faster,
    is_slower_or_equal,
    level_s,
    ratio_missing,
    ratio_of,
    speed_ratio,
)
from pipeline.core import CalibrationMethod, NoteCode, Precision, Recipe
from pipeline.formatting import time_text
from pipeline.results.accuracy import DataFault, ValidationReport
from pipeline.results.benchmarks import LoadCurve
from pipeline.results.candidates import Candidate, Origin
from pipeline.results.report import Verdict

MIN_BLOCK = 32  # weights that share a scale
NO_DATA = "no data: accuracy not proven"
SELECTION_ONLY = "no validation set: accuracy was checked on the selection set only"
TRAIN_IN_16_BITS = (
    "train or fine-tune the model in fp16 or bf16 (mixed precision), then export it again"
)
FIX_LABELS = (
    "check that the labels belong to these samples, row by row, and that the weights are trained:"
    " a reference at chance level proves nothing about an engine"
)
FIX_CALIBRATION = (
    "calibrate on samples of the same kind as those of the selection set, prepared in the same way"
    " (scale, mean, colour order, tokens)"
)
FIXES = {DataFault.LABELS: FIX_LABELS, DataFault.CALIBRATION: FIX_CALIBRATION}
KEEP_WORST = "the worst layers unquantised: `keep_fp32: auto`"
AFTER_INT8 = (
    "bf16 or fp16 instead of int8",
    "quantisation-aware training, then compile the Q/DQ model",
)
FIND_LAYERS = "see the layer table of the report: it names the layers in another precision"
SEE_LAYERS = f"{FIND_LAYERS}; call the candidate by that precision, or leave it out"
QUANTISE_MORE = (
    "run more of the model in 8 bits: `placement: {last_layer: true}`, fewer nodes in `keep_fp32`,"
    " and on onnxruntime `activation: uint8`"
)
FIX_PAIRS = (
    "run `crucible lint MODEL --backend {backend} --fix OUT.onnx`: it lists the Q/DQ that prevent 8"
    " bits and fixes those with an exact fix; then compile OUT.onnx"
)
SEVEN_BITS = (
    "use a CPU with VNNI or AMX, or train with weights limited to 7 bits (-64 to 63, with twice the"
    " scale)"
)

MEASURE_AGAIN = "measure again on an idle host: `crucible bench DIR --set benchmark.budget_s=120`"
MEASURE_LOAD_AGAIN = (
    "compile again on an idle host, with a larger `benchmark.budget_s`: what is built is reused"
)
RAISE_LIMIT = "raise `objective.max_latency_ms`, or give other candidates or smaller batches"
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
        return Decision(
            "rejected", None, _why_none(candidates), _after_none(candidates, miss), miss
        )
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


def _after_none(candidates: Sequence[Candidate], miss: Candidate | None) -> tuple[str, ...]:
    """Return the next steps if there is no winner.

    The layers of a mislabelled engine come first, because they tell more than a near miss.
    """
    mismatches = [candidate.recipe for candidate in candidates if candidate.state == "mislabelled"]
    if mismatches:
        return (*_after_mislabelled(mismatches), *(next_steps(miss) if miss else ()))
    reports = [candidate.selection for candidate in candidates if candidate.selection]
    faults = set(chain.from_iterable(report.data_faults for report in reports))
    if DataFault.LABELS in faults:  # the data is at fault, not an engine
        return fix_data(faults)
    if miss and miss.state == "over the limit":
        return (RAISE_LIMIT,)
    in_16_bits = [
        candidate
        for candidate in candidates
        if candidate.recipe.precision in (Precision.FP16, Precision.BF16)
    ]
    steps = next_steps(miss)
    if miss in in_16_bits and any(each.origin is Origin.FALLBACK for each in in_16_bits):
        steps = (TRAIN_IN_16_BITS,)  # a rescue has tried all other steps already
    return (*fix_data(faults), *steps)


def _after_mislabelled(recipes: Sequence[Recipe]) -> tuple[str, ...]:
    """Return the next steps for engines that do not run the precision of their label.

    A model with its own Q/DQ has no other label and no placement to choose.
    """
    backends = dict.fromkeys(recipe.backend for recipe in recipes if recipe.quantizer == "given")
    if backends:
        return (FIND_LAYERS, *(FIX_PAIRS.format(backend=backend) for backend in backends))
    if any(recipe.precision is Precision.INT8 for recipe in recipes):
        return SEE_LAYERS, QUANTISE_MORE
    return (SEE_LAYERS,)


def fix_data(faults: Collection[DataFault]) -> tuple[str, ...]:
    """Return the next steps for faulty data, in the order of FIXES."""
    return tuple(advice for fault, advice in FIXES.items() if fault in faults)


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


def _other_ranges(recipe: Recipe) -> list[str]:
    """Return the settings of an int8 or fp8 recipe that are worth a change.

    Left out are those that its quantizer decides by itself, and those that were tried already.
    """
    steps = []
    if recipe.method is not None and not recipe.try_methods:
        method = "percentile" if recipe.method is CalibrationMethod.MINMAX else "minmax"
        steps.append(f"another calibration method: `method: {method}`")
    own = recipe.quantizer == "crucible" and recipe.realised_in == "graph"
    if own and not recipe.keep_worst:
        steps.append(KEEP_WORST)
    if own and recipe.activation == "uint8" and recipe.weight_bits == 8:
        steps.append("7-bit weights: `weight_bits: 7`")
    return steps


def next_steps(miss: Candidate | None) -> tuple[str, ...]:
    """Return the next steps after this failure, cheapest first."""
    if miss is None:
        return (
            (
                "run `crucible doctor` to see what this host can build, and `crucible inspect MODEL"
                " --backend B` for unsupported nodes"
            ),
        )
    recipe = miss.recipe
    if recipe.quantizer == "given":
        return _after_own_qdq(miss)
    if recipe.weight_only:
        return _after_weight_only(recipe)
    if recipe.precision in (Precision.INT8, Precision.FP8):
        return (*_other_ranges(recipe), *AFTER_INT8)
    if recipe.precision in (Precision.FP16, Precision.BF16):
        return (
            "keep the overflowing nodes in fp32: `keep_fp32: [NODE]`",
            "bf16 instead of fp16, or fp32",
            TRAIN_IN_16_BITS,
        )
    return (
        (
            "check the export: compare `crucible inspect` before and after simplification, or set"
            " `simplify.enabled: false`"
        ),
    )


def _after_own_qdq(miss: Candidate) -> tuple[str, ...]:
    steps = [
        (
            f"run `crucible lint MODEL --backend {miss.recipe.backend}`: it lists the model's own"
            " Q/DQ that do not suit this backend"
        ),
        "train longer with Q/DQ",
    ]
    if any(note.code is NoteCode.SATURATES for note in miss.notes):
        steps.insert(0, SEVEN_BITS)
    return tuple(steps)


def _after_weight_only(recipe: Recipe) -> tuple[str, ...]:
    steps = ["keep the worst or the last layer unquantised: `keep_fp32: [NODE]`"]
    if recipe.block_size > MIN_BLOCK:
        steps.insert(0, f"smaller blocks: `block_size: {recipe.block_size // 2}`")
    if recipe.precision is Precision.INT4:
        steps.append("8 bits instead of 4: `precision: int8, weight_only: true`")
    return tuple(steps)
