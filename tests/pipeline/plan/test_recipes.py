"""Which candidates a host gets, and what each becomes."""

import pytest

from pipeline.core.artifacts import Target
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
from pipeline.errors import PlanError
from pipeline.plan.default_candidates import default_candidates
from pipeline.plan.recipes import (
    MAX_RECIPES,
    distinct,
    recipe_from_candidate,
    recipes_from_candidate,
    resolve_method,
)
from pipeline.plan.schema import CandidateConfig, PlacementConfig, Plan

AVX2 = ("avx2",)
VNNI = ("avx2", "avx512_bf16", "avx512_vnni")


def target(backend: str, flags: tuple[str, ...]) -> Target:
    return Target(backend=backend, version="1", device="cpu", cpu_flags=flags)


def labels(flags: tuple[str, ...], plan: Plan, calibrated: bool = True) -> list[str]:
    targets = {name: target(name, flags) for name in ("onnxruntime", "openvino")}
    return [
        recipe_from_candidate(c, targets[c.backend], plan, calibrated).label
        for c in default_candidates(targets, calibrated)
    ]


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
    assert labels(VNNI, plan, calibrated=False) == [
        "onnxruntime fp32",
        "openvino fp32",
        "openvino bf16",
    ]


def test_int8_named_without_calibration_data_is_an_error(plan: Plan) -> None:
    with pytest.raises(PlanError, match="needs calibration data"):
        recipe_from_candidate(
            CandidateConfig(backend="onnxruntime", precision=Precision.INT8),
            target("onnxruntime", VNNI),
            plan,
            False,
        )


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        (
            "onnxruntime",
            {"precision": "fp32", "hardware_compatible": True},
            "only TensorRT has `hardware_compatible`",
        ),
        (
            "tensorrt_rtx",
            {"precision": "fp16", "version_compatible": True},
            "only TensorRT has `version_compatible`",
        ),
        ("openvino", {"precision": "fp8"}, "only TensorRT has fp8"),
        (
            "openvino",
            {"precision": "fp32", "compute_capability": "8.9"},
            "`compute_capability` names a GPU",
        ),
        ("tensorrt", {"precision": "fp8", "quantizer": "nncf"}, "`nncf` is for openvino only"),
    ],
)
def test_what_a_backend_would_ignore_is_refused(
    plan: Plan, backend: str, options: dict[str, object], words: str
) -> None:
    candidate = CandidateConfig.model_validate({"backend": backend, **options})
    with pytest.raises(PlanError, match=words):
        recipe_from_candidate(candidate, target(backend, VNNI), plan, True)


def test_nncf_is_for_openvino_only(plan: Plan) -> None:
    with pytest.raises(PlanError, match="for openvino only"):
        recipe_from_candidate(
            CandidateConfig(backend="onnxruntime", precision=Precision.INT8, quantizer="nncf"),
            target("onnxruntime", VNNI),
            plan,
            True,
        )


def gpu(version: str = "10.6.0", generation: str = "9.0") -> Target:
    return Target(backend="tensorrt", version=version, device="gpu", compute_capability=generation)


def tensorrt_recipe(
    plan: Plan, precision: Precision, calibrated: bool = True, **options: object
) -> Recipe:
    named = CandidateConfig.model_validate(
        {"backend": "tensorrt", "precision": precision, **options}
    )
    return recipe_from_candidate(named, gpu(), plan, calibrated)


def test_tensorrt_gets_signed_activations_and_a_16_bit_rest(plan: Plan) -> None:
    recipe = tensorrt_recipe(plan, Precision.INT8)
    assert (recipe.activation, recipe.rest, recipe.weight_bits) == ("int8", Precision.FP16, 8)


FLOATS = ["tensorrt fp32", "tensorrt tf32", "tensorrt fp16", "tensorrt bf16"]


@pytest.mark.parametrize(
    ("target", "calibrated", "expected"),
    [
        (gpu(), True, [*FLOATS, "tensorrt int8 entropy s8s8", "tensorrt int8 implicit entropy"]),
        (gpu(), False, FLOATS),
        (gpu(generation="8.0"), False, FLOATS),
        (
            gpu(
                generation="7.5",
            ),
            True,
            [
                "tensorrt fp32",
                "tensorrt fp16",
                "tensorrt int8 entropy s8s8",
                "tensorrt int8 implicit entropy",
            ],
        ),
        (gpu(version="11.0.0.1"), True, [*FLOATS, "tensorrt int8 entropy s8s8"]),
    ],
)
def test_a_gpu_host_tries_what_its_generation_and_its_tensorrt_have(
    plan: Plan, target: Target, calibrated: bool, expected: list[str]
) -> None:
    targets = {
        "tensorrt": target,
        "onnxruntime": Target(backend="onnxruntime", version="1", device="cpu", cpu_flags=VNNI),
    }
    candidates = default_candidates(targets, calibrated)
    assert [
        recipe_from_candidate(candidate, targets[candidate.backend], plan, calibrated).label
        for candidate in candidates
    ] == expected


def test_tf32_is_told_to_the_builder_and_not_written_into_the_graph(plan: Plan) -> None:
    assert tensorrt_recipe(plan, Precision.TF32).realised_in == "runtime"
    assert tensorrt_recipe(plan, Precision.FP16).realised_in == "graph"


@pytest.mark.parametrize(
    ("precision", "label"),
    [(Precision.FP16, "tensorrt fp16 flags"), (Precision.INT8, "tensorrt int8 implicit minmax")],
)
def test_a_weakly_typed_engine_is_another_candidate_than_a_strongly_typed_one(
    plan: Plan, precision: Precision, label: str
) -> None:
    by_flags = tensorrt_recipe(plan, precision, precision_from="flags", method="minmax")
    assert by_flags.realised_in == "flags"
    assert by_flags.label == label
    assert tensorrt_recipe(plan, precision, method="minmax").label != label


def test_flags_are_for_tensorrt_only(plan: Plan) -> None:
    candidate = CandidateConfig(
        backend="openvino", precision=Precision.FP16, precision_from="flags"
    )
    with pytest.raises(PlanError, match="only TensorRT has `precision_from: flags`"):
        recipe_from_candidate(candidate, target("openvino", VNNI), plan, True)


def test_fp8_is_modelopts_and_needs_calibration_data(plan: Plan) -> None:
    recipe = tensorrt_recipe(plan, Precision.FP8)
    assert (recipe.quantizer, recipe.rest) == ("modelopt", Precision.FP16)
    with pytest.raises(PlanError, match="needs calibration data"):
        tensorrt_recipe(plan, Precision.FP8, calibrated=False)


def test_modelopt_places_qdq_for_tensorrt_only(plan: Plan) -> None:
    assert (
        tensorrt_recipe(plan, Precision.INT8, quantizer="modelopt").label
        == "tensorrt int8 modelopt entropy s8s8"
    )
    candidate = CandidateConfig(backend="openvino", precision=Precision.INT8, quantizer="modelopt")
    with pytest.raises(PlanError, match="`modelopt` is for tensorrt only"):
        recipe_from_candidate(candidate, target("openvino", VNNI), plan, True)


@pytest.mark.parametrize(
    ("method_name", "language_model", "method"),
    [
        ("auto", True, CalibrationMethod.MINMAX),
        ("auto", False, CalibrationMethod.ENTROPY),
        ("percentile", True, CalibrationMethod.PERCENTILE),
    ],
)
def test_auto_is_minmax_for_language_models_else_entropy(
    method_name: str, language_model: bool, method: CalibrationMethod
) -> None:
    assert resolve_method(method_name, language_model) is method


# --- nodes kept in fp32 ---


def test_auto_is_no_name_of_a_node_and_leaves_the_recipe_what_it_is(plan: Plan) -> None:
    auto, plain = (tensorrt_recipe(plan, Precision.FP16, keep_fp32=nodes) for nodes in ("auto", ()))
    assert (auto.keep_worst, auto.keep_fp32) == (True, ())
    assert auto.label == plain.label
    assert auto.model_dump() == plain.model_dump()  # so that the same engine comes from the store


@pytest.mark.parametrize(
    "targets",
    [
        {"onnxruntime": target("onnxruntime", VNNI), "openvino": target("openvino", VNNI)},
        {"tensorrt": gpu()},
    ],
)
def test_default_int8_candidates_of_our_own_rules_keep_their_worst_nodes(
    plan: Plan, targets: dict[str, Target]
) -> None:
    recipes = [
        recipe_from_candidate(candidate, targets[candidate.backend], plan, True)
        for candidate in default_candidates(targets, True)
    ]
    own = [
        recipe.precision is Precision.INT8
        and recipe.quantizer == "crucible"
        and recipe.realised_in == "graph"
        for recipe in recipes
    ]
    assert [recipe.keep_worst for recipe in recipes] == own
    assert any(own)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("openvino", {"precision": "int8", "quantizer": "nncf"}, "another library places them"),
        ("tensorrt", {"precision": "int8", "quantizer": "modelopt"}, "another library places them"),
        ("tensorrt", {"precision": "fp8"}, "another library places them"),
        (
            "tensorrt",
            {"precision": "int8", "precision_from": "flags"},
            "another library places them",
        ),
        ("onnxruntime", {"precision": "int8", "weight_only": True}, "another library places them"),
        ("openvino", {"precision": "int4"}, "another library places them"),
        ("tensorrt", {"precision": "tf32"}, "is for fp16, bf16 and int8"),
        ("onnxruntime", {"precision": "fp32"}, "is for fp16, bf16 and int8"),
    ],
)
def test_auto_where_there_is_nothing_to_choose_from_is_refused(
    plan: Plan, backend: str, options: dict[str, object], words: str
) -> None:
    candidate = CandidateConfig.model_validate({"backend": backend, "keep_fp32": "auto", **options})
    with pytest.raises(PlanError, match=words) as error:
        recipe_from_candidate(
            candidate, gpu() if backend == "tensorrt" else target(backend, VNNI), plan, True
        )
    assert "keep_fp32" in error.value.next_step


def test_equal_recipes_are_one_candidate_that_keeps_worst_nodes_if_either_does(plan: Plan) -> None:
    plain, auto, other = (
        tensorrt_recipe(plan, precision, keep_fp32=nodes)
        for precision, nodes in (
            (Precision.FP16, ()),
            (Precision.FP16, "auto"),
            (Precision.BF16, ()),
        )
    )
    assert distinct([plain, other, auto]) == (auto, other)


# -- one candidate that stands for several -----------------------------------


def recipes(plan: Plan, **options: object) -> list[str]:
    candidate = CandidateConfig.model_validate(
        {"backend": "onnxruntime", "precision": "int8", **options}
    )
    return [
        recipe.label
        for recipe in recipes_from_candidate(candidate, target(candidate.backend, VNNI), plan, True)
    ]


def test_lists_of_methods_and_switches_stand_for_all_combinations_in_order(plan: Plan) -> None:
    assert recipes(plan, method=["minmax", "entropy"], placement={"last_layer": [False, True]}) == [
        "onnxruntime int8 minmax u8s8",
        "onnxruntime int8 minmax u8s8 +last_layer",
        "onnxruntime int8 entropy u8s8",
        "onnxruntime int8 entropy u8s8 +last_layer",
    ]


def test_scalars_and_lists_of_one_stand_for_one_recipe(plan: Plan) -> None:
    assert (
        recipes(plan)
        == recipes(plan, method=["entropy"], placement={"conv": [True]})
        == ["onnxruntime int8 entropy u8s8"]
    )
    assert recipes(plan, precision="fp32", method="entropy") == ["onnxruntime fp32"]


def test_what_comes_to_the_same_is_tried_once(plan: Plan) -> None:
    assert recipes(
        plan, method=["auto", "entropy", "entropy"], placement={"conv": [True, True]}
    ) == ["onnxruntime int8 entropy u8s8"]


def test_a_candidate_that_stands_for_too_many_is_refused_with_the_count(plan: Plan) -> None:
    both = [False, True]
    switches = dict.fromkeys(("last_layer", "residual_add", "per_channel", "conv"), both)
    assert len(recipes(plan, method=["entropy", "minmax"], placement=switches)) == MAX_RECIPES
    with pytest.raises(PlanError, match="stands for 48 engines, expected at most 32"):
        recipes(plan, method=["entropy", "minmax", "percentile"], placement=switches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"precision": "fp32", "method": ["entropy", "minmax"]},
            "'onnxruntime fp32': a list under `method` changes nothing: fp32 has none",
        ),
        (
            {"precision": "fp32", "placement": {"conv": [True, False]}},
            "a list under `placement.conv` changes nothing: fp32 has none",
        ),
        (
            {"backend": "openvino", "quantizer": "nncf", "method": ["entropy", "minmax"]},
            "the quantizer `nncf` chooses ranges by itself",
        ),
        (
            {
                "backend": "openvino",
                "quantizer": "nncf",
                "placement": {"last_layer": [True, False]},
            },
            "the quantizer `nncf` places Q/DQ by itself",
        ),
        (
            {
                "backend": "tensorrt",
                "quantizer": "modelopt",
                "placement": {"last_layer": [True, False]},
            },
            "the quantizer `modelopt` places Q/DQ",
        ),
        (
            {
                "backend": "tensorrt",
                "quantizer": "modelopt",
                "placement": {"first_layer": [True, False]},
            },
            "the quantizer `modelopt` places Q/DQ",
        ),
        (
            {
                "backend": "tensorrt",
                "precision_from": "flags",
                "placement": {"last_layer": [True, False]},
            },
            "TensorRT's own calibrator",
        ),
    ],
)
def test_a_list_that_changes_nothing_is_refused_by_name(
    plan: Plan, options: dict[str, object], words: str
) -> None:
    with pytest.raises(PlanError) as error:
        recipes(plan, **options)
    assert words in error.value.message


def test_quantizers_that_take_a_method_take_a_list_of_them(plan: Plan) -> None:
    labels = recipes(plan, backend="tensorrt", quantizer="modelopt", method=["entropy", "minmax"])
    assert labels == ["tensorrt int8 modelopt entropy s8s8", "tensorrt int8 modelopt minmax s8s8"]
    labels = recipes(plan, backend="tensorrt", precision_from="flags", method=["entropy", "minmax"])
    assert labels == ["tensorrt int8 implicit entropy", "tensorrt int8 implicit minmax"]


def test_the_switches_of_the_plan_are_those_of_a_recipe_with_the_same_defaults() -> None:
    assert dict(PlacementConfig()) == {name: (on,) for name, on in Placement()}


# --- weights alone, and SmoothQuant ---


@pytest.mark.parametrize(
    ("backend", "options", "label"),
    [
        ("onnxruntime", {"precision": "int4"}, "onnxruntime int4 weight-only b32"),
        (
            "onnxruntime",
            {"precision": "int4", "block_size": 128, "keep_fp32": ["head"]},
            "onnxruntime int4 weight-only b128 keep head",
        ),
        (
            "onnxruntime",
            {"precision": "int8", "weight_only": True},
            "onnxruntime int8 weight-only b32",
        ),
        (
            "onnxruntime",
            {"precision": "int8", "weight_only": True, "activation": "int8"},
            "onnxruntime int8 weight-only b32 a8",
        ),
        ("openvino", {"precision": "int4", "block_size": 64}, "openvino int4 nncf weight-only b64"),
        (
            "openvino",
            {"precision": "int8", "weight_only": True, "quantizer": "nncf"},
            "openvino int8 nncf weight-only",
        ),
        ("openvino", {"precision": "int8", "quantizer": "nncf"}, "openvino int8 nncf u8s8"),
        (
            "openvino",
            {"precision": "int8", "quantizer": "nncf", "smooth_quant": True},
            "openvino int8 nncf u8s8 +smooth_quant",
        ),
        (
            "openvino",
            {"precision": "int8", "quantizer": "nncf", "smooth_quant": False},
            "openvino int8 nncf u8s8 -smooth_quant",
        ),
    ],
)
def test_each_switch_shows_in_the_label(
    plan: Plan, backend: str, options: dict[str, object], label: str
) -> None:
    assert (
        recipe_from_candidate(
            CandidateConfig.model_validate({"backend": backend, **options}),
            target(backend, VNNI),
            plan,
            True,
        ).label
        == label
    )


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_weights_alone_need_no_calibration_data(plan: Plan, backend: str) -> None:
    recipe = recipe_from_candidate(
        CandidateConfig(backend=backend, precision=Precision.INT4),
        target(backend, VNNI),
        plan,
        False,
    )
    assert (recipe.weight_only, recipe.activation, recipe.method) == (True, "float", None)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        (
            "tensorrt",
            {"precision": "int4"},
            "not made for tensorrt, only for onnxruntime and openvino",
        ),
        ("tensorrt_rtx", {"precision": "int8", "weight_only": True}, "not made for tensorrt_rtx"),
        ("onnxruntime", {"precision": "fp32", "weight_only": True}, "4 or 8 bits, not fp32"),
        (
            "onnxruntime",
            {"precision": "int4", "method": "minmax"},
            "`method: minmax` has no effect",
        ),
        (
            "onnxruntime",
            {"precision": "int4", "activation": "uint8"},
            "`activation: uint8` has no effect",
        ),
        (
            "openvino",
            {"precision": "int4", "activation": "int8"},
            "`activation: int8` has no effect",
        ),
        ("openvino", {"precision": "int4", "weight_bits": 7}, "`weight_bits: 7` has no effect"),
        (
            "openvino",
            {"precision": "int4", "quantizer": "modelopt"},
            "`quantizer: modelopt` has no effect",
        ),
        (
            "onnxruntime",
            {"precision": "int4", "placement": {"last_layer": True}},
            "`placement: ...` has no effect",
        ),
        (
            "onnxruntime",
            {"precision": "int4", "placement": {"first_layer": False}},
            "`placement: ...` has no effect",
        ),
        (
            "openvino",
            {"precision": "int4", "smooth_quant": True},
            "`smooth_quant: True` has no effect",
        ),
        (
            "openvino",
            {"precision": "int8", "weight_only": True, "block_size": 64},
            "one scale per output channel, no blocks",
        ),
        (
            "onnxruntime",
            {"precision": "int8", "block_size": 64},
            "`block_size` is for weight-only quantisation",
        ),
        (
            "openvino",
            {"precision": "int8", "smooth_quant": True},
            "only NNCF in int8 has `smooth_quant`",
        ),
        (
            "openvino",
            {"precision": "fp32", "quantizer": "nncf", "smooth_quant": False},
            "only NNCF in int8 has `smooth_quant`",
        ),
    ],
)
def test_what_weights_alone_would_ignore_is_refused(
    plan: Plan, backend: str, options: dict[str, object], words: str
) -> None:
    candidate = CandidateConfig.model_validate({"backend": backend, **options})
    with pytest.raises(PlanError, match=words):
        recipe_from_candidate(candidate, target(backend, VNNI), plan, True)


@pytest.mark.parametrize(
    ("precision", "names", "expected"),
    [
        (
            Precision.INT8,
            ("onnxruntime", "openvino"),
            ["onnxruntime int8 given", "openvino int8 given"],
        ),
        (Precision.INT8, ("tensorrt", "onnxruntime"), ["tensorrt int8 given"]),
        (Precision.FP8, ("tensorrt", "onnxruntime"), ["tensorrt fp8 given"]),
        (Precision.FP8, ("onnxruntime", "openvino"), []),
    ],
)
def test_a_model_with_its_own_scales_is_tried_on_every_backend(
    plan: Plan, precision: Precision, names: tuple[str, ...], expected: list[str]
) -> None:
    targets = {name: gpu() if name == "tensorrt" else target(name, VNNI) for name in names}
    candidates = default_candidates(targets, False, precision)
    recipes = [
        recipe_from_candidate(candidate, targets[candidate.backend], plan, False, precision)
        for candidate in candidates
    ]
    assert [recipe.label for recipe in recipes] == expected
    assert {recipe.rest for recipe in recipes} == (
        {Precision.FP16 if "tensorrt" in names else Precision.FP32} if recipes else set()
    )


def given_recipes(plan: Plan, **options: object) -> tuple[Recipe, ...]:
    candidate = CandidateConfig.model_validate(
        {"backend": "tensorrt", "precision": "int8", **options}
    )
    at = gpu() if candidate.backend == "tensorrt" else target(candidate.backend, VNNI)
    return recipes_from_candidate(candidate, at, plan, True, Precision.INT8)


def test_what_the_pairs_of_a_model_leave_open_may_be_asked_for(plan: Plan) -> None:
    (recipe,) = given_recipes(plan, keep_fp32=("head",), hardware_compatible=True)
    assert (recipe.quantizer, recipe.keep_fp32, recipe.hardware_compatible) == (
        "given",
        ("head",),
        True,
    )


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("method", {"method": "minmax"}),
        ("method", {"method": ["auto", "minmax"]}),
        ("activation", {"activation": "uint8"}),
        ("weight_bits", {"weight_bits": 7}),
        ("precision_from", {"precision_from": "flags"}),
        ("quantizer", {"quantizer": "modelopt", "keep_fp32": "auto"}),
        ("placement", {"placement": {"last_layer": [False, True]}}),
        (
            "placement",
            {"placement": {switch: [True, False] for switch in PlacementConfig.model_fields}},
        ),
        ("weight_only", {"weight_only": True, "backend": "onnxruntime"}),
        ("smooth_quant", {"smooth_quant": True, "backend": "openvino"}),
        ("keep_fp32", {"keep_fp32": "auto"}),
        ("keep_fp32", {"keep_fp32": "auto", "backend": "onnxruntime"}),
        ("keep_fp32", {"keep_fp32": ["head"], "backend": "onnxruntime"}),
    ],
)
def test_what_the_pairs_of_a_model_have_decided_is_refused_by_name(
    plan: Plan, key: str, options: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match=f"brings its own Q/DQ, which decide `{key}`") as error:
        given_recipes(plan, **options)
    assert error.value.next_step.startswith(f"leave `{key}` out")


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16"},
        {"precision": "fp16", "keep_fp32": "auto"},
        {"precision": "int4", "backend": "openvino"},
    ],
)
def test_a_precision_that_is_not_that_of_the_pairs_is_refused(
    plan: Plan, options: dict[str, object]
) -> None:
    with pytest.raises(
        PlanError, match=f"it would run int8 under the name of {options['precision']}"
    ):
        given_recipes(plan, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {
                "backend": "openvino",
                "precision": "int8",
                "quantizer": "nncf",
                "placement": {"last_layer": True},
            },
            "places Q/DQ by itself",
        ),
        (
            {
                "backend": "openvino",
                "precision": "int8",
                "quantizer": "nncf",
                "placement": {"first_layer": False},
            },
            "places Q/DQ by itself",
        ),
        (
            {"backend": "tensorrt", "precision": "fp8", "placement": {"first_layer": False}},
            "ModelOpt's fp8 places Q/DQ by itself",
        ),
        (
            {"backend": "openvino", "precision": "int8", "quantizer": "nncf", "method": "minmax"},
            "chooses ranges by itself",
        ),
        (
            {"backend": "tensorrt", "precision": "fp8", "method": "minmax"},
            "chooses ranges by itself",
        ),
        (
            {"backend": "tensorrt", "precision": "fp8", "activation": "uint8"},
            "one form of activations",
        ),
        (
            {"backend": "tensorrt", "precision": "int8", "block_size": 64},
            "`block_size` is for weight-only quantisation",
        ),
    ],
)
def test_what_a_label_would_claim_and_an_engine_ignore_is_refused(
    plan: Plan, options: dict[str, object], words: str
) -> None:
    candidate = CandidateConfig.model_validate(options)
    with pytest.raises(PlanError, match=words):
        recipe_from_candidate(
            candidate,
            gpu() if candidate.backend == "tensorrt" else target("openvino", VNNI),
            plan,
            True,
        )
