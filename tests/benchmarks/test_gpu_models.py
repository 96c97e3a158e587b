"""The GPU table's rows, targets, documents and pages: all that is pure."""

import argparse
import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.pages.figures import FOLDER
from benchmarks.pages.render import load_results, render
from pipeline.compiler.context import open_context
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import TensorSpec
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.host.gpu import Peaks, find_gpus
from pipeline.measurement.clock import samples_from_blocks
from pipeline.plan.files import plan_from_document
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow
from pipeline.results.layer_table import Layer, LayerTable

ROOT = Path(__file__).parents[2]
H200 = Target(
    backend="tensorrt",
    version="10.6.0",
    device="NVIDIA H200",
    compute_capability="9.0",
    driver="580",
)


# -- rows and targets --------------------------------------------------------


def test_every_row_is_a_plan_that_can_be_read(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    rows, plans = gpu["rows"], gpu["plans"]
    names = [row.name for row in rows.ROWS]
    assert len(set(names)) == len(names)
    for row in rows.ROWS:
        plan = plan_from_document(
            plans.document_of(row, tmp_path / "texts.npz"), base=tmp_path, name=row.name
        )
        assert [spec.shape for spec in plan.model.inputs] == list(row.inputs.values())
        assert set(row.ways) <= set(rows.WAYS)
        assert {name for goal in row.goals for name in (*goal.ours, *goal.theirs)} <= {
            *rows.WAYS,
            *row.peers,
        }
        assert set(row.probe) <= set(row.ways)
        assert all(peer.split()[0] in gpu["torch_peers"].WAYS for peer in row.peers)


def test_every_engine_of_ours_in_the_results_is_of_a_way_that_can_be_asked_for(
    gpu: dict[str, ModuleType],
) -> None:
    rows = json.loads(
        (ROOT / "benchmarks" / "results" / "gpu_models.json").read_text(encoding="utf-8")
    )["rows"]
    ours = {
        name.removeprefix("ours ")
        for row in rows.values()
        for name in row["entries"]
        if name.startswith("ours ")
    }
    assert {"fp16"} <= ours <= set(gpu["rows"].WAYS)


@pytest.mark.parametrize("name", ["resnet50_b64", "encoder_b32", "encoder_maskless_b1"])
def test_the_data_of_a_row_fits_its_model(
    gpu: dict[str, ModuleType], own_home: Path, name: str
) -> None:
    context = open_context(
        gpu["plans"].plan_of(gpu["rows"].row_named(name)), Runner(Store(own_home))
    )
    assert context.data.calibration is not None
    assert context.samples.first(1)[0].keys() == {spec.name for spec in context.source.inputs}


def entry(device_ms: float, wall_ms: float = 1.0) -> dict[str, Any]:
    return {"device_median_ms": device_ms, "wall_median_ms": wall_ms}


def test_targets_are_judged_by_the_medians_of_one_run(gpu: dict[str, ModuleType]) -> None:
    rows = gpu["rows"]
    row = rows.row_named("resnet50_b1")
    entries = {
        "ours fp16": entry(0.30, 0.40),
        "bare fp16": entry(0.30),
        "loop fp16": entry(0.30, 0.38),
        "ours int8": entry(0.26),
        "bare int8": entry(0.25),
        "torch compile fp16": entry(0.61),
        "ours fp32": {"failed": "no memory"},
    }
    goals = {goal["text"]: goal for goal in rows.targets(row, entries, "NVIDIA H200")}
    assert goals["fp16: GPU time over that of a bare build"]["reached"] is True
    assert goals["int8: GPU time over that of a bare build"] | {"text": ""} == {
        "text": "",
        "value": pytest.approx(1.04),
        "direction": "at most",
        "limit": 1.03,
        "reached": False,
    }
    assert goals["fp16: GPU time over the probe's 0.29 ms"]["value"] == pytest.approx(0.30 / 0.29)
    assert goals["int8: GPU time over the probe's 0.235 ms"]["reached"] is False
    assert goals["fp32: GPU time over that of a bare build"]["reached"] is None
    assert goals["fp16: us more from bind to fetch than the bare loop"]["value"] == pytest.approx(
        20
    )
    assert goals["torch compile fp16 over ours fp16"]["reached"] is True
    assert not any(
        "probe" in text
        for text in {goal["text"]: goal for goal in rows.targets(row, entries, "NVIDIA H100")}
    )


def test_long_runs_are_judged_by_ratio_and_the_fastest_of_ours_counts(
    gpu: dict[str, ModuleType],
) -> None:
    rows = gpu["rows"]
    row = rows.row_named("resnet50_b64")
    entries = {
        "ours int8": entry(2.2, 5.0),
        "loop int8": entry(2.2, 4.0),
        "ours int8 modelopt": entry(1.28),
        "ours int8 implicit": entry(1.27),
    }
    goals = {goal["text"]: goal for goal in rows.targets(row, entries, "NVIDIA H200")}
    assert goals["int8: bind to fetch over that of the bare loop"]["reached"] is False
    explicit = goals["ours int8 modelopt over ours int8 implicit"]
    assert explicit["value"] == pytest.approx(1.28 / 1.27)
    assert explicit["reached"] is True


def test_a_gain_between_two_peers_is_a_target_too(gpu: dict[str, ModuleType]) -> None:
    rows = gpu["rows"]
    entries = {"torch eager fp32": entry(1.85), "torch graph fp32": entry(0.366)}
    (target,) = [
        goal
        for goal in rows.targets(rows.row_named("mobilenet_128"), entries, "")
        if goal["text"].startswith("torch eager")
    ]
    assert target["reached"] is True
    assert target["limit"] == pytest.approx(2.928)


# -- what the models are fed -------------------------------------------------


def test_texts_are_padded_and_alike_for_all(gpu: dict[str, ModuleType]) -> None:
    plans = gpu["plans"]
    fed = plans.text_feeds({"input_ids": (4, 128), "attention_mask": (4, 128)}, seed=0)
    lengths = fed["attention_mask"].sum(axis=1)
    assert lengths[0] == 128
    assert (lengths >= 32).all()
    assert len(set(lengths)) > 1
    assert (fed["input_ids"][fed["attention_mask"] == 0] == 0).all()
    assert (
        plans.text_feeds({"input_ids": (1, 512), "attention_mask": (1, 512)}, seed=0)[
            "attention_mask"
        ].sum()
        == 384
    )
    assert set(plans.text_feeds({"input_ids": (1, 8)}, seed=0)) == {"input_ids"}


def test_calibration_texts_are_whole_batches(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    row = gpu["rows"].row_named("encoder_b32")
    with np.load(gpu["plans"].calibration_file(row, tmp_path, {})) as file:
        assert {name: file[name].shape for name in file} == {
            "input_ids": (64, 128),
            "attention_mask": (64, 128),
        }


# -- what is written down ----------------------------------------------------


def report(label: str, device_s: float, blocks: int = 8) -> BenchmarkReport:
    samples = samples_from_blocks(
        [(device_s, device_s * 1.01)] * blocks, (), processes=(2,) * (blocks // 2)
    )
    row = LatencyRow(
        sizes={},
        end_to_end=samples,
        upload=samples,
        compute=samples,
        download=samples,
        throughput_per_s=1 / device_s,
        flops_per_s=6e12 / device_s * 1e-3,
        bytes_per_s=4e9 / device_s * 1e-3,
        ratio=None,
        peak_memory_bytes=1,
    )
    return BenchmarkReport(label=label, rows=(row,), notes=())


def engine(tmp_path: Path, variant: str = "") -> Engine:
    return Engine(
        root=tmp_path,
        file="engine.plan",
        digest="d",
        target=H200,
        recipe=Recipe(backend="tensorrt", precision=Precision.FP16, variant=variant),
        inputs=(),
        outputs=(),
        profiles=(),
        threads=0,
        size_bytes=1,
    )


def test_figures_and_ratios_of_a_race(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    contest, facts = gpu["contest"], gpu["facts"]
    loaded = contest.Loaded(2.0, {"y": np.array([1.0, 2.0])}, {"mode": "reduce-overhead"})
    outcomes = [
        contest.Outcome(contest.Entrant(name, engine(tmp_path)), report(name, device_s), loaded)
        for name, device_s in (
            ("ours fp16", 0.3e-3),
            ("bare fp16", 0.29e-3),
            ("loop fp16", 0.3e-3),
            ("torch eager fp16", 2.7e-3),
        )
    ]
    known = Peaks(flops_per_s={Precision.FP16: 1e14}, bytes_per_s=4e12)
    entries = {outcome.entrant.name: facts.entry_of(outcome, known) for outcome in outcomes}
    bound = entries["ours fp16"]["bound"]
    assert (bound["share_of_peak_flops"], bound["share_of_peak_bytes"]) == pytest.approx(
        (0.2, 1 / 600)
    )
    assert facts.entry_of(outcomes[0])["bound"]["share_of_peak_flops"] is None
    assert entries["ours fp16"]["device_median_ms"] == pytest.approx(0.3015)
    assert entries["ours fp16"]["device_p99_ms"] is None  # of 16 values
    assert len(entries["ours fp16"]["device_of_processes_ms"]) == 4
    assert entries["ours fp16"]["mode"] == "reduce-overhead"
    facts.add_answers(entries, outcomes)
    assert entries["ours fp16"]["cosine"] == pytest.approx(1)
    assert "cosine" not in entries["torch eager fp16"]
    ratios = {
        (ratio["over"], ratio["under"]): ratio["device"]
        for ratio in facts.ratios(outcomes, ["fp16", "int8"])
    }
    assert set(ratios) == {
        ("ours fp16", "bare fp16"),
        ("ours fp16", "loop fp16"),
        ("torch eager fp16", "ours fp16"),
    }
    assert ratios["ours fp16", "bare fp16"][0] == pytest.approx(0.3 / 0.29, abs=1e-4)
    assert ratios["torch eager fp16", "ours fp16"][0] == pytest.approx(9, abs=1e-4)


def test_the_layer_table_in_short(gpu: dict[str, ModuleType]) -> None:
    softmax = Layer(
        name="mha",
        kind="kgen",
        precision=Precision.FP16,
        evidence="types",
        heavy=True,
        nodes=("a", "s", "b"),
        operators=("MatMul", "Softmax", "MatMul"),
        seconds=3e-6,
    )
    moving = Layer(name="r", kind="Reformat", precision="none", evidence="none", seconds=1e-6)
    table = LayerTable(sizes={}, runs=1, layers=(softmax, moving))
    facts = gpu["facts"].layer_facts(table, Recipe(backend="tensorrt", precision=Precision.FP16))
    assert facts["time_share"] == {"fp16": 0.75, "none": 0.25}
    assert facts["moving_layers"] == 1
    assert facts["mislabelled"] == ""
    assert facts["fusions"] == ["attention (MatMul, Softmax, MatMul) in one kernel: 1 of 1"]
    assert [layer["ms"] for layer in facts["slowest"]] == pytest.approx([0.003, 0.001])


def test_kernels_that_a_peer_ran(gpu: dict[str, ModuleType]) -> None:
    events = [
        ("aten::_scaled_dot_product_flash_attention", 0.0, 12),
        ("flash_fwd_kernel<half>", 40.0, 12),
        ("gemm", 400.0, 48),
        ("aten::mm", 9.0, 1),
    ]
    kernels = gpu["torch_peers"].kernels(events)
    assert kernels["sdpa_operators"] == ["aten::_scaled_dot_product_flash_attention"]
    assert kernels["attention_kernels"] == ["12 x flash_fwd_kernel<half>"]
    assert kernels["slowest_kernels"][0] == "400 us in 48 x gemm"
    assert len(kernels["slowest_kernels"]) == 2


def test_a_row_that_runs_again_takes_its_own_place_and_no_other(
    gpu: dict[str, ModuleType], tmp_path: Path
) -> None:
    script, file = gpu["gpu_models"], tmp_path / "gpu_models.json"
    goal = {"text": "fast", "value": 1.0, "direction": "at least", "limit": 2.0, "reached": False}
    script.add_row(file, "vit_b1", {"created": "1", "targets": [goal], "entries": {}}, H200)
    script.add_row(file, "async_curve", {"created": "2", "failed": "no GPU"}, H200)
    script.add_row(
        file,
        "resnet50_b1",
        {
            "created": "3",
            "targets": [{**goal, "reached": True}],
            "entries": {"ours fp16": entry(0.3)},
        },
        H200,
    )
    document = json.loads(file.read_text())
    assert list(document["rows"]) == ["resnet50_b1", "vit_b1", "async_curve"]
    assert document["targets"] == {"vit_b1: fast": False, "resnet50_b1: fast": True}
    assert all(
        row["environment"]["python"] and row["target"]["driver"]
        for row in document["rows"].values()
    )
    for name, row in document["rows"].items():
        assert script.table(name, row).row_count == len(row.get("entries", ())) + len(
            row.get("targets", ())
        )


def test_a_row_of_some_ways_stands_beside_the_whole_one(
    gpu: dict[str, ModuleType], tmp_path: Path
) -> None:
    script, options, file = (
        gpu["gpu_models"],
        gpu["measure_row"].Options,
        tmp_path / "gpu_models.json",
    )
    assert script.key_of("vit_b1", options()) == "vit_b1"
    assert (
        script.key_of("resnet50_throughput_b256", options(ways=("int8",)))
        == "resnet50_throughput_b256: int8"
    )
    assert (
        script.key_of("tactics", options(ways=("fp16",), only=("plain", "watched")))
        == "tactics: plain, watched"
    )
    partly = script.key_of("vit_b1", options(ways=("fp16", "int8"), only=("plain",)))
    for key in ("vit_b32", partly, "vit_b1"):
        script.add_row(file, key, {"created": "1", "entries": {}}, H200)
    document = json.loads(file.read_text())
    assert list(document["rows"]) == ["vit_b1: fp16, int8", "vit_b1", "vit_b32"]
    assert "environment" not in document, "each row has its own"


def test_a_row_keeps_the_environment_it_was_measured_in(
    gpu: dict[str, ModuleType], tmp_path: Path
) -> None:
    script, file = gpu["gpu_models"], tmp_path / "gpu_models.json"
    elsewhere = {
        "created": "1",
        "entries": {},
        "environment": {"cores": 999},
        "target": {"device": "another GPU"},
    }
    file.write_text(json.dumps({"rows": {"vit_b1": elsewhere}}))
    script.add_row(file, "vit_b32", {"created": "2", "entries": {}}, H200)
    rows = json.loads(file.read_text())["rows"]
    assert rows["vit_b1"] == elsewhere
    assert rows["vit_b32"]["environment"]["cores"] < 999
    assert rows["vit_b32"]["target"]["device"] == "NVIDIA H200"


def test_committed_rows_say_where_they_ran_or_that_it_was_not_recorded() -> None:
    rows = json.loads(
        (ROOT / "benchmarks" / "results" / "gpu_models.json").read_text(encoding="utf-8")
    )["rows"]
    for name, row in rows.items():
        assert row["target"]["device"], name
        assert row["environment"] or row["environment_source"] == "not recorded", name


def test_no_note_holds_a_figure_that_no_command_repeats() -> None:
    rows = json.loads(
        (ROOT / "benchmarks" / "results" / "gpu_models.json").read_text(encoding="utf-8")
    )["rows"]
    measured = re.compile(r"\d ?(ms|us|%)|\d (s|times as|images)\b")
    assert [name for name, row in rows.items() if measured.search(row.get("note", ""))] == []


def test_every_heading_and_every_command_of_the_page_is_taken_as_printed(
    gpu: dict[str, ModuleType],
) -> None:
    script, page = gpu["gpu_models"], (FOLDER / "gpu.md").read_text(encoding="utf-8")
    rows = json.loads(
        (ROOT / "benchmarks" / "results" / "gpu_models.json").read_text(encoding="utf-8")
    )["rows"]
    assert rows
    for heading, row in rows.items():
        (alone,) = script.parse_arguments([heading]).rows
        assert alone.heading == heading
        words = shlex.split(row["command"])
        (choice,) = script.parse_arguments(words[4:]).rows
        assert words[:4] == ["python", "-m", "benchmarks", "gpu_models"]
        assert choice.heading == heading
        if heading != "async_curve":  # the page about measuring has it
            assert f"### `{heading}`\n" in page
            assert f"\n$ {row['command']}\n" in page


def test_the_command_of_a_row_holds_all_that_is_not_the_default(gpu: dict[str, ModuleType]) -> None:
    script, options = gpu["gpu_models"], gpu["measure_row"].Options
    assert script.command_of("vit_b1", options()) == "python -m benchmarks gpu_models vit_b1"
    special = options(
        2.0,
        ("fp16", "int8"),
        False,
        False,
        ("tensorrt.timing_iterations=2",),
        (),
        ("reduce-overhead",),
    )
    words = shlex.split(script.command_of("vit_b1", special))[4:]
    arguments = script.parse_arguments(words)
    (choice,) = arguments.rows
    assert script.options_for(choice, options()).ways == special.ways
    assert (arguments.seconds, arguments.peers, arguments.bare, arguments.modes) == (
        2.0,
        False,
        False,
        ("reduce-overhead",),
    )
    assert tuple(arguments.set) == special.overrides


def test_a_heading_chooses_ways_of_a_row_and_variants_of_a_part(gpu: dict[str, ModuleType]) -> None:
    script, options = gpu["gpu_models"], gpu["measure_row"].Options
    row, part = script.parse_arguments(["vit_b1: fp16, int8", "tactics: plain, watched"]).rows
    assert script.options_for(row, options()) == options(ways=("fp16", "int8"))
    assert script.options_for(part, options()) == options(only=("plain", "watched"))
    assert script.options_for(gpu["rows"].Choice("vit_b1"), options(ways=("fp8",))).ways == ("fp8",)


def test_rows_that_were_measured_at_once_name_each_other(gpu: dict[str, ModuleType]) -> None:
    old = {
        "created": "2026-11-23T10:10:00+00:00",
        "seconds": 300.0,
        "measured_s": 1.5,
    }  # dated by its end
    part = {"created": "2026-11-23T10:04:00+00:00", "seconds": 120.0}  # by its beginning
    late = {
        "began": "2026-11-23T10:09:00+00:00",
        "created": "2026-11-23T10:20:00+00:00",
        "seconds": 660.0,
    }
    partners = gpu["gpu_model_rows"].rows_at_once(
        {"rows": {"old": old, "part": part, "late": late, "failed": {}}}
    )
    assert partners == {"old": ("part", "late"), "part": ("old",), "late": ("old",)}


def test_the_page_shows_every_engine_with_its_figures(
    gpu: dict[str, ModuleType], tmp_path: Path
) -> None:
    script, file = gpu["gpu_models"], tmp_path / "gpu_models.json"
    goal = {"text": "fast", "value": 2.5, "direction": "at least", "limit": 2.0, "reached": True}
    layers = {
        "time_share": {"fp16": 1.0},
        "count": 9,
        "moving_layers": 2,
        "moving_share": 0.1,
        "mislabelled": "",
        "fusions": ["attention in one: 1 of 1"],
        "slowest": [{"nodes": "conv|1", "precision": "fp16", "share": 0.5}],
    }
    compiled = {
        "mode": "reduce-overhead",
        "mode_before": "too long",
        "compile_s": 60.0,
        "recompilations": 0,
    }
    bound = {
        "kind": "compute",
        "precision": "fp16",
        "share_of_peak_flops": 0.25,
        "share_of_peak_bytes": None,
        "why": "arithmetic | takes it",
    }
    rates = {"throughput_per_s": 2500.0, "flops_per_s": 250e12, "bytes_per_s": 80e9, "bound": bound}
    entries = {
        "ours fp16": {
            **entry(0.29, 0.4),
            **rates,
            "device_p99_ms": 0.31,
            "stable": True,
            "build_s": 61.0,
            "layers": layers,
        },
        "torch compile fp16": {
            **entry(0.62),
            "stable": False,
            "sdpa_operators": ["aten::flash"],
            "attention_kernels": ["12 x flash"],
            **compiled,
        },
        "bare fp16": {"failed": "no memory"},
    }
    ratio = {"over": "ours fp16", "under": "bare fp16", "device": [1.01, 1.0, 1.02], "wall": None}
    when = {
        "created": "2026-11-21T20:00:00+00:00",
        "seconds": 100.0,
        "command": "python -m benchmarks gpu_models vit_b1",
    }
    row = {**when, "entries": entries, "targets": [goal, {**goal, "value": None, "reached": None}]}
    script.add_row(
        file,
        "vit_b1",
        {**row, "ratios": [ratio], "gpu": {"power_w": {"median": 500.0}}, "overrides": ["a=b"]},
        H200,
    )
    script.add_row(
        file, "vit_b32", {"created": "2026-11-21T20:00:00+00:00", "failed": "no GPU"}, H200
    )
    curve = {
        "curve": [{"calls": 1, "unsynchronised_ms": 1.3, "synchronised_ms": 3.0}],
        "per_call_ms_ending_with": {"nothing": 3.0, ".cpu()": 3.1},
    }
    about = {"created": "1", "model": "resnet18", "shape": [1], "events_ms": 3.0}
    script.add_row(file, "async_curve", {**about, "entries": curve, "targets": []}, H200)
    results = load_results(tmp_path)
    text = render("sections/gpu_models.md.j2", results)
    assert (
        "### `vit_b1`\n\nViT-B/16, batch 1.\n\n```console\n$ python -m benchmarks gpu_models"
        " vit_b1\n```\n" in text
    )
    assert (
        "| ours fp16 | 0.400 | 0.290 (0.310) | 2,500 | 250.0 (25%) | 40.0 | 1.010 (1.000 to 1.020)"
        " | - | 61.0 | fp16 100% |" in text
    )
    assert (
        "| torch compile fp16 | 1.000 | 0.620 ~ | - | - | - | - | - | 60.0 | reduce-overhead |"
        in text
    )
    assert "| fast | 2.500 | at least 2 | reached |" in text
    assert "| fast | - | at least 2 | not measured |" in text
    assert (
        "| ours fp16 | compute | 9 | 2 (10% of the time) | conv\\|1 fp16 50% |"
        " attention in one: 1 of 1 |" in text
    )
    assert (
        "| torch compile fp16 | - | - | - | - | attention by `aten::flash`; reduce-overhead"
        " (too long in max-autotune), 60 s, 0 recompilations |" in text
    )
    assert "async_curve" not in text
    curve_text = render("sections/launch_queue.md.j2", results)
    assert "a clock around 1 calls without synchronisation says 1.30 ms" in curve_text
    assert (
        "50 calls take 3.000 ms each, and where every call ends with .cpu() 3.100 ms." in curve_text
    )
    assert "**failed**: no GPU" in text
    engines = ("| ours fp16 |", "| torch compile fp16 |", "| bare fp16 |")
    tabled = [line for line in text.splitlines() if line.startswith(engines)]
    assert {line.replace("\\|", "").count("|") for line in tabled} == {7, 11}


def test_what_flexibility_costs_stands_beside_the_engine_of_the_one_shape(
    gpu: dict[str, ModuleType], tmp_path: Path
) -> None:
    script, file = gpu["gpu_models"], tmp_path / "gpu_models.json"
    at = "at input_ids [1, 128], attention_mask [1, 128]"
    entries = {
        f"fixed, level 5 {at}": {**entry(0.41), "stable": True},
        f"fixed {at}": {**entry(0.4), "stable": True, "activation_bytes": 1_500_000},
        f"sequence {at}": {**entry(0.5, 0.6), "stable": False},
        "sequence at input_ids [1, 64]": {**entry(0.3), "stable": True},
        **{
            name: {"build_s": 20.0, "engine_bytes": 2_000_000}
            for name in ("fixed", "fixed, level 5", "sequence")
        },
        "level 9": {"failed": "no such | level"},
    }
    script.add_row(
        file,
        "flexibility_encoder",
        {"created": "2026-11-21T20:00:00+00:00", "seconds": 9.0, "entries": entries, "targets": []},
        H200,
    )
    results = load_results(tmp_path)
    text = render("sections/gpu_models.md.j2", results)
    assert "| 1x128 | fixed | 1.000 | 0.400 | 1.000 | 20.0 | 2.0 | 1.5 |" in text
    assert "| 1x128 | fixed, level 5 | 1.000 | 0.410 | 1.025 | 20.0 | 2.0 | - |" in text
    assert "| 1x128 | sequence | 0.600 | 0.500 ~ | 1.250 | 20.0 | 2.0 | - |" in text
    assert "| 1x64 | sequence | 1.000 | 0.300 | - | 20.0 | 2.0 | - |" in text
    assert "- **failed**: level 9: no such \\| level" in text
    drawn = gpu["gpu_model_rows"].times_by_picture(results["gpu_models"])
    assert drawn == {
        "gpu_flexibility.svg": {
            "encoder at 1x128": {
                "fixed, level 5": [1.0, 0.41],
                "fixed": [1.0, 0.4],
                "sequence": [0.6, 0.5],
            }
        }
    }


def test_a_part_that_fails_says_so(gpu: dict[str, ModuleType]) -> None:
    def broken(options: object) -> dict[str, Any]:
        raise ValueError("no such shape")

    result = gpu["gpu_models"].guarded(broken, gpu["measure_row"].Options())
    assert result["failed"] == "ValueError: no such shape"
    assert gpu["gpu_models"].summary(result) == {"failed": "ValueError: no such shape"}


def test_words_of_the_command_line(
    gpu: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    parse = gpu["gpu_models"].parse_arguments
    arguments = parse(
        [
            "vit_b1",
            "overlap",
            "--ways",
            "fp16,int8 modelopt",
            "--seconds",
            "2",
            "--no-peers",
            "--set",
            "a=b",
        ]
    )
    assert [choice.heading for choice in arguments.rows] == ["vit_b1", "overlap"]
    assert (arguments.ways, arguments.seconds, arguments.peers, arguments.bare) == (
        ("fp16", "int8 modelopt"),
        2.0,
        False,
        True,
    )
    for wrong in (
        ["vit"],
        ["vit_b1: fp4"],
        ["vit_b1", "--ways", "fp4"],
        ["vit_b1", "--modes", "fast"],
    ):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "expected fp32" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError, match="--list"):
        gpu["gpu_models"]._row("vit")


# -- parts -------------------------------------------------------------------


def test_variants_meet_where_they_take_the_same_shapes(gpu: dict[str, ModuleType]) -> None:
    parts = gpu["parts"]

    class Model:
        def __init__(self, variant: Any) -> None:
            self.inputs = tuple(
                TensorSpec(name=name, dtype="float32", shape=shape)
                for name, shape in variant.inputs.items()
            )

    for variants in parts.FLEXIBILITY.values():
        groups = parts.by_shapes([(variant, Model(variant)) for variant in variants])
        fixed = [index for index, variant in enumerate(variants) if not variant.profile]
        alone = [
            entered
            for entered in groups.values()
            if not {index for index, _ in entered} & set(fixed)
        ]
        assert all(
            {index for index, _ in entered} >= {0}
            for shapes, entered in groups.items()
            if shapes == next(iter(groups))
        )
        assert sum(map(len, groups.values())) == sum(len(variant.points) for variant in variants)
        assert len(alone) < len(groups)


def test_the_best_throughput_leaves_out_what_failed(gpu: dict[str, ModuleType]) -> None:
    entries = {
        "a": {"throughput_per_s": 2.0},
        "b": {"failed": "x"},
        "c": {"throughput_per_s": 3.0},
        "d": {"build_s": 1.0},
    }
    assert gpu["parts"].best_throughput(entries) == ("c", 3.0)
    assert gpu["parts"].best_throughput({}) == (None, None)


def test_a_point_of_the_curve_is_per_call(gpu: dict[str, ModuleType]) -> None:
    """A call takes 2 ms of the host, and 10 ms of the device, which works on after the call."""
    seconds, calls = [0.0], 7

    def call() -> None:
        seconds[0] += 0.002

    def synchronize() -> None:
        seconds[0] += 0.008 * calls

    point = gpu["async_curve"].point(call, synchronize, calls, lambda: seconds[0])
    assert point["calls"] == calls
    assert point["unsynchronised_ms"] == pytest.approx(2.0)
    assert point["synchronised_ms"] == pytest.approx(10.0)


def test_every_kind_of_build_is_found_by_its_recipe_and_built_anew_each_time(
    gpu: dict[str, ModuleType], tmp_path: Path, monkeypatch: Any
) -> None:
    tactics, settings = gpu["tactics"], {}

    class Trt:
        class ProfilingVerbosity:
            DETAILED = "detailed"

    class Config:
        avg_timing_iterations, profiling_verbosity, progress_monitor = 8, "names", None

    def serialized(
        trt: Any, model: Any, recipe: Recipe, options: Any, cache: bytes, change: Any, logger: Any
    ) -> bytes:
        change(config := Config())
        settings[recipe.variant] = (
            cache,
            config.avg_timing_iterations,
            config.profiling_verbosity,
            config.progress_monitor,
            logger,
        )
        return recipe.variant.encode()

    monkeypatch.setattr(
        tactics.trt_library, "host", lambda: (SimpleNamespace(uuid="GPU-1"), "10.6.0")
    )
    monkeypatch.setattr(tactics.trt_library, "library", lambda: Trt)
    monkeypatch.setattr(
        tactics.timing_cache, "gpu_lock", lambda uuid, progress: contextlib.nullcontext()
    )
    monkeypatch.setattr(gpu["bare"].tensorrt_, "probe", lambda: H200)
    monkeypatch.setattr(tactics, "_monitor", lambda trt: "monitor")
    monkeypatch.setattr(tactics, "PAUSE_S", 0.0)
    monkeypatch.setattr(tactics, "logger_of", lambda trt: "logger")
    monkeypatch.setattr(tactics, "builders_logger_of", lambda trt: "own logger")
    monkeypatch.setattr(tactics, "serialized", serialized)
    model = OnnxModel(root=tmp_path, file="m.onnx", digest="m", opset=20, inputs=(), outputs=())
    engines = {}
    for kind in tactics.KINDS:
        recipe = Recipe(backend="tensorrt", precision=Precision.FP16, variant=f"{kind} 2")
        (tmp_path / kind).mkdir()
        engines[kind] = tactics.build_kind(
            model, recipe, BuildOptions(profiles=()), tmp_path / kind
        )
    assert {kind: settings[f"{kind} 2"] for kind in tactics.KINDS} == {
        "plain": (b"", 8, "names", None, None),
        "after a pause": (b"", 8, "names", None, None),
        "timed once": (b"", 1, "names", None, None),
        "watched": (b"", 8, "names", "monitor", None),
        "listened to": (b"", 8, "names", None, "logger"),
        "all together": (b"", 8, "detailed", "monitor", "logger"),
        "as Crucible builds": (b"", 8, "detailed", None, "own logger"),
    }
    assert len({engine.digest for engine in engines.values()}) == len(tactics.KINDS)
    assert engines["plain"].path.read_bytes() == b"plain 2"


@pytest.mark.skipif(bool(find_gpus().devices), reason="this host has a GPU")
@pytest.mark.parametrize("script", ["gpu_models", "tensorrt_compile"])
def test_a_host_without_a_gpu_says_so(script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "cannot be used on this host: no NVIDIA driver" in result.stderr
    assert "next: " in result.stderr
    assert "Traceback" not in result.stderr
