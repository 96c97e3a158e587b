"""FLOPs against published counts and against counting by hand."""

import math
import warnings
from pathlib import Path

import pytest
import torch
import torchvision

from pipeline.errors import ModelError
from pipeline.onnx_graph.flops import node_costs, total
from tests.pipeline.onnx_graph.builders import save


def flops_of(path: Path, sizes: dict[str, int]) -> float | None:
    return total(cost.flops for cost in node_costs(path, sizes))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("resnet50", 4.09e9, 4.11e9),
        ("mobilenet_v2", 0.300e9, 0.305e9),
    ],  # torchvision's model cards: 4.09 and 0.30 giga-multiply-accumulates
)
def test_flops_agree_with_published_counts(
    tmp_path: Path, name: str, least: float, most: float
) -> None:
    path = tmp_path / f"{name}.onnx"
    export(
        torchvision.models.get_model(name, weights=None),
        torch.zeros(2, 3, 224, 224),
        path,
        {0: "batch"},
    )
    flops = flops_of(path, {"batch": 1})
    assert flops is not None
    assert least < flops / 2 < most
    assert flops_of(path, {"batch": 4}) == pytest.approx(4 * flops)


def export(
    module: torch.nn.Module, example: torch.Tensor, path: Path, axes: dict[int, str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, which is not under test
        torch.onnx.export(
            module.eval(),
            (example,),
            path,
            dynamo=False,
            input_names=["x"],
            dynamic_axes={"x": axes},
        )


def test_a_vision_transformer_agrees_with_its_published_count(tmp_path: Path) -> None:
    """torchvision's model card of ViT-B/16: 17.56 giga-multiply-accumulates; its 12 blocks are
    alike, so 1 and 2 of them tell all.

    The exporter computes the targets of its Reshapes by Div and Slice, where onnx's own propagation
    of sizes ends.
    """
    products = []
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused operator cannot be exported
    for blocks in (1, 2):
        model = torchvision.models.VisionTransformer(224, 16, blocks, 12, 768, 3072)
        export(model, torch.zeros(2, 3, 224, 224), tmp_path / "vit.onnx", {0: "batch"})
        costs = node_costs(tmp_path / "vit.onnx", {"batch": 1})
        assert all(cost.flops is not None for cost in costs)
        products.append(
            sum(cost.flops or 0 for cost in costs if cost.operator in ("Conv", "Gemm", "MatMul"))
        )
    torch.backends.mha.set_fastpath_enabled(fast)
    assert (products[0] + 11 * (products[1] - products[0])) / 2 == pytest.approx(17.56e9, rel=0.001)


class EncoderLayer(torch.nn.Module):
    """One layer of BERT-base: attention of 12 heads over 768 channels, and a feed-forward block of
    3072.
    """

    def __init__(self, width: int = 768, heads: int = 12, inner: int = 3072) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, width]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        x = self.first(x + self.out((scores @ v).transpose(1, 2).flatten(2)))
        return self.second(x + self.down(torch.nn.functional.gelu(self.up(x))))


def test_an_encoder_layer_agrees_with_the_formula(tmp_path: Path) -> None:
    """Per token 12 d^2 multiply-accumulates in the linear layers and 2 d for each token attended
    to; the rest is small.
    """
    export(
        EncoderLayer(), torch.zeros(2, 128, 768), tmp_path / "layer.onnx", {0: "batch", 1: "tokens"}
    )
    for batch, tokens in ((1, 128), (4, 96)):
        costs = node_costs(tmp_path / "layer.onnx", {"batch": batch, "tokens": tokens})
        products = sum(cost.flops or 0 for cost in costs if cost.operator in ("Gemm", "MatMul"))
        assert products == 2 * batch * tokens * (12 * 768**2 + 2 * tokens * 768)
        layer_flops = total(cost.flops for cost in costs)
        assert layer_flops is not None
        assert products < layer_flops < 1.02 * products


def test_bytes_of_a_convolution(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        "g (float[N, 4, 8, 8] x, float16[6, 2, 3, 3] w) => (float[N, 6, 6, 6] y) { y = Conv<group ="
        " 2>(x, w) }",
    )
    (cost,) = node_costs(path, {"N": 2})
    assert cost.flops == 2 * (2 * 6 * 6 * 6) * (2 * 3 * 3)
    assert cost.bytes_read == 4 * 2 * 4 * 8 * 8 + 2 * 6 * 2 * 3 * 3
    assert cost.bytes_written == 4 * 2 * 6 * 6 * 6


def test_of_a_table_only_the_rows_that_are_taken_count(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        "g (float[1000, 8] table, int64[N] ids) => (float[N, 8] y) { y = Gather(table, ids) }",
    )
    (few,) = node_costs(path, {"N": 2})
    assert (few.bytes_read, few.bytes_written) == (4 * 2 * 8 + 8 * 2, 4 * 2 * 8)
    (many,) = node_costs(path, {"N": 3000})
    assert many.bytes_read == 4 * 1000 * 8 + 8 * 3000, "rows that are taken again count once"


@pytest.mark.parametrize(
    ("graph", "flops"),
    [
        (
            "g (float[N, 3, 4] x, float[4, 5] w) => (float[N, 3, 5] y) { y = MatMul(x, w) }",
            2 * 2 * 3 * 4 * 5,
        ),
        (
            (
                "g (float[4, N] x, float[5, 4] w, float[5] b) => (float[N, 5] y) { y = Gemm<transA"
                " = 1, transB = 1>(x, w, b) }"
            ),
            2 * 2 * 4 * 5,
        ),
        (
            (
                "g (float[N, 4, 5, 5] x, float[4, 3, 2, 2] w) => (float[N, 3, 6, 6] y) { y ="
                " ConvTranspose(x, w) }"
            ),
            2 * 2 * 4 * 25 * 3 * 4,
        ),
        (
            (
                "g (float[N, 3, 4] x, float[N, 4, 5] w) => (float[N, 3, 5] y) { y = Einsum<equation"
                ' = "bij,bjk->bik">(x, w) }'
            ),
            2 * 2 * 3 * 4 * 5,
        ),
        (
            (
                "g (float[N, 3, 4, 4] x) => (float[N, 3, 2, 2] y) { y = MaxPool<kernel_shape = [2,"
                " 2], strides = [2, 2]>(x) }"
            ),
            2 * 3 * 4 * 4,
        ),
        (
            "g (float[N, 3, 4, 4] x) => (float[N, 3, 1, 1] y) { y = GlobalAveragePool(x) }",
            2 * 3 * 16,
        ),
        ("g (float[N, 3] x) => (float[N, 3] y) { y = Softmax(x) }", 5 * 2 * 3),
        ("g (float[N, 3] x) => (float[3, N] y) { y = Transpose(x) }", 0),
        (
            (
                "g (float[7, N, 3] x, float[1, 20, 3] w, float[1, 20, 5] r) => (float[7, 1, N, 5]"
                " y) { y = LSTM<hidden_size = 5>(x, w, r) }"
            ),
            2 * 14 * 20 * 8,
        ),
    ],
)
def test_flops_by_hand(tmp_path: Path, graph: str, flops: int) -> None:
    assert flops_of(save(tmp_path, graph), {"N": 2}) == flops


@pytest.mark.parametrize(
    "graph",
    [
        (
            "g (float[N, 8, 6, 4] q, float[N, 8, 5, 4] k, float[N, 8, 5, 3] v) => (float[N, 8, 6,"
            " 3] y) { y = Attention(q, k, v) }"
        ),
        """g (float[N, 6, 32] q, float[N, 5, 32] k, float[N, 5, 24] v) => (float[N, 6, 24] y)
        { y = Attention<q_num_heads = 8, kv_num_heads = 8>(q, k, v) }""",
    ],
)
def test_attention_counts_both_products_and_the_softmax(tmp_path: Path, graph: str) -> None:
    assert flops_of(save(tmp_path, graph, opset=23), {"N": 2}) == 2 * 8 * 6 * 5 * (
        2 * 4 + 2 * 3 + 5
    )


def test_shapes_computed_in_the_graph_are_followed(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        """g (float[N, 4, 6] x, float[24, 5] w) => (float[?, 5] y)
          <int64[1] zero = {0}, int64[1] rest = {-1}>
        { s = Shape(x)  n = Gather(s, zero)  shape = Concat<axis = 0>(n, rest)
          flat = Reshape(x, shape)  y = MatMul(flat, w) }""",
    )
    assert flops_of(path, {"N": 3}) == 2 * 3 * 24 * 5
    assert node_costs(path, {"N": 3})[3].bytes_written == 0  # a view


def test_what_depends_on_values_is_unknown_and_not_zero(tmp_path: Path) -> None:
    path = save(tmp_path, "g (float[N] x) => (int64[1, M] y) { i = NonZero(x)  y = Add(i, i) }")
    assert flops_of(path, {"N": 3}) is None
    assert [cost.flops for cost in node_costs(path, {"N": 3})] == [0.0, None]


def test_foreign_operators_are_unknown(tmp_path: Path) -> None:
    path = save(tmp_path, "g (float[N] x) => (float[N] y) { y = com.example.Twist(x) }")
    assert [(cost.operator, cost.flops) for cost in node_costs(path, {"N": 3})] == [
        ("com.example::Twist", None)
    ]


def test_a_symbol_without_a_size_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, "g (float[N, ?] x) => (float[N, ?] y) { y = Relu(x) }")
    with pytest.raises(ModelError, match="dimension 'x_1', which has no size"):
        node_costs(path, {"N": 3})
    assert math.isclose(flops_of(path, {"N": 3, "x_1": 2}) or 0, 6)
