"""Results of candidates: their states, rescues, the ablation and the width of profiles."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pipeline.core.artifacts import Engine, KeptNode, Note
from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Recipe
from pipeline.measurement.statistics import Interval
from pipeline.results.accuracy import ValidationReport
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.results.layer_table import LayerTable

State = Literal[
    "measured", "failed accuracy", "over the limit", "mislabelled", "built", "refused", "failed"
]


class Origin(StrEnum):
    """Where a candidate comes from."""

    PLAN = "plan"
    FALLBACK = "fallback"  # an attempt of a rescue
    ABLATION = "ablation"  # a candidate with one placement switch reversed
    BASELINE = "baseline"


class Candidate(Frozen):
    """One recipe with the results of all stages that it reached."""

    label: str
    recipe: Recipe
    origin: Origin = Origin.PLAN
    # over the limit: at no point within the objective's; built: runs on other hosts only;
    # mislabelled: does not run the precision it is called by, however it answers
    state: State
    reason: str = ""  # why it stopped
    engine: Engine | None = None
    # what the conversion left in fp32, beside the nodes that the recipe names
    kept_fp32: tuple[KeptNode, ...] = ()
    layers: LayerTable | None = None  # what really ran; None: this backend gives no evidence
    # of the profiles after the first, where they have kernels of their own
    other_layers: tuple[LayerTable, ...] = ()
    selection: ValidationReport | None = None
    benchmark: BenchmarkReport | None = None
    notes: tuple[Note, ...] = ()  # of calibration, conversion and build

    @property
    def title(self) -> str:
        """The label for readers: `tensorrt fp16, 2 nodes in fp32`.

        Only the label itself is unique per recipe.
        """
        count = len(self.kept_fp32)
        if not count:
            return self.label
        return f"{self.label}, {count} {'node' if count == 1 else 'nodes'} in fp32"


class NodeHarm(Frozen):
    """Harm of low precision to one node.

    Errors are relative to the norm of the fp32 outputs, in the worst batch.
    """

    node: str
    operator: str
    largest: float  # magnitude among its inputs and outputs, in fp32
    overflows: bool = False  # so near to the limit of fp16 that other inputs will exceed it
    error: float  # of its outputs if only this node is low, and all nodes before it are fp32
    accumulated: float = 0.0  # of its outputs if every node has the engine's precision


class NodeRanking(Frozen):
    """Nodes worth keeping in fp32.

    First those that overflow, by their largest value, then the others by their own error.
    """

    nodes: tuple[NodeHarm, ...] = ()
    samples: int = 0
    failure: str = ""  # why there is no ranking


class RescueStep(Frozen):
    """One step of a rescue, as text."""

    step: str  # what was tried: "opt shape moved to min"
    label: str  # of its candidate; empty: nothing was built
    outcome: str


class Rescue(Frozen):
    """Rescue of a candidate that failed its accuracy: its steps in order, and the conclusion."""

    label: str  # of the candidate that failed
    steps: tuple[RescueStep, ...]
    ranking: NodeRanking | None = None  # None: it ended before the ranking of nodes
    conclusion: str  # the cause, if it is known, and the next step


class AblationRow(Frozen):
    """Effect of one reversed placement switch.

    Accuracy is of the selection set, speed of the first benchmarked shape.
    """

    switch: str
    before: bool  # in the candidate whose switches were reversed
    after: bool
    # of the candidate with this switch reversed; empty: the graph is the same either way, so
    # nothing was built
    label: str = ""
    state: State | None = None  # of that candidate
    reason: str = ""
    drop: float | None = None  # of the metric; None: no metric, or no answers
    drop_change: float | None = None  # above 0: reversed, it loses more
    cosine: float | None = None  # the smallest of all outputs
    cosine_change: float | None = None
    # median before over median after, 95 % interval; above 1: reversed, it is faster
    ratio: Interval | None = None


class Ablation(Frozen):
    """Effect of each placement switch on the best int8 candidate."""

    # of that candidate; empty: there was none with Q/DQ placed by Crucible that gave answers
    label: str
    rows: tuple[AblationRow, ...] = ()


class WidthRow(Frozen):
    """The cost of the width of a profile at one shape, against an engine for this shape only."""

    sizes: dict[str, int]
    # median of the candidate / median of that engine, 95 % interval; above 1: the width costs time
    cost: Interval | None = None
    missing: str = ""  # why there is no cost


class ProfileWidth(Frozen):
    """What the width of its profiles costs the fastest accurate candidate."""

    label: str = ""  # of the candidate; empty: none was measured
    rows: tuple[WidthRow, ...] = ()
    advice: str  # what follows from the costs
