"""Masks of attention are written so that fused kernels know them, and every row answers as
before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.onnx_graph.attention import plain_attention
from pipeline.onnx_graph.attention_masks import HIDDEN

GUARDED = """s{n} = MatMul(q, k)  t{n} = Add(s{n}, {mask})  p{n} = Softmax<axis = -1>(t{n})
  l{n} = IsNaN(p{n})
    w{n} = Where(l{n}, zero, p{n})  y{n} = MatMul(w{n}, v)"""
CAUSAL = np.tril(np.full((4, 4), fill_value=True))


def attention(
    mask: str,
    constants: Mapping[str, np.ndarray] | None = None,
    uses: str = "",
    outputs: str = "float[2, 3, 4, 5] y",
) -> onnx.ModelProto:
    """One of 2 rows, 3 heads, 4 tokens and 5 channels with a guard; `mask` makes `m` of `seen`, and
    `uses` come after the attention.
    """
    body = f"{mask}  {GUARDED.format(n='', mask='m')}  {uses}"
    tensors = {
        "zero": np.zeros(1, np.float32),
        "never": np.full(1, -np.inf, np.float32),
        **(constants or {}),
    }
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[2, 3, 4, 5] q, float[2, 3, 5, 4] k, float[2, 3, 4, 5] v, bool[2, 1, 1, 4] seen)
      => ({outputs}) {{ {body} }}"""
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(tensor), name) for name, tensor in tensors.items()
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def rewritten(before: onnx.ModelProto) -> onnx.ModelProto:
    """Plain, after it has answered as before, where the first text has no token, or its first token
    is padding, or it is whole.
    """
    after = plain_attention(onnx.ModelProto.FromString(before.SerializeToString()))
    assert after is not None
    for hidden in (4, 1, 0):
        for ours, theirs in zip(answers(after, hidden), answers(before, hidden), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return after


def answers(model: onnx.ModelProto, hidden: int) -> list[np.ndarray]:
    import onnxruntime

    random = np.random.default_rng(0)
    shapes = {"q": (2, 3, 4, 5), "k": (2, 3, 5, 4), "v": (2, 3, 4, 5)}
    fed = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    fed["seen"] = np.full((2, 1, 1, 4), fill_value=True)
    fed["seen"][0, ..., :hidden] = False
    return list(
        onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, fed)
    )


def count(model: onnx.ModelProto, operator: str) -> int:
    return sum(node.op_type == operator for node in model.graph.node)


@pytest.mark.parametrize("mask", [
    "m = Where(seen, zero, never)",
    "hidden = Not(seen)  m = Where(hidden, never, zero)",
    "both = And(causal, seen)  m = Where(both, zero, never)",
])  # fmt: skip
def test_rows_without_any_token_answer_as_before_without_a_guard(mask: str) -> None:
    before = attention(mask, {"causal": CAUSAL})
    assert not answers(before, hidden=4)[0][0].any()
    after = rewritten(before)
    assert (count(after, "IsNaN"), count(after, "Where"), count(after, "ReduceMax")) == (0, 1, 1)


def test_attentions_share_what_was_written_of_their_mask() -> None:
    second = GUARDED.format(n=2, mask="m") + "  z = Add(y, y2)"
    after = rewritten(
        attention("m = Where(seen, zero, never)", uses=second, outputs="float[2, 3, 4, 5] z")
    )
    assert (
        count(after, "IsNaN"),
        count(after, "Where"),
        count(after, "ReduceMax"),
        count(after, "Mul"),
    ) == (0, 1, 1, 2)


@pytest.mark.parametrize("use", ["shown = Identity(w)", "shown = Relu(p)", "shown = MatMul(s, w)"])
def test_probabilities_that_are_read_elsewhere_keep_guard_and_mask(use: str) -> None:
    second = GUARDED.format(n=2, mask="m") + "  z = Add(y, y2)  " + use
    after = rewritten(
        attention(
            "m = Where(seen, zero, never)",
            uses=second,
            outputs="float[2, 3, 4, 5] z, float[2, 3, 4, 4] shown",
        )
    )
    assert (count(after, "IsNaN"), count(after, "Where"), count(after, "ReduceMax")) == (
        1,
        3,
        1,
    ), "the other attention gets its own mask"


@pytest.mark.parametrize("hides", [-np.inf, np.finfo(np.float32).min])
def test_a_constant_mask_comes_in_reach_of_fp16_if_every_row_sees_something(hides: float) -> None:
    mask = np.where(CAUSAL, np.float32(0), np.float32(hides))
    after = rewritten(attention("", {"m": mask}))
    assert count(after, "IsNaN") == 0
    assert (
        min(float(numpy_helper.to_array(each).min()) for each in after.graph.initializer) == HIDDEN
    )
    mask[1] = hides
    assert plain_attention(attention("", {"m": mask})) is None


@pytest.mark.parametrize(
    ("start", "step", "least", "alike"),
    [(0, 1, 0, True), (1, 1, 0, True), (0, 1, 1, False), (3, -1, 0, False)],
)
@pytest.mark.parametrize("expanded", [False, True])
def test_a_column_of_positions_that_are_at_least_the_first_is_left_out(
    start: int, step: int, least: int, alike: bool, expanded: bool
) -> None:
    column = (
        "at = Range(start, end, step)  up = Unsqueeze(at, axes)  column = GreaterOrEqual(up, least)"
        "  both = And(column, seen)"
    )
    column += (
        "  whole = Expand(both, size)  m = Where(whole, zero, never)"
        if expanded
        else "  m = Where(both, zero, never)"
    )
    end = start + 4 * step
    constants = {
        "start": start,
        "end": end,
        "step": step,
        "least": least,
        "axes": [0, 1, 3],
        "size": [2, 1, 4, 4],
    }
    after = rewritten(
        attention(column, {name: np.array(value) for name, value in constants.items()})
    )
    assert count(after, "Range") == (0 if alike else 1)
    assert count(after, "Expand") == (0 if alike or not expanded else 1)


NEVER = "m = Where(seen, zero, never)"
NEAR = np.array([-9999, -20000, -20000, -20000], np.float32)  # by 10,000 and by 1 are not the same


@pytest.mark.parametrize(
    "before",
    [
        attention("", {"m": NEAR}),
        attention(
            NEVER, uses="shown = Not(l)", outputs="float[2, 3, 4, 5] y, bool[2, 3, 4, 4] shown"
        ),
        attention(
            NEVER,
            uses="shown = Identity(t)",
            outputs="float[2, 3, 4, 5] y, float[2, 3, 4, 4] shown",
        ),
        attention(
            NEVER,
            uses="p2 = Softmax<axis = -1>(t)  y2 = MatMul(p2, v)",
            outputs="float[2, 3, 4, 5] y, float[2, 3, 4, 5] y2",
        ),
        attention("m = Where(some, zero, never)", {"some": np.array(0, dtype=bool)}),
        attention(
            "both = And(column, seen)  m = Where(both, zero, never)  more = Shape(m)",
            {"column": np.full((1, 1, 4, 1), fill_value=True)},
            uses="shown = Identity(l)",
            outputs="float[2, 3, 4, 5] y, bool[2, 3, 4, 4] shown, int64[4] more",
        ),
    ],
)
def test_what_would_answer_otherwise_stays(before: onnx.ModelProto) -> None:
    assert plain_attention(before) is None


def test_only_a_softmax_over_keys_is_attention() -> None:
    before = attention(NEVER)
    (softmax,) = [node for node in before.graph.node if node.op_type == "Softmax"]
    softmax.attribute[0].i = -2
    assert plain_attention(before) is None
    softmax.attribute[0].i = 3
    assert count(rewritten(before), "IsNaN") == 0


def test_a_mask_that_repeats_its_scores_stays_as_large() -> None:
    constants = {
        "column": np.full((2, 1, 1, 1), fill_value=True),
        "one": np.array([1]),
        "none": np.array([0]),
    }
    mask = (
        "first = Slice(seen, none, one, none)  both = And(column, first)  m = Where(both, zero,"
        " never)"
    )
    before = attention(mask, constants)
    before.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("q", 1, [1, 3, 4, 5]))
    before.graph.input[1].CopyFrom(onnx.helper.make_tensor_value_info("k", 1, [1, 3, 5, 4]))
    del before.graph.value_info[:]
    before = onnx.shape_inference.infer_shapes(before, strict_mode=True, data_prop=True)
    after = plain_attention(before)
    assert after is not None
    assert count(after, "And") == 1


def test_what_torchscript_writes_of_scaled_dot_product_attention_is_known(tmp_path: Path) -> None:
    import torch

    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                x, x, x, attn_mask=mask[:, None, None, :]
            )

    mask = torch.tensor([[True, True, False], [False, False, False]])
    file = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, which is not under test
        torch.onnx.export(
            Masked(),
            (torch.rand(2, 2, 3, 4), mask),
            str(file),
            dynamo=False,
            input_names=["x", "seen"],
            opset_version=17,
        )
    before = onnx.load(file)
    assert count(before, "IsNaN") == 1, "if not, TorchScript has ceased to write guards"
    after = plain_attention(before)
    assert after is not None
    assert (count(after, "IsNaN"), count(after, "ReduceMax")) == (0, 1)
