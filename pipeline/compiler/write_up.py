"""Assemble the report of a compile."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from pipeline.benchmark.packing import SAMPLES, prove_packing
from pipeline.compiler.baselines import built_to_keep
from pipeline.compiler.context import CompileContext
from pipeline.compiler.decision import Baseline, Decision, choose, decide, why_undelivered
from pipeline.compiler.measure import Measured
from pipeline.compiler.speed import ratio_missing, ratio_of
from pipeline.core.artifacts import Engine, Note, OnnxModel
from pipeline.errors import ChildStopped, CrucibleError
from pipeline.execution.child_process import TimeLimit
from pipeline.execution.stage_runner import Stage, StageCall
from pipeline.onnx_graph.files import file_size, operator_histogram
from pipeline.plan.schema import ROLES, GeneratedData, Plan
from pipeline.results.accuracy import ValidationReport
from pipeline.results.benchmarks import LoadPoint
from pipeline.results.candidates import Candidate
from pipeline.results.model_graph import ModelGraph, model_graph
from pipeline.results.report import OperatorTable, PackingProof, Report

PACKING = Stage("packing", 1, writes_files=False)

MAX_GRAPH_S = 120  # to count the FLOPs and bytes of all nodes; 20,000 nodes took 2.4 s


def write_up(
    context: CompileContext,
    models: Sequence[OnnxModel],
    measured: Measured,
    kept: Candidate | None,
    validation: ValidationReport | None,
    notes: Iterable[Note],
    command: str,
) -> Report:
    """Assemble the report, with the verdict.

    `kept`: the baseline in its deliverable form, which is delivered if no candidate is faster. A
    program that was built for that appears among the candidates, or the reason of its failure.
    """
    decision = decide(
        measured.candidates,
        choose(measured.candidates),
        validation,
        Baseline(measured.run.baseline, measured.call, why_undelivered(kept), measured.curve),
    )
    delivered = delivered_engine(decision, kept.engine if kept else None)
    packing = check_packing(context, delivered) if delivered else None
    graph, graph_notes = graph_with_work(context, models[-1])
    winner = decision.winner
    winner_label = winner.label if winner else None
    if decision.verdict == "keep":
        winner_label = measured.run.baseline
    return Report(
        name=context.plan.name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        plan=context.plan,
        source_digest=context.source.digest,
        environment=context.environment,
        steps=tuple(context.runner.steps),
        operators=operator_tables(models),
        graph=graph.nodes,
        graph_sizes=graph.sizes,
        reference=context.reference_name,
        baseline=measured.baselines[0] if measured.baselines else None,
        baselines=measured.baselines[1:],
        candidates=(*measured.candidates, *built_to_keep(kept, measured.candidates)),
        rescues=measured.rescues,
        ablation=measured.ablation,
        profile_width=measured.profile_width,
        winner=winner_label,
        best_point=best_point(decision, kept, measured),
        ratio=ratio_of(winner) if winner else None,
        ratio_missing=ratio_missing(winner) if winner else "",
        delivered=delivered,
        packing=packing,
        validation=validation,
        verdict=decision.verdict,
        reasons=decision.reasons,
        next_steps=decision.next_steps,
        nearest_miss=decision.nearest_miss.label if decision.nearest_miss else None,
        notes=(
            *notes,
            *data_notes(context.plan),
            *chain.from_iterable(model.notes for model in models),
            *graph_notes,
            *context.runner.store.notes,
        ),
        peaks=measured.run.peaks,
        gpu_use=measured.run.gpu_use,
        benchmarked=measured.run.created,
    )


def graph_with_work(
    context: CompileContext, model: OnnxModel
) -> tuple[ModelGraph, tuple[Note, ...]]:
    """Return the graph of a model, with the work of its nodes at the first profile's opt sizes.

    If the work cannot be counted, the graph is without it, and a note gives the reason.
    """
    sizes = context.plan.profiles[0].sizes("opt") if context.plan.profiles else {}
    limit = TimeLimit(MAX_GRAPH_S, "counting the FLOPs and bytes of the graph")
    try:
        graph: ModelGraph = context.runner.run(
            model_graph, model.path, sizes, name="graph", limit=limit
        )
    except ChildStopped:
        raise
    except CrucibleError as error:
        text = f"the FLOPs and bytes of the graph's nodes were not counted: {error.message}"
        return model_graph(model.path), (Note(stage="graph", text=text),)
    return graph, ()


def check_packing(context: CompileContext, engine: Engine) -> PackingProof | None:
    """Prove on the delivered engine that sequences may share a row; None: it is not declared.

    A failed proof turns packing off. The engine itself is right, and serves one sequence per row.
    """
    packing = context.plan.serving.packing
    if packing is None:
        return None
    if context.plan.data.selection is None or isinstance(
        context.plan.data.selection, GeneratedData
    ):
        return PackingProof(reason="the selection set is generated, so it proves nothing")
    samples = context.data.selection.first(SAMPLES)
    work = partial(prove_packing, engine, packing, samples)
    call = StageCall(PACKING, PackingProof, work, subject=engine.recipe.label, target=engine.target)
    return context.runner.stage(call)


def delivered_engine(decision: Decision, kept: Engine | None) -> Engine | None:
    """Return the engine that the verdict delivers; None if it is `rejected`."""
    if decision.verdict == "rejected":
        return None
    if decision.verdict == "keep":
        return kept
    return decision.winner.engine if decision.winner else None


def best_point(decision: Decision, kept: Candidate | None, measured: Measured) -> LoadPoint | None:
    """Return the delivered engine's best point under load; None if it was not measured so.

    A PyTorch baseline was measured as a module, and is delivered as a program.
    """
    curve = None
    if decision.verdict == "keep":
        is_same = kept is not None and kept.label == measured.run.baseline
        curve = measured.curve if is_same else None
    elif decision.verdict != "rejected" and decision.winner and decision.winner.benchmark:
        curve = decision.winner.benchmark.load
    return curve.best if curve else None


def operator_tables(models: Sequence[OnnxModel]) -> tuple[OperatorTable, ...]:
    """Count the operators of the graph after export and after simplification."""
    return tuple(
        OperatorTable(
            stage=stage, operators=operator_histogram(model.path), size_bytes=file_size(model.path)
        )
        for stage, model in zip(("export", "simplify"), models, strict=True)
    )


def data_notes(plan: Plan) -> list[Note]:
    """Return notes on generated data, on the origin of weights, and on a .pt2 as the baseline."""
    notes = (
        [Note(stage="model", text=f"weights: {plan.model.weights_from}", level="info")]
        if plan.model.weights_from
        else []
    )
    if plan.model.path and plan.model.path.suffix == ".pt2":
        text = (
            "the baseline runs the exported program of the .pt2, which on small models is slower"
            " than the module it was made from"
        )
        notes.append(Note(stage="benchmark", text=text))
    for role in ROLES:
        given = getattr(plan.data, role)
        if isinstance(given, GeneratedData):
            notes.append(Note(stage=role, text=f"random data: {given.because}"))
    return notes
