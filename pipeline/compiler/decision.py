"""Which candidate wins, and what may be said about it. Pure: candidates and validations in, a
decision out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.accuracy.metrics import AT_CHANCE, NOT_COVERED
from pipeline.benchmark.elimination import NEAR
from pipeline.core import Precision, Recipe
from pipeline.measurement.comparison import NotMeasurable, compare, processes_from_samples
from pipeline.measurement.measure import Interval
from pipeline.quantization.lint.rules import SATURATES
from pipeline.results.report import Candidate, LatencyRow, ValidationReport, Verdict

MIN_BLOCK = 32  # of weights that share a scale
NO_DATA = "no data: accuracy not proven"
SELECTION_ONLY = "no validation set: accuracy seen on the selection set only"
TRAIN_IN_16_BITS = (
    "train or fine-tune the model in fp16 or bf16 (mixed precision), then export it again"
)
MEND_LABELS = (
    "check that the labels belong to these samples, row by row, and that the weights are trained:"
    " no engine can be judged against chance"
)
MEND_CALIBRATION = (
    "calibrate on samples of the same kind as those of the selection set, prepared in the same way"
    " (scale, mean, colour order, tokens)"
)
KEEP_WORST = "the worst layers unquantised: `keep_fp32: auto`"
AFTER_INT8 = (
    "bf16 or fp16 instead of int8",
    "quantisation-aware training, then compile the Q/DQ model",
)
FIND_LAYERS = "see the table of what really ran: it names the layers in another precision"
SEE_LAYERS = f"{FIND_LAYERS}; call the candidate by that precision, or leave it out"
QUANTISE_MORE = (
    "let more of it run in 8 bits: `placement: {last_layer: true}`, fewer nodes in `keep_fp32`, and"
    " on onnxruntime `activation: uint8`"
)
MEND_PAIRS = (
    "`crucible lint MODEL --backend {backend} --fix OUT.onnx`: which of its Q/DQ keep it out of 8"
    " bits, mended if exact; compile OUT.onnx"
)
SEVEN_BITS = (
    "a CPU with VNNI or AMX; or training with weights that keep to 7 bits (-64 to 63, of twice the"
    " scale)"
)

MEASURE_AGAIN = "measure again in a quiet hour: `crucible bench DIR --set benchmark.budget_s=120`"
NO_BASELINE = "the baseline could not be measured"
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
    """What the user has today, for the sentences of a verdict."""

    label: str = "the baseline"
    call: str = ""  # how a PyTorch module is called to be as fast; empty for any other
    is_delivered: bool = True  # with `keep`, as an engine


def first_row(candidate: Candidate) -> LatencyRow | None:
    """The row that decides about speed: the first benchmarked shape."""
    return candidate.benchmark.rows[0] if candidate.benchmark and candidate.benchmark.rows else None


def ratio_of(candidate: Candidate) -> Interval | None:
    """Baseline median over the candidate's, at the first benchmarked shape."""
    row = first_row(candidate)
    return row.ratio if row else None


def ratio_missing(candidate: Candidate) -> str:
    """Why a candidate has no ratio to the baseline; empty where it has one."""
    if ratio_of(candidate) is not None:
        return ""
    row = first_row(candidate)
    return (row.ratio_missing if row else "") or NO_BASELINE


def is_faster(candidate: Candidate) -> bool:
    """Whether a candidate is measurably faster than the baseline."""
    ratio = ratio_of(candidate)
    return ratio is not None and ratio.low > 1.0


def is_slower_or_equal(candidate: Candidate) -> bool:
    """Whether a candidate was compared with the baseline and is not measurably faster."""
    return ratio_of(candidate) is not None and not is_faster(candidate)


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that kept its accuracy on the selection set; of those whose speed
    cannot be told from its own, the most accurate.
    """
    return min(contenders(candidates), key=loss, default=None)


def contenders(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The fastest that kept its accuracy, and those whose speed cannot be told from its own, in the
    order of the plan.

    Where some are measurably faster than the baseline, only those count. All are held against the
    fastest and not against each other, so that no chain of small differences leads to a slow one.
    """
    accurate = [candidate for candidate in candidates if candidate.state == "measured"]
    fit = [candidate for candidate in accurate if is_faster(candidate)] or accurate
    fastest = min(fit, key=level_s, default=None)
    return tuple(
        candidate
        for candidate in fit
        if fastest and (candidate is fastest or _is_as_fast(candidate, fastest))
    )


def level_s(candidate: Candidate) -> float:
    """The median of a candidate's undisturbed processes at the first shape; infinite where it was
    not measured.
    """
    row = first_row(candidate)
    return processes_from_samples(row.end_to_end).level_s if row else math.inf


def _is_as_fast(candidate: Candidate, fastest: Candidate) -> bool:
    ratio = speed_ratio(fastest, candidate)
    if ratio is None:  # too few processes, or a busy host: only the medians are known
        return level_s(candidate) < NEAR * level_s(fastest)
    same_work = _without_ranges(candidate) == _without_ranges(fastest)
    return not ratio.excludes(1.0) and (same_work or ratio.value > 1 / NEAR)


def _without_ranges(candidate: Candidate) -> Recipe:
    """The recipe but for how ranges are chosen: the same graph with other scales, which run as
    fast.
    """
    return candidate.recipe.model_copy(update={"method": None})


def speed_ratio(base: Candidate, other: Candidate) -> Interval | None:
    """The median of `base` over that of `other` at the first benchmarked shape; None where this
    cannot be told.

    Both ran in the same race, so this is narrower than what their ratios to the baseline tell: the
    baseline's own noise is not in it.
    """
    rows = first_row(base), first_row(other)
    if rows[0] is None or rows[1] is None:
        return None
    try:
        return compare(rows[0].end_to_end, rows[1].end_to_end)
    except NotMeasurable:
        return None


def loss(candidate: Candidate) -> tuple[float, float]:
    """What is lost on the selection set, the smaller the better: the drop of the metric, then what
    the smallest cosine lacks.
    """
    report = candidate.selection
    drop = report.metric.drop if report and report.metric else 0.0
    return (
        (math.inf, 1.0)
        if report is None
        else (drop, -min((output.cosine for output in report.outputs), default=-1.0))
    )


def decide(
    candidates: Sequence[Candidate],
    winner: Candidate | None,
    validation: ValidationReport | None,
    baseline: Baseline = Baseline(),
) -> Decision:
    """What may be said of the winner that `choose` found, or of its absence.

    accepted   measurably faster than the baseline, and proven on the validation set
    keep       compared with the baseline, and not measurably faster: what the user has stays
    unproven   there was no data to prove it on, or the host could not tell how fast it is
    rejected   it failed on the validation set, or no candidate kept its accuracy
    """
    if winner is None:
        miss = _nearest_miss(candidates)
        return Decision(
            "rejected", None, _why_none(candidates), _after_none(candidates, miss), miss
        )
    if is_slower_or_equal(winner):
        return Decision("keep", winner, _why_kept(winner, baseline), (OTHER_CANDIDATES,))
    if validation is not None and not validation.passed:
        reasons = tuple(f"validation: {failure}" for failure in validation.failures)
        return Decision(
            "rejected", winner, reasons, (*mend_data(reasons), *next_steps(winner)), winner
        )
    missing = _missing_proof(winner, validation)
    reasons = (
        *_why_right(winner, validation),
        *_why_fast(winner),
        *_why_chosen(candidates, winner),
    )
    if missing:
        return Decision("unproven", winner, (*missing.reasons, *reasons), missing.next_steps)
    return Decision("accepted", winner, reasons)


@dataclass(frozen=True, slots=True)
class _Missing:
    """What a verdict lacks to be more than `unproven`."""

    reasons: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasons)


def _missing_proof(winner: Candidate, validation: ValidationReport | None) -> _Missing:
    reasons, steps = [], []
    if ratio_of(winner) is None:
        reasons.append(f"not measurable: {ratio_missing(winner)}")
        steps.append(MEASURE_AGAIN)
    if validation is None or validation.role != "validation":
        has_metric = winner.selection is not None and winner.selection.metric is not None
        reasons.append(SELECTION_ONLY if has_metric else NO_DATA)
        steps.append("give data.selection and data.validation in the plan")
    return _Missing(tuple(reasons), tuple(steps))


def _why_kept(best: Candidate, baseline: Baseline) -> tuple[str, ...]:
    ratio = ratio_of(best)
    assert ratio is not None
    slower = "is slower" if ratio.high < 1.0 else "is not measurably faster"
    called = (f"{baseline.label} is the call `{baseline.call}`",) if baseline.call else ()
    if baseline.is_delivered:
        delivered = "what you have is delivered as an engine"
    else:
        delivered = "what you have could not be delivered as an engine: go on as you do"
    return (
        f"no candidate that kept its accuracy is faster than {baseline.label}",
        (
            f"the fastest of them, {best.title}, {slower}: {ratio.value:.2f} times as fast (95 %"
            f" {ratio.low:.2f} to {ratio.high:.2f})"
        ),
        *called,
        delivered,
    )


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


def _why_fast(winner: Candidate) -> tuple[str, ...]:
    ratio = ratio_of(winner)
    if ratio is None:
        return ()
    return (
        (
            f"{ratio.value:.2f} times as fast as the baseline (95 % {ratio.low:.2f} to"
            f" {ratio.high:.2f})"
        ),
    )


def _why_chosen(candidates: Sequence[Candidate], winner: Candidate) -> tuple[str, ...]:
    """Why this one of several that are equally fast; empty where there is no other."""
    others = [candidate for candidate in contenders(candidates) if candidate is not winner]
    if not others:
        return ()
    (drop, cosine), losses = loss(winner), [loss(candidate) for candidate in others]
    if any(each == (drop, cosine) for each in losses):
        better = "none is more accurate, and it comes first in the plan"
    elif any(each[0] == drop for each in losses):
        better = f"it has the highest cosine, {-cosine:.5f}"
    else:
        better = f"it has the smallest drop on the selection set, {drop:+.4f}"
    return (
        (
            f"of {len(others) + 1} candidates whose speeds cannot be told apart {better}; the"
            f" others: {', '.join(each.title for each in others)}"
        ),
    )


def _why_none(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    if not candidates:
        return ("no candidate can be built and run on this host",)
    return tuple(
        f"{candidate.title}: {candidate.state}: {candidate.reason}" for candidate in candidates
    )


def _after_none(candidates: Sequence[Candidate], miss: Candidate | None) -> tuple[str, ...]:
    """What to try where nothing is left: a mislabelled engine is no near miss, its layers tell
    more.
    """
    if wrong := [candidate for candidate in candidates if candidate.state == "mislabelled"]:
        return (
            *_after_mislabelled([candidate.recipe for candidate in wrong]),
            *(next_steps(miss) if miss else ()),
        )
    mend = mend_data([candidate.reason for candidate in candidates])
    if MEND_LABELS in mend:  # no engine is at fault
        return mend
    # all else was tried already
    rescued = any(candidate.recipe.variant for candidate in candidates)
    in_16_bits = miss is not None and miss.recipe.precision in (Precision.FP16, Precision.BF16)
    steps = (TRAIN_IN_16_BITS,) if rescued and in_16_bits else next_steps(miss)
    return (*mend, *(step for step in steps if not (rescued and step == KEEP_WORST)))


def _after_mislabelled(wrong: Sequence[Recipe]) -> tuple[str, ...]:
    """What to do about engines that do not run what they are called by. A model's own Q/DQ leave no
    other name and no placement to choose.
    """
    if given := dict.fromkeys(recipe.backend for recipe in wrong if recipe.quantizer == "given"):
        return (FIND_LAYERS, *(MEND_PAIRS.format(backend=backend) for backend in given))
    return (
        SEE_LAYERS,
        *((QUANTISE_MORE,) if any(recipe.precision is Precision.INT8 for recipe in wrong) else ()),
    )


def mend_data(reasons: Sequence[str]) -> tuple[str, ...]:
    """What to do about the data, where a reason lies there: labels or calibration samples that do
    not belong to the rest.
    """
    faults = {AT_CHANCE: MEND_LABELS, NOT_COVERED: MEND_CALIBRATION}
    return tuple(
        advice for fault, advice in faults.items() if any(fault in reason for reason in reasons)
    )


def _nearest_miss(candidates: Sequence[Candidate]) -> Candidate | None:
    """Of those that failed their accuracy, the one that lost least."""
    return min(
        (
            candidate
            for candidate in candidates
            if candidate.state == "failed accuracy" and candidate.selection
        ),
        key=loss,
        default=None,
    )


def _other_ranges(recipe: Recipe) -> list[str]:
    """What may be changed of an int8 or fp8 recipe: what its quantizer does not decide by itself,
    and what was not tried.
    """
    steps = []
    if recipe.method is not None and not recipe.try_methods:
        steps.append(
            "another calibration method: `method:"
            f" {'percentile' if str(recipe.method) == 'minmax' else 'minmax'}`"
        )
    own = recipe.quantizer == "crucible" and recipe.realised_in == "graph"
    if own and not recipe.keep_worst:
        steps.append(KEEP_WORST)
    if own and recipe.activation == "uint8" and recipe.weight_bits == 8:
        steps.append("7-bit weights: `weight_bits: 7`")
    return steps


def next_steps(miss: Candidate | None) -> tuple[str, ...]:
    """What experience says to try after this failure, cheapest first."""
    if miss is None:
        return (
            (
                "run `crucible doctor` to see what this host can build, and `crucible inspect MODEL"
                " --backend B` for unsupported nodes"
            ),
        )
    recipe = miss.recipe
    if recipe.quantizer == "given":
        saturates = any(SATURATES in note.text for note in miss.notes)
        return (
            *((SEVEN_BITS,) if saturates else ()),
            (
                f"`crucible lint MODEL --backend {recipe.backend}`: what of the model's own Q/DQ"
                " does not suit this backend"
            ),
            "more training with Q/DQ",
        )
    if recipe.weight_only:
        smaller = (
            (f"smaller blocks: `block_size: {recipe.block_size // 2}`",)
            if recipe.block_size > MIN_BLOCK
            else ()
        )
        wider = (
            ("8 bits instead of 4: `precision: int8, weight_only: true`",)
            if recipe.precision is Precision.INT4
            else ()
        )
        return (*smaller, "the worst or the last layer as it is: `keep_fp32: [NODE]`", *wider)
    if recipe.precision in (Precision.INT8, Precision.FP8):
        return (*_other_ranges(recipe), *AFTER_INT8)
    if recipe.precision in (Precision.FP16, Precision.BF16):
        return (
            "the overflowing nodes in fp32: `keep_fp32: [NODE]`",
            "bf16 instead of fp16, or fp32",
            TRAIN_IN_16_BITS,
        )
    return (
        (
            "check the export: compare `crucible inspect` before and after simplification, or set"
            " `simplify.enabled: false`"
        ),
    )
