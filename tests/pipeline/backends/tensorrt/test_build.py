"""Profiles, configuration and errors of a build. What all flavours of TensorRT share is tried with
TensorRT-RTX, which needs no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends.cuda import OutOfDeviceMemory
from pipeline.backends.tensorrt.build import (
    CANNOT,
    MAX_WARNINGS,
    add_profiles,
    build_error,
    configure,
    flags_of,
    serialize,
    shape_tensors,
    shapes_of,
    values_of,
    warnings_of,
    with_locations,
)
from pipeline.backends.tensorrt.messages import messages_of
from pipeline.backends.tensorrt.parser import Parsed, parse, sentence
from pipeline.core.artifacts import BuildOptions, OnnxModel, TensorRTOptions
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, TensorSpec, ValueRange
from pipeline.errors import BackendUnavailable, CrucibleError, PlanError, UnsupportedError
from tests.pipeline.backends.tensorrt.builders import save

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SMALL = Profile(dims={"n": DimRange(min=1, opt=4, max=8)})
LARGE = Profile(dims={"n": DimRange(min=16, opt=16, max=16)})
VALUES = ValueRange(min=(1, 3), opt=(4, 3), max=(8, 3))


@pytest.fixture(scope="module")
def trt() -> Any:
    return pytest.importorskip("tensorrt_rtx")


def convolution(folder: Path) -> OnnxModel:
    """x [n, 4, 8, 8] -> y [n, 8, 6, 6], both fp32."""
    weight = numpy_helper.from_array(np.ones((8, 4, 3, 3), np.float32), "w")
    return save(
        folder,
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        [("x", FLOAT, ["n", 4, 8, 8])],
        [("y", FLOAT, ["n", 8, 6, 6])],
        [weight],
    )


def expansion(folder: Path) -> OnnxModel:
    """x [1, 3] fp32 expanded to the shape that k [2] says."""
    inputs = [("x", FLOAT, [1, 3]), ("k", INT64, [2])]
    return save(
        folder, [helper.make_node("Expand", ["x", "k"], ["y"])], inputs, [("y", FLOAT, ["a", "b"])]
    )


def parsed_model(trt: Any, model: OnnxModel) -> Parsed:
    parsed = parse(trt, model.path.read_bytes(), model.path)
    assert parsed.faults == ()
    return parsed


def recipe(precision: Precision = Precision.FP32, **more: object) -> Recipe:
    return Recipe.model_validate({"backend": "tensorrt", "precision": precision, **more})


# -- profiles ----------------------------------------------------------------


def test_shapes_of_every_profile() -> None:
    specs = (
        TensorSpec(name="x", dtype="float32", shape=("n", 3), kind="dynamic"),
        TensorSpec(name="y", dtype="float32", shape=(2, 2)),
    )
    assert shapes_of(specs, (SMALL, LARGE)) == (
        {"x": ((1, 3), (4, 3), (8, 3))},
        {"x": ((16, 3),) * 3},
    )


def test_a_symbol_without_sizes_is_named() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("n", "length"), kind="dynamic")
    with pytest.raises(
        PlanError,
        match=r"input 'x' \['n', 'length'\] is dynamic, and a profile gives no sizes for length",
    ):
        shapes_of((spec,), (SMALL,))


@pytest.mark.parametrize(
    ("shape", "values", "message"),
    [
        ((2,), {}, "input 'k' decides a shape by its values"),
        (
            (3,),
            {"k": VALUES},
            "input 'k' has 3 numbers, the profile gives 2, and decides a shape by its values",
        ),
        ((), {"k": VALUES}, "input 'k' has 1 numbers, the profile gives 2"),
    ],
)
def test_values_that_are_missing_are_asked_for(
    shape: tuple[int, ...], values: dict[str, ValueRange], message: str
) -> None:
    spec = TensorSpec(name="k", dtype="int64", shape=shape)
    with pytest.raises(PlanError) as error:
        values_of((spec,), ("k",), Profile(values=values))
    assert error.value.message.startswith(message)
    assert error.value.next_step == "give `values: {k: [[min], [opt], [max]]}` in the profile"


def test_profiles_reach_the_library(tmp_path: Path, trt: Any) -> None:
    model = convolution(tmp_path)
    parsed = parsed_model(trt, model)
    config = parsed.builder.create_builder_config()
    first, second = add_profiles(parsed, config, model.inputs, (SMALL, LARGE))
    assert config.num_optimization_profiles == 2
    assert [tuple(shape) for shape in first.get_shape("x")] == [
        (1, 4, 8, 8),
        (4, 4, 8, 8),
        (8, 4, 8, 8),
    ]
    assert [tuple(shape) for shape in second.get_shape("x")] == [(16, 4, 8, 8)] * 3


def test_value_profiles_reach_the_library(tmp_path: Path, trt: Any) -> None:
    model = expansion(tmp_path)
    parsed = parsed_model(trt, model)
    assert shape_tensors(parsed.network) == ("k",)
    config = parsed.builder.create_builder_config()
    (profile,) = add_profiles(parsed, config, model.inputs, (Profile(values={"k": VALUES}),))
    assert [list(values) for values in profile.get_shape_input("k")] == [[1, 3], [4, 3], [8, 3]]
    assert [spec.location for spec in with_locations(model.inputs, parsed)] == ["device", "host"]


@pytest.mark.parametrize("profiles", [(), (Profile(),)])
def test_a_shape_tensor_without_values_is_an_error_of_the_plan(
    tmp_path: Path, trt: Any, profiles: tuple[Profile, ...]
) -> None:
    model = expansion(tmp_path)
    parsed = parsed_model(trt, model)
    with pytest.raises(PlanError, match="input 'k' decides a shape by its values"):
        add_profiles(parsed, parsed.builder.create_builder_config(), model.inputs, profiles)


# -- configuration -----------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (recipe(Precision.FP16), ()),
        (recipe(Precision.INT8), ()),
        (recipe(Precision.FP16, realised_in="flags"), ("FP16",)),
        (recipe(Precision.BF16, realised_in="flags"), ("BF16",)),
        (recipe(Precision.INT8, realised_in="flags"), ("INT8", "FP16")),
    ],
)
def test_flags_only_where_tensorrt_may_choose(recipe: Recipe, flags: tuple[str, ...]) -> None:
    assert flags_of(recipe) == flags


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("fp16", False), ("tf32", True)])
def test_tf32_is_on_for_tf32_only(tmp_path: Path, trt: Any, precision: str, tf32: bool) -> None:
    model = convolution(tmp_path)
    config = configure(
        trt,
        parsed_model(trt, model),
        recipe(Precision(precision)),
        BuildOptions(profiles=(SMALL,)),
        model.inputs,
    )
    assert config.get_flag(trt.BuilderFlag.TF32) is tf32


def test_what_the_plan_allows_reaches_the_library(tmp_path: Path, trt: Any) -> None:
    model = convolution(tmp_path)
    allowed = TensorRTOptions(workspace_mib=64, optimization_level=1, timing_iterations=3)
    request = recipe(version_compatible=True)
    config = configure(
        trt,
        parsed_model(trt, model),
        request,
        BuildOptions(profiles=(SMALL, LARGE), tensorrt=allowed),
        model.inputs,
    )
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 2**26
    assert (config.builder_optimization_level, config.avg_timing_iterations) == (1, 3)
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    assert config.num_optimization_profiles == 2


# -- building ----------------------------------------------------------------


def for_ada(trt: Any, parsed: Parsed, model: OnnxModel, profiles: tuple[Profile, ...]) -> Any:
    """What TensorRT-RTX needs besides: the GPU that is not here."""
    config = configure(trt, parsed, recipe(), BuildOptions(profiles=profiles), model.inputs)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    return config


def test_a_build_says_what_it_does_and_no_fraction(tmp_path: Path, trt: Any) -> None:
    model = convolution(tmp_path)
    parsed = parsed_model(trt, model)
    config = for_ada(trt, parsed, model, (SMALL,))
    events: list[tuple[float | None, str]] = []
    plan = serialize(
        trt, parsed, config, lambda fraction, text, figures=None: events.append((fraction, text))
    )
    assert len(plan) > 1000
    assert events == [(None, "timing kernels")]
    assert (
        config.progress_monitor is None
    )  # it would be Python between the runs of a kernel that is timed


def test_a_value_profile_builds(tmp_path: Path, trt: Any) -> None:
    model = expansion(tmp_path)
    parsed = parsed_model(trt, model)
    config = for_ada(trt, parsed, model, (Profile(values={"k": VALUES}),))
    assert len(serialize(trt, parsed, config, lambda fraction, text, figures=None: None)) > 1000


SKIPPED = (
    "ERROR",
    (
        "Error Code: 9: Skipping tactic 0x0000000000000000 due to exception"
        " [type.cpp:infer_type:145] Could not infer output types"
    ),
)
TACTIC = (
    "WARNING",
    "Tactic Device request: 8456MB Available: 400MB. Device memory is insufficient to use tactic.",
)
NO_KERNEL = (
    "ERROR",
    (
        "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any"
        " implementation for node {conv}.)"
    ),
)
GIB = 2**30


@pytest.mark.parametrize(
    ("messages", "memory", "kind", "message"),
    [
        # seen with 0.4 GiB of an H200's memory left: not a word about memory
        (
            [
                (
                    "ERROR",
                    "IBuilder::buildSerializedNetwork: Error Code 1: Cask (no further information)",
                )
            ],
            (GIB // 3, 140 * GIB),
            OutOfDeviceMemory,
            "0.3 of 140.0 GiB",
        ),
        (
            [
                (
                    "ERROR",
                    (
                        "[executionContext.cpp::x::1] Error Code 2: OutOfMemory (Requested size was"
                        " 34359738368 bytes.)"
                    ),
                )
            ],
            (20 * GIB, 80 * GIB),
            OutOfDeviceMemory,
            "out of the GPU's memory: it asked for 32.0 GiB at once, 20.0 of 80.0 GiB are free now",
        ),
        (
            [TACTIC, NO_KERNEL],
            (70 * GIB, 80 * GIB),
            OutOfDeviceMemory,
            "its kernels need more of the GPU's memory than they may use",
        ),
        (
            [SKIPPED, NO_KERNEL],
            (70 * GIB, 80 * GIB),
            UnsupportedError,
            "model: Could not find any implementation for node {conv}",
        ),
        (
            [
                (
                    "ERROR",
                    (
                        "IBuilder::buildSerializedNetwork: Error Code 6: API Usage Error (Unable to"
                        " load library: libnvinfer_builder_resource_sm90.so.11.2.1:"
                        " libnvinfer_builder_resource_sm90.so.11.2.1: cannot open shared object"
                        " file)"
                    ),
                )
            ],
            (70 * GIB, 80 * GIB),
            BackendUnavailable,
            "its library libnvinfer_builder_resource_sm90.so.11.2.1 is missing on this host",
        ),
        ([SKIPPED], (0, 0), UnsupportedError, "it does not say why"),
        (
            [(NO_KERNEL[0], f"{NO_KERNEL[1]}\nanother's loader: out of memory, 1234567 bytes")],
            (70 * GIB, 80 * GIB),
            UnsupportedError,
            "node {conv}",
        ),
    ],
)
def test_why_there_is_no_engine(
    messages: list[tuple[str, str]],
    memory: tuple[int, int],
    kind: type[CrucibleError],
    message: str,
) -> None:
    error = build_error(messages, memory)
    assert type(error) is kind
    assert error.message.startswith(CANNOT)
    assert message in error.message
    assert "Skipping" not in error.message
    assert error.next_step


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NO_KERNEL[1], "Could not find any implementation for node {conv}"),
        (
            (
                "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find"
                " any implementation for node {ForeignNode[a...b]}.)"
            ),
            "Could not find any implementation for node {ForeignNode[a...b]}",
        ),
        ("x: Error Code 1: Cuda Runtime (out of memory)", "out of memory"),
        ("x: Error Code 4: API Usage Error (no shape for y (input 2))", "no shape for y (input 2)"),
        (
            "Error Code 4: Internal Error (x: two outputs. In checkAll at optimizer.cpp:12)",
            "x: two outputs",
        ),
        (
            "IRuntime::x: Error Code 1: Serialization (Serialization assertion a == f(b) failed.)",
            "Serialization assertion a == f(b) failed",
        ),
        ("Missing scale for tensor x (a guess)", "Missing scale for tensor x (a guess)"),
        ("Make sure input x has Int64 binding.", "Make sure input x has Int64 binding."),
    ],
)
def test_a_sentence_of_the_library_is_told_without_what_c_plus_plus_puts_around_it(
    text: str, message: str
) -> None:
    assert sentence(text) == message


def test_warnings_become_notes_but_not_without_end(tmp_path: Path, trt: Any) -> None:
    model = convolution(tmp_path)
    messages_of(trt)[:] = [
        ("WARNING", f"Missing scale for tensor {number}") for number in range(30)
    ] + [("WARNING", "Make sure input x has Int64 binding.")]
    notes = warnings_of(trt, model)
    assert [note.text for note in notes][:1] == ["TensorRT: Missing scale for tensor 0"]
    assert notes[-1].text == f"TensorRT: and {30 - MAX_WARNINGS} more warnings"
    assert len(notes) == MAX_WARNINGS + 1
    messages_of(trt).clear()
