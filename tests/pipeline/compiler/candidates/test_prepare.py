"""What stops a candidate on its way is its state and reason, and stops no other; what stops the
check of a mislabelled one hides nothing of that.
"""

from pathlib import Path
from typing import Any

import pytest

from pipeline.backends import BACKENDS
from pipeline.compiler.candidates.host_recipes import (
    MIN_AOTI_BYTES,
    TOO_SMALL_FOR_AOTI,
    check_candidates,
    recipes_of,
    release_notes,
)
from pipeline.compiler.candidates.prepare import prepare, stopped, with_layers
from pipeline.compiler.context import CompileContext, open_context
from pipeline.core.artifacts import Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import UnsupportedError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from pipeline.results.candidates import Candidate
from tests.builders.attention import written_out
from tests.builders.cli import write_task
from tests.builders.halves import Halves
from tests.builders.layers import real_table
from tests.pipeline.backends.onnxruntime.onnxruntime_double import pretend_gpu

RECIPE = Recipe(backend="tensorrt", precision=Precision.INT8, realised_in="flags")


def test_what_stops_a_candidate_is_its_state_and_reason() -> None:
    result = stopped(
        Candidate(label="a", recipe=RECIPE, state="failed"), "refused", "no such kernel"
    )
    assert (result.state, result.reason) == ("refused", "no such kernel")


def test_a_mislabelled_engine_that_cannot_be_checked_stays_mislabelled() -> None:
    wrong = Candidate(
        label="a", recipe=RECIPE, state="mislabelled", reason="called int8, but runs fp16"
    )
    result = stopped(wrong, "failed", "out of the GPU's memory")
    assert (result.state, result.reason) == (
        "mislabelled",
        "called int8, but runs fp16; its outputs were not checked: out of the GPU's memory",
    )


def opened(folder: Path, *precisions: str) -> CompileContext:
    candidates = [{"backend": "onnxruntime", "precision": precision} for precision in precisions]
    return open_context(
        load_plan(write_task(folder, candidates=candidates)), Runner(Store(folder / "home"))
    )


def test_what_this_host_cannot_do_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    context = opened(tmp_path, "bf16", "fp32")
    check_candidates(context)
    (bf16, fp32), _ = recipes_of(context)
    nothing: Any = None  # neither an answer to compare with nor a graph is looked at
    outcome = prepare(context, onnx_model(tmp_path, "model.onnx"), bf16, nothing)
    refused = outcome.candidate
    assert outcome.bug is None
    assert (refused.label, refused.state, refused.engine) == ("onnxruntime bf16", "refused", None)
    assert "would only pretend to run bf16" in refused.reason
    assert fp32.precision is Precision.FP32
    assert context.runner.steps == []


def test_a_plan_of_which_nothing_can_be_done_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="would only pretend to run bf16"):
        check_candidates(opened(tmp_path, "bf16", "fp16"))


def test_the_report_warns_of_a_tensorrt_with_reported_wrong_answers() -> None:
    target = Target(
        backend="tensorrt", version="11.1.0.106", device="NVIDIA H200", compute_capability="9.0"
    )
    (note,) = release_notes({"tensorrt": target})
    assert (note.level, "NVIDIA/TensorRT#4853" in note.text) == ("warning", True)
    ours = target.model_copy(update={"version": "10.6.0"})
    assert release_notes({"tensorrt": ours}) == release_notes({}) == ()


@pytest.mark.parametrize(
    ("precision", "backend", "table", "plain", "remedies"),
    [
        (
            Precision.FP16,
            "tensorrt",
            "enc_fp32",
            False,
            [": `simplify: {rewrite_attention: true}` may bring it there"],
        ),
        (Precision.FP16, "tensorrt", "enc_fp32", True, [""]),
        (Precision.FP16, "tensorrt", "enc_fp16", False, []),
        (Precision.FP16, "tensorrt", "resnet_fp16", False, []),
        (Precision.FP16, "onnxruntime", "enc_fp32", False, []),
        (
            Precision.FP32,
            "tensorrt",
            "enc_fp32",
            False,
            [],
        ),  # no kernel of TensorRT does it in fp32
        (Precision.FP8, "tensorrt", "enc_fp32", False, []),
    ],
)
def test_attention_in_several_kernels_is_said_with_what_may_help(
    tmp_path: Path, precision: Precision, backend: str, table: str, plain: bool, remedies: list[str]
) -> None:
    model = written_out()
    (softmax,) = [node for node in model.graph.node if node.op_type == "Softmax"]
    softmax.name = "/m/encoder/layer.0/attention/self/Softmax"  # as in the tables
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    candidate = Candidate(
        label="a", recipe=Recipe(backend=backend, precision=precision), state="built"
    )
    result = with_layers(candidate, [real_table(table)], onnx_model(tmp_path, "model.onnx"), plain)
    text = "attention is in one kernel in 0 of 1 places"
    assert [
        note.text.removeprefix(text)
        for note in result.notes
        if note.text.startswith("attention is")
    ] == remedies


def test_an_engine_whose_second_profile_runs_something_else_is_mislabelled(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(written_out().SerializeToString())
    recipe = Recipe(backend="tensorrt", precision=Precision.FP16)
    candidate = Candidate(label="a", recipe=recipe, state="built")
    honest = real_table("resnet_fp16")
    wrong = real_table("enc_fp32").model_copy(update={"profile": 1})
    result = with_layers(candidate, [honest, wrong], onnx_model(tmp_path, "model.onnx"), True)
    assert result.state == "mislabelled"
    assert result.reason.startswith("profile 2: called fp16, but ")
    assert (result.layers, result.other_layers) == (honest, (wrong,))
    alike = honest.model_copy(update={"profile": 1})
    result = with_layers(candidate, [honest, alike], onnx_model(tmp_path, "model.onnx"), True)
    assert (result.state, result.reason) == ("built", "")


def test_a_second_profile_does_not_hide_that_the_first_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(written_out().SerializeToString())
    recipe = Recipe(backend="tensorrt", precision=Precision.FP16)
    candidate = Candidate(label="a", recipe=recipe, state="built")
    wrong, honest = (
        real_table("enc_fp32"),
        real_table("resnet_fp16").model_copy(update={"profile": 1}),
    )
    result = with_layers(candidate, [wrong, honest], onnx_model(tmp_path, "model.onnx"), True)
    assert result.state == "mislabelled"
    assert result.reason.startswith("called fp16, but ")


class OnGpu(Halves):
    """Halves that says it is on a GPU."""

    def probe(self) -> Target:
        return Target(
            backend=self.name, version="10.6", device="NVIDIA H200", compute_capability="9.0"
        )


@pytest.mark.parametrize(
    ("size", "tensorrt", "tried"),
    [(MIN_AOTI_BYTES - 1, True, False), (MIN_AOTI_BYTES, True, True), (10, False, True)],
    ids=["small", "large", "small, without TensorRT"],
)
def test_small_models_are_not_compiled_by_aotinductor_beside_tensorrt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    tensorrt: bool,
    tried: bool,
) -> None:
    pretend_gpu(tmp_path / "bin", monkeypatch)
    monkeypatch.setitem(BACKENDS, "torch", OnGpu("torch"))
    if tensorrt:
        monkeypatch.setitem(BACKENDS, "tensorrt", OnGpu("tensorrt"))
    (tmp_path / "net.py").write_text("def build(): ...\n")
    inputs = [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}]
    model = {"entrypoint": "net:build", "weights_from": "random: a test", "inputs": inputs}
    plan = load_plan(write_task(tmp_path, model=model, data={}, candidates=[]))
    context = open_context(plan, Runner(Store(tmp_path / "home")))
    recipes, notes = recipes_of(context, size=size)
    assert any(recipe.form == "aoti" for recipe in recipes) is tried
    assert (TOO_SMALL_FOR_AOTI in [note.text for note in notes]) is not tried
