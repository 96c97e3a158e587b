"""The pages of figures say what the results say, those of a GPU host too."""

import argparse
import json
import re
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from benchmarks.__main__ import BENCHMARKS
from benchmarks.common import Row, beside
from benchmarks.cpu import pitfalls, resnet50
from benchmarks.gpu import tensorrt_compile
from benchmarks.pages import accuracy, gpu_drawings, tensorrt_rows, torch_comparison, write
from benchmarks.pages.figures import FOLDER
from benchmarks.pages.render import load_results, render
from benchmarks.run_all import NAMES
from benchmarks.serving import json_beside_binary
from pipeline.core.artifacts import Note, NoteCode, Target
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.results.benchmarks import Bound
from pipeline.results.report import Report
from tests.builders.report import proven_report

ROOT = Path(__file__).parents[2]
H200 = Target(
    backend="tensorrt",
    version="10.6.0",
    device="NVIDIA H200",
    compute_capability="9.0",
    driver="580.159.04",
)


def anchors_of(page: str) -> set[str]:
    """Anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.fixture
def h200(tmp_path: Path) -> Path:
    """Results as `tensorrt_compile.py` writes them: two parts of one model, each run a second
    time.
    """
    folder = tmp_path / "results"
    refused = [
        {"candidate": "tensorrt fp8 modelopt", "state": "refused", "reason": "fp8 needs | sm_89"}
    ]
    for _ in range(2):
        for group, report in (("float", proven_report()), ("other", None)):
            rows = [*tensorrt_compile.rows_from_report(report), *refused] if report else refused
            part = {
                "created": "2026-11-21T20:00:00+00:00",
                "winner": "x",
                "verdict": "accepted",
                "rows": rows,
            }
            tensorrt_compile.add_part(folder / "tensorrt_digits.json", "digits", group, part, H200)
    return folder


def test_work_beside_a_measurement_goes_on_and_its_failure_is_told() -> None:
    calls, twice = list[int](), threading.Event()

    def work() -> None:
        calls.append(1)
        if len(calls) > 1:
            twice.set()

    with beside(work):
        assert twice.wait(60)
    count = len(calls)
    assert count > 1

    def fail() -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), beside(fail):
        pass
    assert len(calls) == count


def test_the_pages_are_in_step_with_the_results() -> None:
    for file, text in write.pages().items():
        assert text == file.read_text(encoding="utf-8"), "run: python -m benchmarks pages"
    for drawing in write.drawings():
        assert drawing.is_current(), "run: python -m benchmarks pages"
        assert (FOLDER / drawing.name).stat().st_size < 200_000


def test_the_pages_and_figures_are_those_that_are_written() -> None:
    written = {file.name for file in write.pages()} | {each.name for each in write.drawings()}
    assert {file.name for file in FOLDER.iterdir()} == written - {"README.md"}


def test_every_figure_is_shown_and_every_link_between_the_pages_leads_somewhere() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.md")}
    anchors = {name: anchors_of(text) for name, text in texts.items()}
    shown = {name for text in texts.values() for name in re.findall(r"!\[[^]]*\]\((.+?)\)", text)}
    assert shown == {each.name for each in write.drawings()}
    links = [link for text in texts.values() for link in re.findall(r"\[[^]]*\]\((\S+?)\)", text)]
    inside = [link for link in links if ".md" in link and not link.startswith("../")]
    assert inside
    for link in inside:
        name, _, anchor = link.partition("#")
        assert name in texts, link
        assert not anchor or anchor in anchors[name], link


def test_a_page_without_the_marks_of_a_part_is_refused() -> None:
    mark = "<!-- {0}: from here on written by x -->\n{1}<!-- {0}: written by x up to here -->\n"
    old, new, other = mark.format("a", "old\n"), mark.format("a", "new\n"), mark.format("b", "")
    replace = write.with_parts_of
    assert replace(f"before\n{old}after\n", new) == f"before\n{new}after\n"
    for page, rendered in ((old, new + other), (old + other, new)):
        with pytest.raises(ValueError, match=r"the template has the parts \['a'"):
            replace(page, rendered)


def test_every_result_holds_its_environment_and_its_targets() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for file in results:
        document = json.loads(file.read_text())
        runs = document.get("parts") or (
            document["rows"] if isinstance(document["rows"], dict) else {}
        )
        if runs:  # of several runs in one file each has its own, or says that it was not recorded
            assert all(
                run["environment"] or run["environment_source"] == "not recorded"
                for run in runs.values()
            ), file
        else:
            assert document["environment"]["cpu_flags"], file
        assert document["rows"], file
        assert document["targets"], file


def test_make_bench_runs_what_the_pages_show() -> None:
    page = "\n".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.md"))
    command = r"^Repeat it with `.venv/bin/python -m benchmarks (\w+)`\.$"
    assert {"resnet50", "peak"} <= set(re.findall(command, page, re.MULTILINE)) <= set(NAMES)
    results = ROOT / "benchmarks" / "results"
    assert all(name in BENCHMARKS and (results / f"{name}.json").is_file() for name in NAMES)


def test_the_overview_is_short() -> None:
    assert len((FOLDER / "index.md").read_text(encoding="utf-8").split()) <= 1500


def test_every_missed_target_is_on_the_overview_or_on_the_page_that_it_links() -> None:
    section = (FOLDER / "index.md").read_text(encoding="utf-8").partition("## What was missed")[2]
    lines = dict(re.findall(r"^\| (\w+) \| (\d+ of \d+ \| .*) \|$", section, re.MULTILINE))
    linked = 0
    for name, document in load_results().items():
        targets = {} if name == "gpu_tests" else document["targets"]
        missed = [target for target, met in targets.items() if not met]
        assert (name in lines) == bool(missed), name
        if not missed:
            continue
        assert lines[name].startswith(f"{len(missed)} of {len(targets)} |")
        text = lines[name]
        if link := re.search(r"\]\(([\w-]+\.md)#", text):
            linked += 1
            text = (FOLDER / link[1]).read_text(encoding="utf-8")
        # gpu.md has a cell for the model and one for the target.
        texts = (text, text.replace(" | ", ": "))
        assert all(any(target in each for each in texts) for target in missed), name
    assert linked


def test_the_page_of_figures_says_what_make_bench_runs() -> None:
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    listed = page.partition("one after another")[2].partition("\n\n")[0]
    assert all(f"`{name}`" in listed for name in NAMES)


def test_every_part_on_the_page_of_tensorrt_exists() -> None:
    page = (FOLDER / "tensorrt.md").read_text(encoding="utf-8")
    parts = re.findall(r'make bench-gpu PARTS="([^"]+)"', page)
    assert parts
    for part in parts:
        assert tensorrt_compile.parse_arguments(shlex.split(part)).parts


def test_one_lucky_round_beside_long_json_does_not_meet_the_target() -> None:
    rises = {(1.0, 9.0, 2.0): True, (1.0, 9.0, 6.0): False, (5.0, 5.0, 9.0): True}
    for rounds, met in rises.items():
        rows = [{"p99 alone ms": 10.0, "p99 beside JSON ms": 10.0 + rise} for rise in rounds]
        assert list(json_beside_binary.targets_of(rows).values()) == [met]


def test_noise_does_not_pass_for_a_mistake_that_is_seen() -> None:
    names = ("one after the other", "two at once", "cold caches", "peak memory of a child")

    def visible(*figures: tuple[float, float]) -> list[bool]:
        rows: list[Row] = [
            {"mistake": name, "careless": more, "careful": less}
            for name, (more, less) in zip(names, figures, strict=True)
        ]
        return list(pitfalls.targets_of(rows).values())

    assert visible((12.0, 8.0), (200.0, 100.0), (107.0, 100.0), (400.0, 50.0)) == [
        True,
        True,
        False,
        True,
    ]
    assert visible((8.0, 2.0), (101.0, 100.0), (107.0, 100.0), (50.0, 50.0)) == [
        True,
        False,
        True,
        False,
    ]


def test_committed_results_of_gpu_tests_are_whole_and_green() -> None:
    documents = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in (ROOT / "tests" / "gpu" / "results").glob("*.json")
    ]
    assert documents
    assert all(
        document["finished"] and document["gpus"] and document["environment"]["python"]
        for document in documents
    )
    last = {
        test: tensorrt_rows.last_of(outcomes)
        for test, outcomes in tensorrt_rows.outcomes_by_test(documents).items()
    }
    assert {test for test, outcome in last.items() if outcome not in ("passed", "skipped")} == set()


def test_the_table_of_images_shows_what_was_measured_and_nothing_else() -> None:
    base = {
        "image": "base",
        "serves": None,
        "unpacked_mb": 176.0,
        "compressed_mb": 73.9,
        "starts": 0,
        "start_s": None,
        "memory_mb": None,
    }
    serve = {
        **base,
        "image": "serve",
        "serves": "one model",
        "starts": 5,
        "start_s": 2.5,
        "least_s": 2.25,
        "most_s": 3.0,
        "memory_mb": 112.9,
    }
    document = {
        "created": "2026-11-22T05:00:00+00:00",
        "rows": [base, serve],
        "environment": {"cpu": "AMD EPYC", "cores": 2, "load_1min": 0.5},
    }
    text = render("sections/images.md.j2", {"image_size": document})
    assert "the median of 5 starts" in text
    assert "| base |  | 176 MB | 74 MB |  |  |" in text
    assert "| serve | one model | 176 MB | 74 MB | 2.50 s (2.25 to 3.00) | 113 MB |" in text
    assert "2026-11-22, AMD EPYC, 2 cores, a load of 0.5 at the end." in text


def test_a_part_that_runs_again_takes_the_place_of_its_rows(h200: Path) -> None:
    document = json.loads((h200 / "tensorrt_digits.json").read_text())
    report = proven_report()
    assert [row["part"] for row in document["rows"]].count("other") == 1
    assert [row["candidate"] for row in document["rows"] if row["part"] == "float"] == [
        *(baseline.label for baseline in (report.baseline, *report.baselines) if baseline),
        *(each.label for each in report.candidates),
        "tensorrt fp8 modelopt",
    ]
    assert list(document["parts"]) == ["float", "other"]
    figures = {row["candidate"]: row for row in document["rows"]}
    for candidate in report.candidates:
        row = figures[candidate.label]
        assert row["state"] == candidate.state
        assert len(row["latency"]) == (len(candidate.benchmark.rows) if candidate.benchmark else 0)
        if candidate.selection and candidate.selection.metric:
            assert row["drop"] == candidate.selection.metric.drop
        if candidate.layers:
            assert sum(row["time_share"].values()) == pytest.approx(1, abs=1e-3)


def test_a_candidate_without_an_answer_misses_its_target(h200: Path) -> None:
    document = json.loads((h200 / "tensorrt_digits.json").read_text())
    answered = {
        row["candidate"]: row.get("cosine") is not None
        for row in document["rows"]
        if row["part"] == "float" and row["state"] != "baseline"
    }
    missing = {"the part `int8` ran": False}
    assert (
        document["targets"]
        == {
            f"{label}: built, ran and compared with the reference": ran
            for label, ran in answered.items()
        }
        | missing
    )
    assert set(answered.values()) == {True, False}


def part_of_gpu_tests(outcomes: dict[str, str], **more: Any) -> dict[str, Any]:
    tests = [
        {"test": f"tests/test_a.py::{name}", "outcome": each} for name, each in outcomes.items()
    ]
    return {"gpus": [{"name": "NVIDIA H200"}], "tensorrt": "10.6.0", "tests": tests, **more}


def test_of_a_test_in_several_parts_the_last_run_counts(h200: Path) -> None:
    first = part_of_gpu_tests(
        {"test_1": "passed", "test_2": "passed", "test_3": "failed", "test_4": "failed"},
        created="2026-11-21T08",
        seconds=240.3,
        revision="82dfba75f031338f",
    )
    second = part_of_gpu_tests(
        {"test_3": "passed"}, created="2026-11-21T09", seconds=300.0, revision="90d73fdd7451"
    )
    results = load_results(h200)
    alone = render("sections/tensorrt.md.j2", {**results, "gpu_tests": [first]})
    assert (
        "on NVIDIA H200 with TensorRT 10.6.0: 2 passed, 2 failed (2026-11-21; 4 min in all)."
        " Failed: `test_3`. Failed: `test_4`.\n" in alone
    )
    in_parts = render("sections/tensorrt.md.j2", {**results, "gpu_tests": [first, second]})
    assert (
        "10.6.0 in 2 parts (1 at 82dfba7, 1 at 90d73fd): 3 passed, 1 failed (2026-11-21; 9 min in"
        " all). 1 of those that passed had failed in an earlier part. Failed: `test_4`.\n"
        in in_parts
    )


def test_the_tables_show_every_candidate_of_a_gpu_with_its_figures(h200: Path) -> None:
    results = load_results(h200)
    speed = render("sections/tensorrt.md.j2", results)
    drops = render("sections/gpu_accuracy.md.j2", results)
    assert speed.startswith("## TensorRT on H200 GPUs")
    assert "fp8 needs \\| sm_89" in speed
    assert "driver 580.159.04, TensorRT 10.6.0" in drops
    assert "| +0.0033 (-0.0034 to +0.0100) | 0.99620 |" in drops
    for text in (speed, drops):
        for block in text.split("\n\n"):
            rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
            assert len({row.count("|") for row in rows}) <= 1
        for candidate in proven_report().candidates:
            assert f"\n| {candidate.label} |" in text


def test_the_choice_of_crucible_is_told_in_a_sentence(tmp_path: Path) -> None:
    report = proven_report()
    part = {
        "created": "2026-11-21T20:00:00+00:00",
        "winner": report.winner,
        "verdict": report.verdict,
        "rows": tensorrt_compile.rows_from_report(report),
    }
    file = tmp_path / "tensorrt_resnet50.json"
    document = tensorrt_compile.add_part(file, "resnet50", "choice", part, H200)
    assert document["targets"]["Crucible chose among its own candidates"]
    text = render("sections/tensorrt.md.j2", load_results(tmp_path))
    assert f"and chose **{report.winner}** ({report.verdict})" in text, text


@pytest.mark.parametrize(("code", "build_s"), [(None, 9.5), (NoteCode.GPU_SHARED, None)])
def test_a_build_beside_another_process_has_no_time(
    code: NoteCode | None, build_s: float | None
) -> None:
    report = proven_report()
    note = Note(stage="build", text="timing cache not filled", code=code)
    candidate = report.candidates[0].model_copy(update={"notes": (note,)})
    step = report.steps[0].model_copy(
        update={"stage": "build", "subject": candidate.label, "seconds": 9.5}
    )
    report = report.model_copy(update={"steps": (step,)})
    row = tensorrt_compile.row_from_candidate(candidate, report)
    assert row["build_s"] == build_s


def test_a_part_that_failed_is_said_in_the_table(tmp_path: Path) -> None:
    part = {"created": "2026-11-21T20:00:00+00:00", "failed": "stopped after 540 s", "rows": []}
    file = tmp_path / "tensorrt_minilm.json"
    document = tensorrt_compile.add_part(file, "minilm", "int8", part, H200)
    assert document["targets"] == {"the part `float` ran": False, "the part `int8` ran": False}
    text = render("sections/tensorrt.md.j2", load_results(tmp_path))
    assert "**failed**: part `int8`: stopped after 540 s" in text


def test_every_candidate_of_every_part_is_one_that_this_gpu_can_build() -> None:
    for model, groups in tensorrt_compile.PARTS.items():
        for options in groups.values():
            plan = ROOT / "configs" / f"{model}.yaml"
            candidates, refused = tensorrt_compile.possible(plan, options, H200)
            assert len(candidates) == len(options)
            assert refused == []
    older = H200.model_copy(update={"compute_capability": "7.5"})
    _, refused = tensorrt_compile.possible(
        ROOT / "configs" / "digits.yaml", tensorrt_compile.PARTS["digits"]["other"], older
    )
    assert [row["state"] for row in refused] == ["refused", "refused"]
    assert "8.9" in refused[0]["reason"]


def test_parts_are_named_by_model_and_group() -> None:
    parts_of = tensorrt_compile.parts_of
    assert parts_of("digits/int8") == [("digits", "int8")]
    assert parts_of("resnet50") == [
        ("resnet50", group) for group in ("float", "int8", "other", "choice")
    ]
    for wrong in ("vit", "digits/none"):
        with pytest.raises(argparse.ArgumentTypeError, match="--list"):
            parts_of(wrong)


def test_the_row_of_a_recipe_is_found_by_its_label() -> None:
    report: Report = proven_report()
    labels = [candidate.label for candidate in report.candidates]
    assert len(set(labels)) == len(labels)
    flags = Recipe(
        backend="tensorrt",
        precision=Precision.INT8,
        realised_in="flags",
        method=CalibrationMethod.MINMAX,
    )
    assert flags.label == "tensorrt int8 implicit minmax"


# -- int8 and few bits --------------------------------------------------------


def calibration(losses: dict[tuple[str, str, int, int, int], float]) -> dict[str, object]:
    """A result of `calibration`: (model, method, samples, draw, weight bits) -> 1 -
    mean cosine.
    """
    rows = [
        {
            "model": model,
            "samples": samples,
            "draw": draw,
            "method": method,
            "weight_bits": bits,
            "metric": "cosine",
            "drop": lost,
            "max_drop": 0.01,
        }
        | {"mean_cosine": 1 - lost, "passed": lost <= 0.01}
        for (model, method, samples, draw, bits), lost in losses.items()
    ]
    host = {
        "cpu": "some CPU",
        "cpu_flags": ["avx2"],
        "python": "3.11",
        "packages": {"onnxruntime": "1"},
    }
    return {"created": "2026-11-21T", "rows": rows, "environment": host}


@pytest.fixture
def draws() -> dict[str, object]:
    models, methods = ("digits", "minilm"), ("entropy", "minmax", "percentile")
    few = {
        (model, method, 10, draw, 7): 0.002 * (draw + 1)
        for model in models
        for method in methods
        for draw in range(2)
    }
    many = {
        (model, method, 500, 0, bits): 0.001 if bits == 7 else 0.02
        for model in models
        for method in methods
        for bits in (7, 8)
    }
    return calibration(few | many)


def test_the_spread_of_draws_and_the_bits_of_weights_are_told(draws: dict[str, object]) -> None:
    text = render("sections/calibration.md.j2", {"calibration": draws})
    assert "| digits | entropy | 0.003 (0.002 to 0.004) | 0.001 | +0.0040 cosine | 3 of 3 |" in text
    assert "| minilm | minmax | 0.001 | +0.0010 | yes | 0.02 | +0.0200 | no |" in text
    assert "7-bit weights" in text


def test_the_figure_is_drawn_again_for_other_values_only(
    draws: dict[str, object], tmp_path: Path
) -> None:
    drawing = accuracy.calibration_drawing(draws)
    assert not drawing.is_current(tmp_path)
    drawn = drawing.write(tmp_path).read_text()
    assert drawing.is_current(tmp_path)
    assert all(
        text in drawn
        for text in ("entropy", "calibration samples", "the plan's limit", "configs/minilm.yaml")
    )
    assert not accuracy.calibration_drawing(
        calibration({("digits", "entropy", 10, 0, 7): 0.5})
    ).is_current(tmp_path)


def test_the_gpus_figures_show_every_engine_that_was_measured(tmp_path: Path) -> None:
    timed: dict[str, Any] = {
        "ours fp16": {"wall_median_ms": 0.75, "device_median_ms": 0.5},
        "torch eager fp16": {"wall_median_ms": 2.25, "device_median_ms": 2.0},
        "bare fp16": {"failed": "no memory"},
    }
    curve = [
        {"calls": calls, "unsynchronised_ms": 1.0, "synchronised_ms": 6.0} for calls in (1, 500)
    ]
    rows = {
        name: {"inputs": {"x": [1]}, "entries": timed}
        for name in ("net_b1", "net_b1: fp16", "net_b32", "vit_b1")
    }
    document = {
        "rows": {
            **rows,
            "failed_b1": {"failed": "no GPU"},
            "async_curve": {"entries": {"curve": curve}, "events_ms": 6.1},
        }
    }
    models, of_vit = gpu_drawings.models_drawings(document)
    launches = gpu_drawings.curve_drawing(document)
    drawn = models.write(tmp_path).read_text()
    shown = ("ours fp16", "torch eager fp16", " 2.250", "bare fp16", "net_b32", "failed_b1")
    assert [drawn.count(text) for text in shown] == [3, 3, 3, 0, 1, 0]
    assert (models.name, of_vit.name, of_vit.values) == (
        "gpu_net.svg",
        "gpu_vit.svg",
        {"vit_b1": {"ours fp16": [0.75, 0.5], "torch eager fp16": [2.25, 2.0]}},
    )
    assert "until the last call returns" in launches.write(tmp_path).read_text()
    assert models.is_current(tmp_path)
    timed["ours fp16"]["device_median_ms"] = 0.4
    assert not gpu_drawings.models_drawings(document)[0].is_current(tmp_path)


def test_int8_stands_beside_the_fastest_floats_of_its_backend_and_shape() -> None:
    times = {
        "pytorch eager fp32": 1.0,
        "openvino fp32": 4.0,
        "openvino bf16": 3.0,
        "openvino int8 nncf u8s8": 6.0,
        "x int8": 1.0,
    }
    rows = [
        {"engine": engine, "sizes": f"{{'batch': {batch}}}", "median_ms": ms * batch}
        for engine, ms in times.items()
        for batch in (1, 2)
    ]
    document = {"rows": rows, "environment": {"cpu": "some CPU", "cores": 2}}
    pairs = accuracy.int8_pairs({"resnet50": document, "gpu_models": {"rows": {}}})
    model, host, int8 = "resnet50", "some CPU, 2 cores", "openvino int8 nncf u8s8"
    assert pairs == [
        (
            0.5,
            (model, host, f"batch {batch}", int8, 6.0 * batch),
            (model, host, f"batch {batch}", "openvino bf16", 3.0 * batch),
        )
        for batch in (1, 2)
    ]


def test_our_int8_of_the_gpus_models_stands_beside_our_floats() -> None:
    timed = {
        "ours int8": 0.25,
        "ours fp16": 0.5,
        "bare int8": 0.4,
        "bare tf32": 0.2,
        "torch eager fp16": 0.1,
    }
    entries = {name: {"wall_median_ms": ms} for name, ms in timed.items()} | {
        "ours fp8": {"failed": "no memory"}
    }
    target = {"device": "NVIDIA H200"}
    rows = {
        "cnn_b4": {"batch": 4, "entries": entries, "target": target},
        "failed": {"batch": 4, "failed": "x", "target": target},
        "async_curve": {"entries": {"curve": []}},
    }
    results = {"resnet50": {"rows": [], "environment": {"cpu": "", "cores": 2}}}
    pairs = accuracy.int8_pairs({**results, "gpu_models": {"rows": rows}})
    at = ("cnn_b4", "NVIDIA H200", "batch 4")
    assert pairs == [(2.0, (*at, "ours int8", 0.25), (*at, "ours fp16", 0.5))]


GPU_HOST = "NVIDIA H200, driver 580, TensorRT 10.6.0"
CPU_HOST = "some CPU, 12 cores, Python 3.12, torch 2.11"
TIMINGS = "tensorrt.timing_iterations"


def gpu_row(times: dict[str, tuple[float, float]], **more: Any) -> dict[str, Any]:
    """A row of gpu_models.json: end-to-end and GPU medians of each engine in ms."""
    entries = {
        name: {"wall_median_ms": wall, "device_median_ms": gpu}
        for name, (wall, gpu) in times.items()
    }
    host = {"cpu": "some CPU", "cores": 12, "python": "3.12", "packages": {"torch": "2.11"}}
    target = {"device": "NVIDIA H200", "driver": "580", "version": "10.6.0"}
    row = {"entries": entries, "environment": host, "target": target}
    return {**row, "created": "2026-11-22T08:00:00+00:00", **more}


def test_the_comparison_leads_with_end_to_end_time_beside_pytorchs_best() -> None:
    """The fastest on the GPU is not the fastest end to end, on either side."""
    torch = {
        "torch compile fp16": (4.5, 2.5),
        "torch graph fp16": (5.0, 2.0),
        "torch eager fp16": (9.0, 8.0),
    }
    ours = {
        "ours fp16": (6.0, 1.5),
        "ours int8": (5.0, 1.25),
        "ours int8 modelopt": (4.0, 1.3),
        "bare int8": (0.1, 0.1),
    }
    row = gpu_row(torch | ours, overrides=["tensorrt.timing_iterations=2"])
    row["entries"]["ours fp8"] = {"failed": "x"}
    row["entries"]["torch compile fp16"]["mode"] = "reduce-overhead"
    results = {"gpu_models": {"rows": {"resnet50_b64": row}}}
    text = render("sections/torch_comparison.md.j2", results)
    line = (
        "| ResNet-50, batch 64 | 4.500 / 2.500 (compile fp16, reduce-overhead) | 6.000 / 1.500 |"
        " 0.75 / 1.67 |"
    )
    assert f"{line} 5.000 / 1.250 (int8) | 0.90 / 2.00 | 2 times | 12 |\n" in text
    assert (
        "| ResNet-50, batch 64 | 4.000 / 1.300 (int8 modelopt) | 1.12 / 1.92 | a candidate with"
        " `quantizer: modelopt` |" in text
    )
    assert (
        "End to end, ours are slower for ResNet-50, batch 64, although the GPU works for less time"
        in text
    )
    short = render("readme.md.j2", {**load_results(), **results})
    assert "| ResNet-50, batch 64 | 4.500 | 5.000 | **0.90** | 2.00 |" in short
    assert "Ours is slower end to end for ResNet-50, batch 64:" in short
    assert "NVIDIA H200, driver 580, TensorRT 10.6.0; some CPU, Python 3.12, torch 2.11." in text


def test_of_models_with_attention_plain_attention_is_the_default() -> None:
    times = {
        "torch graph fp16": (2.0, 2.0),
        "ours fp16": (0.5, 0.5),
        "ours fp16 surgery": (1.0, 1.0),
        "ours fp16 folded": (0.4, 0.4),
    }
    results = {"gpu_models": {"rows": {"vit_b1": gpu_row(times)}}}
    text = render("sections/torch_comparison.md.j2", results)
    assert (
        "| 1.000 / 1.000 | 2.00 / 2.00 | 1.000 / 1.000 (fp16) | 2.00 / 2.00 | 8 times | 12 |"
        in text
    )
    assert (
        "| 0.400 / 0.400 (fp16 folded) | 5.00 / 5.00 | `simplify.surgery:"
        " pipeline.folding:fold_strides` |" in text
    )
    assert "slower" not in text


def test_of_several_rows_the_one_nearest_to_the_default_settings_counts() -> None:
    times = {"torch graph fp16": (2.0, 2.0), "ours fp16": (1.0, 1.0)}
    rows = {
        "resnet50_b1": gpu_row(times, overrides=["tensorrt.timing_iterations=2"]),
        "resnet50_b1: fp16": gpu_row(
            times | {"ours fp16": (0.5, 0.5)}, overrides=["tensorrt.timing_iterations=8"]
        ),
        "mobilenet_128": gpu_row(
            {"torch graph fp32": (9.0, 9.0), "ours fp16": (1.0, 1.0)}
        ),  # fp32 beside fp16 would flatter
        "encoder_b1: fp16": gpu_row({"ours fp16": (1.0, 1.0)}),
        "vit_b1": {"failed": "x"},
        "async_curve": {"entries": {"events_ms": 0.5}},
    }
    (comparison,) = torch_comparison.comparisons({"rows": rows})
    assert (comparison.heading, comparison.usual[0].wall_ms) == ("resnet50_b1: fp16", 0.5)


@pytest.mark.parametrize(
    ("changes", "settings", "host"),
    [
        ({}, "", CPU_HOST),
        ({"environment_source": "of another row"}, "", f"{CPU_HOST} (of another row)"),
        ({"environment": {"cores": 10}}, "", "10 cores, CPU and packages not recorded"),
        ({"environment": None}, "", "cores not recorded, CPU and packages not recorded"),
        ({"overrides": [f"{TIMINGS}=8", "simplify.plain_attention=true"]}, "", CPU_HOST),
        ({"overrides": ["simplify.rewrite_attention=true"]}, "", CPU_HOST),
        (
            {"overrides": [f"{TIMINGS}=2", "export.exporter=torchscript", "a.b=1"]},
            "; each kernel timed 2 times, not 8 as by default; exported by `torchscript`, which is"
            " not the default; `a.b=1`",
            CPU_HOST,
        ),
    ],
)
def test_a_row_names_its_host_and_the_settings_that_are_not_the_default(
    changes: dict[str, Any], settings: str, host: str
) -> None:
    row = gpu_row({}, targets=[], **changes)
    text = render("sections/gpu_models.md.j2", {"gpu_models": {"rows": {"vit_b1": row}}})
    assert text.splitlines()[-1] == f"2026-11-22{settings}. {GPU_HOST}; {host}."


def test_a_row_without_an_environment_is_refused() -> None:
    row = gpu_row({}, targets=[])
    del row["environment"]
    with pytest.raises(UndefinedError, match="environment"):
        render("sections/gpu_models.md.j2", {"gpu_models": {"rows": {"vit_b1": row}}})


def test_a_missing_result_is_refused() -> None:
    with pytest.raises(UndefinedError, match="gpu_models"):
        render("sections/launch_queue.md.j2", {})


def test_engines_of_few_bits_show_what_they_save_and_cost() -> None:
    row = {
        "engine": "a int4",
        "size_mb": 14.25,
        "cosine": 0.985,
        "drop": 0.015,
        "drop_low": 0.01,
        "drop_high": 0.02,
        "smallest_cosine": 0.9,
    }
    failed = {
        **dict.fromkeys(row),
        "engine": "b int4",
        "passed": False,
        "reason": "refused | here",
    }
    host = {
        "cpu": "some CPU",
        "cpu_flags": ["avx2"],
        "python": "3.11",
        "packages": dict.fromkeys(("onnxruntime", "openvino", "nncf"), "1"),
    }
    rows = [{**row, "passed": True, "reason": ""}, failed]
    result = {"rows": rows, "created": "2026-11-22T", "environment": host}
    text = render("sections/few_bits.md.j2", {"few_bits": result})
    assert text.splitlines()[2:4] == [
        "| a int4 | 14.2 | 0.9850 | +0.0150 (+0.0100 to +0.0200) | 0.9000 | yes |",
        "| b int4 | - | - | - | - | no: refused \\| here |",
    ]


def test_how_far_processes_of_one_file_lie_apart_is_told_by_model() -> None:
    rows = [
        {
            "model": "digits",
            "width_%": width,
            "holds_1": width > 10,
            "processes_differ_%": apart,
        }
        for width, apart in ((20.0, 2.0), (5.0, 4.0))
    ]
    host = {"cpu": "some CPU", "cores": 2, "load_1min": 0.25}
    result = {"rows": rows, "created": "2026-11-22T", "environment": host}
    text = render("sections/same_engine.md.j2", {"same_engine": result})
    assert "on digits by 2 to 4 % (standard deviation), with intervals 5 to 20 % wide.\n" in text
    assert "1 of 2 intervals held 1" in text


def test_a_row_of_resnet50_says_its_rates_its_shares_and_what_binds_it() -> None:
    report = proven_report()
    rows = resnet50.rows_from_report(report)
    assert report.baseline is not None
    first = report.baseline.rows[0]
    bound = Bound(
        kind="compute", precision=Precision.FP32, share_of_peak_flops=0.5, why="x", next_step="y"
    )
    rates = resnet50.row_of(
        report.baseline.model_copy(
            update={"rows": (first.model_copy(update={"bytes_per_s": 2e9, "bound": bound}),)}
        )
    )
    assert (
        rates["gbytes_per_s"],
        rates["of_peak_flops_%"],
        rates["of_peak_bytes_%"],
        rates["bound_by"],
    ) == (2.0, 50.0, None, "compute")
    assert {row["engine"] for row in rows} >= {report.baseline.label}
    assert len({tuple(row) for row in rows}) == 1  # one table
