"""Rewrites of graphs that a plan may name in `simplify.rewrites`.

Each takes a simplified model and returns one that computes the same, with the names of the nodes
that it changes. No names: there is nothing to rewrite.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans name rewrites, and load no library for that
    import onnx

    RewriteFunction = Callable[[onnx.ModelProto], tuple[onnx.ModelProto, tuple[str, ...]]]


class Rewrite(StrEnum):
    """The rewrites, by their name in a plan."""

    EARLY_ROWS = "early_rows"
    MERGED_PRODUCTS = "merged_products"
    ALIGNED_PRODUCTS = "aligned_products"
    FOLDED_STRIDES = "folded_strides"


def rewrite_function(rewrite: Rewrite) -> RewriteFunction:
    """Return the function of a rewrite."""
    from pipeline.onnx_graph.rewrites.aligned_products import align_products
    from pipeline.onnx_graph.rewrites.early_rows import take_rows_early
    from pipeline.onnx_graph.rewrites.folded_strides import fold_strides_by_name
    from pipeline.onnx_graph.rewrites.merged_products import merge_products

    functions: dict[Rewrite, RewriteFunction] = {
        Rewrite.EARLY_ROWS: take_rows_early,
        Rewrite.MERGED_PRODUCTS: merge_products,
        Rewrite.ALIGNED_PRODUCTS: align_products,
        Rewrite.FOLDED_STRIDES: fold_strides_by_name,
    }
    return functions[rewrite]
