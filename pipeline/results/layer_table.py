"""What an engine really runs, kernel by kernel: how every backend tells it."""

from __future__ import annotations

from typing import Literal

from pipeline.core import Frozen, Precision


class Layer(Frozen):
    """One kernel of an engine as it really ran, and how its precision is known."""

    name: str
    kind: str  # the library's own word: CaskConvolution, gemm, kgen, Reformat
    # integer: sizes and indices; none: moves or converts data only
    precision: Precision | Literal["integer", "none", "unknown"]
    # the kernel's name, else the types of inputs and outputs
    evidence: Literal["tactic", "types", "none"]
    # multiplies matrices (convolution, Gemm, MatMul, attention): what an engine's precision is
    # about
    heavy: bool = False
    nodes: tuple[str, ...] = ()  # the ONNX nodes it computes
    # of each node its operator, "" where it is not known; empty: nothing is
    operators: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()  # dtype of each
    outputs: tuple[str, ...] = ()
    seconds: float | None = None  # median per run; None: not timed
    tactic: str = ""  # the kernel's name


class LayerTable(Frozen):
    """Every kernel of one engine in the order of running, timed by plain enqueue at one shape."""

    sizes: dict[str, int]
    runs: int  # of which `Layer.seconds` is the median
    layers: tuple[Layer, ...]
    profile: int = 0  # that ran, counted from 0
