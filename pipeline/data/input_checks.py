"""Checks of names, dtypes, shapes and values of samples against the inputs of the model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import DataError

LABELS = "labels"
NUMBER_THEM = (
    "number the samples and give each array as the model takes it: '0/{0}', '1/{0}', ..."
    " (docs/howto/own-data.md)"
)


def name_faults(where: str, missing: list[str], unknown: list[str]) -> str:
    faults = [f"input '{name}' is missing" for name in missing]
    for name in unknown:
        near = difflib.get_close_matches(name, missing or [LABELS], n=1, cutoff=0.5)
        faults.append(
            f"array '{name}' is none of the model's inputs"
            + (f" (did you mean '{near[0]}'?)" if near else "")
        )
    return f"{where}: {'; '.join(faults)}"


def check_dtype(where: str, spec: TensorSpec, dtype: np.dtype[np.generic]) -> None:
    if dtype.str != dtype_str(spec):
        raise DataError(
            f"{where}: '{spec.name}' is {dtype.name if dtype.isnative else dtype.str}, the model's"
            f" input is {spec.dtype}",
            f"nothing is cast silently: save {spec.name}.astype('{spec.dtype}')",
        )


def outside_error(where: str, sizes: Mapping[str, int], profiles: Sequence[Profile]) -> DataError:
    got = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    by_profile = [
        ", ".join(f"{name} {dim.min} to {dim.max}" for name, dim in profile.dims.items())
        for profile in profiles
    ]
    ranges = "; ".join(by_profile)
    return DataError(
        f"{where}: {got} lies outside all profiles ({ranges})",
        "widen a profile in the plan, or cut or pad the samples",
    )


def values_error(where: str, values: Mapping[str, object]) -> DataError:
    got = ", ".join(f"{name} = {value}" for name, value in values.items())
    return DataError(
        f"{where} has {got}, outside all profiles",
        "widen `values` in a profile, or leave such samples out",
    )


def dtype_str(spec: TensorSpec) -> str:
    """Return the spec's dtype in numpy's byte-exact form. DataError for bfloat16."""
    # numpy knows bfloat16 after an import of ml_dtypes, but .npz files cannot hold it
    if spec.dtype == "bfloat16":
        raise DataError(
            f"input '{spec.name}' is {spec.dtype}, which .npz files and generated data cannot hold",
            "give the model a float32 input and cast inside it",
        )
    return np.dtype(spec.dtype).str


def spec_text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(str(dim) for dim in spec.shape)}]"


def check_finite(path: Path, name: str, array: NDArray[np.generic], start: int) -> None:
    if array.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        # much faster than a check of each value; if the sum overflows, each value is checked
        if np.isfinite(array.sum()):
            return
    bad = ~np.isfinite(array.reshape(len(array), -1))
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        value = "NaN" if np.isnan(array[row]).any() else "an infinity"
        raise DataError(
            f"'{path}': '{name}' has {value} in sample {start + row}",
            "repair or leave out such samples; no accuracy can be measured on them",
        )
