"""Encoded images become what the engine takes: preprocessed here or there, never twice."""

import re

import numpy as np
import pytest

from pipeline.core.processing import Preprocess
from pipeline.core.shapes import TensorSpec
from pipeline.errors import PlanError
from pipeline.serving_inputs import (
    ServingConfig,
    check_serving,
    client_inputs,
    with_made_inputs,
    with_raw_image,
)

RAW = (TensorSpec(name="x", dtype="uint8", shape=("n", 8, 6, 3)),)


def test_an_image_is_decoded_to_pixels_where_the_engine_preprocesses() -> None:
    image = {"input": "x", "size": [8, 6], "resize": 10, "colour": "BGR"}
    serving = ServingConfig.model_validate({"image": image})
    decoded = with_raw_image(serving, RAW, {"x": Preprocess(mean=(0.5,))})
    assert decoded.image is not None
    assert decoded.image.model_dump() == {
        **image,
        "size": (8, 6),
        "layout": "NHWC",
        "scale": 1.0,
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
    }
    stored = ServingConfig.model_validate(decoded.model_dump())
    assert with_raw_image(stored, RAW, {"x": Preprocess(mean=(0.5,))}) == decoded
    assert with_raw_image(serving, RAW, {}) == serving


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "serving.image.mean and preprocess.x are both given"),
        ({"scale": 0.5}, "serving.image.scale and preprocess.x are both given"),
        ({"size": [6, 8]}, "gives pixels of [6, 8, 3], the engine takes [8, 6, 3] as 'x'"),
    ],
)
def test_an_image_is_never_preprocessed_twice_nor_of_another_size(
    changes: dict[str, object], message: str
) -> None:
    image = {"input": "x", "size": [8, 6], **changes}
    serving = ServingConfig.model_validate({"image": image})
    with pytest.raises(PlanError, match=re.escape(message)):
        with_raw_image(serving, RAW, {"x": Preprocess()})


PACKING = {"axis": "tokens", "mask": "mask", "positions": "positions"}


def packed(dtype: str = "int64", **shapes: tuple[int | str, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of an encoder, with these shapes in the place of the usual ones."""
    usual = {
        "ids": ("batch", "tokens"),
        "mask": ("batch", "tokens", "tokens"),
        "positions": ("batch", "tokens"),
    }
    return tuple(
        TensorSpec(name=name, dtype=dtype if name == "mask" else "int64", shape=shape)
        for name, shape in (usual | shapes).items()
    )


HIDDEN = TensorSpec(name="hidden", dtype="float32", shape=("batch", "tokens", 8))


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
@pytest.mark.parametrize("front", [(), (1,)])
def test_the_server_makes_masks_and_positions(dtype: str, front: tuple[int, ...]) -> None:
    inputs = packed(dtype, mask=("batch", *front, "tokens", "tokens"))
    serving = ServingConfig.model_validate({"packing": PACKING})
    check_serving(serving, inputs, (HIDDEN,))
    ids = np.zeros((2, 3), np.int64)
    feeds = with_made_inputs({"ids": ids}, inputs, serving.packing)
    assert (feeds["mask"].shape, feeds["mask"].dtype.name) == ((2, *front, 3, 3), dtype)
    assert feeds["mask"].all()
    assert feeds["positions"].tolist() == [[0, 1, 2]] * 2
    assert [spec.name for spec in client_inputs(inputs, serving.packing)] == ["ids"]


@pytest.mark.parametrize(
    ("changes", "inputs", "message"),
    [
        ({"mask": "m"}, packed(), "serving.packing.mask names 'm', which is no input"),
        ({"positions": "p"}, packed(), "serving.packing.positions names 'p', which is no input"),
        (
            {"axis": "tokens"},
            packed(ids=("batch", 8), mask=("batch", 8, 8), positions=("batch", 8)),
            "'tokens', which is no symbolic dimension of the inputs; they have batch",
        ),
        (
            {},
            packed(mask=("batch", "tokens")),
            "'mask' is ['batch', 'tokens'], expected [batch, tokens, tokens] or"
            " [batch, 1, tokens, tokens]",
        ),
        ({}, packed("float32"), "'mask' is float32, expected one of int32, int64, bool"),
        ({}, packed(positions=("batch",)), "'positions' is ['batch'], expected [batch, tokens]"),
        ({}, packed(ids=("batch",)), "input 'ids' is ['batch'], expected 'batch' in front"),
        ({}, packed()[1:], "the model has no inputs beside the mask and the positions"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    changes: dict[str, str], inputs: tuple[TensorSpec, ...], message: str
) -> None:
    serving = ServingConfig.model_validate({"packing": {**PACKING, **changes}})
    with pytest.raises(PlanError, match=re.escape(message)):
        check_serving(serving, inputs, (HIDDEN,))


def test_packing_and_padding_are_not_declared_together() -> None:
    both = {"packing": PACKING, "padding": [{"input": "ids", "axis": 1}]}
    with pytest.raises(PlanError, match=r"and serving\.padding are both given"):
        check_serving(ServingConfig.model_validate(both), packed(), (HIDDEN,))
