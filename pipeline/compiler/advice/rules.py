"""The rules: what each finds in a delivered engine, and which change of the plan it proposes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.backends import backend
from pipeline.compiler.context import CompileContext
from pipeline.compiler.profile_width import fixed_profile
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import PlanError, UnsupportedError
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import attentions
from pipeline.onnx_graph.rewrites import Rewrite
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import CandidateConfig
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.layer_work import LayerWork, Limit
from pipeline.results.precision_audit import attention_in_one_kernel

MIN_BOUND_SHARE = 0.05  # of the time in layers that wait for their weights
MOST_WEIGHTS = 0.5  # of a layer's bytes from which it is bound by its weights


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine, and what its rules look at."""

    context: CompileContext
    model: OnnxModel  # from which the engine was converted
    engine: Engine
    table: LayerTable | None  # of its first profile; None: the backend gives no layers
    works: tuple[LayerWork, ...]  # of each layer of the table
    sizes: dict[str, int]  # at which it is measured
    rewritable: Mapping[Rewrite, tuple[str, ...]]  # nodes that each rewrite changes
    labels: frozenset[str]  # of all candidates that the compile has tried


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the plan, or of the recipe, and why it may help."""

    rule: str
    reason: str
    overrides: tuple[str, ...] = ()  # of the plan, as `--set` takes them
    recipe: Recipe | None = None  # None: that of the engine
    nodes: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """The keys of the plan."""
        return ", ".join(self.overrides)


Rule = Callable[[Subject], Iterator[Change]]

REASONS = {
    Rewrite.EARLY_ROWS: (
        "the model takes a part of the rows after {count} nodes that compute all of them"
    ),
    Rewrite.MERGED_PRODUCTS: (
        "{count} nodes multiply one input several times and add the results, as an adapter does"
    ),
    Rewrite.ALIGNED_PRODUCTS: (
        "the width of products misses the multiples that matrix units take: {count} nodes"
    ),
    Rewrite.FOLDED_STRIDES: "{count} convolutions have few channels and a stride",
}


def rewrites(subject: Subject) -> Iterator[Change]:
    """Propose each rewrite that fits a node, and that the plan does not name yet."""
    named = subject.context.plan.simplify.rewrites
    for rewrite, nodes in subject.rewritable.items():
        if nodes and rewrite not in named:
            names = json.dumps([*named, rewrite])
            reason = REASONS[rewrite].format(count=len(nodes))
            yield Change(str(rewrite), reason, (f"simplify.rewrites={names}",), nodes=nodes)


def attention(subject: Subject) -> Iterator[Change]:
    """Propose the other form of attention if not every one runs in one kernel."""
    simplify = subject.context.plan.simplify
    softmaxes = attentions(read_proto(subject.model.path, weights=False).graph)
    if subject.table is None or not softmaxes:
        return
    fused, places = attention_in_one_kernel(subject.table, softmaxes)
    if fused < places:
        wanted = "false" if simplify.rewrite_attention else "true"
        reason = f"attention is in one kernel in {fused} of {places} places"
        yield Change("attention", reason, (f"simplify.rewrite_attention={wanted}",))


def one_shape(subject: Subject) -> Iterator[Change]:
    """Propose a profile for the measured shape only."""
    if not subject.sizes or 0 in subject.sizes.values():
        return
    fixed = fixed_profile(subject.sizes, subject.engine.profiles)
    if subject.engine.profiles != (fixed,):
        written = json.dumps([{**{name: [size] * 3 for name, size in subject.sizes.items()}}])
        reason = "the engine takes a range of sizes; an engine for one shape may be faster"
        yield Change("one_shape", reason, (f"profiles={written}",))


NARROW_FORMS: dict[str, tuple[dict[str, str], ...]] = {"onnxruntime": ({"activation": "int8"}, {})}
"""Keys of a candidate with narrow weights. ONNX Runtime's kernel with float activations turns 8-bit
weights back into floats at each run; OpenVINO quantises the activations by itself.
"""


def narrow_weights(subject: Subject) -> Iterator[Change]:
    """Propose int8 weights where products wait for their weights."""
    recipe = subject.engine.recipe
    if subject.table is None or recipe.precision not in (Precision.FP32, Precision.BF16):
        return
    bound = [
        layer
        for layer, work in zip(subject.table.layers, subject.works, strict=True)
        if layer.heavy and _waits_for_weights(work)
    ]
    share = share_of(subject.table, {layer.name for layer in bound}, by_name=True)
    if not share or share < MIN_BOUND_SHARE:
        return
    nodes = tuple(node for layer in bound for node in layer.nodes)
    reason = f"{len(bound)} products wait for the memory to read their weights"
    for form in NARROW_FORMS.get(recipe.backend, ({},)):
        written = {"backend": recipe.backend, "precision": "int8", "weight_only": True, **form}
        narrow = _recipe(subject, CandidateConfig.model_validate(written))
        if narrow is not None and narrow.label not in subject.labels:
            how = (f"candidates={json.dumps([written])}",)
            yield Change("narrow_weights", reason, how, narrow, nodes)


def _recipe(subject: Subject, candidate: CandidateConfig) -> Recipe | None:
    """Return the recipe of a candidate, or None if this host cannot run it."""
    context = subject.context
    target = context.target(candidate.backend)
    try:
        recipe = recipe_from_candidate(candidate, target, context.plan, False, context.given)
        backend(candidate.backend).check_recipe(recipe, target)
    except UnsupportedError:
        return None
    return recipe


def _waits_for_weights(work: LayerWork) -> bool:
    return (
        work.limit is Limit.MEMORY
        and work.moved_bytes is not None
        and work.weight_bytes >= MOST_WEIGHTS * work.moved_bytes
    )


RULES: tuple[Rule, ...] = (rewrites, attention, one_shape, narrow_weights)
NAMES = (*map(str, Rewrite), "attention", "one_shape", "narrow_weights", "batch", "clocks")


def check_rules(names: Iterable[str]) -> None:
    """Raise PlanError unless all are names of rules."""
    if unknown := [name for name in names if name not in NAMES]:
        raise PlanError(
            f"expected --rule {', '.join(NAMES)}, got '{unknown[0]}'", "name one of them"
        )


def changes_for(subject: Subject, only: Iterable[str] = ()) -> tuple[Change, ...]:
    """Return the changes that the rules propose; of the rules in `only`, if it names any."""
    wanted = frozenset(only)
    found = (change for rule in RULES for change in rule(subject))
    return tuple(change for change in found if not wanted or change.rule in wanted)


def share_of(table: LayerTable | None, names: Iterable[str], by_name: bool = False) -> float | None:
    """Return the share of the time of the layers that compute any of these nodes.

    None if no layer names one of them: then nothing is known. `by_name`: names are of layers.
    """
    if table is None:
        return None
    wanted = frozenset(names)

    def concerns(layer: Layer) -> bool:
        return layer.name in wanted if by_name else not wanted.isdisjoint(layer.nodes)

    total_s = sum(layer.seconds or 0.0 for layer in table.layers)
    found = [layer.seconds or 0.0 for layer in table.layers if concerns(layer)]
    return sum(found) / total_s if found and total_s else None
