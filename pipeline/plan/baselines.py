"""The recipes of baselines: PyTorch as the plan lists it, or an unchanged ONNX file. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.core.artifacts import Target
from pipeline.core.recipe import CompileMode, OrtProvider, Precision, Recipe
from pipeline.errors import PlanError
from pipeline.plan.precisions import floats_of, realised_in
from pipeline.plan.schema import BASELINE

AS_GIVEN = "as given"
"""Variant of a recipe: the unchanged ONNX file of the user."""

AS_WRITTEN = "as written"
"""Variant of a recipe of ONNX Runtime: Q/DQ nodes are computed in fp32, as they are in the graph.

The int8 kernels that ONNX Runtime would otherwise use in their place can saturate.
"""

BEST_MODES: tuple[CompileMode | None, ...] = (None, "reduce-overhead", "max-autotune")
FOR_GPUS = ("reduce-overhead",)  # on a CPU there are no launches to save
LOW = (Precision.FP16, Precision.BF16)


def baseline_recipes(
    names: Sequence[str], target: Target, castable: bool = True
) -> tuple[Recipe, ...]:
    """Return the baselines of a PyTorch model by the plan's names. Eager fp32 comes first.

    `castable`: whether the module can be cast to 16 bits. PlanError for a 16-bit baseline if not.
    """
    expanded = ["eager"]
    for name in names:
        expanded += _expanded_name(name, target, castable)
    return tuple(dict.fromkeys(_baseline(name, target, castable) for name in expanded))


def _expanded_name(name: str, target: Target, castable: bool) -> tuple[str, ...]:
    """Expand `default` and `best` for this device. Any other name stands for itself."""
    if name not in ("default", "best"):
        return (name,)
    floats = floats_of(target) if target.compute_capability else [Precision.FP32]
    able = [precision for precision in floats if castable or precision not in LOW]
    plain = [f"eager {precision}" for precision in able if precision is not Precision.BF16]
    if name == "default":
        return tuple(plain)
    fast = able[1:] or able
    modes = [mode for mode in BEST_MODES if target.compute_capability or mode not in FOR_GPUS]
    compiled = []
    for mode in modes:
        prefix = f"compile {mode}" if mode else "compile"
        compiled += [f"{prefix} {precision}" for precision in fast]
    return (*plain, *compiled)


def _baseline(name: str, target: Target, castable: bool) -> Recipe:
    match = BASELINE.fullmatch(name)
    assert match is not None  # the plan was checked
    kind, mode = match[1].split()[0], match[2]
    precision = Precision(match[3] or Precision.FP32)
    if precision is Precision.TF32 and not target.compute_capability:
        raise PlanError(
            f"benchmark.baselines: '{name}' needs an NVIDIA GPU, and PyTorch runs on the CPU here",
            f"leave '{name}' out",
        )
    if precision in LOW and not castable:
        raise PlanError(
            f"benchmark.baselines: '{name}': the graph has fixed dtypes and cannot be cast",
            f"leave '{name}' out, or give a module without quantisation as `entrypoint`",
        )
    return Recipe.model_validate(
        {"backend": "pytorch", "precision": precision, "variant": kind, "mode": mode}
    )


def call_of(baseline: Recipe) -> str:
    """Return the Python call of a PyTorch baseline."""
    casts = {Precision.FP16: "module.half()", Precision.BF16: "module.bfloat16()"}
    module = casts.get(baseline.precision, "module")
    mode = f', mode="{baseline.mode}"' if baseline.mode else ""
    calls = {
        "eager": f"{module}(...)",
        "traced": f"torch.jit.optimize_for_inference(torch.jit.trace({module}, ...))",
        "compile": f"torch.compile({module}{mode})",
    }
    tf32 = 'torch.set_float32_matmul_precision("high"); '
    return (tf32 if baseline.precision is Precision.TF32 else "") + calls[baseline.variant]


def cpu_recipe_as_given(given: Precision | None) -> Recipe:
    """Return the recipe of an unchanged ONNX file on the CPU. Int8 Q/DQ run in int8."""
    if given is Precision.INT8:
        return Recipe(backend="onnxruntime", precision=given, quantizer="given", variant=AS_GIVEN)
    return Recipe(backend="onnxruntime", precision=Precision.FP32, variant=AS_GIVEN)


def recipe_as_given(backend: str, given: Precision | None, target: Target) -> Recipe:
    """Return the recipe of an unchanged ONNX file on one backend, with ONNX Runtime on the CPU."""
    if backend == "tensorrt":
        return gpu_recipes_as_given(given, target, ())[0]
    return cpu_recipe_as_given(given).model_copy(update={"backend": backend})


def gpu_recipes_as_given(
    given: Precision | None, tensorrt: Target | None, providers: Collection[OrtProvider]
) -> tuple[Recipe, ...]:
    """Return the recipes of an unchanged ONNX file on a GPU: TensorRT, and ONNX Runtime's CUDA.

    TensorRT builds as trtexec does, with TF32, or in the precision of the file's own Q/DQ.
    """
    recipes = []
    if tensorrt and given:
        recipes.append(
            Recipe(backend="tensorrt", precision=given, quantizer="given", variant=AS_GIVEN)
        )
    elif tensorrt:
        precision = Precision.TF32 if Precision.TF32 in floats_of(tensorrt) else Precision.FP32
        recipes.append(
            Recipe(
                backend="tensorrt",
                precision=precision,
                realised_in=realised_in("tensorrt", precision),
                variant=AS_GIVEN,
            )
        )
    if "cuda" in providers and not given:
        recipes.append(
            Recipe(
                backend="onnxruntime",
                precision=Precision.TF32,
                realised_in="runtime",
                provider="cuda",
                variant=AS_GIVEN,
            )
        )
    return tuple(recipes)


def deliverable_recipe(baseline: Recipe) -> Recipe:
    """Return the recipe in which a baseline is delivered: a program for PyTorch, else itself."""
    if baseline.backend != "pytorch":
        return baseline
    form = "compile" if baseline.variant == "compile" else "exported"
    return Recipe.model_validate(
        {
            "backend": "torch",
            "precision": baseline.precision,
            "realised_in": "runtime",
            "form": form,
            "mode": baseline.mode,
        }
    )
