"""onnxsim, then GraphSurgeon, in a child process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.core.progress import Progress
from pipeline.onnx_graph.files import external_files, operator_histogram, read_proto, write_proto
from pipeline.onnx_graph.fold_constants import FOLD_LIMIT_BYTES, fold_constants
from pipeline.onnx_graph.interface import restore_interface
from pipeline.quantization.existing_qdq import QDQ

Simplifier = Callable[[Path, Path, Progress], None]
"""Reads the first path, writes the second. Runs in a child process, so it must be importable by
name.
"""

SKIPPED_OPTIMIZERS = (
    "fuse_matmul_add_bias_into_gemm_batched",  # wraps each product of rank 3 in two Reshape
    "fuse_attention",  # an operator of ONNX Runtime alone
    "fuse_qkv",  # one product for queries, keys and values, which split_qkv.py takes apart
)
MERGES_OF_QDQ = ("eliminate_common_subexpression", "eliminate_duplicate_initializer")
"""Optimizers that merge equal Q/DQ."""


def run_onnxsim(source: Path, target: Path, progress: Progress) -> None:
    """Run onnxsim without its own check, and without changing input shapes.

    Call it in a child process only: it hides modules from the rest of the process.
    """
    # onnxsim tries to import both, which takes 5 s, and does not need them.
    for unused in ("torch", "sympy"):
        sys.modules.setdefault(unused, None)  # type: ignore[arg-type]
    import onnxsim

    skipped = list(SKIPPED_OPTIMIZERS)
    if set(QDQ) & set(operator_histogram(source)):
        skipped += MERGES_OF_QDQ
    onnxsim.simplify(
        str(source),
        check_n=0,
        skipped_optimizers=skipped,
        inline_functions=True,
        tensor_size_threshold=f"{FOLD_LIMIT_BYTES}B",
        output_path=str(target),
        external_data_threshold="1.5GB",
    )


def simplify_file(simplifier: Simplifier, source: Path, target: Path, progress: Progress) -> None:
    """Run the simplifier and fold constants, then restore the names of the interface."""
    draft = target.with_name("draft.onnx")
    progress(None, "simplifying")
    simplifier(source, draft, progress)
    progress(None, "folding constants")
    folded = fold_constants(read_proto(draft))
    restore_interface(read_proto(source, weights=False), folded)
    write_proto(folded, target)
    for file in (*external_files(draft), draft):
        file.unlink()
