"""What TensorRT says of its layers, read from what it really said; the timing with doubles; on a
GPU, an fp32 graph called fp16.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import backends
from pipeline.backends.tensorrt.layers import (
    is_heavy,
    layer_table,
    layers_from_inspector,
    nodes_of,
    precision_from_tactic,
    precision_of,
)
from pipeline.core.artifacts import BuildOptions
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, Tensors, TensorSpec
from pipeline.errors import DataError, InternalError
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.results.precision_audit import fusions, mislabelled, time_by_precision
from pipeline.stages.inspect_layers import prove
from tests.builders.convert import ATTENTION, RESIDUAL, model_from_text
from tests.builders.layers import CAPTURED, captured, real_table, seconds_of

# -- kernels' names ----------------------------------------------------------


@pytest.mark.parametrize(
    ("tactic", "precision"),
    [
        (
            "sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc"
            "_tilesize128x64x32_stage3",
            "tf32",
        ),
        (
            "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw"
            "_tilesize64x64x8_stage3_g1_ffma",
            "fp32",
        ),
        ("sm80_xmma_fprop_wngd_f32f32_f32_f32_nchwkcrs_nchw_tilesize8x16x64x8_wngd2x2", "fp32"),
        ("sm90_xmma_fprop_image_first_layer_f16f16_f32_f16_nhwckrsc_nhwc_hmma_k64c4r7s7", "fp16"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32_stage3", "fp16"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64", "bf16"),
        (
            "sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n"
            "_tilesize64x64x64_stage4_tensor16x8x32_bias_f32",
            "fp8",
        ),
        ("sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "fp8"),
        ("sm90_xmma_fprop_implicit_gemm_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32", "int8"),
        ("sm90_xmma_fprop_implicit_gemm_i8f32_i8i32_f32_nchw_vect_c_32kcrs", "int8"),
        ("sm80_xmma_fprop_avdt_dense_chw_int8int8_tilesize16x16_k64_fltsteps4", "int8"),
        ("sm72_xmma_pooling_IMMA_NCxHW32_gap", "int8"),
        ("sm50_xmma_pooling_fw_4d_FP16FP32NHWC_Average_FastDiv_CAlign4", "fp16"),
        ("turing_h1688cudnn_256x128_ldg8_relu_exp_medium_nhwc_tn_v1", "fp16"),
        ("volta_h884cudnn_256x128_ldg8_relu_exp_small_nhwc_tn_v1", "fp16"),
        ("ampere_h16816gemm_256x128_ldg8_nn_v1", "fp16"),
        ("ampere_scudnn_128x64_relu_xregs_large_nn_v1", "fp32"),
        ("ampere_sgemm_32x128_tn", "fp32"),
        ("trt_volta_int8_i8816cudnn_int8_256x64_ldg16_relu_interior_c32_nn_v1", "int8"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn", "bf16"),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x4_nn_align8", "bf16"),
        ("cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4", "tf32"),
        (
            "cutlass3x_sm100_tensorop_s128x64x8tf32gemm_f32_f32_f32_f32_f32_128x64x32_0_tnn_align4",
            "tf32",
        ),
        (
            "cutlass3x_sm90_tensorop_s64x128x8gemm_f32_f32_f32_f32_f32_128x128x32",
            "tf32",
        ),  # tensor cores multiply no fp32
        (
            "cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32"
            "_64x32x16_1x1x1_3_tnn_align1_bias_f32_relu",
            "fp32",
        ),
        ("cutlass3x_sm90_tensorop_s64x128x32gemm_e4m3_e4m3_f32_bf16_bf16_128x128x128", "fp8"),
        ("sm50_xmma_pooling_coalescedC_NHWC_kMAX_3_False", None),
        ("_gemm_mha_v2_0xcc1db96fa05edee60a3076f3b59c3d81", None),
        ("_gemm_mha_v2_0xcf16bf16f32a05edee60a3076f3", None),  # a hash holds "f16" by chance
        ("__myl_DivErfAddMulMul_0x4b0d390d90cc3a0e66ba1c6aa067f92b_vec", None),
        ("", None),
    ],
)
def test_a_kernels_name_tells_what_it_multiplies(tactic: str, precision: str | None) -> None:
    assert precision_from_tactic(tactic) == (Precision(precision) if precision else None)


@pytest.mark.parametrize(
    ("kind", "tactic", "inputs", "outputs", "precision", "evidence"),
    [
        ("kgen", "_gemm_mha_v2_0xcc1d", ("fp16", "fp16", "int64"), ("fp16",), "fp16", "types"),
        (
            "kgen",
            "_gemm_mha_v2_0xcc1d",
            ("fp8", "fp8", "fp16"),
            ("fp16",),
            "fp8",
            "types",
        ),  # heavy: the narrowest that it reads
        ("CaskConvActPool", "", ("int8",), ("int8",), "int8", "types"),
        (
            "gemm",
            "a kernel of a later version",
            ("fp16", "fp16", "fp32"),
            ("fp32",),
            "fp16",
            "types",
        ),
        ("kgen", "__myl_AddCasMeaSubMulMea_0x29", ("fp16", "int64"), ("fp32",), "fp32", "types"),
        (
            "kgen",
            "__myl_CasMulCasAddMaxCasMulMinMaxRouCas_0x58",
            ("int8", "fp16"),
            ("int8",),
            "fp16",
            "types",
        ),
        ("kgen", "__myl_MaxSubExpSumDivMul_0x46", ("fp16",), ("fp16",), "fp16", "types"),
        ("kgen", "__myl_EqlGtrOr_0x74", ("int64",), ("bool",), "integer", "types"),
        ("kgen", "__myl_CasResTra_0x3b", ("fp32",), ("fp16",), "none", "none"),
        ("kgen", "__myl_CastReshape_0x3b", ("fp32",), ("fp16",), "none", "none"),
        ("Reformat", "", ("fp32",), ("int8",), "none", "none"),
        ("Reformat", "sm80_xmma_something_f16f16_f16f16_f16", ("fp32",), ("fp16",), "none", "none"),
        ("shape_call", "", (), (), "none", "none"),
        ("ShapeHostToDevice", "", (), ("int64",), "none", "none"),
        ("cuConvertKernel", "", ("fp32",), ("fp16",), "fp32", "types"),
        ("PluginV3", "", (), (), "unknown", "none"),
        ("PluginV3", "", ("Row major INT4 format",), (), "unknown", "none"),
    ],
)
def test_types_decide_where_no_name_tells(
    kind: str,
    tactic: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    precision: str,
    evidence: str,
) -> None:
    assert precision_of(kind, tactic, inputs, outputs) == (precision, evidence)


def test_what_multiplies_matrices_is_heavy() -> None:
    tactic = "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32_by_fusion_tactic"
    assert all(
        is_heavy(*pair)
        for pair in (
            ("CaskConvolution", ""),
            ("fusion", tactic),
            ("kgen", "_gemm_mha_v2_0xcc"),
            ("MatrixMultiply", ""),
        )
    )
    assert not any(
        is_heavy(*pair)
        for pair in (
            ("CaskPooling", ""),
            ("Reformat", tactic),
            ("kgen", "__myl_AddMul_0xc"),
            ("cuConvertKernel", ""),
        )
    )


@pytest.mark.parametrize("between", ["\x1e", "\x1f", ""])
def test_nodes_are_found_whatever_stands_between_them(between: str) -> None:
    metadata = between.join(
        f"[ONNX Layer: {name}]" for name in ("/a[0]/Conv", "Relu 1", "node_of_y", "Relu 1")
    )
    assert nodes_of(metadata) == ("/a[0]/Conv", "Relu 1", "y")
    assert nodes_of("") == ()


# -- real engines ------------------------------------------------------------


@pytest.mark.parametrize("name", CAPTURED)
def test_every_layer_of_a_real_engine_is_known_timed_and_mapped(name: str) -> None:
    layers = real_table(name).layers
    assert len(layers) == len(captured()[name]["inspector"]["Layers"])
    assert all(layer.seconds is not None for layer in layers)
    assert {layer.precision for layer in layers} & {"unknown"} == set()
    assert all(layer.nodes for layer in layers if layer.heavy)
    assert all(
        layer.evidence == "tactic"
        for layer in layers
        if layer.heavy and "mha" not in layer.tactic and layer.kind != "CaskConvActPool"
    )
    assert all(layer.evidence == "none" for layer in layers if layer.precision == "none")


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("resnet_fp32", {"fp32": 0.999, "none": 0.001}),
        ("resnet_tf32", {"tf32": 0.901, "fp32": 0.051, "none": 0.048}),  # fp32: pooling
        ("resnet_fp16", {"fp16": 0.962, "none": 0.038}),
        ("resnet_int8qdq", {"none": 0.455, "int8": 0.433, "fp16": 0.112}),
        ("resnet_int8impl", {"int8": 0.939, "none": 0.061}),
        ("enc_fp16", {"fp16": 0.763, "none": 0.119, "fp32": 0.118}),  # fp32: halves of LayerNorms
    ],
)
def test_shares_of_real_engines(name: str, shares: dict[str, float]) -> None:
    assert time_by_precision(real_table(name)) == pytest.approx(shares, abs=0.0006)


@pytest.mark.parametrize(
    ("multiplied", "word", "precision"),
    [
        ("bf16bf16_bf16f32_f32", "BFloat16", Precision.BF16),
        ("e4m3e4m3_e4m3f32_f32", "FP8", Precision.FP8),
    ],
)
def test_bf16_and_fp8_are_told_as_fp16_is(multiplied: str, word: str, precision: Precision) -> None:
    """No engine of these was captured: the fp16 encoder's words, changed."""
    text = (
        json.dumps(captured()["enc_fp16"]["inspector"])
        .replace("f16f16_f16f16_f16", multiplied)
        .replace('"Half"', f'"{word}"')
    )
    layers = layers_from_inspector(text, seconds_of("enc_fp16"))
    assert {layer.precision for layer in layers if layer.heavy} == {precision}


def test_a_time_of_no_known_layer_is_not_lost_and_other_profiles_are_left_out() -> None:
    information = json.dumps({"Layers": ["conv", "conv [profile 1]", "idle"], "Bindings": []})
    layers = layers_from_inspector(information, {"conv": [0.002, 0.001, 0.009], "loop body": [0.5]})
    assert [(layer.name, layer.seconds, layer.precision) for layer in layers] == [
        ("conv", 0.002, "unknown"),
        ("idle", None, "unknown"),
        ("loop body", 0.5, "unknown"),
    ]


def test_of_two_profiles_each_has_the_graphs_that_ran_in_it() -> None:
    """Names of TensorRT 10.6: only some of the second profile's layers say so, and not at the
    end.
    """
    first = ["__mye37_0_myl0_0", "__myl_Cas_myl0_1", "hidden_myl0_2"]
    second = ["__mye37_0_myl1_0", "__myl_Cas_myl1_1", "hidden [profile 1]_myl1_2"]
    information = json.dumps({"Layers": first + second})
    for profile, names in enumerate((first, second)):
        layers = layers_from_inspector(information, {name: [0.001] for name in names[1:]}, profile)
        assert [(layer.name, layer.seconds) for layer in layers] == [
            (names[0], None),
            (names[1], 0.001),
            (names[2], 0.001),
        ]


def test_the_layers_of_a_later_profile_are_those_that_name_it() -> None:
    information = json.dumps({"Layers": ["conv", "conv [profile 1]", "conv [profile 2]", "idle"]})
    layers = layers_from_inspector(information, {"conv [profile 1]": [0.002]}, profile=1)
    assert [(layer.name, layer.seconds) for layer in layers] == [("conv [profile 1]", 0.002)]


def test_separators_may_come_unescaped_and_what_is_no_json_is_our_bug() -> None:
    layers = layers_from_inspector(
        '{"Layers": [{"Name": "c", "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: b]"}]}', {}
    )
    assert layers[0].nodes == ("a", "b")
    assert layers_from_inspector("null", {}) == ()
    assert (
        layers_from_inspector("", {"conv": [0.1]})[0].precision == "unknown"
    )  # nothing is told of a later profile
    with pytest.raises(InternalError, match="is no JSON"):
        layers_from_inspector("Layers(0): conv", {})


# -- timing, with doubles for the library and the session --------------------


class Profiler:
    def __init__(self) -> None:
        self.ready = True


class Session:
    """Reports `convolution` twice and `gemm` once per enqueue, from the moment a profiler is there;
    the n-th run takes n ms.
    """

    inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 3)),)

    def __init__(self) -> None:
        self.context = SimpleNamespace(profiler=None)
        self.calls: list[str] = []
        self.runs = 0

    def bind(self, feeds: Tensors) -> None:
        self.calls.append("bind")

    def upload(self) -> None:
        self.calls.append("upload")

    def enqueue(self) -> None:
        self.calls.append("enqueue")
        if self.context.profiler is not None:
            assert self.context.profiler.ready  # IProfiler.__init__ must have run
            self.runs += 1
            for name in ("convolution", "gemm", "convolution"):
                self.context.profiler.report_layer_time(name, float(self.runs))

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def close(self) -> None:
        self.calls.append("close")


class Loaded:
    def __init__(self, session: Session) -> None:
        self._session = session
        self.cuda_engine = SimpleNamespace(create_engine_inspector=lambda: self)
        self.execution_context: Any = None
        self.is_silent = False

    def session(self, profile: int | None = None) -> Session:
        self._session.calls.append(f"profile {profile}")
        return self._session

    def get_engine_information(self, form: str) -> str:
        assert self.execution_context is self._session.context or self.is_silent
        if self.is_silent and self.execution_context is not None:
            self.execution_context = None  # the next inspector has none
            return ""
        return (
            json.dumps(
                {
                    "Layers": [
                        {"Name": name, "LayerType": name} for name in ("convolution", "gemm")
                    ],
                    "Bindings": [],
                }
            )
            if form == "json"
            else ""
        )


LIBRARY = SimpleNamespace(IProfiler=Profiler, LayerInformationFormat=SimpleNamespace(JSON="json"))


def test_layers_are_timed_after_a_warm_up_and_repeats_within_a_run_add_up() -> None:
    session = Session()
    table = layer_table(LIBRARY, Loaded(session), {"x": np.zeros((5, 3), np.float32)}, runs=3)
    assert (table.sizes, table.runs) == ({"batch": 5}, 3)
    assert {layer.name: layer.seconds for layer in table.layers} == pytest.approx(
        {"convolution": 0.004, "gemm": 0.002}
    )
    assert session.calls[:4] == ["profile 0", "bind", "upload", "enqueue"]
    assert session.calls[-7:] == ["enqueue", "synchronize"] * 3 + ["close"]
    assert session.runs == 3


def test_feeds_of_another_shape_are_named_and_the_session_is_closed() -> None:
    session = Session()
    with pytest.raises(DataError, match="rank 1"):
        layer_table(LIBRARY, Loaded(session), {"x": np.zeros(3, np.float32)})
    assert session.calls == ["profile 0", "close"]


def test_the_profile_that_is_asked_for_is_timed() -> None:
    session = Session()
    table = layer_table(
        LIBRARY, Loaded(session), {"x": np.zeros((5, 3), np.float32)}, profile=1, runs=3
    )
    assert (table.profile, session.calls[0]) == (1, "profile 1")
    assert {layer.name for layer in table.layers} == {"convolution", "gemm"}


def test_where_nothing_is_said_of_a_context_the_engine_is_asked() -> None:
    session = Session()
    loaded = Loaded(session)
    loaded.is_silent = True
    table = layer_table(LIBRARY, loaded, {"x": np.zeros((5, 3), np.float32)}, profile=1, runs=3)
    assert [layer.name for layer in table.layers] == ["convolution", "gemm"]
    assert loaded.execution_context is None


# -- on a GPU ----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "dims"),
    [
        (RESIDUAL, {"N": DimRange(min=1, opt=8, max=8)}),
        (ATTENTION, {"N": DimRange(min=1, opt=4, max=4), "T": DimRange(min=8, opt=16, max=32)}),
    ],
    ids=["convolutions", "attention"],
)
def test_an_fp32_graph_called_fp16_is_named_with_what_it_runs(
    text: str, dims: dict[str, DimRange], tmp_path: Path
) -> None:
    model = model_from_text(tmp_path / "model", text).model_copy(
        update={"precision": Precision.FP16}
    )
    profile = Profile(dims=dims)
    out = tmp_path / "engine"
    out.mkdir()
    recipe = Recipe(backend="tensorrt", precision=Precision.FP16)
    engine = backends.backend("tensorrt").build(
        model,
        recipe,
        BuildOptions(profiles=(profile,)),
        out,
        lambda fraction, message, figures=None: None,
    )
    table = prove(engine, draw_feeds(engine.inputs, profile.sizes("opt"), seed=0), model).table
    assert table is not None
    assert table.sizes == profile.sizes("opt")
    assert all(layer.seconds for layer in table.layers if layer.heavy)
    message = mislabelled(Precision.FP16, table)
    assert message.startswith("called fp16, but its heavy layers run 0 % fp16")
    assert "slowest: " in message
    assert mislabelled(Precision.FP32, table) == ""
    assert {operator for layer in table.layers for operator in layer.operators} & {"Conv", "MatMul"}
    assert fusions(table)
