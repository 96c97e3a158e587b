"""PyTorch programs and baselines, providers of ONNX Runtime, and the documented defaults."""

import re
from pathlib import Path

import pytest

from pipeline.core.artifacts import Target
from pipeline.core.recipe import OrtProvider, Precision, Recipe
from pipeline.errors import PlanError
from pipeline.plan.baselines import (
    baseline_recipes,
    call_of,
    deliverable_recipe,
    gpu_recipes_as_given,
)
from pipeline.plan.default_candidates import default_candidates
from pipeline.plan.files import plan_from_document
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import CandidateConfig, Plan
from tests.pipeline.plan.test_recipes import VNNI, gpu, target

PYTORCH = {
    "model": {
        "entrypoint": "m:f",
        "weights_from": "nowhere",
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}],
    },
}
ON_GPU = Target(backend="torch", version="2", device="gpu", compute_capability="9.0")
ON_CPU = Target(backend="torch", version="2", device="cpu", cpu_flags=VNNI)


def torch_recipe(**options: object) -> Recipe:
    candidate = CandidateConfig.model_validate({"backend": "torch", "precision": "fp16", **options})
    return recipe_from_candidate(
        candidate,
        ON_GPU,
        plan_from_document(dict(PYTORCH), Path.cwd(), "p"),
        True,
    )


def default_labels(plan: Plan, on_gpu: bool, providers: tuple[OrtProvider, ...] = ()) -> list[str]:
    targets = {name: target(name, VNNI) for name in ("onnxruntime", "openvino")}
    if on_gpu:
        targets |= {"tensorrt": gpu(), "torch": ON_GPU}
    candidates = default_candidates(targets, True, providers=providers)
    return [
        recipe_from_candidate(each, targets[each.backend], plan, True).label for each in candidates
    ]


def test_the_documentation_lists_exactly_the_default_candidates() -> None:
    text = (Path(__file__).parents[3] / "docs" / "howto" / "write-a-plan.md").read_text()
    rows = re.findall(r"^\| (CPU|GPU) \| (.+?) \|", text, re.MULTILINE)
    listed = {
        place: [
            label
            for where, cell in rows
            if where == place
            for label in re.findall(
                r"`(.+?)`",
                cell,
            )
        ]
        for place in ("CPU", "GPU")
    }
    plan = plan_from_document(dict(PYTORCH), Path.cwd(), "p")
    assert sorted(listed["CPU"]) == sorted(default_labels(plan, on_gpu=False))
    assert sorted(listed["GPU"]) == sorted(
        default_labels(plan, on_gpu=True, providers=("cuda", "tensorrt")),
    )


def test_on_a_gpu_without_tensorrt_pytorch_is_tried_alone_and_on_none_the_cpu(plan: Plan) -> None:
    cpu = target("onnxruntime", VNNI)
    alone = default_candidates({"onnxruntime": cpu, "torch": ON_GPU}, False)
    assert [(each.backend, each.form, str(each.precision)) for each in alone] == [
        ("torch", "aoti", precision) for precision in ("fp32", "tf32", "fp16", "bf16")
    ]
    for torch in (ON_CPU, None):  # a PyTorch without CUDA, or none
        targets = {"onnxruntime": cpu, **({"torch": torch} if torch else {})}
        assert [each.backend for each in default_candidates(targets, False)] == ["onnxruntime"]


def test_a_program_is_called_by_its_form_and_mode() -> None:
    assert torch_recipe().label == "torch aoti fp16"
    assert torch_recipe(form="exported", precision="fp32").label == "torch exported fp32"
    tuned = torch_recipe(form="compile", mode="max-autotune", precision="bf16")
    assert tuned.label == "torch compile max-autotune bf16"
    assert tuned.realised_in == "runtime"  # the graph stays as it is


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_fp32": ["conv"]}, "`keep_fp32` has no effect on a PyTorch program"),
        ({"quantizer": "nncf", "precision": "int8"}, "`quantizer` has no effect"),
        ({"placement": {"last_layer": True}}, "`placement` has no effect"),
        ({"provider": "cuda"}, "`provider` has no effect"),
    ],
)
def test_what_says_nothing_of_a_program_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        torch_recipe(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "torch", "precision": "fp32"}, "an ONNX file, which has no PyTorch program"),
        ({"backend": "onnxruntime", "precision": "fp32", "form": "aoti"}, "only torch has `form`"),
        (
            {
                "backend": "tensorrt",
                "precision": "fp32",
                "mode": "max-autotune",
            },
            "only torch has `mode`",
        ),
        (
            {
                "backend": "openvino",
                "precision": "fp32",
                "provider": "cuda",
            },
            "only onnxruntime has `provider`",
        ),
        (
            {
                "backend": "onnxruntime",
                "precision": "int8",
                "provider": "cuda",
            },
            "expected the provider cuda with fp32, tf32, fp16",
        ),
        (
            {
                "backend": "onnxruntime",
                "precision": "fp32",
                "provider": "tensorrt",
            },
            "expected the provider tensorrt with tf32, fp16",
        ),
    ],
)
def test_a_program_of_an_onnx_file_and_keys_of_other_backends_are_refused(
    plan: Plan,
    options: dict[str, object],
    words: str,
) -> None:
    candidate = CandidateConfig.model_validate(options)
    with pytest.raises(PlanError, match=words):
        recipe_from_candidate(candidate, target(candidate.backend, VNNI), plan, True)


def test_a_provider_is_part_of_the_name_and_tf32_is_told_to_it(plan: Plan) -> None:
    candidate = CandidateConfig(backend="onnxruntime", precision=Precision.TF32, provider="cuda")
    recipe = recipe_from_candidate(candidate, target("onnxruntime", VNNI), plan, True)
    assert (recipe.label, recipe.realised_in) == ("onnxruntime cuda tf32", "runtime")


# --- baselines ---


@pytest.mark.parametrize(
    ("names", "target", "expected"),
    [
        ((), ON_CPU, ["eager fp32"]),
        (("default",), ON_CPU, ["eager fp32"]),
        (("best",), ON_CPU, ["eager fp32", "compile fp32", "compile max-autotune fp32"]),
        (("default",), ON_GPU, ["eager fp32", "eager tf32", "eager fp16"]),
        (("eager", "traced", "compile"), ON_GPU, ["eager fp32", "traced fp32", "compile fp32"]),
        (
            ("compile max-autotune fp16", "eager fp32", "eager bf16"),
            ON_GPU,
            [
                "eager fp32",
                "compile max-autotune fp16",
                "eager bf16",
            ],
        ),
    ],
)
def test_baselines_by_name(names: tuple[str, ...], target: Target, expected: list[str]) -> None:
    assert [
        recipe.label
        for recipe in baseline_recipes(
            names,
            target,
        )
    ] == [f"pytorch {name}" for name in expected]


def test_the_best_baselines_of_a_gpu_are_every_mode_in_every_fast_precision() -> None:
    labels = [
        recipe.label.removeprefix("pytorch ")
        for recipe in baseline_recipes(
            ("best",),
            ON_GPU,
        )
    ]
    modes = ("compile", "compile reduce-overhead", "compile max-autotune")
    compiled = [f"{mode} {precision}" for mode in modes for precision in ("tf32", "fp16", "bf16")]
    assert labels == ["eager fp32", "eager tf32", "eager fp16", *compiled]


def test_a_program_that_cannot_be_cast_has_no_baseline_in_16_bits() -> None:
    labels = [recipe.label for recipe in baseline_recipes(("best",), ON_GPU, castable=False)]
    assert [label for label in labels if label.endswith(("fp16", "bf16"))] == []
    with pytest.raises(PlanError, match="cannot be cast"):
        baseline_recipes(("eager fp16",), ON_GPU, castable=False)
    with pytest.raises(PlanError, match="needs an NVIDIA GPU"):
        baseline_recipes(("eager tf32",), ON_CPU)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("eager", "module(...)"),
        ("compile max-autotune fp16", 'torch.compile(module.half(), mode="max-autotune")'),
        ("compile tf32", 'torch.set_float32_matmul_precision("high"); torch.compile(module)'),
        ("traced", "torch.jit.optimize_for_inference(torch.jit.trace(module, ...))"),
    ],
)
def test_a_baseline_is_named_by_its_call(name: str, call: str) -> None:
    assert call_of(baseline_recipes((name,), ON_GPU)[-1]) == call


@pytest.mark.parametrize(
    ("name", "delivered"),
    [
        ("eager fp16", "torch exported fp16"),
        ("traced", "torch exported fp32"),
        ("compile", "torch compile fp32"),
        ("compile max-autotune bf16", "torch compile max-autotune bf16"),
    ],
)
def test_a_baseline_of_pytorch_is_delivered_as_a_program(name: str, delivered: str) -> None:
    assert deliverable_recipe(baseline_recipes((name,), ON_GPU)[-1]).label == delivered


@pytest.mark.parametrize(
    ("precision", "tensorrt", "providers", "expected"),
    [
        (
            None,
            gpu(),
            ("cuda", "tensorrt"),
            [
                "tensorrt as given tf32",
                "onnxruntime cuda as given tf32",
            ],
        ),
        (None, gpu(generation="7.5"), (), ["tensorrt as given fp32"]),
        (Precision.INT8, gpu(), ("cuda",), ["tensorrt as given int8"]),
        (None, None, ("cuda",), ["onnxruntime cuda as given tf32"]),
        (None, None, (), []),
    ],
)
def test_on_a_gpu_the_baseline_of_an_onnx_file_is_what_the_gpu_makes_of_it(
    precision: Precision | None,
    tensorrt: Target | None,
    providers: tuple[OrtProvider, ...],
    expected: list[str],
) -> None:
    recipes = gpu_recipes_as_given(precision, tensorrt, providers)
    assert [recipe.label for recipe in recipes] == expected
    assert [deliverable_recipe(recipe) for recipe in recipes] == list(
        recipes,
    )  # they are engines already
