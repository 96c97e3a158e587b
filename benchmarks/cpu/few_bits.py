"""MiniLM with weights in 4 or 8 bits alone, and with SmoothQuant: size, and what it costs in
accuracy, beside fp32 and int8 by calibration.

The candidates that the comments of `configs/minilm.yaml` name, through the stages of a compile up
to the check on the selection set. Nothing is timed, so a busy machine does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from benchmarks.common import ROOT, Row, publish, takes_no_arguments
from benchmarks.cpu.calibration import here
from pipeline.backends import backend
from pipeline.compiler.baselines import build_reference
from pipeline.compiler.candidates.prepare import prepare
from pipeline.compiler.candidates.side_by_side import candidates_of
from pipeline.compiler.candidates.stages import reference_outputs
from pipeline.compiler.context import open_context
from pipeline.compiler.graph import export_model, simplify_model
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import home, load_plan
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import CandidateConfig
from pipeline.results.candidates import Candidate

PLAN = ROOT / "configs" / "minilm.yaml"
CANDIDATES = (
    {"backend": "onnxruntime", "precision": "fp32"},
    {"backend": "onnxruntime", "precision": "int8"},
    {"backend": "onnxruntime", "precision": "int8", "weight_only": True},
    {"backend": "onnxruntime", "precision": "int8", "weight_only": True, "activation": "int8"},
    {"backend": "onnxruntime", "precision": "int4", "block_size": 32},
    {"backend": "onnxruntime", "precision": "int4", "block_size": 128},
    {"backend": "openvino", "precision": "fp32"},
    {"backend": "openvino", "precision": "int8", "weight_only": True},
    {"backend": "openvino", "precision": "int4"},
    {"backend": "openvino", "precision": "int8", "quantizer": "nncf", "smooth_quant": True},
    {"backend": "openvino", "precision": "int8", "quantizer": "nncf", "smooth_quant": False},
)


def main(words: Sequence[str]) -> None:
    takes_no_arguments("few_bits", __doc__, words)
    logging.disable(logging.INFO)  # ONNX Runtime's quantiser logs every node
    context = open_context(load_plan(PLAN), Runner(Store(home()), run=here))
    exported = export_model(context)
    model = simplify_model(context, exported)
    expected = reference_outputs(
        context, build_reference(context, exported), context.data.selection
    )
    rows, outcomes = [], []
    for candidate in (CandidateConfig.model_validate(each) for each in CANDIDATES):
        recipe = recipe_from_candidate(
            candidate, backend(candidate.backend).probe(), context.plan, calibrated=True
        )
        outcomes.append(prepare(context, model, recipe, expected))
        rows.append(row_of(outcomes[-1].candidate))
        print(rows[-1], flush=True)
    candidates_of(outcomes)  # raises a bug of ours
    publish(
        "few_bits",
        rows,
        {f"{row['engine']}: built, proved and checked": row["drop"] is not None for row in rows},
    )


def row_of(made: Candidate) -> Row:
    """Size, and what is lost on the selection set; nothing where there is no answer."""
    metric = made.selection.metric if made.selection else None
    return {
        "engine": made.label,
        "size_mb": made.engine.size_bytes / 1e6 if made.engine else None,
        "cosine": metric.candidate if metric else None,
        "drop": metric.drop if metric else None,
        "drop_low": metric.interval.low if metric else None,
        "drop_high": metric.interval.high if metric else None,
        "smallest_cosine": min(output.cosine for output in made.selection.outputs)
        if made.selection
        else None,
        "passed": made.state == "measured",
        "reason": made.reason,
    }
