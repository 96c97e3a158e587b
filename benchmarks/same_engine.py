"""The same engine entered twice: its interval must hold 1. Each entry is a process of its own, as in every compile."""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import DIGITS, RESNET50, Row, graph_of, publish

from pipeline.backends import onnxruntime_
from pipeline.config import BenchmarkConfig
from pipeline.core import BuildOptions, Precision, Recipe
from pipeline.report import BenchmarkReport
from pipeline.stages.benchmark import benchmark

REPEATS = {DIGITS: 6, RESNET50: 3}


def main() -> None:
    rows: list[Row] = []
    for plan_path, repeats in REPEATS.items():
        plan, model = graph_of(plan_path)
        with tempfile.TemporaryDirectory() as folder:
            recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
            engine = onnxruntime_.build(model, recipe, BuildOptions(profiles=plan.profiles), Path(folder))
            for number in range(repeats):
                _, second = benchmark([engine, engine], model, BenchmarkConfig(sizes=({"batch": 1},))).results
                assert isinstance(second, BenchmarkReport), second
                ratio = second.rows[0].ratio
                assert ratio is not None
                holds = not ratio.excludes(1.0)
                rows.append({"model": plan.name, "run": number + 1, "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "holds_1": holds})
    publish("same_engine", rows, {f"{row['model']}, run {row['run']}: the interval holds 1": bool(row["holds_1"]) for row in rows})


if __name__ == "__main__":
    main()
