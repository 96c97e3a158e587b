"""NNCF on a small encoder: SmoothQuant where activations have outliers, and few bits in the weights
alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.backends.base import run_session
from pipeline.backends.openvino import backend as openvino_
from pipeline.backends.openvino.nncf import compress_with_nncf, quantize_with_nncf
from pipeline.core.artifacts import BuildOptions, OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.errors import UnsupportedError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.schema import CalibrationConfig
from pipeline.results.precision_audit import mislabelled
from tests.builders.convert import RESIDUAL, model_from_text, proto_from_text

nncf = pytest.importorskip("nncf")

PROFILES = (Profile(dims={"N": [1, 1, 8], "T": [8, 8, 8]}),)
ALLOWED = BuildOptions(profiles=PROFILES)
INT8 = Recipe(backend="openvino", precision=Precision.INT8, quantizer="nncf", activation="uint8")
FP32 = Recipe(backend="openvino", precision=Precision.FP32)
NARROW = Recipe(
    backend="openvino",
    precision=Precision.INT8,
    quantizer="nncf",
    weight_only=True,
    activation="float",
)

ENCODER = """
<ir_version: 9, opset_import: ["" : 17]>
net (float[N, T, 32] x) => (float[N, T, 32] y)
<float[32] gain, float[32, 32] wq, float[32, 32] wk, float[32, 32] wv, float[32] gain2,
  float[32, 64] up, float[64, 32] down>
{
    [norm] n = LayerNormalization (x, gain)
    [q] q = MatMul (n, wq)
    [k] k = MatMul (n, wk)
    [v] v = MatMul (n, wv)
    [turn] t = Transpose <perm = [0, 2, 1]> (k)
    [scores] s = MatMul (q, t)
    [weights] p = Softmax (s)
    [mix] m = MatMul (p, v)
    [skip] r = Add (m, x)
    [norm2] h = LayerNormalization (r, gain2)
    [up] u = MatMul (h, up)
    [relu] g = Relu (u)
    [down] d = MatMul (g, down)
    [skip2] y = Add (d, r)
}
"""


def encoder(folder: Path, outliers: float) -> OnnxModel:
    """One block whose norms make two channels so many times larger, as those of language models do,
    and the rows that read them smaller.
    """
    proto = proto_from_text(ENCODER)
    arrays = {
        tensor.name: numpy_helper.to_array(tensor).copy() for tensor in proto.graph.initializer
    }
    for gain in ("gain", "gain2"):
        arrays[gain] = np.ones(32, np.float32)
        arrays[gain][[3, 17]] = outliers
    for name in ("wq", "wk", "wv", "up"):
        arrays[name][[3, 17]] /= outliers
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    folder.mkdir()
    onnx.save_model(proto, str(folder / "source.onnx"))
    return onnx_model(folder, "source.onnx")


def states(count: int, seed: int) -> Tensors:
    return {"x": np.random.default_rng(seed).standard_normal((count, 8, 32)).astype(np.float32)}


def quantised(model: OnnxModel, smooth: bool | None, folder: Path) -> OnnxModel:
    np.savez(folder / "set.npz", **states(40, 0))  # type: ignore[arg-type]
    samples = open_set(CalibrationSet, (folder / "set.npz",), model.inputs, PROFILES)
    out = folder / f"smooth_{smooth}"
    out.mkdir()
    recipe = INT8.model_copy(update={"smooth_quant": smooth})
    return call_in_child(
        quantize_with_nncf, model, samples, recipe, CalibrationConfig(), ALLOWED, out, name="nncf"
    )


def cosine(expected: Tensors, got: Tensors) -> float:
    a, b = expected["y"].ravel().astype(np.float64), got["y"].ravel().astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_smooth_quant_saves_what_outliers_would_cost(tmp_path: Path) -> None:
    """Without it two channels take the range, and the other thirty share four or five of the 256
    steps.
    """
    model, feeds = encoder(tmp_path / "source", outliers=60.0), states(8, 1)
    expected = open_reference(model.path)(feeds)
    models = {smooth: quantised(model, smooth, tmp_path) for smooth in (True, False)}
    cosines = {
        smooth: cosine(expected, open_reference(each.path)(feeds))
        for smooth, each in models.items()
    }
    assert cosines[True] > 0.995
    assert cosines[False] < cosines[True] - 0.02
    assert "SmoothQuant rescales 3 activations" in models[True].notes[-1].text
    assert "without SmoothQuant" in models[False].notes[-1].text


def test_smooth_quant_that_finds_nothing_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]> net (float[N, T, 32] x)
      => (float[N, T, 32] y) { [relu] y = Relu (x) }"""
    model = model_from_text(tmp_path / "source", text)
    with pytest.raises(UnsupportedError, match="SmoothQuant found no product"):
        quantised(model, True, tmp_path)


@pytest.mark.parametrize(
    ("precision", "block", "fp32", "least", "note"),
    [
        (
            Precision.INT8,
            0,
            ("up", "v"),
            0.9999,
            "3 of 5 linear layers hold their weights in 8 bits; as they were: v, up",
        ),
        (
            Precision.INT4,
            32,
            (),
            0.98,
            (
                "4 of 5 linear layers hold their weights in 4 bits; 1 of 5 linear layers hold their"
                " weights in 8 bits"
            ),
        ),
    ],
)
def test_weights_alone_have_few_bits(
    precision: Precision, block: int, fp32: tuple[str, ...], least: float, note: str, tmp_path: Path
) -> None:
    recipe = NARROW.model_copy(
        update={"precision": precision, "block_size": block, "keep_fp32": fp32}
    )
    model, feeds = encoder(tmp_path / "source", outliers=1.0), states(8, 1)
    for folder in ("made", "engine", "fp32"):
        (tmp_path / folder).mkdir()
    low = call_in_child(compress_with_nncf, model, recipe, tmp_path / "made", name="nncf")
    assert (low.inputs, low.outputs, low.precision) == (model.inputs, model.outputs, precision)
    assert note in low.notes[-1].text
    engine = openvino_.build(low, recipe, ALLOWED, tmp_path / "engine")
    got = run_session(openvino_.load(engine).session(), feeds)
    assert least < cosine(open_reference(model.path)(feeds), got) < 1 - 1e-9
    table = openvino_.layers(engine, feeds)
    assert table is not None
    assert mislabelled(precision, table, fp32, weight_only=True) == ""
    assert (
        engine.path.with_suffix(".bin").stat().st_size
        < openvino_.build(model, FP32, ALLOWED, tmp_path / "fp32").size_bytes
    )


def test_int4_of_a_last_layer_alone_is_refused(tmp_path: Path) -> None:
    """NNCF gives the last layer 8 bits, and convolutions none in blocks."""
    recipe = NARROW.model_copy(update={"precision": Precision.INT4, "block_size": 32})
    with pytest.raises(UnsupportedError, match="int4 weight-only would only be its name"):
        call_in_child(
            compress_with_nncf,
            model_from_text(tmp_path / "source", RESIDUAL),
            recipe,
            tmp_path,
            name="nncf",
        )
