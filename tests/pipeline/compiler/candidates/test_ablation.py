"""Which switches are reversed, and how what came of it is paired with the candidate they were
reversed in.
"""

import math
from pathlib import Path

import pytest

from pipeline.cli.terminal import ablation_table, console
from pipeline.compiler.candidates.ablation import (
    SWITCHES,
    Ablated,
    Reversal,
    ablation_from,
    base_of,
    reversals,
)
from pipeline.compiler.measure import worth_measuring
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from pipeline.report.files import load_report, write_report
from pipeline.report.markdown import markdown
from pipeline.report.sections import sections
from pipeline.results.candidates import Ablation, AblationRow, Candidate, Origin, State
from tests.builders.report import (
    EVIL,
    benchmark,
    latency_row,
    sample_report,
    selection,
    without_graph,
)

INT8 = Recipe(backend="onnxruntime", precision=Precision.INT8, method=CalibrationMethod.ENTROPY)


def candidate(
    recipe: Recipe,
    drop: float,
    cosine: float = 0.99,
    state: State = "measured",
    median_ms: float = 2.0,
) -> Candidate:
    accuracy = selection(drop, cosine) if state in ("measured", "failed accuracy") else None
    benchmarks = benchmark(recipe.label, median_ms, 8.0) if accuracy else None
    return Candidate(
        label=recipe.label,
        recipe=recipe,
        state=state,
        reason="" if state == "measured" else "why",
        selection=accuracy,
        benchmark=benchmarks,
    )


def method(name: str) -> Recipe:
    return INT8.model_copy(update={"method": CalibrationMethod(name)})


def test_the_switches_are_those_of_a_placement() -> None:
    assert set(SWITCHES) < set(Placement.model_fields)


def test_each_switch_is_reversed_alone() -> None:
    entries = reversals(INT8)
    assert [reversal.switch for reversal in entries] == list(SWITCHES)
    for reversal in entries:
        changed = {
            name for name, on in reversal.recipe.placement if on != getattr(INT8.placement, name)
        }
        assert changed == {reversal.switch}
        assert reversal.recipe.model_copy(update={"placement": INT8.placement}) == INT8
    labels = [reversal.recipe.label for reversal in entries]
    assert len({*labels, INT8.label}) == 6
    assert labels[:2] == [f"{INT8.label} -first_layer", f"{INT8.label} +last_layer"]


def test_the_most_accurate_int8_candidate_of_our_own_is_taken() -> None:
    others = [
        candidate(Recipe(backend="onnxruntime", precision=Precision.FP32), 0.0),
        candidate(INT8.model_copy(update={"quantizer": "nncf"}), 0.0),
        candidate(INT8.model_copy(update={"realised_in": "flags", "backend": "tensorrt"}), 0.0),
    ]
    assert base_of(others) is None
    bad, good, twin = (
        candidate(method("entropy"), 0.003),
        candidate(method("minmax"), 0.001, 0.98),
        candidate(method("percentile"), 0.001, 0.97),
    )
    assert base_of([*others, bad, twin, good]) is good


def test_where_none_passed_the_nearest_of_those_that_gave_answers_is_taken() -> None:
    broken = candidate(method("minmax"), 0.0, state="failed")
    far, near = (
        candidate(method("entropy"), 0.5, state="failed accuracy"),
        candidate(method("percentile"), 0.1, state="failed accuracy"),
    )
    assert base_of([broken, far, near]) is near
    assert base_of([broken]) is None
    assert base_of([near.model_copy(update={"state": "mislabelled"})]) is None
    passed = candidate(INT8.model_copy(update={"weight_bits": 7}), 0.009)
    assert base_of([far, near, passed]) is passed


@pytest.mark.parametrize(
    ("origin", "state", "is_measured"),
    [
        (Origin.PLAN, "failed accuracy", True),
        (Origin.ABLATION, "failed accuracy", True),
        (Origin.FALLBACK, "failed accuracy", False),
        (Origin.FALLBACK, "measured", True),
        (Origin.PLAN, "mislabelled", False),
        (Origin.PLAN, "failed", False),
    ],
)
def test_all_checked_candidates_are_measured_but_failed_attempts_of_a_rescue(
    origin: Origin, state: State, is_measured: bool
) -> None:
    checked = candidate(INT8, 0.1, state=state).model_copy(update={"origin": origin})
    assert worth_measuring(checked, ()) is is_measured


def test_a_failed_attempt_is_measured_if_its_switches_were_reversed() -> None:
    base = candidate(INT8, 0.1, state="failed accuracy")
    base = base.model_copy(update={"origin": Origin.FALLBACK})
    assert worth_measuring(base, Ablated(base, ()).labels)


def test_rows_tell_each_change_and_what_changed_nothing() -> None:
    base = candidate(INT8, 0.002, 0.99)
    first, last, residual, activations, channels = reversals(INT8)
    known = [
        base,
        candidate(first.recipe, 0.001, 0.995),
        candidate(last.recipe, 0.005, 0.98),
        candidate(residual.recipe, 0.0, state="failed"),
        candidate(channels.recipe, 0.2, 0.5, "failed accuracy"),
    ]
    ablated = Ablated(
        base,
        (
            first,
            last,
            residual,
            Reversal(activations.switch, activations.recipe, changes=False),
            channels,
        ),
    )
    ablation = ablation_from(ablated, known)
    assert ablation.label == base.label
    rows = {row.switch: row for row in ablation.rows}
    assert (rows["first_layer"].before, rows["first_layer"].after) == (True, False)
    assert rows["first_layer"].drop_change == pytest.approx(-0.001)
    assert (rows["last_layer"].before, rows["last_layer"].after) == (False, True)
    assert (rows["per_channel"].before, rows["per_channel"].after) == (True, False)
    assert rows["last_layer"].drop_change == pytest.approx(0.003)
    assert rows["last_layer"].cosine_change == pytest.approx(-0.01)
    assert (rows["residual_add"].state, rows["residual_add"].reason, rows["residual_add"].drop) == (
        "failed",
        "why",
        None,
    )
    assert (rows["matmul_activations"].label, rows["matmul_activations"].state) == ("", None)
    assert rows["per_channel"].state == "failed accuracy"
    assert rows["per_channel"].drop_change == pytest.approx(0.198)


def test_speed_is_told_process_by_process() -> None:
    def in_processes(entry: Candidate, medians_ms: tuple[float, ...]) -> Candidate:
        row = latency_row(1.0, 1, 2.0)
        values = tuple(ms * 1e-3 for ms in medians_ms for _ in range(2))
        samples = Samples(
            values_s=values, blocks=(2,) * len(medians_ms), processes=(1,) * len(medians_ms)
        )
        report = benchmark(entry.label, 1.0, 2.0).model_copy(
            update={"rows": (row.model_copy(update={"end_to_end": samples}),)}
        )
        return entry.model_copy(update={"benchmark": report})

    last = reversals(INT8)[1]
    base = in_processes(candidate(INT8, 0.0), (1.0, 1.5, 0.8, 1.0))
    faster = in_processes(candidate(last.recipe, 0.0), (0.5, 0.75, 0.41, 0.5))
    (row,) = ablation_from(Ablated(base, (last,)), [base, faster]).rows
    assert row.ratio is not None
    assert row.ratio.value == pytest.approx((8 / 4.1 * 8) ** (1 / 4))
    assert 1.9 < row.ratio.low < row.ratio.high < 2.1  # what slowed a generation slowed both
    (row,) = ablation_from(
        Ablated(base, (last,)), [base, in_processes(candidate(last.recipe, 0.0), (0.5, 0.7, 0.4))]
    ).rows
    assert row.ratio is None  # three processes say too little
    assert math.isclose(row.drop or 0.0, 0.0)


# -- in the report -----------------------------------------------------------

LAST = AblationRow(
    switch="last_layer",
    before=False,
    after=True,
    label="onnxruntime int8 entropy u8s8 +last_layer",
    state="failed accuracy",
    reason=f"top1 dropped{EVIL}",
    drop=0.02,
    drop_change=0.0167,
    cosine=0.9512,
    cosine_change=-0.0388,
    ratio=Interval(value=1.04, low=1.01, high=1.07),
)
TOLD = Ablation(
    label="onnxruntime int8 entropy u8s8",
    rows=(LAST, AblationRow(switch="residual_add", before=True, after=False)),
)


def test_every_switch_is_a_line_of_the_report(tmp_path: Path) -> None:
    report = sample_report().model_copy(update={"ablation": TOLD})
    section = next(section for section in sections(report) if section.key == "ablation")
    assert section.tables[0].rows == (
        (
            "last_layer",
            "off",
            "on",
            "0.0200",
            "+0.0167",
            "0.95120",
            "-0.03880",
            "1.04 [1.01, 1.07]",
            f"failed accuracy: top1 dropped{EVIL}",
        ),
        ("residual_add", "on", "off", "-", "-", "-", "-", "-", "changes nothing in this graph"),
    )
    written = write_report(report, tmp_path)
    assert "Switches reversed" in written.html_file.read_text()
    assert "<script" not in without_graph(written.html_file.read_text())
    assert "<script" not in written.markdown_file.read_text()
    assert load_report(tmp_path).ablation == TOLD


def test_without_ablation_the_report_says_nothing_of_it_and_without_a_candidate_why() -> None:
    assert "Switches reversed" not in markdown(sample_report())
    nothing = sample_report().model_copy(update={"ablation": Ablation(label="")})
    assert "so no switch was reversed" in markdown(nothing)


def test_the_terminal_shows_each_switch(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(ablation_table(TOLD))
    shown = " ".join(capsys.readouterr().out.split())
    assert "switches reversed: onnxruntime int8 entropy u8s8" in shown
    assert "last_layer on" in shown
    assert "+0.0167 1.04 (1.01 to 1.07) failed accuracy" in shown.replace("│", " ").replace(
        "  ", " "
    ).replace("  ", " ")
    assert "residual_add off" in shown
    assert "changes nothing in this graph" in shown
