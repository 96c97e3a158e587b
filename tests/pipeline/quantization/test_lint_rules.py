"""Each rule finds its breach, by name, for the backends that it is about, and nothing in a graph
that keeps it.
"""

from __future__ import annotations

import pytest

from pipeline.core.artifacts import NoteCode
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.rules import (
    EVERYWHERE,
    RULES,
    Finding,
    finding_notes,
    lint,
    saturation_notes,
)
from tests.builders.qat import CONSTANTS, GAINS, INPUT, NORMED, PLAIN, SAME, WEIGHTS, quantised

CONV = f"{INPUT} {WEIGHTS} [conv] c = Conv<{SAME}>(xd, wd)"
SECOND = (
    "[q2] rq = QuantizeLinear(r, t, z) [dq2] rd = DequantizeLinear(rq, t, z) [conv2] y ="
    f" Conv<{SAME}>(rd, vd)"
)
OUT = "float[N, 5] y"
RESIDUAL = f"""{CONV} [relu] r = Relu(c) [q2] rq = QuantizeLinear(r, t, z)
  [dq2] rd = DequantizeLinear(rq, t, z)
 [conv2] d = Conv<{SAME}>(rd, vd) [q3] eq = QuantizeLinear(d, t, z)
   [dq3] ed = DequantizeLinear(eq, t, z) [add] a = Add(LEFT, RIGHT)
 [q4] aq = QuantizeLinear(a, t, z) [dq4] ad = DequantizeLinear(aq, t, z)
   [conv3] e = Conv<{SAME}>(ad, wd) [last] y = Relu(e)"""
BOTH, ONE, RESIDUAL_ONLY = (
    RESIDUAL.replace("LEFT", left).replace("RIGHT", right)
    for left, right in (("ed", "rd"), ("ed", "r"), ("d", "rd"))
)
PAIR = "[q2] cq = QuantizeLinear(c, t, z) [dq2] cd = DequantizeLinear(cq, t, z)"

CASES = [
    ("bad-scale", "tensorrt", PLAIN, CONSTANTS.replace("s = {0.02}", "s = {0.0}"), ("q",)),
    (
        "bad-scale",
        "openvino",
        PLAIN,
        CONSTANTS.replace("{0.01, 0.02, 0.01, 0.02}", "{0.01, 1e-40, 0.01, 0.02}"),
        ("wq",),
    ),
    ("small-scale", "tensorrt", PLAIN, CONSTANTS.replace("s = {0.02}", "s = {0.00001}"), ("dq",)),
    ("zero-point", "tensorrt", PLAIN.replace("s, z)", "s, u)"), CONSTANTS, ("dq",)),
    ("zero-point", "tensorrt", PLAIN.replace("s, z)", "s, u0)"), CONSTANTS, ("dq",)),
    ("zero-point", "tensorrt_rtx", PLAIN, CONSTANTS.replace("z = {0}", "z = {5}"), ("dq",)),
    (
        "per-tensor-weight",
        "onnxruntime",
        PLAIN.replace("<axis = 0>", "").replace("ws, wz", "s, z"),
        CONSTANTS,
        ("conv", "wdq"),
    ),
    ("float-weight", "tensorrt", PLAIN.replace("wd) [relu]", "w) [relu]"), CONSTANTS, ("conv",)),
    ("float-input", "openvino", PLAIN.replace("(xd, wd)", "(x, wd)"), CONSTANTS, ("conv",)),
    (
        "pair-before-mover",
        "onnxruntime",
        PLAIN.replace(
            "[conv] c = Conv<pads = [1, 1, 1, 1]>(xd",
            "m = Identity(xd) [conv] c = Conv<pads = [1, 1, 1, 1]>(m",
        ),
        CONSTANTS,
        ("conv", "dq"),
    ),
    ("float-result", "onnxruntime", f"{CONV} [relu] r = Relu(c) y = Abs(r)", CONSTANTS, ("conv",)),
    (
        "signed-relu",
        "onnxruntime",
        f"{CONV} [relu] r = Relu(c) {SECOND}",
        CONSTANTS,
        ("conv", "relu", "q2"),
    ),
    ("signed-shared", "onnxruntime", BOTH, CONSTANTS, ("q2", "conv2", "add")),
    (
        "clip-between",
        "tensorrt",
        PLAIN.replace("DequantizeLinear(xq", "DequantizeLinear(xc").replace(
            "[dq]", "[clip] xc = Clip(xq, , z) [dq]"
        ),
        CONSTANTS,
        ("q", "clip"),
    ),
    (
        "between-fused",
        "tensorrt",
        f"{CONV} {PAIR} [relu] y = Relu(cd)",
        CONSTANTS,
        ("conv", "q2", "relu"),
    ),
    ("norm-after", "onnxruntime", NORMED, CONSTANTS + GAINS, ("conv", "undo", "bias", "norm")),
    ("residual-both", "tensorrt", BOTH, CONSTANTS, ("add", "conv2")),
    ("residual-one", "openvino", ONE, CONSTANTS, ("add",)),
    (
        "matmul-activations",
        "tensorrt",
        f"{INPUT} [q2] q2 = QuantizeLinear(x, t, z) [dq2] d2 = DequantizeLinear(q2, t, z) "
        "[mm] y = MatMul(xd, d2)",
        CONSTANTS,
        ("mm",),
    ),
    (
        "quantised-bias",
        "tensorrt",
        PLAIN.replace("(xd, wd)", "(xd, wd, bd)").replace(
            "[conv]", "[bdq] bd = DequantizeLinear<axis = 0>(bi, bs, bz) [conv]"
        ),
        CONSTANTS,
        ("conv", "bdq"),
    ),
    (
        "concat-scales",
        "openvino",
        f"{CONV} {PAIR} [join] y = Concat<axis = 1>(xd, cd)",
        CONSTANTS,
        ("join", "dq", "dq2"),
    ),
    (
        "moved-scales",
        "tensorrt",
        f"{INPUT} [pool] p = MaxPool<kernel_shape = [1, 1]>(xd) [q2] pq = QuantizeLinear(p, t, z) "
        "[dq2] y = DequantizeLinear(pq, t, z)",
        CONSTANTS,
        ("pool", "dq", "q2"),
    ),
    (
        "duplicate-pair",
        "tensorrt",
        f"{INPUT} [pool] p = MaxPool<kernel_shape = [1, 1]>(xd) [q2] pq = QuantizeLinear(p, s, z) "
        "[dq2] pd = DequantizeLinear(pq, s, z) [relu] y = Relu(pd)",
        CONSTANTS,
        ("dq", "q2"),
    ),
    (
        "split-q",
        "openvino",
        f"{INPUT} {WEIGHTS} [q2] x2 = QuantizeLinear(x, s, z) "
        "[dq2] d2 = DequantizeLinear(x2, s, z) "
        f"[conv] c = Conv<{SAME}>(xd, wd) "
        f"[conv2] d = Conv<{SAME}>(d2, vd) [add] y = Add(c, d)",
        CONSTANTS,
        ("q", "q2"),
    ),
    ("weight-in-floats", "openvino", PLAIN, CONSTANTS, ("wq",)),
]


def findings(
    body: str, backend: str, constants: str = CONSTANTS, output: str = "float[N, A, B, C] y"
) -> list[Finding]:
    return list(lint(flatten(quantised(body, output, constants)).graph, backend))


@pytest.mark.parametrize(
    ("rule", "backend", "body", "constants", "nodes"),
    CASES,
    ids=[f"{case[0]}-{case[1]}" for case in CASES],
)
def test_each_breach_is_found_with_its_nodes(
    rule: str, backend: str, body: str, constants: str, nodes: tuple[str, ...]
) -> None:
    by_nodes = {
        finding.nodes: finding
        for finding in findings(body, backend, constants)
        if finding.rule == rule
    }
    assert nodes in by_nodes, findings(body, backend, constants)
    assert by_nodes[nodes].why
    assert by_nodes[nodes].cost


@pytest.mark.parametrize(
    ("rule", "backend"), [case[:2] for case in CASES if case[0] != "weight-in-floats"]
)
def test_a_plain_convolution_breaks_no_other_rule(rule: str, backend: str) -> None:
    assert rule not in {finding.rule for finding in findings(PLAIN, backend)}


def test_every_rule_has_a_case() -> None:
    tested = {case[0].replace("-", "_") for case in CASES} | {
        "unused_range",
        "classifier",
        "rest_in_fp32",
        "lone_q",
    }  # below
    assert {rule.__name__ for rule in RULES} == tested


def test_the_residual_alone_may_be_quantised_where_the_convolution_adds() -> None:
    assert {finding.rule for finding in findings(RESIDUAL_ONLY, "tensorrt")} & {
        "residual-both",
        "residual-one",
    } == set()
    assert "residual-one" in {finding.rule for finding in findings(RESIDUAL_ONLY, "onnxruntime")}


def test_rules_without_a_pair_of_their_own() -> None:
    weight = "[fq] fi = QuantizeLinear(f, t, z) [fdq] fd = DequantizeLinear(fi, t, z)"
    classifier = f"{INPUT} {weight} p = GlobalAveragePool(xd) g = Flatten(p) [fc] y = Gemm(g, fd)"
    assert ("classifier", ("fc",)) in [
        (each.rule, each.nodes) for each in findings(classifier, "tensorrt", output="float[N, 5] y")
    ]
    few = "[wdq] wd = DequantizeLinear(small, s, z) [mm] y = MatMul(x, wd)"
    constants = (
        CONSTANTS + ", int8[8, 2] small = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -15}"
    )
    assert ("unused-range", ("wdq",)) in [
        (finding.rule, finding.nodes) for finding in findings(few, "tensorrt", constants)
    ]
    assert "rest-fp32" in {finding.rule for finding in findings(PLAIN, "tensorrt")}
    assert "rest-fp32" not in {finding.rule for finding in findings(PLAIN, "openvino")}
    lone = f"{INPUT} [q2] xi = QuantizeLinear(x, t, z) y = Cast<to = 1>(xi)"
    assert ("lone-q", ("q2",)) in [(each.rule, each.nodes) for each in findings(lone, "openvino")]


def test_a_graph_without_pairs_has_no_findings() -> None:
    assert all(findings("y = Relu(x)", backend) == [] for backend in EVERYWHERE)


def test_a_note_per_rule_names_the_command_that_tells_more() -> None:
    (note,) = finding_notes(
        tuple(each for each in findings(PLAIN, "openvino") if each.rule == "weight-in-floats"),
        "openvino",
    )
    assert note.level == "warning"
    assert "(wq, and 1 more)" in note.text
    assert "`crucible lint MODEL --backend openvino`" in note.text


SMALL = ", int8[4, 4] small = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, REACH}"
DENSE = ", float[4, 4] dense = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}"
PRODUCT = "[mm] y = MatMul(x, wd)"


@pytest.mark.parametrize(
    ("weight", "constants", "saturates"),
    [
        ("[wdq] wd = DequantizeLinear(small, s, z)", SMALL.replace("REACH", "64"), False),
        ("[wdq] wd = DequantizeLinear(small, s, z)", SMALL.replace("REACH", "-65"), True),
        (
            "[wdq] wd = DequantizeLinear<axis = 0>(small, ws, wz)",
            SMALL.replace("REACH", "-65"),
            True,
        ),
        (
            "wi = QuantizeLinear(dense, big, z) [wdq] wd = DequantizeLinear(wi, big, z)",
            DENSE + ", float big = {0.25}",
            False,
        ),
        (
            "wi = QuantizeLinear(dense, fine, z) [wdq] wd = DequantizeLinear(wi, fine, z)",
            DENSE + ", float fine = {0.125}",
            True,
        ),
        # the largest values of the channels are 4, 8, 12 and 16
        (
            "wi = QuantizeLinear<axis = 0>(dense, cs, wz) "
            "[wdq] wd = DequantizeLinear<axis = 0>(wi, cs, wz)",
            DENSE + ", float[4] cs = {0.1, 0.2, 0.2, 0.2}",
            True,
        ),
        (
            "wi = QuantizeLinear<axis = 0>(dense, cs, wz) "
            "[wdq] wd = DequantizeLinear<axis = 0>(wi, cs, wz)",
            DENSE + ", float[4] cs = {0.1, 0.2, 0.2, 0.3}",
            False,
        ),
    ],
)
def test_weights_that_use_the_eighth_bit_are_named(
    weight: str, constants: str, saturates: bool
) -> None:
    notes = saturation_notes(
        flatten(
            quantised(f"{weight} {PRODUCT}", "float[A, B, C, D] y", CONSTANTS + constants)
        ).graph
    )
    assert [note.code for note in notes] == ([NoteCode.SATURATES] if saturates else [])
    assert all(
        note.text.startswith("weights of more than 7 bits (wdq): their products") for note in notes
    )
