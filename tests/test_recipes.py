"""Which candidates a host gets, and what each becomes."""

from pathlib import Path

import pytest

from pipeline.config import CandidateConfig, Plan, plan_from_document
from pipeline.core import CalibrationMethod, Precision, Target
from pipeline.errors import PlanError
from pipeline.recipes import default_candidates, recipe_from_candidate, resolve_method

AVX2 = ("avx2",)
VNNI = ("avx2", "avx512_bf16", "avx512_vnni")


def target(backend: str, flags: tuple[str, ...]) -> Target:
    return Target(backend=backend, version="1", device="cpu", cpu_flags=flags)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_from_document({"model": {"path": "m.onnx"}}, tmp_path)


def labels(flags: tuple[str, ...], plan: Plan, calibrated: bool = True) -> list[str]:
    targets = {name: target(name, flags) for name in ("onnxruntime", "openvino")}
    return [recipe_from_candidate(c, targets[c.backend], plan, calibrated).label for c in default_candidates(targets, calibrated)]


def test_a_host_with_vnni_and_bf16_tries_all_of_it(plan: Plan) -> None:
    assert labels(VNNI, plan) == [
        "onnxruntime fp32",
        "onnxruntime int8 entropy u8s8",
        "openvino fp32",
        "openvino bf16",
        "openvino int8 entropy u8s8",
        "openvino int8 entropy s8s8",
        "openvino int8 nncf u8s8",
    ]


def test_without_vnni_weights_have_seven_bits_and_bf16_is_not_tried(plan: Plan) -> None:
    assert "onnxruntime int8 entropy u8s7" in labels(AVX2, plan)
    assert not any("bf16" in label for label in labels(AVX2, plan))


def test_without_calibration_data_there_is_no_int8(plan: Plan) -> None:
    assert labels(VNNI, plan, calibrated=False) == ["onnxruntime fp32", "openvino fp32", "openvino bf16"]


def test_int8_named_without_calibration_data_is_an_error(plan: Plan) -> None:
    with pytest.raises(PlanError, match="needs calibration data"):
        recipe_from_candidate(CandidateConfig(backend="onnxruntime", precision=Precision.INT8), target("onnxruntime", VNNI), plan, False)


def test_nncf_is_for_openvino_only(plan: Plan) -> None:
    with pytest.raises(PlanError, match="for OpenVINO only"):
        recipe_from_candidate(
            CandidateConfig(backend="onnxruntime", precision=Precision.INT8, quantizer="nncf"), target("onnxruntime", VNNI), plan, True
        )


def test_tensorrt_gets_signed_activations_and_a_16_bit_rest(plan: Plan) -> None:
    gpu = Target(backend="tensorrt", version="10", device="gpu", compute_capability="9.0")
    recipe = recipe_from_candidate(CandidateConfig(backend="tensorrt", precision=Precision.INT8), gpu, plan, True)
    assert (recipe.activation, recipe.rest, recipe.weight_bits) == ("int8", Precision.FP16, 8)


@pytest.mark.parametrize(
    ("asked", "language_model", "method"),
    [("auto", True, CalibrationMethod.MINMAX), ("auto", False, CalibrationMethod.ENTROPY), ("percentile", True, CalibrationMethod.PERCENTILE)],
)
def test_auto_is_minmax_for_language_models_else_entropy(asked: str, language_model: bool, method: CalibrationMethod) -> None:
    assert resolve_method(asked, language_model) is method
