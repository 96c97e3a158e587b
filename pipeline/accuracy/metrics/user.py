"""The user's own metrics and decoders: `module:function`.

A metric is called as `function(outputs, labels, reference)` on the whole set at once:

    outputs    [samples, ...]  of the output the metric reads, from the engine that is scored
    labels     [samples, ...]  or None where the set has none; from a file, also texts or `Boxes`
    reference  [samples, ...]  the same output of the reference
    returns    one score per sample, shape [samples], or one number for the set; higher is better

A decoder is called as `function(outputs)` on [samples, ...] outputs of a batch, and returns one
entry per sample, of the kind that the built-in decoder of the metric returns.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Array, Floats
from pipeline.accuracy.metrics.metric import (
    Batches,
    Decode,
    Evaluation,
    Metric,
    Picks,
    SampleScores,
    class_labels,
    joined,
)
from pipeline.errors import DataError, PlanError

MetricFunction = Callable[[Array, Array | None, Array], object]

METRIC_PAGE = (
    "the function takes (outputs, labels, reference) and returns one score per sample or one"
    " number; docs/howto/own-metric.md"
)


def load_function(name: str, key: str, python_path: Path) -> Callable[..., Any]:
    """Import `module:function`, which `key` of the plan names. PlanError if it is no function."""
    module, _, function_name = name.partition(":")
    sys.path.insert(0, str(python_path))
    try:
        function = getattr(importlib.import_module(module), function_name)
    except (ImportError, AttributeError) as error:
        next_step = f"correct `{key}`, or set `accuracy.python_path` to the folder of its module"
        raise PlanError(
            f"{key} '{name}' cannot be imported from '{python_path}': {error}", next_step
        ) from error
    finally:
        sys.path.remove(str(python_path))
    if not callable(function):
        raise PlanError(
            f"{key} '{name}' is a {type(function).__name__}, expected a function",
            f"correct `{key}`",
        )
    return function  # type: ignore[no-any-return]  # user code; its result is checked


def metric_of_function(name: str, function: MetricFunction) -> Metric:
    """Return the metric that a function of the user computes."""

    def evaluate(records: Batches, labels: Batches | None, reference: Batches) -> Evaluation:
        outputs = joined(records)
        whole = _WholeSet(
            name, function, outputs, joined(labels) if labels else None, joined(reference)
        )
        scores = whole.scores(np.arange(len(outputs)))
        if scores.ndim == 0:
            return whole
        return SampleScores(scores, class_labels(labels, scores.size))

    return Metric(name, evaluate, may_be_partial=False, is_function=True)


@dataclass(frozen=True, slots=True)
class _WholeSet:
    """One number for a set, by a function of the user."""

    name: str
    function: MetricFunction
    outputs: Array
    labels: Array | None
    reference: Array

    @property
    def units(self) -> int:
        return len(self.outputs)

    @property
    def classes(self) -> Mapping[int, int]:
        return {}

    def score(self, picks: Picks) -> float:
        return float(self.scores(picks))

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        raise NotImplementedError("a number for the whole set has no classes")

    def scores(self, picks: Picks) -> Floats:
        """Call the user's function and check its result: shape [samples] or ()."""
        labels = None if self.labels is None else self.labels[picks]
        try:
            value = self.function(self.outputs[picks], labels, self.reference[picks])
            scores = np.asarray(value, dtype=np.float64)
        except (Exception, SystemExit) as error:
            raise DataError(
                f"metric '{self.name}' failed: {type(error).__name__}: {error}", METRIC_PAGE
            ) from error
        if value is None:  # numpy takes it for NaN
            raise DataError(f"metric '{self.name}' returned None", METRIC_PAGE)
        if scores.shape not in ((), picks.shape):
            raise DataError(
                f"metric '{self.name}' returned shape {scores.shape} for {picks.size} samples",
                METRIC_PAGE,
            )
        return scores


def decoder_of_function(name: str, function: Callable[[Array], Any]) -> Decode:
    """Return the decoder that a function of the user computes: [samples] entries of any kind."""

    def decode(outputs: Array, mask: Array | None) -> Array:
        try:
            entries = list(function(outputs))
        except (Exception, SystemExit) as error:
            raise DataError(
                f"decoder '{name}' failed: {type(error).__name__}: {error}",
                "the function takes outputs of shape [samples, ...] and returns one entry per"
                " sample; docs/howto/own-metric.md",
            ) from error
        if len(entries) != len(outputs):
            raise DataError(
                f"decoder '{name}' returned {len(entries)} entries for {len(outputs)} samples",
                "return one entry per sample; docs/howto/own-metric.md",
            )
        return object_array(entries)

    return decode


def object_array(entries: list[Any]) -> Array:
    """Return entries of any kind and shape as an array [entries] of objects."""
    array = np.empty(len(entries), dtype=object)
    for index, entry in enumerate(entries):
        array[index] = entry
    return array
