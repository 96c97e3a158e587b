"""The outputs of the engine, and the steps in numpy."""

import numpy as np
import pytest

from pipeline.core.processing import Postprocess
from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.postprocess import (
    IndexOutput,
    check_steps,
    index_outputs,
    postprocessed,
    reduced_specs,
    sources_of,
)

X = TensorSpec(name="x", dtype="int64", shape=("batch", "tokens"))
LOGITS = TensorSpec(name="logits", dtype="float32", shape=("batch", 10, "tokens"))
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch",))
PROFILES = (
    Profile(dims={"batch": DimRange(min=1, opt=2, max=4), "tokens": DimRange(min=3, opt=4, max=8)}),
)


def test_the_highest_come_first_and_of_equal_scores_the_lower_index() -> None:
    nan, low = np.nan, -np.inf
    scores = np.array([[1, 3, 2, 3], [0, 0, 0, 0], [nan, low, 5, low]], np.float32)
    outputs = postprocessed({"y": scores, "z": scores}, {"y": Postprocess(top_k=3)})
    assert list(outputs) == ["y_indices", "y_values", "z"]
    assert outputs["y_indices"].tolist() == [[1, 3, 2], [0, 1, 2], [2, 0, 1]]
    np.testing.assert_array_equal(
        outputs["y_values"], np.array([[3, 3, 2], [0, 0, 0], [5, nan, low]], np.float32)
    )


def test_any_axis_may_hold_the_classes() -> None:
    scores = np.random.default_rng(0).standard_normal((2, 7, 3)).astype(np.float16)
    softmax = Postprocess(top_k=2, axis=1, softmax=True)
    top = postprocessed({"y": scores}, {"y": softmax})
    order = np.argsort(-scores.astype(np.float32), axis=1)[:, :2]
    np.testing.assert_array_equal(top["y_indices"], order)
    powers = np.exp(scores.astype(np.float64))
    shares = np.take_along_axis(powers / powers.sum(axis=1, keepdims=True), order, 1)
    np.testing.assert_allclose(top["y_values"], shares, rtol=1e-5)
    best = postprocessed({"y": scores}, {"y": Postprocess(argmax=True, axis=-2)})
    np.testing.assert_array_equal(best["y_indices"], order[:, 0])


def test_an_engine_has_the_indices_and_the_values_in_the_place_of_the_output() -> None:
    steps = {"logits": Postprocess(top_k=5, axis=1)}
    indices, values, ids = reduced_specs((LOGITS, IDS), steps)
    assert (indices.name, indices.dtype) == ("logits_indices", "int64")
    assert (values.name, values.dtype) == ("logits_values", "float32")
    assert indices.shape == values.shape == ("batch", 5, "tokens")
    assert ids == IDS
    assert sources_of(("logits_indices", "logits_values", "ids"), steps) == ("logits", "ids")
    (best,) = reduced_specs((LOGITS,), {"logits": Postprocess(argmax=True, axis=1)})
    assert best.shape == ("batch", "tokens")
    (index,) = index_outputs((LOGITS, IDS), steps)
    assert index == IndexOutput("logits_indices", "logits", axis=-2, top_k=5)


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        (
            "scores",
            {"argmax": True},
            "postprocess names 'scores', which is no output; the model",
        ),
        ("ids", {"argmax": True}, r"output 'ids' is int64 \[batch\], expected floating-point"),
        ("logits", {"argmax": True, "axis": 3}, "postprocess.logits.axis is 3, .* it has 3 axes"),
        ("logits", {"top_k": 1, "axis": -4}, "postprocess.logits.axis is -4"),
        ("logits", {"top_k": 11, "axis": 1}, "top_k is 11, .* its axis 1 has 10"),
        ("logits", {"top_k": 4}, "top_k is 4, 'tokens' starts at 3 in a profile"),
    ],
)
def test_steps_that_do_not_fit_the_outputs_are_errors(
    name: str, step: dict[str, object], message: str
) -> None:
    steps = {name: Postprocess.model_validate(step)}
    with pytest.raises(PlanError, match=message):
        check_steps(steps, (X,), (LOGITS, IDS), PROFILES)


def test_a_name_that_the_model_has_already_is_an_error() -> None:
    taken = LOGITS.model_copy(update={"name": "logits_values"})
    steps = {"logits": Postprocess(top_k=2)}
    with pytest.raises(PlanError, match="makes the output 'logits_values', and the model has that"):
        check_steps(steps, (X,), (LOGITS, taken), PROFILES)
    check_steps(steps, (X,), (LOGITS,), PROFILES)
