"""Postprocessing of outputs, as the plan declares it: the reduced outputs, and the steps in numpy.

The steps in numpy stand behind the reference. They share no code with the graph
(`onnx_graph/processing.py`) and with the PyTorch module (`backends/pytorch/postprocessing.py`)
that are compared with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.processing import Postprocess
from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.errors import PlanError

Steps = Mapping[str, Postprocess]
"""The postprocessing by output. Outputs that are not named leave the engine as they are."""

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
KEY = "postprocess"
NODE_PREFIX = "plan_postprocess/"
"""Prefix of the names of the nodes and values in a graph, so that they differ from all others."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


# --- the reduced outputs ---


@dataclass(frozen=True, slots=True)
class IndexOutput:
    """An output of the engine that holds indices."""

    name: str
    source: str  # the model's output that they point into
    axis: int  # of the classes in `source`, counted from the last: negative
    top_k: int | None  # None: argmax, whose output lacks the axis

    def with_last(self, indices: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the indices as [..., k]."""
        return indices[..., np.newaxis] if self.top_k is None else self.classes_last(indices)

    def classes_last(self, scores: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the scores that the indices point into as [..., classes]."""
        return np.moveaxis(scores, self.axis, -1)


def names_of(name: str, step: Postprocess) -> tuple[str, ...]:
    """Return the names of the outputs in the place of `name`, the indices first."""
    indices, values = f"{name}_indices", f"{name}_values"
    return (indices,) if step.argmax else (indices, values)


def sources_of(names: Iterable[str], steps: Steps) -> tuple[str, ...]:
    """Return the names of the model's outputs, in order, from those of the engine's outputs."""
    source = {new: name for name, step in steps.items() for new in names_of(name, step)}
    return tuple(dict.fromkeys(source.get(name, name) for name in names))


def reduced_specs(outputs: tuple[TensorSpec, ...], steps: Steps) -> tuple[TensorSpec, ...]:
    """Return the outputs of the engine: int64 indices and float32 values, the others unchanged.

    PlanError if the steps name an unknown output or do not fit its dtype, rank or size.
    """
    names = [spec.name for spec in outputs]
    for name in steps:
        if name not in names:
            raise PlanError(
                f"{KEY} names '{name}', which is no output; the model has {', '.join(names)}",
                "name one of these",
            )
    return tuple(
        reduced
        for spec in outputs
        for reduced in (_reduced(spec, steps[spec.name]) if spec.name in steps else (spec,))
    )


def _reduced(spec: TensorSpec, step: Postprocess) -> tuple[TensorSpec, ...]:
    rank = len(spec.shape)
    shown = f"output '{spec.name}' is {spec.dtype} [{', '.join(map(str, spec.shape))}]"
    if spec.dtype not in FLOATS:
        raise PlanError(
            f"{KEY}.{spec.name}: {shown}, expected floating-point scores",
            f"leave '{spec.name}' out of `{KEY}`",
        )
    if not -rank <= step.axis < rank:
        raise PlanError(
            f"{KEY}.{spec.name}.axis is {step.axis}, {shown}: it has {rank} axes",
            "give the axis of the classes; -1 is the last",
        )
    shape = list(spec.shape)
    size = shape.pop(step.axis)
    if step.top_k is not None:
        _check_size(spec.name, step.top_k, size, f"{shown}: its axis {step.axis} has {size}")
        shape.insert(step.axis % rank, step.top_k)
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape), kind=spec.kind)
        for name, dtype in zip(names_of(spec.name, step), ("int64", "float32"), strict=False)
    )


def check_steps(
    steps: Steps,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    profiles: tuple[Profile, ...],
) -> None:
    """Raise PlanError if the steps do not fit the model's outputs, or the profiles.

    A new name must be free, and an axis of symbolic size must hold k at its smallest.
    """
    reduced = [spec.name for spec in reduced_specs(outputs, steps)]
    taken = [*(spec.name for spec in inputs), *reduced]
    for name, step in steps.items():
        for new in names_of(name, step):
            if taken.count(new) > 1:
                raise PlanError(
                    f"{KEY}.{name} makes the output '{new}', and the model has that name already",
                    "give the output another name (`model.outputs`)",
                )
    for spec in outputs:
        top_k = steps[spec.name].top_k if spec.name in steps else None
        if top_k is None:
            continue
        dim = spec.shape[steps[spec.name].axis]
        for profile in profiles:
            if dim in profile.dims:
                least = profile.dims[str(dim)].min
                _check_size(spec.name, top_k, least, f"'{dim}' starts at {least} in a profile")


def _check_size(name: str, top_k: int, size: int | str, shown: str) -> None:
    if isinstance(size, int) and top_k > size:
        raise PlanError(
            f"{KEY}.{name}.top_k is {top_k}, {shown}", f"give a top_k of at most {size}"
        )


def index_outputs(outputs: tuple[TensorSpec, ...], steps: Steps) -> tuple[IndexOutput, ...]:
    """Return the engine's outputs that hold indices. `outputs` are those of the model."""
    found = []
    for spec in outputs:
        if step := steps.get(spec.name):
            axis = step.axis % len(spec.shape) - len(spec.shape)
            name = names_of(spec.name, step)[0]
            found.append(IndexOutput(name, spec.name, axis, step.top_k))
    return tuple(found)


def indices_with_values(outputs: Iterable[TensorSpec]) -> frozenset[str]:
    """Return the names of the engine's outputs of indices beside which their values stand."""
    shapes = {spec.name: spec.shape for spec in outputs}
    found = []
    for name in shapes:
        indices, values = names_of(name.removesuffix("_indices"), Postprocess(top_k=1))
        if name == indices and shapes.get(values) == shapes[name]:
            found.append(name)
    return frozenset(found)


def steps_in_words(step: Postprocess) -> str:
    """Return the steps: "the 5 highest scores of axis -1, and their indices"."""
    if step.argmax:
        return f"the index of the highest score of axis {step.axis}"
    scores = "probabilities (softmax)" if step.softmax else "scores"
    return f"the {step.top_k} highest {scores} of axis {step.axis}, and their indices"


# --- the steps in numpy ---


def postprocessed(outputs: Tensors, steps: Steps) -> dict[str, NDArray[Any]]:
    """Return the outputs that the engine gives, from those of the model."""
    reduced: dict[str, NDArray[Any]] = {}
    for name, array in outputs.items():
        if name in steps:
            reduced |= zip(names_of(name, steps[name]), _steps_on(array, steps[name]), strict=True)
        else:
            reduced[name] = array
    return reduced


def _steps_on(array: NDArray[Any], step: Postprocess) -> tuple[NDArray[Any], ...]:
    scores = np.moveaxis(array, step.axis, -1).astype(np.float32)  # [..., classes]
    indices = _highest(scores, step.top_k or 1)
    if step.argmax:
        return (indices[..., 0],)
    values = np.take_along_axis(_softmax(scores) if step.softmax else scores, indices, -1)
    return tuple(
        np.ascontiguousarray(np.moveaxis(each, -1, step.axis)) for each in (indices, values)
    )


def _highest(scores: Floats, count: int) -> Indices:
    """Return the indices of the highest scores, [..., count], the highest first.

    Of equal scores the lower index comes first. NaN counts as the lowest score.
    """
    known = np.where(np.isnan(scores), -np.inf, scores)
    last = known.shape[-1] - count
    limit = np.partition(known, last, axis=-1)[..., last : last + 1]  # sorting all is far slower
    chosen = known >= limit
    if (chosen.sum(axis=-1) > count).any():  # of those that equal the limit, the first
        above, equal = known > limit, known == limit
        missing = count - above.sum(axis=-1, keepdims=True)
        chosen = above | (equal & (np.cumsum(equal, axis=-1, dtype=np.int32) <= missing))
    indices = np.nonzero(chosen)[-1].reshape(*known.shape[:-1], count)  # ascending
    order = np.argsort(-np.take_along_axis(known, indices, -1), axis=-1, kind="stable")
    return np.take_along_axis(indices, order, -1).astype(np.int64)


def _softmax(scores: Floats) -> Floats:
    with np.errstate(invalid="ignore"):  # all are -inf: NaN, as everywhere
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares
