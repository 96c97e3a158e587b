"""Recorded calls become three disjoint sets, which the reader of a compile accepts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.data.samples import (
    CalibrationSet,
    SelectionSet,
    ValidationSet,
    check_disjoint,
    open_set,
)
from pipeline.errors import DataError
from pipeline.recording.datasets import write_sets
from pipeline.recording.outcome import Recording

ROWS = (TensorSpec(name="x", dtype="float32", shape=("batch", "x_1")),)
PROFILE = Profile(
    dims={"batch": DimRange(min=1, opt=2, max=2), "x_1": DimRange(min=3, opt=3, max=5)}
)


def recording_of(
    folder: Path,
    calls: Sequence[np.ndarray],
    inputs: tuple[TensorSpec, ...] = ROWS,
    has_rows: bool = True,
) -> Recording:
    files = tuple(folder / f"call_{number}.npz" for number in range(len(calls)))
    for path, array in zip(files, calls, strict=True):
        np.savez(path, in_0=array)
    return Recording("Net", folder / "model.pt2", inputs, ("y",), PROFILE, has_rows, files, ())


def opened(
    folder: Path, files: dict[str, tuple[str, ...]], inputs: tuple[TensorSpec, ...]
) -> dict[str, int]:
    sets = [
        open_set(kind, tuple(folder / name for name in files[kind.role]), inputs, (PROFILE,))
        for kind in (CalibrationSet, SelectionSet, ValidationSet)
    ]
    check_disjoint(*sets)
    return {each.role: each.samples for each in sets}


def test_rows_of_several_shapes_are_split_without_a_common_row(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    calls = [random.normal(size=(2, (3, 5)[number % 2])).astype(np.float32) for number in range(40)]
    calls += calls[:5]  # repeated calls count once
    calls.append(np.full((2, 3), np.nan, np.float32))
    sets = write_sets(recording_of(tmp_path, calls), 72, tmp_path)
    assert sets.samples == {"calibration": 40, "selection": 16, "validation": 16}
    assert (sets.distinct, sets.repeated, sets.invalid) == (80, 10, 2)
    assert opened(tmp_path, sets.files, ROWS) == sets.samples


def test_a_fixed_batch_gets_whole_batches(tmp_path: Path) -> None:
    fixed = (TensorSpec(name="x", dtype="float32", shape=(4, 3)),)
    random = np.random.default_rng(0)
    calls = [random.normal(size=(4, 3)).astype(np.float32) for _ in range(10)]
    sets = write_sets(recording_of(tmp_path, calls, fixed), 900, tmp_path)
    assert sets.samples == {"calibration": 24, "selection": 8, "validation": 8}
    assert opened(tmp_path, sets.files, fixed) == sets.samples
    least = write_sets(recording_of(tmp_path, calls[:3], fixed), 900, tmp_path)
    assert least.samples == dict.fromkeys(sets.samples, 4)


def test_whole_calls_are_numbered(tmp_path: Path) -> None:
    inputs = (TensorSpec(name="x", dtype="float32", shape=("x_1", 6)),)
    random = np.random.default_rng(0)
    calls = [random.normal(size=(3 + number % 3, 6)).astype(np.float32) for number in range(9)]
    sets = write_sets(recording_of(tmp_path, calls, inputs, has_rows=False), 900, tmp_path)
    assert sets.samples == {"calibration": 5, "selection": 2, "validation": 2}
    assert opened(tmp_path, sets.files, inputs) == sets.samples


def test_too_few_different_samples_are_refused(tmp_path: Path) -> None:
    calls = [np.ones((1, 3), np.float32)] * 50 + [np.zeros((1, 3), np.float32)]
    with pytest.raises(DataError, match=r"at least 3 different samples, .* got 2 \(49 more") as got:
        write_sets(recording_of(tmp_path, calls), 900, tmp_path)
    assert "500 + 200 + 200" in got.value.next_step
