"""Prepare the candidates of the plan, in parallel if that disturbs no timing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import repeat

from pipeline.compiler.candidates.prepare import Outcome, prepare
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import OnnxModel
from pipeline.core.recipe import Recipe
from pipeline.execution.child_process import stop_children
from pipeline.results.candidates import Candidate
from pipeline.stages.validate import ReferenceOutputs

MAX_SIDE_BY_SIDE_BYTES = 50 * 2**20  # bytes of a model whose candidates are prepared side by side
POLL_S = 0.1  # between two checks whether the threads have ended


def prepare_all(
    context: CompileContext, model: OnnxModel, recipes: Sequence[Recipe], expected: ReferenceOutputs
) -> list[Outcome]:
    """Prepare every candidate, in order. They run in parallel if that disturbs no timing."""
    if context.runner.workers == 1 or not may_overlap(model, recipes, context.has_gpu):
        return [prepare(context, model, recipe, expected) for recipe in recipes]
    branches = [context.runner.branch() for _ in recipes]
    contexts = [replace(context, runner=branch) for branch in branches]
    try:
        with ThreadPoolExecutor(context.runner.workers) as pool:
            arguments = zip(contexts, repeat(model), recipes, repeat(expected))
            return results_of([pool.submit(prepare, *values) for values in arguments])
    finally:
        for branch in branches:
            context.runner.take_over(branch)


def candidates_of(outcomes: Sequence[Outcome]) -> list[Candidate]:
    """Return the candidates. Raises the first InternalError if there is no engine at all."""
    candidates = [outcome.candidate for outcome in outcomes]
    bugs = [outcome.bug for outcome in outcomes if outcome.bug]
    if bugs and not any(candidate.engine for candidate in candidates):
        raise bugs[0]
    return candidates


def results_of(futures: Sequence[Future[Outcome]]) -> list[Outcome]:
    """Return the results of the threads, in order. The first error stops all threads."""
    try:
        for done in wait(futures, return_when=FIRST_EXCEPTION).done:
            done.result()
        return [future.result() for future in futures]
    except BaseException:  # Ctrl-C, or an error that stops the whole compile
        for future in futures:
            future.cancel()
        while any(not future.done() for future in futures):
            stop_children()  # again: a thread may have started its next child meanwhile
            wait(futures, POLL_S)
        raise


def may_overlap(model: OnnxModel, recipes: Sequence[Recipe], has_gpu: bool) -> bool:
    """Return whether candidates may be prepared in parallel.

    False on a GPU, where TensorRT and inductor time kernels while they build. False for large
    models: each of their stages uses all cores and needs much memory.
    """
    on_cpu = all(recipe.backend in ("onnxruntime", "openvino") for recipe in recipes)
    size = sum(file.stat().st_size for file in model.root.rglob("*") if file.is_file())
    return on_cpu and size <= MAX_SIDE_BY_SIDE_BYTES and not has_gpu
