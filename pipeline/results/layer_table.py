"""The layer table: the kernels that an engine really runs, in one form for every backend."""

from __future__ import annotations

from typing import Literal

from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Precision

LayerPrecision = Precision | Literal["integer", "none", "unknown"]
"""integer: sizes and indices; none: moves or converts data only."""

Evidence = Literal["tactic", "types", "none"]
"""Evidence for a precision: the kernel's name, else the types of inputs and outputs."""


class Layer(Frozen):
    """One kernel of an engine, with its precision and the evidence for it."""

    name: str
    kind: str  # the library's own word: CaskConvolution, gemm, kgen, Reformat
    precision: LayerPrecision
    evidence: Evidence  # of the precision
    # multiplies matrices (convolution, Gemm, MatMul, attention): such layers decide the precision
    heavy: bool = False
    nodes: tuple[str, ...] = ()  # the ONNX nodes it computes
    # of each node its operator, "" if it is unknown; empty: none is known
    operators: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()  # dtype of each
    outputs: tuple[str, ...] = ()
    seconds: float | None = None  # median per run; None: not timed
    tactic: str = ""  # the kernel's name


class LayerTable(Frozen):
    """Every kernel of one engine in execution order, timed by plain enqueue at one shape."""

    sizes: dict[str, int]
    runs: int  # of which `Layer.seconds` is the median
    layers: tuple[Layer, ...]
    profile: int = 0  # index of the profile that ran
