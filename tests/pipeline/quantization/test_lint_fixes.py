"""Each fix leaves every answer as it was, bit by bit where it says so, and mends what its rule
found; what is not exact is left alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import write_proto
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.fixes import FIXES, mend
from pipeline.quantization.lint.rules import lint
from tests.builders.qat import CONSTANTS, GAINS, NORMED, PLAIN, WEIGHTS, quantised
from tests.pipeline.quantization.test_lint_rules import CASES, CONV, SECOND

SAME_BITS = 0.0
EXACT = {
    "weight-in-floats": ("openvino", PLAIN, CONSTANTS, SAME_BITS),
    "norm-after": ("onnxruntime", NORMED, CONSTANTS + GAINS, 1e-5),
    "between-fused": (
        "tensorrt",
        next(case[2] for case in CASES if case[0] == "between-fused"),
        CONSTANTS,
        SAME_BITS,
    ),
    "signed-relu": ("onnxruntime", f"{CONV} [relu] r = Relu(c) {SECOND}", CONSTANTS, SAME_BITS),
    "signed-shared": (
        "onnxruntime",
        next(case[2] for case in CASES if case[0] == "signed-shared"),
        CONSTANTS,
        SAME_BITS,
    ),
    "zero-point": ("tensorrt", PLAIN.replace("s, z)", "s, u)"), CONSTANTS, SAME_BITS),
    "quantised-bias": (
        "tensorrt",
        next(case[2] for case in CASES if case[0] == "quantised-bias"),
        CONSTANTS,
        SAME_BITS,
    ),
    "split-q": (
        "openvino",
        next(case[2] for case in CASES if case[0] == "split-q"),
        CONSTANTS,
        SAME_BITS,
    ),
    "pair-before-mover": (
        "onnxruntime",
        next(case[2] for case in CASES if case[0] == "pair-before-mover"),
        CONSTANTS,
        SAME_BITS,
    ),
    "duplicate-pair": (
        "tensorrt",
        next(case[2] for case in CASES if case[0] == "duplicate-pair"),
        CONSTANTS,
        SAME_BITS,
    ),
}


def answers(proto: onnx.ModelProto, path: Path) -> np.ndarray:
    """Outputs on inputs that fill the range of the scales, reach beyond it, and lie on the edges
    between steps.
    """
    write_proto(proto, path)
    onnx.checker.check_model(str(path), full_check=True)
    x = np.random.default_rng(0).normal(0, 2, (6, 4, 8, 8)).astype(np.float32)
    x[3:] = np.rint(x[3:] / 0.01) * np.float32(0.01)
    (result,) = open_reference(path)({"x": x}).values()
    return np.asarray(result, np.float64)


def test_every_fix_has_a_case() -> None:
    assert set(EXACT) == set(FIXES)


COMPUTED_WEIGHT, PAIR_AS_WEIGHT = (
    NORMED.replace(
        WEIGHTS,
        f"{maker} [wq] wi = QuantizeLinear(a, t, z) [wdq] wd = DequantizeLinear(wi, t, z)",
    )
    for maker in ("a = Abs(w)", "m = ReduceMax<keepdims = 0>(x) a = Mul(w, m)")
)


@pytest.mark.parametrize(
    ("rule", "exact"),
    [
        *EXACT.items(),
        ("norm-after", ("onnxruntime", COMPUTED_WEIGHT, CONSTANTS + GAINS, 1e-5)),
        ("norm-after", ("onnxruntime", PAIR_AS_WEIGHT, CONSTANTS + GAINS, 1e-5)),
    ],
    ids=[*EXACT, "norm-after, of a computed weight", "norm-after, of a pair as the weight"],
)
def test_a_fix_changes_no_answer_and_mends_what_was_found(
    tmp_path: Path, rule: str, exact: tuple[str, str, str, float]
) -> None:
    backend, body, constants, allowed = exact
    proto = flatten(quantised(body, "float[N, A, B, C] y", constants))
    expected = answers(proto, tmp_path / "before.onnx")
    assert np.ptp(expected) > 0
    assert rule in {finding.rule for finding in lint(proto.graph, backend) if finding.fixable}
    assert mend(proto, backend, [rule])[rule] > 0
    got = answers(proto, tmp_path / "after.onnx")
    assert np.abs(got - expected).max() <= allowed * np.abs(expected).max()
    assert rule not in {finding.rule for finding in lint(proto.graph, backend)}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_all_fixes_together_change_no_answer_of_any_graph(
    tmp_path: Path, backend: str, case: tuple[str, str, str, str, tuple[str, ...]]
) -> None:
    rule, _, body, constants, _ = case
    if rule == "bad-scale":
        pytest.skip("NaN has no equal")
    proto = flatten(quantised(body, "float[N, A, B, C] y", constants))
    expected = answers(proto, tmp_path / "before.onnx")
    mend(proto, backend)
    assert np.allclose(
        answers(proto, tmp_path / "after.onnx"),
        expected,
        rtol=0,
        atol=1e-5 * np.abs(expected).max(),
    )
    assert not [finding for finding in lint(proto.graph, backend) if finding.fixable]


@pytest.mark.parametrize(
    ("backend", "body", "constants"),
    [
        (
            "tensorrt",
            PLAIN.replace("s, z)", "s, u0)"),
            CONSTANTS,
        ),  # uint8 from 0 has no int8 form with zero point 0
        ("tensorrt", PLAIN, CONSTANTS.replace("z = {0}", "z = {5}")),
        (
            "onnxruntime",
            NORMED,
            CONSTANTS + GAINS.replace("gain = {1.5", "gain = {1.6"),
        ),  # a factor that does not cancel belongs into the scales
    ],
)
def test_what_would_change_the_arithmetic_is_left_alone(
    backend: str, body: str, constants: str
) -> None:
    proto = flatten(quantised(body, "float[N, A, B, C] y", constants))
    assert set(mend(proto, backend)) <= {"weight-in-floats"}
    assert not [finding for finding in lint(proto.graph, backend) if finding.fixable]
