"""Sets of preprocessed images are refused where the engine preprocesses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.processing import ImageResize, Preprocess
from pipeline.core.shapes import TensorSpec
from pipeline.data.raw_images import check_raw
from pipeline.errors import DataError

RAW = (TensorSpec(name="image", dtype="uint8", shape=("batch", 8, 6, 3)),)
STEPS = {"image": Preprocess(scale=0.5, mean=(0.1, 0.2, 0.3))}
FLOATS = np.zeros((4, 3, 8, 6), np.float32)


@pytest.mark.parametrize("array", ["image", "0/image"])
def test_floats_are_refused_with_both_forms_and_what_undoes_the_steps(
    tmp_path: Path, array: str
) -> None:
    arrays: dict[str, Any] = {array: FLOATS}
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(DataError) as refusal:
        check_raw((tmp_path / "set.npz",), RAW, STEPS)
    message = refusal.value
    assert f"'{array}' is float32 [4, 3, 8, 6]" in message.message
    assert "the engine takes image uint8 [batch, 8, 6, 3]" in message.message
    assert "`image = numpy.rint((image.transpose(0, 2, 3, 1)" in message.next_step


def test_a_resize_cannot_be_undone(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", image=FLOATS)
    resize = ImageResize(source=(8, 6), target=(4, 4), filter="linear")
    steps = {"image": STEPS["image"].model_copy(update={"resize": resize})}
    with pytest.raises(DataError) as refusal:
        check_raw((tmp_path / "set.npz",), RAW, steps)
    assert refusal.value.next_step == "save the images as they are before any step"


def test_bytes_pass_and_so_does_a_plan_without_steps(tmp_path: Path) -> None:
    np.savez(tmp_path / "bytes.npz", image=np.zeros((4, 8, 6, 3), np.uint8))
    np.savez(tmp_path / "floats.npz", image=FLOATS)
    check_raw((tmp_path / "bytes.npz",), RAW, STEPS)
    check_raw((tmp_path / "floats.npz",), RAW, {})
