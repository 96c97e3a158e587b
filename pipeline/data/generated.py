"""Random samples for models without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.core.shapes import Profile, TensorSpec, sizes_from_shapes
from pipeline.data.batch import Batch, batch_range, batch_sizes, check_batch_sizes, without_rows
from pipeline.data.input_checks import dtype_str
from pipeline.errors import DataError
from pipeline.plan.schema import GeneratedData


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """Random samples of one shape. Sample i depends only on the seed and i, not on its batch."""

    specs: tuple[TensorSpec, ...]  # of one sample
    seed: int
    first: int
    samples: int
    rows: tuple[int, int]
    whole: bool  # a sample is a whole input
    # for inputs with values that decide a shape: the opt values of the profile
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def sizes(self, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
        """Return the size of each symbol of a sample, without the batch symbol."""
        cut = inputs if self.whole else without_rows(inputs)
        sizes = sizes_from_shapes(cut, {spec.name: spec.resolve({}) for spec in self.specs})
        assert not isinstance(sizes, str), "the samples were drawn for these inputs"
        return (sizes,)

    def batches(self, size: int) -> Iterator[Batch]:
        first = self.first
        for count in batch_sizes(self.samples, size, self.rows):
            rows = [_random_sample(self, index) for index in range(first, first + count)]
            feeds = (
                rows[0]
                if self.whole
                else {spec.name: np.stack([row[spec.name] for row in rows]) for spec in self.specs}
            )
            yield Batch(feeds, None, first, count, self.whole)
            first += count


def generated_parts(
    role: str,
    source: GeneratedData,
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile],
) -> tuple[GeneratedPart, ...]:
    """Return samples at the opt size of every profile, nearly the same number for each."""
    for spec in inputs:
        dtype_str(spec)
    shared = {spec.shape[0] if spec.shape else None for spec in inputs}
    symbol = next(iter(shared)) if len(shared) == 1 else None
    batched = isinstance(symbol, str) and not any(symbol in spec.shape[1:] for spec in inputs)
    specs = without_rows(inputs) if batched else inputs
    choices = list(profiles or (Profile(),))[: source.samples]
    parts, first = list[GeneratedPart](), 0
    for index, profile in enumerate(choices):
        count = (source.samples - first) // (len(choices) - index)
        rows = batch_range(symbol, {}, profile) if batched and symbol is not None else (1, 1)
        check_batch_sizes(role, count, rows)
        parts.append(
            GeneratedPart(
                _resolved(specs, profile),
                source.seed,
                first,
                count,
                rows,
                not batched,
                tuple(profile.values_at("opt").items()),
            )
        )
        first += count
    return tuple(parts)


def _resolved(specs: tuple[TensorSpec, ...], profile: Profile) -> tuple[TensorSpec, ...]:
    try:
        return tuple(
            spec.model_copy(update={"shape": spec.resolve(profile.sizes("opt"))}) for spec in specs
        )
    except KeyError as error:
        raise DataError(
            f"cannot generate samples: no profile gives the size of {error}",
            "add the symbol to `profiles:`",
        ) from None


def _random_sample(part: GeneratedPart, index: int) -> dict[str, NDArray[np.generic]]:
    """Draw one sample.

    Floats are standard normal, and uint8 values are pixels. Other integers are 0 or 1, which every
    embedding table or mask accepts, and rows begin with 1, like the mask of a text.
    """
    random = np.random.default_rng([part.seed, index])
    sample: dict[str, NDArray[np.generic]] = {}
    for spec in part.specs:
        dtype, shape = np.dtype(spec.dtype), spec.resolve({})
        drawn = (
            random.standard_normal(shape)
            if dtype.kind == "f"
            else random.integers(0, 256 if dtype == np.uint8 else 2, shape)
        )
        if dtype.kind != "f" and dtype != np.uint8 and shape and shape[-1] > 1:
            drawn[..., 0] = 1
        sample[spec.name] = (
            np.asarray(dict(part.values).get(spec.name, drawn)).astype(dtype).reshape(shape)
        )
    return sample
