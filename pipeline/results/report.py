"""The report of a compile: all its results, as report.json has them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.core.artifacts import Engine, Note
from pipeline.core.frozen import Frozen
from pipeline.host.environment import Environment
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.statistics import Interval
from pipeline.plan.schema import Plan
from pipeline.results.accuracy import ValidationReport
from pipeline.results.advice import Advice
from pipeline.results.benchmarks import BenchmarkReport, LoadCurve, LoadPoint
from pipeline.results.candidates import Ablation, Candidate, ProfileWidth, Rescue
from pipeline.results.graph_node import GraphNode
from pipeline.results.module_findings import ModuleFindings

SCHEMA_VERSION = 1

Verdict = Literal["accepted", "keep", "unproven", "rejected"]


class Step(Frozen):
    """One stage run of the compile."""

    stage: str
    subject: str  # candidate's label, or empty
    seconds: float  # of work; for a reused artifact, the seconds of the original run
    reused: bool
    created: str  # UTC; of the artifact, so that a reused one shows its date
    digest: str


class OperatorTable(Frozen):
    """Operators of the graph after one stage."""

    stage: str
    operators: dict[str, int]
    size_bytes: int


class PackingProof(Frozen):
    """Comparison of sequences in one row of the delivered engine with each of them alone."""

    sequences: int = 0  # compared ones
    rows: int = 0  # that they were packed into
    # of all outputs, relative to the largest value; None: not compared, or not finite
    largest_error: float | None = None
    reason: str = ""  # why packing is off; empty: it is on


class Report(Frozen):
    """All evidence of a compile: plan, steps, measurements, verdict and reasons."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this format.")
    name: str = Field(description="The plan's name.")
    created: str = Field(description="When the report was written, in UTC.")
    command: str = Field(description="The command that repeats this compile exactly.")
    plan: Plan
    source_digest: str = Field(description="Digest of the model, its weights and its code.")
    environment: Environment
    steps: tuple[Step, ...] = Field(description="What ran, with its times, and what was reused.")
    operators: tuple[OperatorTable, ...] = Field(
        description="The operators of the graph, before and after simplification."
    )
    graph: tuple[GraphNode, ...] = Field(
        default=(),
        description=(
            "The graph after simplification, in execution order. Empty: too large, or an older"
            " report."
        ),
    )
    graph_sizes: dict[str, int] | None = Field(
        default=None,
        description=(
            "The sizes at which the work of the nodes is counted: the opt sizes of the first"
            " profile. null: it was not counted."
        ),
    )
    reference: str = Field(
        description="What the accuracy is compared with, such as `PyTorch eager fp32`."
    )
    baseline: BenchmarkReport | None = Field(
        description="The fastest of the baselines. All ratios refer to it."
    )
    baselines: tuple[BenchmarkReport, ...] = Field(default=(), description="Further baselines.")
    candidates: tuple[Candidate, ...] = Field(
        description="All candidates with their state, accuracy and speed."
    )
    rescues: tuple[Rescue, ...] = Field(
        default=(), description="Fallbacks: the steps for candidates that failed their accuracy."
    )
    ablation: Ablation | None = Field(
        default=None,
        description="What each switch of the placement does. null: the plan did not ask for it.",
    )
    profile_width: ProfileWidth | None = Field(
        default=None,
        description="What the width of the profile costs. null: the plan did not ask for it.",
    )
    module: ModuleFindings | None = Field(
        default=None,
        description=(
            "What a run of the user's PyTorch module showed about its code. null: the model is no"
            " PyTorch code, or an older report."
        ),
    )
    advice: Advice | None = Field(
        default=None,
        description="What would make the winner faster. null: the plan did not ask for it.",
    )
    winner: str | None = Field(
        default=None, description="Label of the winner; with `keep` that of the baseline."
    )
    best_point: LoadPoint | None = Field(
        default=None,
        description=(
            "The best point of the delivered engine by the objective, which serving uses by"
            " default. null: the objective is latency, or the delivered engine was not measured"
            " under load."
        ),
    )
    ratio: Interval | None = Field(
        default=None,
        description=(
            "Speed-up of the winner over the baseline, at the first shape or by the objective;"
            " with `keep` that of the fastest accurate candidate."
        ),
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio.")
    delivered: Engine | None = Field(
        default=None,
        description=(
            "The engine that the verdict stands for. null: rejected, it cannot be delivered, or an"
            " older report."
        ),
    )
    validation: ValidationReport | None = Field(
        default=None, description="Accuracy of the winner on the validation set."
    )
    packing: PackingProof | None = Field(
        default=None,
        description=(
            "Whether the delivered engine may pack. null: no engine is delivered, or the plan does"
            " not declare packing."
        ),
    )
    verdict: Verdict
    reasons: tuple[str, ...] = Field(default=(), description="Why the verdict is what it is.")
    next_steps: tuple[str, ...] = Field(default=(), description="What to do next.")
    nearest_miss: str | None = Field(
        default=None, description="Label of the candidate that came nearest to its limits."
    )
    notes: tuple[Note, ...] = Field(default=(), description="Notes on the compile as a whole.")
    peaks: tuple[Peaks, ...] = Field(
        default=(), description="Peaks of the devices that were measured, as far as they are known."
    )
    gpu_use: GpuUse | None = Field(
        default=None, description="Use of the GPU while the latencies were measured."
    )
    benchmarked: str = Field(
        default="", description="UTC date of the latency figures; older than `created` if reused"
    )

    def title_of(self, label: str) -> str:
        """Return the title of the candidate with this label; for any other label, the label."""
        titles = (candidate.title for candidate in self.candidates if candidate.label == label)
        return next(titles, label)

    @property
    def has_engine(self) -> bool:
        """True if an engine was delivered with this report."""
        return self.engine_delivered is not None

    @property
    def engine_delivered(self) -> Engine | None:
        """The delivered engine. Reports of earlier versions name it only by their winner."""
        if self.delivered or self.verdict in ("rejected", "keep"):
            return self.delivered
        for candidate in self.candidates:
            if candidate.label == self.winner:
                return candidate.engine
        return None

    @property
    def benchmark_delivered(self) -> BenchmarkReport | None:
        """The latencies of the delivered engine."""
        for benchmark in self._benchmarks():
            if benchmark.label == self.winner:
                return benchmark
        return None

    @property
    def is_baseline_over_limit(self) -> bool:
        """True if no baseline has a point within the objective's limit: there is no ratio."""
        curve = self.baseline.load if self.baseline else None
        return curve is not None and curve.best is None

    @property
    def curves(self) -> dict[str, LoadCurve]:
        """The curves under load, by the label of their engine."""
        return {each.label: each.load for each in self._benchmarks() if each.load}

    def _benchmarks(self) -> list[BenchmarkReport]:
        """Return the latencies of all baselines and candidates that were measured."""
        of_candidates = (candidate.benchmark for candidate in self.candidates)
        all_engines = (self.baseline, *self.baselines, *of_candidates)
        return [benchmark for benchmark in all_engines if benchmark is not None]

    def every_note(self) -> tuple[tuple[str, Note], ...]:
        """Return all notes, each with the label of its engine, or "" for a note on the compile."""
        notes = [("", note) for note in self.notes]
        if self.validation:
            notes += [("", note) for note in self.validation.notes]
        for benchmark in self._benchmarks():
            notes += [(benchmark.label, note) for note in benchmark.notes]
        for candidate in self.candidates:
            notes += [(candidate.label, note) for note in candidate.notes]
            if candidate.selection:
                notes += [(candidate.label, note) for note in candidate.selection.notes]
        return tuple(notes)


class ReportFiles(Frozen):
    """Paths of a written report."""

    folder: Path
    json_file: Path
    markdown_file: Path
    html_file: Path
