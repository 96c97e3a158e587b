"""A report as a real compile gives it: eight candidates in every state, two shapes, reused steps,
and notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.artifacts import Engine, Note, Target
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.host.environment import Environment
from pipeline.host.gpu import Peaks
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from pipeline.plan.schema import AccuracyConfig, DataConfig, LatencyLimit, ModelConfig, Plan
from pipeline.report.graph.view import graph_script
from pipeline.results.accuracy import MetricResult, OutputError, ValidationReport
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow, LoadCurve, LoadPoint
from pipeline.results.candidates import Candidate, Rescue, RescueStep, State
from pipeline.results.graph_node import GraphNode, NodeWork
from pipeline.results.precision_audit import mislabelled
from pipeline.results.report import OperatorTable, Report, Step
from tests.builders.layers import real_table

PROCESSES = 6
EVIL = "<script>alert('x')</script> & | `$\\frac{1}$"


def without_graph(page: str) -> str:
    """A page of a report without its two own scripts: the one that draws the graph, and its data,
    in which every "<" is escaped.
    """
    page = page.replace(f"<script>{graph_script()}</script>", "", 1)
    return re.sub(r'<script type="application/json">[^<]*</script>', "", page, count=1)


def chain(nodes: Iterable[tuple[str, str]]) -> tuple[GraphNode, ...]:
    """A graph of nodes (name, operator), each of which reads the one before it."""
    ends = (("image", "input"), *nodes, ("logits", "output"))
    return tuple(
        GraphNode(name=name, operator=operator, reads=(index - 1,) if index else ())
        for index, (name, operator) in enumerate(ends)
    )


_PLAN = Plan(
    name="digits",
    model=ModelConfig(path=Path("/models/digits.onnx")),
    profiles=(Profile(dims={"batch": DimRange(min=1, opt=1, max=64)}),),
    data=DataConfig(
        calibration=(Path("calibration.npz"),),
        selection=(Path("selection.npz"),),
        validation=(Path("validation.npz"),),
    ),
    accuracy=AccuracyConfig(max_drop=0.01),
)
_TARGET = Target(
    backend="onnxruntime",
    version="1.31.0",
    device="Intel(R) Xeon(R) Platinum 8481C",
    cpu_flags=("avx2", "avx512_vnni"),
)


def latency_row(
    median_ms: float, batch: int, ratio: float | None, values: int = 1500
) -> LatencyRow:
    """Row of random times about this median, reproducible."""
    random = np.random.default_rng(int(median_ms * 1000) + batch)

    def samples(share: float) -> Samples:
        raw = median_ms * share * 1e-3 * (1 + random.gamma(1.2, 0.03, size=values + 10))
        blocks = tuple(len(part) for part in np.array_split(raw[10:], PROCESSES))
        return Samples(
            values_s=tuple(raw[10:].tolist()),
            blocks=blocks,
            processes=(1,) * PROCESSES,
            generations=tuple(range(PROCESSES)),
            waiting=(0.0,) * PROCESSES,
            warmup_s=tuple(raw[:10].tolist()),
            stable=median_ms != 7.9,
        )

    return LatencyRow(
        sizes={"batch": batch},
        end_to_end=samples(1.0),
        upload=samples(0.01),
        compute=samples(0.97),
        download=samples(0.02),
        throughput_per_s=batch / (median_ms * 1e-3),
        flops_per_s=8.2e9 * batch / (median_ms * 1e-3),
        bytes_per_s=None,
        ratio=(
            None if ratio is None else Interval(value=ratio, low=ratio * 0.985, high=ratio * 1.012)
        ),
        peak_memory_bytes=int(3.1e8),
    )


def benchmark(
    label: str, median_ms: float, baseline_ms: float | None, values: int = 1500
) -> BenchmarkReport:
    """Rows of batch 1 and 8."""
    ratio = None if baseline_ms is None else baseline_ms / median_ms
    rows = (
        latency_row(median_ms, 1, ratio, values),
        latency_row(median_ms * 6.1, 8, ratio, values),
    )
    return BenchmarkReport(label=label, rows=rows)


def load_curve(
    label: str, samples_per_s: float, ratio: float | None = None, limit_s: float | None = None
) -> LoadCurve:
    """Batches 1 and 8 with 1 and 2 sessions; the highest throughput is that of the last point.

    A request takes as long as its samples do, and its p99 a quarter more.
    """
    points = []
    for sessions in (1, 2):
        for batch, share in ((1, 0.25), (8, 0.5)):
            rate = samples_per_s * share * sessions
            request_s = batch * sessions / rate
            points.append(
                LoadPoint(
                    sizes={"batch": batch},
                    batch=batch,
                    sessions=sessions,
                    requests=1200,
                    samples_per_s=rate,
                    p50_s=request_s,
                    p99_s=1.25 * request_s,
                )
            )
    within = [point for point in points if limit_s is None or (point.p99_s or 0) <= limit_s]
    best = max(within, key=lambda point: point.samples_per_s, default=None)
    times = (1 / best.samples_per_s,) * PROCESSES if best else ()
    return LoadCurve(
        label=label,
        limit_s=limit_s,
        points=tuple(points),
        best=best,
        untried=("4 sessions: the time was over",),
        sample_time=Samples(values_s=times, blocks=(1,) * PROCESSES, processes=(1,) * PROCESSES)
        if best
        else None,
        p99_s=best.p99_s if best else None,
        ratio=(
            None if ratio is None else Interval(value=ratio, low=ratio * 0.985, high=ratio * 1.012)
        ),
    )


def selection(
    drop: float, cosine: float, max_drop: float = 0.01, role: str = "selection"
) -> ValidationReport:
    """Validation with this drop of top-1, passed if it is at most `max_drop`."""
    passed = drop <= max_drop
    failure = (
        f"top1 drops by {drop:.4f} (0.9867 to {0.9867 - drop:.4f}), over max_drop {max_drop:g}"
    )
    metric = MetricResult(
        name="top1",
        reference=0.9867,
        candidate=0.9867 - drop,
        drop=drop,
        interval=Interval(value=drop, low=drop - 0.0067, high=drop + 0.0067),
        max_drop=max_drop,
        passed=passed,
    )
    error = OutputError(
        output="logits",
        max_abs=0.4412,
        mean_abs=0.0312,
        max_rel=31.2,
        cosine=cosine,
        snr_db=31.4,
        nan=0,
        inf=0,
        worst_sample=117,
        passed=True,
    )
    return ValidationReport.model_validate(
        {
            "role": role,
            "set_digest": "5e1",
            "samples": 300,
            "outputs": (error,),
            "metric": metric,
            "failures": () if passed else (failure,),
        }
    )


def engine(recipe: Recipe, size_bytes: int, root: Path) -> Engine:
    """Engine of an image classifier, without files."""
    return Engine(
        root=root,
        file="model.onnx",
        digest="ab12",
        target=_TARGET,
        recipe=recipe,
        inputs=(TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8)),),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 10)),),
        profiles=_PLAN.profiles,
        threads=2,
        size_bytes=size_bytes,
        notes=(
            (Note(stage="build", text="weights take 7 bits: this CPU lacks VNNI", level="info"),)
            if recipe.weight_bits == 7
            else ()
        ),
    )


def _int8(
    backend: str, method: CalibrationMethod | None, bits: int = 8, quantizer: str = "crucible"
) -> Recipe:
    return Recipe.model_validate(
        {
            "backend": backend,
            "precision": "int8",
            "method": method,
            "activation": "uint8",
            "weight_bits": bits,
            "quantizer": quantizer,
        }
    )


def _candidates(root: Path) -> tuple[Candidate, ...]:
    entropy, minmax = CalibrationMethod.ENTROPY, CalibrationMethod.MINMAX
    measured = (
        (Recipe(backend="onnxruntime", precision=Precision.FP32), 7.9, 0.0, 1.0, 1_180_000),
        (_int8("onnxruntime", entropy, 7), 2.61, 0.0033, 0.9987, 310_000),
        (_int8("onnxruntime", minmax, 7), 2.58, 0.0267, 0.9712, 310_000),
        (Recipe(backend="openvino", precision=Precision.FP32), 7.1, 0.0, 1.0, 1_210_000),
        (
            Recipe(backend="openvino", precision=Precision.BF16, realised_in="runtime"),
            7.4,
            0.0,
            0.9998,
            1_210_000,
        ),
        (_int8("openvino", None, 8, "nncf"), 2.2, 0.0067, 0.9951, 342_000),
    )
    candidates = []
    for recipe, median_ms, drop, cosine, size in measured:
        report = selection(drop, cosine)
        state = "measured" if report.passed else "failed accuracy"
        timing = benchmark(recipe.label, median_ms, 13.4, values=1500 if median_ms < 5 else 400)
        fields: dict[str, Any] = {
            "label": recipe.label,
            "recipe": recipe,
            "state": state,
            "reason": "; ".join(report.failures),
        }
        candidates.append(
            Candidate(
                **fields, engine=engine(recipe, size, root), selection=report, benchmark=timing
            )
        )
    half = Recipe(backend="onnxruntime", precision=Precision.FP16)
    refusal = (
        "ONNX Runtime computes fp16 graphs on the CPU in fp32, with casts around every node:"
        " slower, and no fp16"
    )
    candidates.append(Candidate(label=half.label, recipe=half, state="refused", reason=refusal))
    rtx = Recipe(backend="tensorrt_rtx", precision=Precision.FP16, compute_capability="8.9")
    built = "runs on compute capability 8.9 only; this host has no GPU"
    candidates.append(
        Candidate(
            label=rtx.label,
            recipe=rtx,
            state="built",
            reason=built,
            engine=engine(rtx, 702_000, root),
        )
    )
    return tuple(candidates)


def _steps() -> tuple[Step, ...]:
    stages = (
        ("export", "", 7.3, True),
        ("simplify", "", 1.2, True),
        ("reference", "selection", 2.4, True),
        ("calibrate", "entropy", 6.1, True),
    )
    later = (
        ("convert", "onnxruntime int8", 1.1, False),
        ("build", "onnxruntime int8", 0.4, False),
        ("validate", "selection", 1.9, False),
    )
    steps = (*stages, *later, ("benchmark", "", 21.4, False))
    return tuple(
        Step(
            stage=stage,
            subject=subject,
            seconds=seconds,
            reused=reused,
            created="2026-03-01T09:00:00+00:00" if reused else "2026-03-02T10:11:00+00:00",
            digest="0123456789abcdef" * 4,
        )
        for stage, subject, seconds, reused in steps
    )


def sample_report(root: Path = Path("/store/engine"), evil: str = "") -> Report:
    """An accepted report. `evil` is planted wherever a model or a user has a say."""
    export = {
        "Conv": 9,
        "BatchNormalization": 9,
        "Relu": 9,
        "Add": 4,
        "Shape": 6,
        "Gather": 6,
        "Constant": 21,
        "Gemm": 1,
        "Reshape": 2,
    }
    simplified = {"Conv": 9, "Relu": 9, "Add": 4, "Gemm": 1, "GlobalAveragePool": 1, "Flatten": 1}
    if evil:
        export[evil] = 3
    return Report(
        name="digits",
        created="2026-03-02T10:12:00+00:00",
        command=f"crucible compile configs/digits.yaml {evil}".strip(),
        plan=_PLAN,
        source_digest="f" * 64,
        environment=Environment(
            cpu="Intel(R) Xeon(R) Platinum 8481C",
            cpu_flags=("avx2", "avx512_vnni", "avx512f", "fma"),
            cores=2,
            memory_bytes=16_400_000_000,
            os="Linux 6.1.0 x86_64",
            python="3.11.2",
            packages={
                "onnxruntime": "1.31.0",
                "openvino": "2026.4",
                "torch": "2.15",
                "numpy": "2.4",
            },
            load_1min=0.31,
        ),
        steps=_steps(),
        operators=(
            OperatorTable(stage="export", operators=export, size_bytes=1_210_000),
            OperatorTable(stage="simplify", operators=simplified, size_bytes=1_180_000),
        ),
        reference=f"PyTorch eager fp32{evil}",
        baseline=benchmark("pytorch eager fp32", 13.4, None, values=220),
        baselines=(benchmark("pytorch traced fp32", 9.8, 13.4, values=300),),
        candidates=_candidates(root),
        winner="openvino int8 nncf u8s8",
        ratio=Interval(value=6.09, low=6.0, high=6.17),
        validation=selection(0.0033, 0.9962, role="validation"),
        verdict="accepted",
        reasons=(
            f"top1 drops by 0.0033 [-0.0034, 0.0100] on 300 validation samples, within 0.01{evil}",
            "the 95 % interval of the speed-up, 6.00 to 6.17, excludes 1",
        ),
        next_steps=("serve it: crucible serve",),
        notes=(
            Note(stage="export", text=f"the exporter warned: 'mean' over a dynamic axis{evil}"),
            Note(stage="simplify", text="24 nodes less", level="info"),
        ),
        benchmarked="2026-03-02T10:11:40+00:00",
    )


def throughput_report(limit_s: float | None = None) -> Report:
    """A report by throughput, with the curves of the baseline and the winner."""
    report = sample_report()
    assert report.baseline is not None
    curve = load_curve(report.winner or "", 900.0, 6.0, limit_s)
    base = load_curve(report.baseline.label, 150.0, None, limit_s)
    candidates = tuple(
        each.model_copy(update={"benchmark": each.benchmark.model_copy(update={"load": curve})})
        if each.label == report.winner and each.benchmark
        else each
        for each in report.candidates
    )
    objective = LatencyLimit(max_latency_ms=limit_s * 1e3) if limit_s else "throughput"
    return report.model_copy(
        update={
            "plan": report.plan.model_copy(update={"objective": objective}),
            "candidates": candidates,
            "baseline": report.baseline.model_copy(update={"load": base}),
            "best_point": curve.best,
        }
    )


def proven_report(evil: str = "") -> Report:
    """The sample as a GPU host gives it: an int8 winner, an fp16 engine, and one called fp16 that
    runs fp32, each with its real layers.
    """
    report = sample_report(evil=evil)
    fallback = report.candidates[-1]
    variants: tuple[tuple[str, str, float, State], ...] = (
        ("int8", "resnet_int8impl", 2.2, "measured"),
        ("fp16", "resnet_fp16", 2.8, "measured"),
        ("fp16", "resnet_fp32", 0.0, "mislabelled"),
    )
    candidates = []
    for number, (precision, variant, median_ms, state) in enumerate(variants):
        method = "entropy" if precision == "int8" else None
        fields = {
            "backend": "tensorrt",
            "precision": precision,
            "method": method,
            "realised_in": "flags",
            "variant": "rescued" if number == 2 else "",
        }
        recipe = Recipe.model_validate(fields)
        layers = real_table(variant)
        if evil:
            first = layers.layers[0].model_copy(
                update={
                    "nodes": (evil, "b"),
                    "operators": (evil, "Add"),
                    "tactic": evil,
                    "kind": evil,
                    "seconds": 9.0,
                }
            )
            layers = layers.model_copy(
                update={"sizes": {evil: 8}, "layers": (first, *layers.layers[1:])}
            )
        timings: dict[str, Any] = (
            {
                "benchmark": benchmark(recipe.label, median_ms, 13.4),
                "selection": selection(0.0033, 0.9962),
            }
            if median_ms
            else {}
        )
        reason = mislabelled(recipe.precision, layers) if state == "mislabelled" else ""
        candidates.append(
            Candidate(
                label=recipe.label,
                recipe=recipe,
                state=state,
                reason=reason,
                layers=layers,
                **timings,
            )
        )
    table = candidates[0].layers
    assert table is not None
    nodes = dict(
        pair
        for layer in table.layers
        for pair in zip(layer.nodes, layer.operators, strict=True)
        if pair[1]
    )
    tried = RescueStep(
        step=f"opt shape moved to min{evil}", label=candidates[2].label, outcome="mislabelled"
    )
    skipped = RescueStep(step="worst nodes kept in fp32", label="", outcome="not tried")
    rescue = Rescue(
        label=candidates[1].label,
        steps=(tried, skipped),
        conclusion=f"keep {evil or '/fc/Gemm'} in fp32",
    )
    return report.model_copy(
        update={
            "candidates": (*candidates, fallback),
            "winner": candidates[0].label,
            "graph": chain(nodes.items()),
            "rescues": (rescue,),
        }
    )


PEAKS_OF_H200 = Peaks(
    device="NVIDIA H200",
    source="known: data sheet",
    flops_per_s={Precision.FP32: 60e12, Precision.FP16: 990e12, Precision.INT8: 1980e12},
    bytes_per_s=4.8e12,
)


def worked_report(peaks: Peaks | None = PEAKS_OF_H200) -> Report:
    """The report of a GPU host, with the work of every node: 1 MFLOP for a convolution, 1 kFLOP for
    any other, 100 kB read from the node before, and 100 kB written.
    """
    report = proven_report()
    graph = []
    for node in report.graph:
        work = NodeWork(
            flops=1e6 if node.operator == "Conv" else 1e3,
            moved_bytes=200_000,
            read_bytes=(100_000,) * len(node.reads),
            written_bytes=100_000,
            dtype="float32",
        )
        graph.append(node.model_copy(update={"work": work}))
    target = Target(
        backend="tensorrt", version="10.6", device="NVIDIA H200", compute_capability="9.0"
    )
    candidates = tuple(
        candidate.model_copy(
            update={
                "engine": engine(candidate.recipe, 1000, Path("/store")).model_copy(
                    update={"target": target}
                )
            }
        )
        for candidate in report.candidates[:3]
    )
    return report.model_copy(
        update={
            "graph": tuple(graph),
            "graph_sizes": {"b": 8},
            "candidates": (*candidates, *report.candidates[3:]),
            "peaks": (peaks,) if peaks else (),
        }
    )
