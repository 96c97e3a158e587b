"""The verdict, from made-up evidence."""

import math

import pytest

from pipeline.compiler.candidates.fallback import keeping
from pipeline.compiler.decision import (
    DELIVER_BASELINE,
    MEASURE_AGAIN,
    OTHER_CANDIDATES,
    Baseline,
    choose,
    contenders,
    decide,
)
from pipeline.compiler.next_steps import (
    FIX_CALIBRATION,
    FIX_LABELS,
    KEEP_WORST,
    QUANTISE_MORE,
    SEE_LAYERS,
    SEVEN_BITS,
    TRAIN_IN_16_BITS,
    next_steps,
)
from pipeline.compiler.speed import ratio_missing, speed_ratio
from pipeline.core.artifacts import Note, NoteCode
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from pipeline.results.accuracy import DataFault, MetricResult, OutputError, ValidationReport
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow
from pipeline.results.candidates import Candidate, Origin, State

ONE = Samples(values_s=(0.001,) * 10)
BASELINE_S = 0.004


def row(ratio: float, low: float | None = None, high: float | None = None) -> LatencyRow:
    """An engine that is so many times as fast as a baseline of 4 ms."""
    samples = Samples(values_s=(BASELINE_S / ratio,) * 4, blocks=(1,) * 4, processes=(1,) * 4)
    interval = Interval(
        value=ratio,
        low=low if low is not None else ratio * 0.99,
        high=high if high is not None else ratio * 1.01,
    )
    return LatencyRow(
        sizes={},
        end_to_end=samples,
        upload=ONE,
        compute=ONE,
        download=ONE,
        throughput_per_s=1,
        flops_per_s=None,
        bytes_per_s=None,
        ratio=interval,
    )


def validation(
    drop: float, role: str = "validation", failures: tuple[str, ...] = ()
) -> ValidationReport:
    interval = Interval(value=drop, low=drop, high=drop)
    metric = MetricResult(
        name="top1",
        reference=0.99,
        candidate=0.99 - drop,
        drop=drop,
        interval=interval,
        max_drop=0.01,
        passed=not failures,
    )
    output = OutputError(
        output="y",
        max_abs=0,
        mean_abs=0,
        max_rel=0,
        cosine=1,
        snr_db=90,
        nan=0,
        inf=0,
        worst_sample=0,
        passed=True,
    )
    return ValidationReport.model_validate(
        {
            "role": role,
            "set_digest": "d",
            "samples": 300,
            "outputs": [output],
            "metric": metric if role != "generated" else None,
            "failures": failures,
        }
    )


def candidate(
    backend: str,
    ratio: float,
    state: State = "measured",
    drop: float = 0.0,
    precision: Precision = Precision.FP32,
) -> Candidate:
    recipe = Recipe(
        backend=backend,
        precision=precision,
        method=CalibrationMethod.ENTROPY if precision is Precision.INT8 else None,
    )
    failures = ("top1 dropped",) if state == "failed accuracy" else ()
    return Candidate(
        label=backend,
        recipe=recipe,
        state=state,
        reason="; ".join(failures),
        selection=validation(drop, "selection", failures),
        benchmark=BenchmarkReport(label=backend, rows=(row(ratio),)),
    )


def in_three_processes(candidate: Candidate) -> Candidate:
    """The same, measured in too few processes for a ratio."""
    assert candidate.benchmark is not None
    (row,) = candidate.benchmark.rows
    samples = Samples(values_s=row.end_to_end.values_s[:3], blocks=(1,) * 3, processes=(1,) * 3)
    few = row.model_copy(update={"end_to_end": samples, "ratio": None})
    report = candidate.benchmark.model_copy(update={"rows": (few,)})
    return candidate.model_copy(update={"benchmark": report})


def test_the_fastest_that_kept_its_accuracy_is_chosen() -> None:
    candidates = [
        candidate("a", 2.0),
        candidate("b", 3.0),
        candidate("c", 9.0, "failed accuracy", 0.5),
    ]
    winner = choose(candidates)
    assert winner is not None
    assert winner.label == "b"


def test_where_no_ratio_is_known_the_more_accurate_of_two_near_medians_is_chosen() -> None:
    """Seen on a GPU: an int8 engine was chosen for 0.2 %, and then failed on the validation set."""
    near = in_three_processes(candidate("near", 3.0))
    far = in_three_processes(candidate("far", 2.8))
    fastest = in_three_processes(candidate("fastest", 3.1, drop=0.005))
    assert speed_ratio(fastest, near) is None
    assert choose([near, fastest, far]) is near
    assert contenders([near, fastest, far]) == (near, fastest)


def test_nothing_is_chosen_where_nothing_passed() -> None:
    assert choose([candidate("c", 9.0, "failed accuracy", 0.5)]) is None
    assert choose([]) is None


def test_a_winner_that_holds_on_the_validation_set_is_accepted_with_its_numbers() -> None:
    winner = candidate("a", 2.0)
    decision = decide([winner], winner, validation(0.002))
    assert decision.verdict == "accepted"
    assert "drop +0.0020" in decision.reasons[0]
    assert "2.00 times as fast" in decision.reasons[1]


def test_a_ratio_whose_interval_holds_one_is_not_called_faster() -> None:
    winner = candidate("a", 1.02).model_copy(
        update={"benchmark": BenchmarkReport(label="a", rows=(row(1.02, 0.97, 1.06),))}
    )
    decision = decide([winner], winner, None, Baseline("pytorch eager fp32"))
    assert decision.verdict == "keep"
    assert decision.winner is winner, "the fastest of those that lost"
    assert decision.reasons[:2] == (
        "no candidate that kept its accuracy is faster than pytorch eager fp32",
        "the fastest of them, a, is not measurably faster: 1.02 times as fast (95 % 0.97 to 1.06)",
    )
    assert decision.next_steps == (OTHER_CANDIDATES,)


def test_a_winner_that_is_slower_than_the_baseline_is_none() -> None:
    """What an H200 said of small models: ACCEPTED, at 0.66 (0.52 to 0.85) times the speed of the
    baseline.
    """
    slower = candidate("a", 0.66).model_copy(
        update={"benchmark": BenchmarkReport(label="a", rows=(row(0.66, 0.52, 0.85),))}
    )
    decision = decide(
        [slower], choose([slower]), validation(0.0), Baseline("tensorrt as given tf32")
    )
    assert decision.verdict == "keep"
    assert "a, is slower: 0.66 times as fast (95 % 0.52 to 0.85)" in decision.reasons[1]


@pytest.mark.parametrize("undelivered", ["", "torch exported fp16 failed: it was not exported"])
def test_what_is_kept_is_named_as_it_is_called_and_why_it_is_not_delivered(
    undelivered: str,
) -> None:
    slower = candidate("a", 0.66).model_copy(
        update={"benchmark": BenchmarkReport(label="a", rows=(row(0.66, 0.52, 0.85),))},
    )
    baseline = Baseline("pytorch compile fp16", "torch.compile(module.half())", undelivered)
    decision = decide([slower], slower, None, baseline)
    assert "pytorch compile fp16 is the call `torch.compile(module.half())`" in decision.reasons
    failure = f"the baseline could not be delivered as an engine, because {undelivered}"
    assert decision.reasons[-1] == (
        failure if undelivered else "the baseline is delivered as an engine"
    )
    assert (DELIVER_BASELINE in decision.next_steps) is bool(undelivered)


def test_where_the_host_cannot_tell_the_verdict_is_unproven_with_the_reason() -> None:
    busy = (
        "this host is too busy to tell: load 4.1 on 2 cores; the slowest process took 340 times as"
        " long as the fastest"
    )
    measured = row(1.0).model_copy(update={"ratio": None, "ratio_missing": busy})
    winner = candidate("a", 1.0).model_copy(
        update={"benchmark": BenchmarkReport(label="a", rows=(measured,))}
    )
    decision = decide([winner], winner, validation(0.002))
    assert decision.verdict == "unproven"
    assert decision.reasons[0] == f"not measurable: {busy}"
    assert "drop +0.0020" in decision.reasons[1], "its accuracy is proven all the same"
    assert decision.next_steps == (MEASURE_AGAIN,)
    assert ratio_missing(winner) == busy


def test_without_figures_of_the_baseline_the_verdict_is_unproven() -> None:
    measured = row(1.0).model_copy(update={"ratio": None})
    winner = candidate("a", 1.0).model_copy(
        update={"benchmark": BenchmarkReport(label="a", rows=(measured,))}
    )
    assert (
        decide([winner], winner, validation(0.0)).reasons[0]
        == "not measurable: the baseline could not be measured"
    )


def test_a_measurably_faster_candidate_is_taken_before_one_that_only_may_be() -> None:
    doubtful = candidate("doubtful", 1.3).model_copy(
        update={"benchmark": BenchmarkReport(label="d", rows=(row(1.3, 0.9, 1.9),))}
    )
    certain = candidate("certain", 1.2)
    assert choose([doubtful, certain]) == certain
    assert choose([doubtful]) == doubtful


def test_a_winner_that_fails_on_the_validation_set_is_rejected_with_what_to_try() -> None:
    winner = candidate("a", 2.0, precision=Precision.INT8)
    decision = decide(
        [winner], winner, validation(0.05, failures=("top1 dropped by 0.05, limit 0.01",))
    )
    assert decision.verdict == "rejected"
    assert decision.nearest_miss is winner
    assert "validation: top1 dropped by 0.05" in decision.reasons[0]
    assert "minmax" in decision.next_steps[0]


def test_without_data_the_verdict_is_unproven() -> None:
    winner = candidate("a", 2.0).model_copy(update={"selection": validation(0, "generated")})
    decision = decide([winner], winner, None)
    assert decision.verdict == "unproven"
    assert decision.reasons == (
        "no data: accuracy not proven",
        "2.00 times as fast as the baseline (95 % 1.98 to 2.02)",
    )


def test_without_a_validation_set_the_verdict_is_unproven_and_says_what_was_seen() -> None:
    winner = candidate("a", 2.0)
    assert "selection set only" in decide([winner], winner, None).reasons[0]


def test_the_nearest_miss_has_the_smallest_drop() -> None:
    candidates = [
        candidate("far", 9.0, "failed accuracy", 0.5),
        candidate("near", 2.0, "failed accuracy", 0.02),
    ]
    decision = decide(candidates, None, None)
    assert decision.verdict == "rejected"
    assert decision.nearest_miss is candidates[1]
    assert len(decision.reasons) == 2


def test_mislabelled_engines_are_rejected_and_are_no_near_miss() -> None:
    wrong = candidate("a", 2.0, "mislabelled").model_copy(
        update={"reason": "called fp16, but its heavy layers run 0 % fp16", "selection": None}
    )
    assert choose([wrong]) is None
    decision = decide([wrong], None, None)
    assert (decision.verdict, decision.winner, decision.nearest_miss) == ("rejected", None, None)
    assert decision.reasons == ("a: mislabelled: called fp16, but its heavy layers run 0 % fp16",)
    assert decision.next_steps == (SEE_LAYERS,)
    int8 = candidate("b", 2.0, "mislabelled", precision=Precision.INT8)
    assert decide([wrong, int8], None, None).next_steps == (SEE_LAYERS, QUANTISE_MORE)


def test_where_a_models_own_pairs_are_not_run_the_next_step_is_to_mend_them() -> None:
    wrong = candidate("a", 2.0, "mislabelled", precision=Precision.INT8)
    candidates = [
        wrong.model_copy(
            update={
                "recipe": wrong.recipe.model_copy(update={"backend": backend, "quantizer": "given"})
            }
        )
        for backend in ("onnxruntime", "openvino")
    ]
    first, *mend = decide(candidates, None, None).next_steps
    assert "call the candidate by" not in first  # another name is refused
    assert [step.partition(":")[0] for step in mend] == [
        "run `crucible lint MODEL --backend onnxruntime`",
        "run `crucible lint MODEL --backend openvino`",
    ]


def test_a_failed_model_with_its_own_pairs_is_not_told_to_calibrate() -> None:
    failed = candidate("a", 2.0, "failed accuracy", 0.1, precision=Precision.INT8)
    failed = failed.model_copy(
        update={"recipe": failed.recipe.model_copy(update={"quantizer": "given"})}
    )
    steps = decide([failed], None, None).next_steps
    assert "crucible lint MODEL --backend" in steps[0]
    assert not [step for step in steps if "method" in step or "keep_fp32" in step]
    saturated = failed.model_copy(
        update={"notes": (Note(stage="lint", text="wide weights", code=NoteCode.SATURATES),)}
    )
    assert decide([saturated], None, None).next_steps == (SEVEN_BITS, *steps)


def test_beside_a_mislabelled_engine_the_near_miss_keeps_its_next_steps() -> None:
    miss = candidate("b", 2.0, "failed accuracy", 0.1, precision=Precision.INT8)
    decision = decide([candidate("a", 2.0, "mislabelled", 0.0), miss], None, None)
    assert decision.nearest_miss is miss
    assert "layer table of the report" in decision.next_steps[0]
    assert decision.next_steps[1:] == next_steps(miss)


def test_a_mislabelled_engine_never_wins_however_fast() -> None:
    winner = choose([candidate("a", 9.0, "mislabelled"), candidate("b", 1.1)])
    assert winner is not None
    assert winner.label == "b"


def test_after_a_vain_rescue_the_advice_is_training_in_16_bits() -> None:
    first = candidate("fp16", 2.0, "failed accuracy", 0.1, precision=Precision.FP16)
    vain = first.model_copy(update={"origin": Origin.FALLBACK})
    assert "keep_fp32" in decide([first], None, None).next_steps[0]
    assert decide([first, vain], None, None).next_steps == (TRAIN_IN_16_BITS,)
    fp32 = candidate("fp32", 2.0, "failed accuracy", 0.5)
    ended = decide([first, fp32.model_copy(update={"origin": Origin.FALLBACK})], None, None)
    assert ended.next_steps == next_steps(first)  # the rescue ended there, with steps left


def test_after_a_vain_rescue_of_int8_nobody_is_told_to_try_it() -> None:
    first = candidate("int8", 2.0, "failed accuracy", 0.1, precision=Precision.INT8)
    assert KEEP_WORST in decide([first], None, None).next_steps
    searched = first.recipe.model_copy(update={"keep_worst": True})
    vain = first.model_copy(update={"recipe": keeping(searched, ["a"]), "origin": Origin.FALLBACK})
    expected = [step for step in next_steps(first) if step != KEEP_WORST]
    assert list(decide([vain], None, None).next_steps) == expected


def test_where_the_data_is_at_fault_the_advice_is_about_the_data() -> None:
    failed = candidate("a", 2.0, "failed accuracy", 0.0, Precision.INT8)
    selection = failed.selection
    assert selection is not None

    def with_faults(*faults: DataFault) -> Candidate:
        report = selection.model_copy(update={"data_faults": faults})
        return failed.model_copy(update={"selection": report})

    chance = with_faults(DataFault.LABELS)
    assert decide([chance], None, None).next_steps == (FIX_LABELS,)
    foreign = with_faults(DataFault.CALIBRATION)
    assert decide([foreign], None, None).next_steps == (FIX_CALIBRATION, *next_steps(foreign))
    both = with_faults(DataFault.CALIBRATION, DataFault.LABELS)
    assert decide([both], None, None).next_steps == (FIX_LABELS, FIX_CALIBRATION)
    late = decide(
        [failed],
        failed,
        selection.model_copy(update={"data_faults": (DataFault.LABELS,), "failures": ("top1",)}),
    )
    assert late.next_steps[0] == FIX_LABELS


@pytest.mark.parametrize("precision", list(Precision))
def test_every_failure_has_a_next_step(precision: Precision) -> None:
    assert next_steps(candidate("a", 1.0, precision=precision))
    assert next_steps(None)


# -- equal speed -------------------------------------------------------------


def timed(
    label: str, process_ms: tuple[float, ...], drop: float = 0.0, cosine: float = 1.0
) -> Candidate:
    """A candidate with these medians of its processes, twice over and two blocks each, and the
    ratio to a baseline of 4 ms.
    """
    process_ms = process_ms * 2
    values = [ms * 1e-3 for ms in process_ms for _ in range(4)]
    samples = Samples(
        values_s=tuple(values), blocks=(2,) * (len(values) // 2), processes=(2,) * len(process_ms)
    )
    geometric_mean = math.prod(process_ms) ** (1 / len(process_ms)) * 1e-3
    entry = candidate(label, BASELINE_S / geometric_mean, drop=drop)
    assert entry.selection is not None
    outputs = tuple(
        output.model_copy(update={"cosine": cosine}) for output in entry.selection.outputs
    )
    measured = row(BASELINE_S / geometric_mean).model_copy(update={"end_to_end": samples})
    return entry.model_copy(
        update={
            "selection": entry.selection.model_copy(update={"outputs": outputs}),
            "benchmark": BenchmarkReport(label=label, rows=(measured,)),
        }
    )


FASTEST = timed("fastest", (1.00, 1.02, 0.98), drop=0.006)
AS_FAST = timed("as fast", (1.02, 1.00, 1.01), drop=0.003)


def chosen(*candidates: Candidate) -> str:
    winner = choose(candidates)
    assert winner is not None
    return winner.label


def test_of_two_equally_fast_engines_the_more_accurate_is_chosen() -> None:
    assert chosen(FASTEST, AS_FAST) == "as fast"
    decision = decide([FASTEST, AS_FAST], AS_FAST, validation(0.0))
    assert (
        "of 2 candidates whose speeds cannot be told apart it has the smallest drop on the"
        " selection set, +0.0030" in decision.reasons[-1]
    )
    assert decision.reasons[-1].endswith("the others: fastest")
    assert "cannot be told apart" in decide([FASTEST, AS_FAST], AS_FAST, None).reasons[-1]


def test_at_equal_drop_the_higher_cosine_then_the_order_of_the_plan_decides() -> None:
    near, far = (
        timed("near", (1.02, 1.00, 1.01), cosine=0.999),
        timed("far", (1.00, 1.02, 0.98), cosine=0.99),
    )
    assert chosen(far, near) == chosen(near, far) == "near"
    assert (
        "it has the highest cosine, 0.99900"
        in decide([far, near], near, validation(0.0)).reasons[-1]
    )
    twin = timed("twin", (1.00, 1.02, 0.99), cosine=0.999)
    assert (chosen(near, twin), chosen(twin, near)) == ("near", "twin")
    assert "it comes first in the plan" in decide([near, twin], near, validation(0.0)).reasons[-1]


def test_what_is_measurably_slower_is_not_chosen_for_its_accuracy() -> None:
    slower = timed(
        "slower", (1.030, 1.051, 1.009), drop=0.0
    )  # by 3 % in every pair of processes, although each varies by 2 %
    assert contenders([slower, FASTEST]) == (FASTEST,)
    assert chosen(slower, FASTEST) == "fastest"
    assert not any(
        "told apart" in reason
        for reason in decide([slower, FASTEST], FASTEST, validation(0.0)).reasons
    )


def test_on_a_noisy_host_speed_is_not_given_away_for_accuracy() -> None:
    noisy = timed("noisy", (0.9, 1.7, 1.2), drop=0.0)
    ratio = speed_ratio(FASTEST, noisy)
    assert ratio is not None
    assert not ratio.excludes(1.0)
    assert chosen(noisy, FASTEST) == "fastest"


def test_engines_that_differ_only_in_ranges_tie_unless_measured_otherwise() -> None:
    def int8(entry: Candidate, method: str) -> Candidate:
        return entry.model_copy(
            update={
                "recipe": Recipe.model_validate(
                    {"backend": "onnxruntime", "precision": "int8", "method": method}
                )
            }
        )

    entropy, minmax = (
        int8(FASTEST, "entropy"),
        int8(timed("minmax", (0.9, 1.7, 1.2), drop=0.0), "minmax"),
    )
    assert chosen(entropy, minmax) == "minmax"
    slower = int8(timed("slower", (1.30, 1.33, 1.27), drop=0.0), "percentile")
    assert chosen(entropy, slower) == "fastest"


def test_a_chain_of_small_differences_does_not_lead_to_a_slow_candidate() -> None:
    chain = [
        timed(
            f"{step}",
            (1.0 + step * 0.03, 1.05 + step * 0.03, 0.95 + step * 0.03),
            drop=-0.001 * step,
        )
        for step in range(6)
    ]
    assert [candidate.label for candidate in contenders(chain)] == [
        "0"
    ]  # paired, 3 % are told apart
    shuffled = [
        timed(f"{step}", (1.0 + step * 0.03, 1.05, 0.95), drop=-0.001 * step) for step in range(9)
    ]
    ties = contenders(shuffled)
    assert 1 < len(ties) < 9
    assert all(
        ratio is not None and ratio.value > 1 / 1.05
        for ratio in (speed_ratio(ties[0], each) for each in ties)
    )


def test_without_a_baseline_the_fastest_is_known_all_the_same() -> None:
    def alone(entry: Candidate) -> Candidate:
        assert entry.benchmark is not None
        rows = tuple(row.model_copy(update={"ratio": None}) for row in entry.benchmark.rows)
        return entry.model_copy(
            update={"benchmark": entry.benchmark.model_copy(update={"rows": rows})}
        )

    assert chosen(alone(timed("slow", (2.0, 2.1, 1.9))), alone(FASTEST)) == "fastest"


@pytest.mark.parametrize(
    ("recipe", "has", "lacks"),
    [
        (
            Recipe(
                backend="onnxruntime", precision=Precision.INT4, weight_only=True, block_size=64
            ),
            "block_size: 32",
            "simplify",
        ),
        (
            Recipe(
                backend="onnxruntime", precision=Precision.INT4, weight_only=True, block_size=32
            ),
            "weight_only: true",
            "block_size",
        ),
        (
            Recipe(
                backend="onnxruntime", precision=Precision.INT8, weight_only=True, block_size=32
            ),
            "keep_fp32: [NODE]",
            "method",
        ),
        (
            Recipe(backend="openvino", precision=Precision.INT8, quantizer="nncf"),
            "quantisation-aware",
            "keep_fp32: auto",
        ),
        (
            Recipe(
                backend="tensorrt",
                precision=Precision.INT8,
                realised_in="flags",
                method=CalibrationMethod.ENTROPY,
            ),
            "method: minmax",
            "auto",
        ),
        (
            Recipe(backend="tensorrt", precision=Precision.FP8, quantizer="modelopt"),
            "bf16 or fp16",
            "simplify",
        ),
        (
            Recipe(backend="onnxruntime", precision=Precision.INT8, keep_worst=True),
            "quantisation-aware",
            "keep_fp32: auto",
        ),
    ],
)
def test_no_next_step_is_one_that_the_plan_refuses_or_has(
    recipe: Recipe, has: str, lacks: str
) -> None:
    miss = candidate("c", 0.5, state="failed accuracy").model_copy(update={"recipe": recipe})
    message = "\n".join(next_steps(miss))
    assert has in message
    assert lacks not in message
