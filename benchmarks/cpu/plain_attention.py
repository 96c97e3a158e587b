"""What `simplify.rewrite_attention` does to the speed of engines on the CPU: each twice in one
race, of the graph as exported and of the plain one.

MiniLM with its real weights and dynamic shapes, by both of torch's exporters, and with random
weights and fixed shapes a BERT-base, and a ViT-B/16 and a Swin-T, whose queries, keys and values
come out of one product. On a GPU `gpu_models` has the same as ways that end in `surgery`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from benchmarks.common import ROOT, Row, publish, takes_no_arguments
from benchmarks.gpu.plans import plan_of
from benchmarks.gpu.rows import row_named
from pipeline.backends import backend
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.candidates.stages import build_engine, convert_model
from pipeline.compiler.context import open_context
from pipeline.compiler.graph import export_model, simplify_model
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.measurement.comparison import compare
from pipeline.plan.files import home, load_plan
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import BenchmarkConfig, CandidateConfig, Plan
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.stages.benchmark import benchmark

MINILM = ROOT / "configs" / "minilm.yaml"
TEXTS = tuple(
    {"batch": batch, "sequence": tokens} for batch, tokens in ((8, 16), (4, 64), (1, 128))
)
SIZES: Mapping[str, tuple[dict[str, int], ...]] = {
    "minilm": TEXTS,
    "minilm torchscript": TEXTS,
    "encoder_b1": ({},),
    "encoder_512": ({},),
    "vit_b1": ({},),
    "swin_b8": ({},),
}
"""By model, and its exporter where that is not torch.export. Rows of gpu/rows.py have one shape
each.
"""
SHAPES = {
    "encoder_b1": "1x128",
    "encoder_512": "1x512",
    "vit_b1": "1x3x224x224",
    "swin_b8": "8x3x224x224",
}
CANDIDATES = tuple(
    {"backend": name, "precision": precision}
    for name in ("onnxruntime", "openvino")
    for precision in ("fp32", "int8")
)
BUDGET_S = 300.0  # of one shape: eight engines, and all of them are compared
LEAST = 0.95  # of the speed as exported, by the lower end of the interval
PLAIN, AS_EXPORTED = "simplify.rewrite_attention=true", "simplify.rewrite_attention=false"


def main(words: Sequence[str]) -> None:
    takes_no_arguments("plain_attention", __doc__, words)
    logging.disable(logging.INFO)  # ONNX Runtime's quantiser logs every node
    rows = []
    for name, choices in SIZES.items():
        model, engines = engines_of(plan(name, AS_EXPORTED))
        plain, others = engines_of(plan(name, PLAIN))
        if plain.digest == model.digest:
            raise SystemExit(
                f"{name}: attention was not written plainly: {[note.text for note in plain.notes]}"
            )
        engines += others
        for sizes in choices:
            entries = [RaceEntry(engine, Role.COMPARED) for engine in engines]
            options = BenchmarkConfig(sizes=(sizes,), budget_s=BUDGET_S)
            rows += rows_of(name, sizes, benchmark(entries, model, options).results)
            print(*rows[-len(CANDIDATES) :], sep="\n", flush=True)
    least = min(float(row["low"] or 0) for row in rows)
    publish(
        "plain_attention",
        rows,
        {f"the lower end of no interval below {LEAST:g} (got {least:.3f})": least >= LEAST},
    )


def plan(name: str, override: str) -> Plan:
    name, _, exporter = name.partition(" ")
    overrides = (override, *([f"export.exporter={exporter}"] if exporter else []))
    row = row_named(name)
    return plan_of(row, overrides) if row else load_plan(MINILM, overrides=overrides)


def engines_of(of: Plan) -> tuple[OnnxModel, list[Engine]]:
    """The plan's graph, and an engine of every candidate."""
    context = open_context(of, Runner(Store(home())))
    model, engines = simplify_model(context, export_model(context)), []
    for candidate in map(CandidateConfig.model_validate, CANDIDATES):
        recipe = recipe_from_candidate(
            candidate, backend(candidate.backend).probe(), of, calibrated=True
        )
        engines.append(build_engine(context, convert_model(context, model, recipe), recipe))
    return model, engines


def rows_of(name: str, sizes: Mapping[str, int], results: Sequence[object]) -> list[Row]:
    """The first half of the race is of the graph as exported, the second of the plain one, in the
    same order.
    """
    times = [result.rows[0].end_to_end for result in results if isinstance(result, BenchmarkReport)]
    if len(times) < len(results):
        raise SystemExit(
            f"{name}: {[result for result in results if not isinstance(result, BenchmarkReport)]}"
        )
    found: list[Row] = []
    for candidate, before, after in zip(CANDIDATES, times, times[len(CANDIDATES) :], strict=False):
        ratio = compare(before, after)
        shape = SHAPES.get(name) or "x".join(map(str, sizes.values()))
        medians = {"as_exported_ms": 1e3 * before.median_s, "plain_ms": 1e3 * after.median_s}
        times_as_fast = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        found.append(
            {
                "model": name.partition("_")[0],
                "shape": shape,
                "engine": " ".join(candidate.values()),
                **medians,
                **times_as_fast,
            }
        )
    return found
