"""The verdict on what really ran: every real engine passes its own label and fails every other."""

from __future__ import annotations

import pytest

from pipeline.core.recipe import Precision
from pipeline.results.precision_audit import (
    fusions,
    mislabelled,
    node_text,
    percent_text,
    precision_notes,
    reformats,
    slowest,
    time_by_precision,
)
from tests.builders.layers import CAPTURED, layer, real_table, table


@pytest.mark.parametrize("label", list(Precision))
@pytest.mark.parametrize("name", CAPTURED)
def test_a_real_engine_passes_its_own_label_only(name: str, label: Precision) -> None:
    reason = mislabelled(label, real_table(name))
    assert bool(reason) == (label is not CAPTURED[name])


def test_an_fp16_engine_that_runs_fp32_is_told_with_shares_and_its_slowest_layers() -> None:
    assert (
        mislabelled(Precision.FP16, real_table("resnet_fp32"))
        == "called fp16, but its heavy layers run 0 % fp16, 100 % fp32 by time; slowest:"
        " /layer4/layer4.1/conv2/Conv and 2 more fp32 12 %, /layer3/layer3.1/conv2/Conv and 2"
        " more fp32 8.1 %, /layer4/layer4.0/conv2/Conv fp32 7.9 % of all time"
    )


@pytest.mark.parametrize(
    ("label", "parts", "wrong"),
    [
        ("fp32", {"fp32": 0.995, "tf32": 0.005}, False),
        ("fp32", {"fp32": 0.98, "tf32": 0.02}, True),
        ("fp32", {"fp32": 0.98, "int8": 0.02}, True),
        ("tf32", {"tf32": 0.6, "fp32": 0.4}, False),
        ("fp16", {"fp16": 0.51, "fp32": 0.49}, False),
        ("fp16", {"fp16": 0.49, "fp32": 0.51}, True),
        ("fp16", {"bf16": 1.0}, True),
        ("bf16", {"fp16": 1.0}, True),
        ("int8", {"int8": 0.2, "fp16": 0.8}, False),
        ("int8", {"int8": 0.09, "fp16": 0.91}, True),
        ("fp8", {"fp8": 0.09, "fp16": 0.91}, True),
        ("fp8", {"fp8": 0.6, "fp16": 0.4}, False),
    ],
)
def test_heavy_time_decides(label: str, parts: dict[str, float], wrong: bool) -> None:
    pooling = layer("fp32", 10.0, heavy=False, kind="pooling")
    reason = mislabelled(
        Precision(label), table(*(layer(name, seconds) for name, seconds in parts.items()), pooling)
    )
    assert bool(reason) is wrong


def test_without_heavy_layers_or_evidence_an_engine_is_not_mislabelled() -> None:
    assert mislabelled(Precision.FP16, table(layer("fp32", heavy=False))) == ""
    assert mislabelled(Precision.FP16, table(layer("unknown"), layer("fp32", 0.5))) == ""
    assert mislabelled(Precision.FP16, table(layer("fp32", None))) == ""
    assert mislabelled(Precision.FP16, table()) == ""


def test_fp32_inputs_prove_neither_fp32_nor_tf32() -> None:
    by_types = layer("fp32", evidence="types", tactic="_gemm_mha_v2")
    assert mislabelled(Precision.TF32, table(by_types, layer("tf32"))) == ""
    assert mislabelled(Precision.FP32, table(by_types, layer("fp32"))) == ""
    assert (
        mislabelled(Precision.FP16, table(by_types)) != ""
    )  # but they do prove that it is not fp16
    assert mislabelled(Precision.TF32, table(by_types, layer("fp32"))) != ""


def test_what_a_recipe_keeps_in_fp32_is_asked_for() -> None:
    ffn = layer("fp32", 4.0, nodes=("/ffn/MatMul", "/ffn/Add"))
    mixed = table(ffn, layer("fp16", nodes=("/q/MatMul",)))
    assert "20 % fp16, 80 % fp32" in mislabelled(Precision.FP16, mixed)
    assert mislabelled(Precision.FP16, mixed, ("/ffn/*",)) == ""
    assert "every heavy layer is kept" in mislabelled(
        Precision.FP16, mixed.model_copy(update={"layers": (ffn,)}), ("/ffn/*",)
    )
    bf16 = table(layer("bf16", nodes=("/ffn/MatMul",)))
    assert mislabelled(Precision.FP16, bf16, ("/ffn/*",)) != ""  # kept, yet not in fp32


def test_unknown_time_is_a_warning_with_names() -> None:
    layers = [layer("unknown", 0.3 - index / 100, name=f"mystery {index}") for index in range(7)]
    (note,) = precision_notes(table(*layers, layer("fp16", 2.0)))
    assert note.level == "warning"
    assert (
        note.text
        == "the precision of 49 % of the time is not known: mystery 0, mystery 1, mystery 2,"
        " mystery 3, mystery 4 and 2 more"
    )
    assert precision_notes(table(layer("unknown", 0.1), layer("fp16", 0.95))) == ()


def test_reformats_are_counted_with_their_share() -> None:
    totals = reformats(real_table("resnet_int8qdq"))
    assert totals.count == 30
    assert totals.share == pytest.approx(0.455, abs=0.001)
    (note,) = precision_notes(real_table("resnet_int8qdq"), Precision.INT8)
    assert (note.level, note.text) == (
        "info",
        "45 % of the time goes to 30 layers that only move or convert data",
    )
    assert precision_notes(real_table("resnet_int8impl"), Precision.INT8) == ()


def test_int8_that_is_the_smaller_part_is_a_warning() -> None:
    mixed = table(layer("int8", 0.3), layer("fp16", 0.7))
    (note,) = precision_notes(mixed, Precision.INT8)
    assert (
        note.text == "int8 is the smaller part: its heavy layers run 30 % int8, 70 % fp16 by time"
    )
    assert precision_notes(mixed) == ()
    assert (
        precision_notes(table(layer("int8", 0.05), layer("fp16", 0.95)), Precision.INT8) == ()
    )  # mislabelled: said with the state


def test_shares_add_up_and_are_sorted() -> None:
    shares = time_by_precision(real_table("enc_fp16"))
    assert list(shares) == ["fp16", "none", "fp32"]
    assert sum(shares.values()) == pytest.approx(1)
    assert time_by_precision(table(layer("fp16", None))) == {}


def test_the_slowest_layers_come_first() -> None:
    layers = slowest((layer("fp16", 1.0), layer("fp32", None), layer("int8", 3.0)), 5)
    assert [layer.precision for layer in layers] == ["int8", "fp16"]
    assert node_text(layer("fp16", nodes=("a", "b", "c"))) == "a and 2 more"
    assert node_text(layer("fp16", nodes=("a", "b", "c")), 3) == "a, b, c"
    assert node_text(layer("fp16")) == "fp16 layer"


def test_percent_has_a_digit_more_where_it_matters() -> None:
    assert [percent_text(share) for share in (0, 0.0123, 0.5, 0.994, 1)] == [
        "0 %",
        "1.2 %",
        "50 %",
        "99.4 %",
        "100 %",
    ]


# -- fusions -----------------------------------------------------------------


def test_fusions_of_a_convolutional_network() -> None:
    assert fusions(real_table("resnet_fp16")) == (
        "Conv + Relu in one kernel: 9",
        "Conv + Add + Relu in one kernel: 8",
    )
    assert "Conv + MaxPool + Relu in one kernel: 1" in fusions(real_table("resnet_int8impl"))
    assert fusions(real_table("resnet_int8qdq")) == (
        "Conv + Relu in one kernel: 9",
    )  # both inputs of the Adds are quantised: no Add is fused


def test_attention_in_one_kernel_or_not() -> None:
    assert fusions(real_table("enc_fp16"))[:3] == (
        "attention (MatMul, Softmax, MatMul) in one kernel: 3 of 3",
        "LayerNormalization in one kernel: 5 of 7, 5 with the Add before it",
        "3 Gemm in one kernel: 3",
    )
    assert (
        fusions(real_table("enc_fp32"))[0]
        == "attention (MatMul, Softmax, MatMul) in one kernel: 0 of 3"
    )


def test_batch_normalisation_that_is_still_there_and_layernorm_written_out() -> None:
    conv = layer("fp16", nodes=("c", "r", "n"), operators=("Conv", "Relu", "BatchNormalization"))
    assert fusions(table(conv)) == ("Conv + BatchNormalization + Relu in one kernel: 1",)
    norm = layer("fp16", heavy=False, nodes=("m", "s"), operators=("ReduceMean", "Sqrt"))
    half = layer("fp16", heavy=False, nodes=("s2",), operators=("Sqrt",))
    assert fusions(table(norm, half)) == (
        "LayerNorm written out (ReduceMean to Sqrt) in one kernel: 1 of 2",
    )


def test_a_softmax_without_matmuls_or_an_unknown_operator_is_no_attention() -> None:
    classifier = layer("fp16", heavy=False, nodes=("s",), operators=("Softmax",))
    assert fusions(table(classifier, layer("fp16", nodes=("c",), operators=("Conv",)))) == ()
    assert fusions(table(layer("fp16", nodes=("a", "b")))) == ()


# --- weights alone ---


def test_weights_alone_are_judged_by_what_the_products_read() -> None:
    """They multiply floats: an fp32 kernel that reads 4-bit weights is what int4 weight-only
    says.
    """
    narrow = layer("fp32", 0.2, inputs=("fp32", "uint8", "fp32"))
    scores, wide = (
        layer("fp32", 0.8, inputs=("fp32", "fp32")),
        layer("fp32", 1.0, inputs=("fp32",)),
    )  # its weight is packed away
    packed = layer("int8", 0.2, kind="MatMulNBits", inputs=("fp32", "fp32"))
    assert mislabelled(Precision.INT8, table(packed, scores), weight_only=True) == ""
    assert mislabelled(Precision.INT4, table(narrow, scores), weight_only=True) == ""
    assert mislabelled(Precision.INT4, table(narrow, scores)) != ""
    reason = mislabelled(Precision.INT8, table(wide, scores), weight_only=True)
    assert (
        reason
        == "called int8 weight-only, but by time only 0 % of its heavy layers read weights in 4 or"
        " 8 bits"
    )


def test_weights_of_which_nothing_is_known_are_not_judged() -> None:
    assert (
        mislabelled(
            Precision.INT4,
            table(layer("fp32"), layer("fp32", 0.1, inputs=("fp32", "fp32"))),
            weight_only=True,
        )
        == ""
    )
    assert mislabelled(Precision.INT4, table(), weight_only=True) == ""


def test_weights_kept_in_fp32_count_neither_way() -> None:
    head = layer("fp32", 9.9, inputs=("fp32", "fp32"), nodes=("/head/MatMul",))
    narrow = layer("fp32", 0.1, inputs=("fp32", "i4"))
    assert mislabelled(Precision.INT4, table(head, narrow), weight_only=True) != ""
    assert mislabelled(Precision.INT4, table(head, narrow), ("/head/*",), weight_only=True) == ""
