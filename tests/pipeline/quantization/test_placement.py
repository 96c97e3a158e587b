"""The placement rules."""

import pytest

from pipeline.core.recipe import Placement
from pipeline.quantization.placement import (
    KERNELS,
    Kernels,
    Sites,
    Wiring,
    fused_input,
    place,
)
from tests.builders.convert import ATTENTION, DOWNSAMPLE, RESIDUAL, proto_from_text

DEFAULTS = Placement()
BIASED = RESIDUAL.replace(
    "[add] s = Add (c2, r1)", "[bias] h = Add (c2, k) [add] s = Add (r1, h)"
).replace("b3>", "b3, float[4, 1, 1] k>")
GATED = RESIDUAL.replace("[add] s = Add (c2, r1)", "[gate] t = Sigmoid (c2) [add] s = Add (t, r1)")
TENSORRT, ONNXRUNTIME, OPENVINO = KERNELS["tensorrt"], KERNELS["onnxruntime"], Kernels()


def sites_of(
    text: str,
    rules: Placement = DEFAULTS,
    fp32_nodes: frozenset[str] = frozenset(),
    kernels: Kernels = TENSORRT,
) -> Sites:
    graph = proto_from_text(text).graph
    constants = {tensor.name for tensor in graph.initializer}
    ranged = (
        frozenset(name for node in graph.node for name in (*node.input, *node.output)) - constants
    )
    return place(graph, rules, ranged, fp32_nodes, kernels)


def reads(sites: Sites) -> list[tuple[str, str]]:
    return [(site.node, site.tensor) for site in sites.activations]


def nodes(sites: Sites) -> set[str]:
    return {site.node for site in sites.activations} | {site.node for site in sites.weights}


def test_default_rules_take_convolutions_and_residual_adds_but_not_the_classifier() -> None:
    sites = sites_of(RESIDUAL)
    assert nodes(sites) == {"conv1", "conv2", "conv3", "add"}
    assert reads(sites) == [("conv1", "x"), ("conv2", "r1"), ("add", "r1"), ("conv3", "r2")]


def test_tensorrt_quantises_the_residual_and_not_what_a_convolution_adds_to_it() -> None:
    """A pair between a convolution and its Add makes the Add a kernel of its own."""
    assert [tensor for node, tensor in reads(sites_of(RESIDUAL)) if node == "add"] == ["r1"]
    for kernels in (OPENVINO, ONNXRUNTIME):
        assert [
            tensor for node, tensor in reads(sites_of(RESIDUAL, kernels=kernels)) if node == "add"
        ] == ["c2", "r1"]


def test_of_two_convolutions_into_an_add_the_later_one_adds() -> None:
    sites = reads(sites_of(DOWNSAMPLE))
    assert [tensor for node, tensor in sites if node == "add1"] == ["c2"]
    assert [tensor for node, tensor in sites if node == "add2"] == ["r2"]


def test_a_sum_that_no_quantised_operator_reads_leaves_its_kernel_in_8_bits_too() -> None:
    assert ("pool", "r4") in reads(sites_of(DOWNSAMPLE))
    for text in (
        DOWNSAMPLE.replace(
            "p = GlobalAveragePool (r4)", "t = Sigmoid (r4) [gap] p = GlobalAveragePool (t)"
        ),
        RESIDUAL,
    ):
        assert not {"pool", "relu4", "relu2"} & nodes(sites_of(text))
    assert not {"pool"} & nodes(sites_of(DOWNSAMPLE, kernels=OPENVINO))


def test_an_add_beside_a_convolution_that_stays_in_floats_stays_too() -> None:
    assert nodes(sites_of(RESIDUAL, fp32_nodes=frozenset({"conv2"}))) == {"conv1", "conv3"}
    assert nodes(sites_of(RESIDUAL, Placement(conv=False))) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RESIDUAL, ("c2", "conv2")),
        (DOWNSAMPLE, ("d", "down")),
        (
            RESIDUAL.replace(
                "[add] s = Add (c2, r1)", "[bias] h = Add (c2, k) [add] s = Add (r1, h)"
            ).replace("b3>", "b3, float[4, 1, 1] k>"),
            ("h", "conv2"),
        ),
        (GATED, None),
        (RESIDUAL.replace("s = Add (c2, r1)", "s = Add (c2, c2)"), None),
        (RESIDUAL.replace("(float[N, 5] y)", "(float[N, 5] y, float[N, 4, 8, 8] c2)"), None),
    ],
    ids=[
        "one convolution",
        "two",
        "behind a bias",
        "behind an activation",
        "the same twice",
        "an output of the model",
    ],
)
def test_which_input_of_an_add_is_made_in_its_kernel(
    text: str, expected: tuple[str, str] | None
) -> None:
    graph = proto_from_text(text).graph
    add = next(node for node in graph.node if node.name in ("add1", "add"))
    assert fused_input(add, Wiring(graph)) == expected


def test_an_add_that_fuses_with_neither_input_reads_both_in_8_bits() -> None:
    assert [tensor for node, tensor in reads(sites_of(GATED)) if node == "add"] == ["t", "r1"]


def test_nothing_stands_between_an_operator_and_what_fuses_into_it() -> None:
    read = {(site.node, site.tensor) for site in sites_of(RESIDUAL).activations}
    assert not {("relu1", "c1"), ("relu2", "s")} & read
    integer = {
        (site.node, site.tensor) for site in sites_of(RESIDUAL, kernels=ONNXRUNTIME).activations
    }
    assert not {("relu1", "c1"), ("relu2", "s")} & integer


def test_each_switch_is_a_rule() -> None:
    assert nodes(sites_of(RESIDUAL, Placement(residual_add=False))) == {"conv1", "conv2", "conv3"}
    assert nodes(sites_of(RESIDUAL, Placement(conv=False), kernels=OPENVINO)) == {"add"}
    assert "fc" in nodes(sites_of(RESIDUAL, Placement(last_layer=True)))
    assert "fc" not in nodes(sites_of(RESIDUAL, Placement(last_layer=True, matmul_weight=False)))
    assert nodes(sites_of(RESIDUAL, fp32_nodes=frozenset({"conv2", "add"}))) == {"conv1", "conv3"}


def test_weights_lie_on_the_output_axis() -> None:
    assert {
        site.node: site.axis for site in sites_of(RESIDUAL, Placement(last_layer=True)).weights
    } == {"conv1": 0, "conv2": 0, "conv3": 0, "fc": 1}
    assert {site.axis for site in sites_of(ATTENTION).weights} == {1}
    assert {site.axis for site in sites_of(RESIDUAL, Placement(per_channel=False)).weights} == {-1}


def test_biases_are_quantised_only_where_kernels_add_them_in_int32() -> None:
    assert {site.bias for site in sites_of(RESIDUAL, Placement(last_layer=True)).weights} == {""}
    biases = {
        site.node: site.bias
        for site in sites_of(RESIDUAL, Placement(last_layer=True), kernels=ONNXRUNTIME).weights
    }
    assert biases == {"conv1": "b1", "conv2": "b2", "conv3": "", "fc": "b3"}


def test_attention_keeps_its_products_its_mask_and_sums_that_are_normalised() -> None:
    assert nodes(sites_of(ATTENTION)) == {"q", "k", "o"}
    assert nodes(sites_of(ATTENTION, Placement(matmul_activations=True))) == {
        "q",
        "k",
        "o",
        "scores",
        "mix",
    }
    assert nodes(sites_of(ATTENTION, Placement(matmul_weight=False))) == set()


def test_integer_io_quantises_results_and_shares_scales_through_byte_moves() -> None:
    sites = sites_of(
        RESIDUAL.replace("GlobalAveragePool (c3)", "MaxPool <kernel_shape = [8, 8]> (c3)"),
        kernels=ONNXRUNTIME,
    )
    tensors = {site.tensor for site in sites.activations}
    assert {"x", "r1", "c2", "r2", "c3", "p", "f"} == tensors
    assert sites.same_scale == {"p": "c3", "f": "c3"}


PRODUCTS = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, 8] x) => (float[N, 8] y)
<float[8, 8] w1, float[8, 8] w2, float[8, 8] w3>
{
    [first] a = MatMul (x, w1)
    [relu] r = Relu (a)
    [tanh] t = Tanh (r)
    [second] b = Gemm (t, w2)
    [third] c = MatMul (b, w3)
    [sigmoid] s = Sigmoid (c)
    [mul] m = Mul (s, b)
    [answer] y = Softmax (m)
}
"""


def test_onnx_runtime_is_given_8_bits_for_all_readers_of_a_product_or_for_none() -> None:
    rules = Placement(last_layer=True)
    assert reads(sites_of(PRODUCTS, rules, kernels=ONNXRUNTIME)) == [
        ("first", "x"),
        ("tanh", "r"),  # behind the Relu, which is then part of the product's kernel
        ("second", "t"),
        ("third", "b"),
        ("mul", "b"),  # the third reads it in 8 bits, so the Mul does
    ]
    assert reads(sites_of(PRODUCTS, rules, kernels=OPENVINO)) == [
        ("first", "x"),
        ("second", "t"),
        ("third", "b"),
    ]


STEM = """
<ir_version: 9, opset_import: ["" : 20]>
net (uint8[N, 8, 8, 3] x) => (float[N, 5] y)
<float[1, 3, 1, 1] mean, float[1, 3, 1, 1] std, float[4, 3, 3, 3] w1, float[4, 3, 3, 3] w2,
  float[4, 4, 3, 3] w3, float[4, 5] w4>
{
    [cast] f = Cast <to = 1> (x)
    [nchw] t = Transpose <perm = [0, 3, 1, 2]> (f)
    [sub] m = Sub (t, mean)
    [div] n = Div (m, std)
    [left] a = Conv (n, w1)
    [right] b = Conv (n, w2)
    [sum] s = Add (a, b)
    [relu] r = Relu (s)
    [next] c = Conv (r, w3)
    [pool] p = GlobalAveragePool (c)
    [flat] l = Flatten (p)
    [fc] y = Gemm (l, w4)
}
"""
"""Two convolutions that read the input, an image that is normalised in the graph."""

NO_FIRST = Placement(first_layer=False)


@pytest.mark.parametrize(
    "kernels", [TENSORRT, ONNXRUNTIME, OPENVINO], ids=["tensorrt", "onnxruntime", "openvino"]
)
def test_without_the_first_layer_nothing_up_to_it_is_quantised(kernels: Kernels) -> None:
    assert {"left", "right", "next"} <= nodes(sites_of(STEM, kernels=kernels))
    sites = sites_of(STEM, NO_FIRST, kernels=kernels)
    assert not {"cast", "nchw", "sub", "div", "left", "right"} & nodes(sites)
    assert not {"x", "f", "t", "m", "n"} & sites.tensors
    assert ("next", "r") in reads(sites)
    assert [site.node for site in sites.weights] == ["next"]
    assert {site.node for site in sites_of(RESIDUAL, NO_FIRST, kernels=kernels).weights} == {
        "conv2",
        "conv3",
    }


@pytest.mark.parametrize(
    ("before", "weight", "first"),
    [
        ("Resize (x, , scales)", "w1", True),
        ("Pad (x, pads)", "w1", True),
        ("Concat <axis = 1> (x, x)", "w6", True),  # as of slices, which fold an image into channels
        ("BatchNormalization (x, b, b, b, b)", "w1", True),
        ("Mul (x, x)", "w1", False),
        ("Relu (x)", "w1", False),
    ],
)
def test_nodes_that_move_or_scale_an_input_come_before_the_first_layer(
    before: str, weight: str, first: bool
) -> None:
    constants = (
        "float[3] b, float[4, 6, 3, 3] w6, float[4] scales = {1.0, 1.0, 2.0, 2.0}, int64[8] pads ="
        " {0, 0, 1, 1, 0, 0, 1, 1}"
    )
    text = RESIDUAL.replace("b3>", f"b3, {constants}>").replace(
        "[conv1] c1 = Conv", f"[before] i = {before} [conv1] c1 = Conv"
    )
    sites = sites_of(text.replace("(x, w1, b1)", f"(i, {weight}, b1)"), NO_FIRST)
    assert ("conv1" not in nodes(sites)) is first
    assert {"conv2", "conv3"} <= nodes(sites)


def test_an_input_that_others_read_in_8_bits_reaches_the_first_layer_in_floats() -> None:
    text = RESIDUAL.replace("[conv1] c1 = Conv", "[turn] t = Transpose (x) [conv1] c1 = Conv")
    text = text.replace("(x, w1, b1)", "(t, w1, b1)").replace(
        "float[4, 4, 3, 3] w4", "float[4, 7, 3, 3] w4"
    )
    text = text.replace(
        "[conv3] c3 = Conv <pads = [1, 1, 1, 1]> (r2, w4)",
        "[join] j = Concat <axis = 1> (r2, t) [conv3] c3 = Conv (j, w4)",
    )
    assert ("conv1", "t") in reads(sites_of(text, kernels=ONNXRUNTIME))
    sites = sites_of(text, NO_FIRST, kernels=ONNXRUNTIME)
    assert {"conv3", "join"} <= nodes(sites)
    assert not {"turn", "conv1"} & nodes(sites)


EMBEDDED = """
<ir_version: 9, opset_import: ["" : 20]>
net (int64[N, T] ids, float[N, T, 8] mask) => (float[N, T, 8] y)
<float[9, 8] table, float[8, 8] w1, float[8, 8] w2>
{
    [same] i = Identity (ids)
    [look] e = Gather (table, i)
    [masked] m = Mul (e, mask)
    [up] u = MatMul (m, w1)
    [relu] r = Relu (u)
    [down] d = MatMul (r, w2)
    [answer] y = Softmax (d)
}
"""


def test_where_no_layer_reads_an_input_the_first_layer_changes_nothing() -> None:
    for kernels in (TENSORRT, ONNXRUNTIME, OPENVINO):
        assert sites_of(EMBEDDED, NO_FIRST, kernels=kernels) == sites_of(EMBEDDED, kernels=kernels)
        assert "up" in nodes(sites_of(EMBEDDED, NO_FIRST, kernels=kernels))


def test_nodes_whose_input_was_not_calibrated_are_named() -> None:
    sites = place(
        proto_from_text(RESIDUAL).graph, Placement(), frozenset({"x", "r2"}), frozenset(), OPENVINO
    )
    assert sites.unseen == ("conv2", "add")
    assert nodes(sites) == {"conv1", "conv3"}
