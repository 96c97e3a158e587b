"""The nodes of a model's graph, with the work of each: FLOPs, and bytes that it moves."""

from __future__ import annotations

from pydantic import Field

from pipeline.core.frozen import Frozen


class NodeWork(Frozen):
    """The work of one node at one size, in the types of the model.

    Each node counts by itself, as if nothing were fused or kept in caches.
    """

    flops: float | None = Field(
        description=(
            "One multiply-add is two. Rough for operators that multiply no matrices. null: its"
            " number is not known before running."
        )
    )
    moved_bytes: int = Field(
        description=(
            "Constants and inputs that it reads, and outputs. 0 for a view, such as Reshape."
        )
    )
    weight_bytes: int = Field(default=0, description="The constants alone.")
    read_bytes: tuple[int, ...] = Field(
        default=(), description="What it reads of each node in `reads`."
    )
    written_bytes: int = Field(
        default=0, description="All its outputs; of an input of the model, its own bytes."
    )
    dtype: str = Field(default="", description="Type of its first output.")
    weight_dtype: str = Field(default="", description="Type of its largest constant.")


class GraphNode(Frozen):
    """One node of the model's graph."""

    name: str  # a node without a name has that of its first output
    operator: str  # "input" and "output" for the inputs and outputs of the model
    reads: tuple[int, ...] = ()  # indices of the nodes whose outputs it reads
    work: NodeWork | None = Field(
        default=None,
        description="null: a shape is not known before running, or an older report.",
    )
