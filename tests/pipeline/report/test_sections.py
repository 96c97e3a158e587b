"""The tables of a report, numbered alike, and the same in the report and in a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.benchmark.roofline import bound_of, with_bounds
from pipeline.cli.terminal import (
    candidate_table,
    console,
    first_rows,
    limits_table,
    print_limits,
    verdict_lines,
)
from pipeline.core.artifacts import KeptNode
from pipeline.core.recipe import Precision
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.report.entries import entries
from pipeline.report.figures import plots
from pipeline.report.html import page
from pipeline.report.layer_sections import layers_of_engines
from pipeline.report.markdown import markdown
from pipeline.report.run_sections import grouped_notes
from pipeline.report.sections import headline, sections
from pipeline.report.tables import Section, left, right
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.results.candidates import NodeHarm, NodeRanking
from pipeline.results.gpu_cost import GpuCost
from pipeline.results.module_findings import CompiledGraphs, ModuleFindings, Wait
from pipeline.results.report import Report
from tests.builders.report import (
    PEAKS_OF_H200,
    proven_report,
    sample_report,
    throughput_report,
    worked_report,
)


def test_entries_are_numbered_from_fast_to_slow_with_the_unmeasured_last(report: Report) -> None:
    lines = entries(report)
    assert [line.number for line in lines] == list(range(1, 11))
    assert lines[0].part == "winner"
    assert [line.state for line in lines[-2:]] == ["refused", "built"]
    assert {line.label for line in lines if line.part == "baseline"} == {
        "pytorch eager fp32",
        "pytorch traced fp32",
    }


def test_percentiles_are_absent_without_enough_values(report: Report) -> None:
    rows = {
        row[1]: row
        for section in sections(report)
        if section.key == "candidates"
        for row in section.tables[0].rows
    }
    headings = (
        next(section for section in sections(report) if section.key == "candidates")
        .tables[0]
        .headings
    )
    p90, p99 = headings.index("p90"), headings.index("p99")
    assert rows["openvino int8 nncf u8s8"][p99] != "-"
    assert rows["openvino fp32"][p99] == "-"  # 400 values
    assert rows["openvino fp32"][p90] != "-"


def test_every_row_has_as_many_cells_as_its_table_has_columns(report: Report) -> None:
    tables = [table for section in sections(report) for table in section.tables]
    assert {len(row) - len(table.columns) for table in tables for row in table.rows} == {0}


@pytest.mark.parametrize(
    ("limit_s", "where"), [(None, "batch 8 with 2 sessions"), (0.02, "batch 1 with 2 sessions")]
)
def test_throughput_has_the_best_points_all_points_and_what_was_not_tried(
    limit_s: float | None, where: str
) -> None:
    report = throughput_report(limit_s)
    section = next(section for section in sections(report) if section.key == "throughput")
    best, points, untried = section.tables
    assert best.emphasised == 0
    assert best.rows[0][2] == where
    assert best.rows[0][6] == "6.00 [5.91, 6.07]"
    assert len(points.rows) == 8
    assert {row[2] for row in untried.rows} == {"4 sessions: the time was over"}
    assert "times the throughput of pytorch eager fp32" in headline(report)
    (plot,) = (plot for plot in plots(report) if plot.name == "throughput")
    drawing = plot.draw()
    assert "p99 of a request, ms" in drawing
    assert ("limit, 20 ms" in drawing) == (limit_s is not None)


def test_a_figure_that_repeats_in_every_row_stands_above_the_table(report: Report) -> None:
    latency = next(section for section in sections(report) if section.key == "latency")
    assert "In every row at batch 8: warm-up 10." in latency.paragraphs
    assert [table.headings[-1] for table in latency.tables] == ["values", "values"]
    assert all(len(row) == len(latency.tables[0].columns) for row in latency.tables[0].rows)


def test_a_report_by_latency_has_no_throughput(report: Report) -> None:
    assert "throughput" not in {section.key for section in sections(report)}
    assert "throughput" not in {plot.name for plot in plots(report)}


def test_every_proven_engine_is_told_with_its_shares_and_fusions() -> None:
    section = next(section for section in sections(proven_report()) if section.key == "layers")
    shares, classes, fused, *layers = section.tables
    assert shares.columns == (
        *left("#", "engine"),
        *right("fp32", "fp16", "int8", "reformats", "not known", "layers", "of them reformats"),
    )
    assert shares.rows == (
        ("1", "tensorrt int8 implicit entropy", "-", "-", "94 %", "6.1 %", "-", "24", "2"),
        ("2", "tensorrt fp16 flags", "-", "96 %", "-", "3.8 %", "-", "27", "4"),
        ("5", "tensorrt rescued fp16 flags", "99.9 %", "-", "-", "0.1 %", "-", "24", "1"),
    )
    assert shares.emphasised == 0
    assert classes.headings[2:] == (
        *("matrix products", "normalisation", "element-wise", "layout", "other"),
        *("wall", "compute", "kernels", "host", "gaps", "layers times"),
    )
    assert classes.rows[0][:7] == (
        *("1", "tensorrt int8 implicit entropy", "92 %", "0 %", "0 %", "6.1 %", "2.4 %"),
    )
    assert fused.rows[1][2] == "Conv + Relu in one kernel: 9; Conv + Add + Relu in one kernel: 8"
    assert [(table.title, len(table.rows), table.folded) for table in layers] == [
        ("The layers of tensorrt int8 implicit entropy, slowest first", 24, False),
        ("The layers of tensorrt fp16 flags, slowest first", 27, True),
        ("The layers of tensorrt rescued fp16 flags, slowest first", 24, True),
    ]
    assert layers[2].headings == (
        *("layer", "operator", "time", "share", "precision", "known by", "ONNX nodes", "kernel"),
    )
    assert layers[2].rows[0][1:7] == (
        "Conv + Add + Relu",
        "154 us",
        "12 %",
        "fp32",
        "tactic",
        "/layer4/layer4.1/conv2/Conv, /layer4/layer4.1/Add, /layer4/layer4.1/relu_1/Relu",
    )
    assert section.paragraphs[1:] == (
        "Layers were not timed for pytorch traced fp32, pytorch eager fp32.",
        "FLOPs, bytes and rooflines of layers are not in this report: its graph is without the work"
        " of its nodes.",
        "Own errors of layers were not measured: only candidates that fail their accuracy have"
        " them.",
    )


def layer_section(report: Report) -> Section:
    return next(section for section in sections(report) if section.key == "layers")


def test_layers_have_their_share_of_the_roofline() -> None:
    section = layer_section(worked_report())
    table = section.tables[3]
    assert table.headings[2:9] == (
        "time",
        "share",
        "of roofline",
        "above it",
        "limit",
        "FLOPs",
        "bytes moved",
    )
    cells = {row[0]: row for row in table.rows}
    first = next(row for name, row in cells.items() if "layer1.0/conv1/Conv" in name)
    # Conv and Relu in int8: 25 kB in and 25 kB out, which takes 10.4 ns at 4.8 TB/s.
    assert first[2] == "7.17 us"
    assert first[4:9] == ("0.1 %", "7.16 us", "memory", "1.00 MFLOP", "50.0 kB")
    reformat = next(row for name, row in cells.items() if "Reformatting" in name)
    assert reformat[4:9] == ("-", "-", "no node of the graph", "-", "-")
    text = " ".join(section.paragraphs)
    assert "What fused nodes pass to each other does not count as moved" in text
    assert "The layers of tensorrt int8 implicit entropy whose roofline is known take" in text
    assert "Furthest above it: /conv1/Conv" in text
    assert "peaks of" not in text


def test_without_peaks_layers_have_their_work_only() -> None:
    other = PEAKS_OF_H200.model_copy(update={"device": "NVIDIA H200 NVL"})
    for peaks in (None, other):
        section = layer_section(worked_report(peaks))
        row = next(row for row in section.tables[3].rows if "layer1.0/conv1/Conv" in row[0])
        assert row[4:8] == ("-", "-", "peaks not known", "1.00 MFLOP")
        text = " ".join(section.paragraphs)
        assert "The peaks of this device are not known" in text
        assert "`crucible doctor --measure`" in text
        assert "whose roofline is known" not in text


def test_the_peaks_of_a_cpu_name_its_threads() -> None:
    cpu = PEAKS_OF_H200.model_copy(update={"device": "NVIDIA H200, 2 threads"})
    section = layer_section(worked_report(cpu))
    assert "whose roofline is known" in " ".join(section.paragraphs)


def test_a_report_without_a_graph_says_that_rooflines_are_missing() -> None:
    report = worked_report().model_copy(update={"graph": (), "graph_sizes": None})
    section = layer_section(report)
    assert "rooflines of layers are not in this report: it has no graph." in section.paragraphs[2]
    assert "of roofline" not in section.tables[3].headings


def test_markdown_has_the_slowest_layers_of_the_winner_and_of_a_wrong_precision() -> None:
    lines = markdown(proven_report()).splitlines()
    assert [line for line in lines if line.startswith("The layers of")] == [
        "The layers of tensorrt int8 implicit entropy, slowest first (the first 15 of 24):",
        "The layers of tensorrt rescued fp16 flags, slowest first (the first 15 of 24):",
    ]


def test_a_layer_has_the_largest_own_error_of_its_nodes_that_are_low() -> None:
    report = proven_report()
    fp16 = report.candidates[1]
    conv, kept = "/layer4/layer4.1/conv2/Conv", "/layer4/layer4.1/Add"
    harms = (
        NodeHarm(node=conv, operator="Conv", largest=1.0, error=0.1),
        NodeHarm(node=kept, operator="Add", largest=1.0, error=0.5),
    )
    rescue = report.rescues[0].model_copy(update={"ranking": NodeRanking(nodes=harms)})
    left_out = KeptNode(node=kept, operator="Add", reason="large values")
    changed = fp16.model_copy(update={"kept_fp32": (left_out,)})
    for candidate, error in ((fp16, 0.5), (changed, 0.1)):
        candidates = (report.candidates[0], candidate, *report.candidates[2:])
        update = {"candidates": candidates, "rescues": (rescue,)}
        _, engine, rescued = layers_of_engines(report.model_copy(update=update))
        (layer,) = (layer for layer in engine.layers if conv in layer.nodes)
        assert engine.error_of(layer) == error
        assert rescued.errors  # a step of the same rescue
    (of_layers,) = (
        section
        for section in sections(report.model_copy(update={"rescues": (rescue,)}))
        if section.key == "layers"
    )
    rows = [row for row in of_layers.tables[4].rows if conv in row[7]]
    assert [row[6] for row in rows] == ["0.5 (6 dB)"]
    assert of_layers.tables[4].headings[6] == "own error"
    assert 'as under "Which layers hurt"' in of_layers.paragraphs[-1]


def test_a_mislabelled_candidate_says_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    report = proven_report()
    assert "called fp16, but its heavy layers run 0 % fp16, 100 % fp32" in markdown(report)
    console().print(candidate_table(report))
    shown = " ".join(capsys.readouterr().out.split())
    assert "wrong" in shown
    assert "precision:" in shown
    assert "mislabelled" not in shown
    assert "int8 94 %" in shown
    assert "really ran" not in str(
        [column.header for column in candidate_table(sample_report()).columns]
    )


def test_a_rescue_is_told_step_by_step() -> None:
    section = next(section for section in sections(proven_report()) if section.key == "rescue")
    assert section.paragraphs == ("tensorrt fp16 flags: keep /fc/Gemm in fp32",)
    assert section.tables[0].rows == (
        (
            "tensorrt fp16 flags",
            "opt shape moved to min",
            "tensorrt rescued fp16 flags",
            "wrong precision",
        ),
        ("tensorrt fp16 flags", "worst nodes kept in fp32", "-", "not tried"),
    )
    assert "  fallback of tensorrt fp16 flags: keep /fc/Gemm in fp32" in verdict_lines(
        proven_report()
    )


def bounded(report: Report) -> Report:
    """The report as a host gives it whose fp32 peak is known, with moved bytes for the baseline
    only.
    """
    peaks = Peaks(
        device="EPYC, 2 threads",
        source="measured 2026-11-21",
        flops_per_s={Precision.FP32: 1e12},
        bytes_per_s=50e9,
    )
    assert report.baseline
    rows = tuple(row.model_copy(update={"bytes_per_s": 4e9}) for row in report.baseline.rows)
    baseline = with_bounds(report.baseline.model_copy(update={"rows": rows}), Precision.FP32, peaks)
    candidates = tuple(
        (
            each.model_copy(
                update={"benchmark": with_bounds(each.benchmark, each.recipe.precision, peaks)}
            )
            if each.benchmark
            else each
        )
        for each in report.candidates
    )
    use = GpuUse(uuid="GPU-1", samples=3, other_processes=(4711,))
    return report.model_copy(
        update={"baseline": baseline, "candidates": candidates, "peaks": (peaks,), "gpu_use": use}
    )


def test_bottlenecks_are_shown_in_every_form(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = bounded(report)
    for text in (markdown(copy), page(copy)):
        assert "Bottlenecks" in text
        assert (
            "Peaks of EPYC, 2 threads: fp32 1,000 GFLOP/s; memory 50.0 GB/s (measured 2026-11-21)."
            in text
        )
        assert "61 % (fp32)" in text, "8.2 GFLOP in 13.4 ms"
        assert "try int8, or a smaller model" in text
        assert "other processes on the GPU: 4711" in text
    (limits,) = (section for section in sections(copy) if section.key == "limits")
    measured = [entry for entry in entries(copy) if entry.benchmark]
    assert [len(table.rows) for table in limits.tables] == [len(measured)] * 2
    console().print(limits_table(first_rows(copy)))
    rows = [line for line in capsys.readouterr().out.splitlines() if "pytorch eager fp32" in line]
    assert all(each in rows[0] for each in ("612", "4.00", "61 % (fp32)", "8.0 %", "compute"))
    assert any("its bottleneck is unknown" in line for line in verdict_lines(copy)), (
        "the winner's bytes are not known"
    )


def test_rates_are_printed_also_where_no_peak_is_known(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.baseline
    row = report.baseline.rows[0].model_copy(update={"bytes_per_s": 4e9})
    print_limits(
        console(), [("fast", row.model_copy(update={"bound": bound_of(row, Precision.FP32, None)}))]
    )
    output = capsys.readouterr().out
    (line,) = (line for line in output.splitlines() if "fast" in line)
    assert "612" in line
    assert "4.00" in line
    assert (
        "the bottlenecks are unknown: this device's peak rates are not known; the next compile"
        " on a quiet host measures the peaks" in output
    )
    assert "of peak" not in output


def test_a_report_without_verdicts_on_rows_has_no_such_section(report: Report) -> None:
    assert all(section.key != "limits" for section in sections(report))


def with_cost(benchmark: BenchmarkReport, cost: GpuCost) -> BenchmarkReport:
    rows = tuple(row.model_copy(update={"gpu": cost}) for row in benchmark.rows)
    return benchmark.model_copy(update={"rows": rows})


def costly(report: Report) -> Report:
    """The report as a GPU gives it: all is known of one candidate, not all of the baseline."""
    first, *others = report.candidates
    assert first.benchmark
    assert report.baseline
    known = GpuCost(
        weights_bytes=98_000_000,
        activation_bytes=12_000_000,
        peak_bytes=640_000_000,
        peak_source="process",
        energy_per_1000_requests_j=312.4,
        energy_window_s=0.5,
    )
    listed = {"peak_bytes": 900_000_000, "peak_source": "device"}
    missing = {"energy": "no counter here", "weights": "a package"}
    partly = GpuCost.model_validate({**listed, "activation_bytes": 4_000_000, "missing": missing})
    fast = first.model_copy(update={"benchmark": with_cost(first.benchmark, known)})
    baseline = with_cost(report.baseline, partly)
    return report.model_copy(update={"candidates": (fast, *others), "baseline": baseline})


def test_memory_and_energy_of_a_gpu_are_columns_with_reasons_for_what_is_missing(
    report: Report,
) -> None:
    copy = costly(report)
    by_key = {section.key: section for section in sections(copy)}
    candidates = by_key["candidates"].tables[0]
    assert candidates.headings[-2:] == ("GPU memory", "J per 1,000 requests")
    cells = {row[1]: row[-2:] for row in candidates.rows}
    label = copy.candidates[0].label
    assert cells[label] == ("640 MB", "312")
    assert cells["pytorch eager fp32"] == ("900 MB", "-")
    assert cells["openvino fp32"] == ("-", "-")
    single, batch, missing = by_key["latency"].tables
    assert single.headings[-4:] == ("weights", "activations", "GPU memory", "J per 1,000 requests")
    assert batch.headings[-1] == "J per 1,000 samples"
    rows = {row[1]: row for row in batch.rows}
    assert rows[label][-5:] == ("98.0 MB", "12.0 MB", "640 MB", "312", "39.0")
    assert rows["pytorch eager fp32"][-5:] == ("-", "4.00 MB", "900 MB", "-", "-")
    assert {row[1:] for row in missing.rows} == {
        ("pytorch eager fp32", "energy", "no counter here"),
        ("pytorch eager fp32", "weights", "a package"),
    }
    assert "what became free when the process ended" in by_key["latency"].paragraphs[-1]
    for text in (markdown(copy), page(copy)):
        assert "J per 1,000 samples" in text
        assert "no counter here" in text


def test_a_report_of_a_cpu_has_no_columns_of_a_gpu(report: Report) -> None:
    assert "GPU memory" not in markdown(report)
    assert "J per 1,000" not in page(report)


def test_a_note_of_the_graph_itself_names_no_engine() -> None:
    notes = [
        ("", "said of all"),
        ("openvino int8", "said of all"),
        ("openvino int8", "said of one"),
        ("openvino int8", "said of one"),
    ]
    assert grouped_notes(notes) == ("said of all", "said of one (openvino int8)")


WAITS = (
    Wait(call=".item()", where="net.py:12", count=3),
    Wait(call="bool(tensor)", where="", count=1),
)
GRAPHS = CompiledGraphs(
    graphs=3,
    breaks=2,
    first_break="Unsupported Tensor.item() <call> | with.",
    where="net.py:12",
    recompiles=1,
    sizes=3,
)
GRAPHS_TEXT = (
    "torch.compile makes 3 graphs of the module, with 2 graph breaks; the first, at net.py:12:"
    " Unsupported Tensor.item() <call> | with. Over 3 sizes it compiled 1 graph again."
)


def with_module(**findings: Any) -> Report:
    return sample_report().model_copy(update={"module": ModuleFindings(**findings)})


def test_calls_that_wait_and_graph_breaks_are_in_every_form_of_the_report() -> None:
    report = with_module(waits=WAITS, graphs=GRAPHS)
    section = next(section for section in sections(report) if section.key == "module")
    assert section.paragraphs[1] == GRAPHS_TEXT
    assert section.tables[0].rows == (
        (".item()", "net.py:12", "3"),
        ("bool(tensor)", "in PyTorch", "1"),
    )
    lines = [line.strip() for line in verdict_lines(report)]
    assert (
        "module: .item() at net.py:12 waits for a GPU 3 times per run, and ends a graph of"
        " torch.compile: keep the value in a tensor"
    ) in lines
    assert (
        "module: bool(tensor) in PyTorch waits for a GPU once per run, and ends a graph of"
        " torch.compile: keep the value in a tensor"
    ) in lines
    assert f"module: {GRAPHS_TEXT}" in lines
    html = page(report)
    assert "net.py:12: Unsupported Tensor.item() &lt;call&gt;" in html
    assert "net.py:12" in markdown(report)


def test_a_module_of_one_graph_gives_no_advice() -> None:
    one = CompiledGraphs(graphs=1, breaks=0, recompiles=0, sizes=1)
    report = with_module(graphs=one)
    assert not any("module: " in line for line in verdict_lines(report))
    section = next(section for section in sections(report) if section.key == "module")
    assert section.paragraphs == (
        "torch.compile makes 1 graph of the module, with 0 graph breaks. Over 1 size it compiled 0"
        " graphs again.",
    )


def test_a_module_that_could_not_be_examined_has_the_reason() -> None:
    section = next(
        section
        for section in sections(with_module(failure="it crashed"))
        if section.key == "module"
    )
    assert section.paragraphs == ("The module's code was not examined: it crashed.",)


def test_without_findings_there_is_no_section() -> None:
    for report in (sample_report(), with_module()):
        assert "module" not in {section.key for section in sections(report)}
        assert not any("module: " in line for line in verdict_lines(report))
