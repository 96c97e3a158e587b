"""The user's module: loading it, naming what it returns, and running it as a baseline."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.backends.pytorch import backend as pytorch_
from pipeline.backends.pytorch.inductor import CudaHeaders, cuda_headers, lack_of_tools, seed_cache
from pipeline.backends.pytorch.module import (
    allow_tf32,
    array_from_tensor,
    in_precision,
    load_module,
    name_outputs,
    run_module,
    tensor_from_array,
    weights_bytes,
)
from pipeline.core.artifacts import BuildOptions, ModelSource, OnnxModel
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.errors import BackendUnavailable, DataError, HostError, ModelError, UnsupportedError
from tests.pipeline.backends.pytorch.builders import (
    CLASSES,
    COMPILE,
    EMBEDDING,
    IDS,
    IMAGE,
    MASK,
    TOKENS,
    engine_of,
    run,
    source_of,
)

# --- loading ---


def test_weights_come_from_the_file_and_the_module_is_in_eval_mode(tmp_path: Path) -> None:
    trained = load_module(source_of("residual_cnn", IMAGE))
    state = {name: torch.full_like(value, 0.5) for name, value in trained.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    module = load_module(source_of("residual_cnn", IMAGE, weights=tmp_path / "w.safetensors"))
    assert not module.training
    assert {float(value.float().mean()) for value in module.state_dict().values()} <= {0.5, 0.0}


def test_the_weights_of_a_module_are_its_parameters_and_buffers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3))
    tied = torch.nn.ModuleList([module, module])
    batch_norm = 4 * 3 * 4 + 8  # two parameters, two buffers, and a count in int64
    assert weights_bytes(module) == weights_bytes(tied) == 4 * 3 * 4 + batch_norm
    assert weights_bytes(lambda x: x) is None


def test_random_weights_follow_the_seed() -> None:
    source = source_of("residual_cnn", IMAGE)
    one, same, other = (
        load_module(source.model_copy(update={"seed": seed})).state_dict()["head.weight"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = load_module(source_of("residual_cnn", IMAGE)).state_dict()
    file = tmp_path / "w.safetensors"
    source = source_of("residual_cnn", IMAGE).model_copy(update={"weights": file})
    save_file(
        {
            "extra": torch.zeros(1),
            **{name: value for name, value in state.items() if name != "head.bias"},
        },
        file,
    )
    with pytest.raises(ModelError, match=r"lacks head\.bias and has unknown extra"):
        load_module(source)
    save_file({**state, "head.bias": torch.zeros(3)}, file)
    with pytest.raises(ModelError, match=r"size mismatch for head\.bias"):
        load_module(source)
    file.write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load_module(source)
    torch.save(state, file)
    with pytest.raises(ModelError, match=r"looks like a file of torch\.save") as raised:
        load_module(source)
    assert "save_model" in raised.value.next_step


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nothing_of_this_name\n", "No module named 'nothing_of_this_name'"),
        ("def other(): ...\n", "has no function or class 'make'"),
        ("class Maker: ...\n", "has no function or class 'make': did you mean 'Maker'"),
        ("def make(): return 1 / 0\n", "raised ZeroDivisionError: division by zero"),
        ("def make(): return 3\n", "returned int"),
        ("def make(): raise SystemExit(5)\n", "raised SystemExit: 5"),
    ],
)
def test_an_entrypoint_that_fails_is_named_with_its_cause(
    tmp_path: Path, text: str, expected: str
) -> None:
    name = f"entry_{abs(hash(text))}"  # a module is imported once per process
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ModelError, match=expected):
        load_module(source_of(f"{name}:make", IMAGE, folder=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_an_entrypoint_that_uses_cuda_without_a_gpu_is_told_to_build_on_the_cpu(
    tmp_path: Path,
) -> None:
    text = "import torch\ndef make(): return torch.nn.Linear(1, 1).cuda()\n"
    (tmp_path / "entry_on_cuda.py").write_text(text)
    with pytest.raises(ModelError, match="raised") as raised:
        load_module(source_of("entry_on_cuda:make", IMAGE, folder=tmp_path))
    assert "builds the module on the CPU" in raised.value.next_step


def test_a_damaged_pt2_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"not a program")
    with pytest.raises(ModelError, match=r"model\.pt2' cannot be read"):
        load_module(ModelSource(path=tmp_path / "model.pt2", inputs=(IMAGE,)))


# --- outputs ---


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


X, Y = torch.zeros(1), torch.ones(2)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (X, ["output_0"]),
        ((X, [Y, None]), ["output_0", "output_1"]),
        (OrderedDict(b=X, a={"c": Y}), ["b", "a_c"]),
        (Answer(X, (Y, Y)), ["logits", "hidden_0", "hidden_1"]),
    ],
)
def test_outputs_are_flattened_in_a_stated_order(result: object, names: list[str]) -> None:
    assert list(name_outputs(result, source_of("several"))) == names


def test_outputs_take_the_plans_names_and_must_be_as_many() -> None:
    assert list(name_outputs((X, Y), source_of("several", outputs=("a", "b")))) == ["a", "b"]
    with pytest.raises(ModelError, match="names 1 outputs, the model returns 2"):
        name_outputs((X, Y), source_of("several", outputs=("a",)))
    with pytest.raises(ModelError, match="'output_1' of the model is a int"):
        name_outputs((X, 3), source_of("several"))
    with pytest.raises(ModelError, match="'image' is the name of an input and of an output"):
        name_outputs({"image": X}, source_of("several", IMAGE))


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"]
)
def test_arrays_cross_to_torch_and_back(dtype: str) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array.flags.writeable = False
    tensor = tensor_from_array(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    back = array_from_tensor(tensor)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_a_model_that_fails_says_on_what() -> None:
    source = source_of("residual_cnn", IMAGE)
    with pytest.raises(ModelError, match=r"fails on image float32\[1, 2, 8, 8\]"):
        run_module(load_module(source), source, {"image": np.zeros((1, 2, 8, 8), np.float32)})


# --- the baselines ---


# inductor warns while it compiles, and a warning turned into an error becomes an internal error of
# its own


@pytest.mark.parametrize("variant", ["eager", "traced", COMPILE])
def test_every_variant_answers_as_the_module_does_at_every_shape(
    tmp_path: Path, variant: str
) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    engine = engine_of(source, (CLASSES,), variant, tmp_path)
    module = load_module(source)
    for batch in (2, 5):
        image = np.random.default_rng(batch).standard_normal((batch, 1, 8, 8)).astype(np.float32)
        got = run(engine, {"image": image})
        np.testing.assert_allclose(
            got["classes"],
            run_module(module, source, {"image": image})["classes"],
            rtol=1e-4,
            atol=1e-5,
        )


def test_several_inputs_and_a_dict_of_outputs(tmp_path: Path) -> None:
    source = source_of("encoder", IDS, MASK)
    feeds = {
        "mask": np.ones((3, 5), np.int64),
        "ids": np.arange(15).reshape(3, 5),
    }  # bound by name, not by order
    for variant in ("eager", "traced"):
        got = run(engine_of(source, (EMBEDDING, TOKENS), variant, tmp_path), feeds)
        assert [(name, array.shape) for name, array in got.items()] == [
            ("embedding", (3, 16)),
            ("tokens", (3, 5, 16)),
        ]


def test_bind_refuses_what_the_engine_does_not_take(tmp_path: Path) -> None:
    session = pytorch_.load(
        engine_of(source_of("encoder", IDS, MASK), (EMBEDDING, TOKENS), "eager", tmp_path)
    ).session()
    ids = np.zeros((2, 4), np.int64)
    wrong: list[Tensors] = [
        {"ids": ids},
        {"ids": ids, "mask": ids.astype(np.int32)},
        {"ids": ids, "mask": ids[:1]},
        {"ids": ids[:, :0], "mask": ids[:, :0]},
    ]
    for feeds in wrong:
        with pytest.raises(DataError):
            session.bind(feeds)


def test_the_caller_owns_what_it_fetched(tmp_path: Path) -> None:
    specs = tuple(
        TensorSpec(name=f"output_{i}", dtype=dtype, shape=())
        for i, dtype in enumerate(("float32", "int64", "bool"))
    )
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 3))
    scale = TensorSpec(name="scale", dtype="float32", shape=())
    session = pytorch_.load(
        engine_of(source_of("several", x, scale), specs, "eager", tmp_path)
    ).session()
    fetched = []
    for value in (1.0, 2.0):
        session.bind({"x": np.ones((1, 3), np.float32), "scale": np.array(value, np.float32)})
        session.upload()
        session.execute()
        session.download()
        fetched.append(session.fetch()["output_0"])
    assert [array.tolist() for array in fetched] == [[[1, 1, 1]], [[2, 2, 2]]]


def test_an_engine_does_not_load_once_the_source_has_changed(tmp_path: Path) -> None:
    (tmp_path / "changing.py").write_text("import torch\ndef make(): return torch.nn.ReLU()\n")
    source = source_of("changing:make", IMAGE, folder=tmp_path)
    engine = engine_of(source, (IMAGE.model_copy(update={"name": "output_0"}),), "eager", tmp_path)
    (tmp_path / "changing.py").write_text("import torch\ndef make(): return torch.nn.GELU()\n")
    with pytest.raises(ModelError, match="have changed"):
        pytorch_.load(engine)


def test_two_sources_with_one_export_are_two_engines(tmp_path: Path) -> None:
    engines = [
        engine_of(source_of(function, IMAGE), (CLASSES,), "eager", tmp_path)
        for function in ("residual_cnn", "several")
    ]
    assert len({engine.digest for engine in engines}) == 2


def test_what_pytorch_cannot_be_is_refused(tmp_path: Path) -> None:
    source = source_of("residual_cnn", IMAGE)
    with pytest.raises(UnsupportedError, match="no variant 'fast' in fp32"):
        engine_of(source, (CLASSES,), "fast", tmp_path)
    engine = engine_of(source, (CLASSES,), "eager", tmp_path)
    with pytest.raises(UnsupportedError, match="not on 'cuda'"):
        pytorch_.load(engine, "cuda")
    with pytest.raises(BackendUnavailable, match="version"):
        pytorch_.load(
            engine.model_copy(
                update={"target": engine.target.model_copy(update={"version": "1.0"})}
            )
        )
    with pytest.raises(BackendUnavailable, match=r"compute capability 9\.0, this host has none"):
        pytorch_.load(
            engine.model_copy(
                update={"target": engine.target.model_copy(update={"compute_capability": "9.0"})}
            )
        )
    model = OnnxModel(
        root=tmp_path, file="model.onnx", digest="d", opset=20, inputs=(IMAGE,), outputs=(CLASSES,)
    )
    with pytest.raises(UnsupportedError, match="a baseline, not a candidate"):
        pytorch_.build(model, engine.recipe, BuildOptions(profiles=()), tmp_path)


def test_compile_without_a_compiler_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HostError, match="no 'no-such-compiler'") as error:
        engine_of(source_of("residual_cnn", IMAGE), (CLASSES,), "compile", tmp_path)
    assert error.value.next_step == "install g++, or drop the baseline `compile`"


# --- in other precisions ---


def test_a_baseline_in_16_bits_is_the_module_cast_with_its_interface_as_it_was(
    tmp_path: Path,
) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    engine = engine_of(source, (CLASSES,), "eager", tmp_path, Precision.BF16)
    assert engine.recipe.label == "pytorch eager bf16"
    image = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)
    got = run(engine, {"image": image})["classes"]
    want = run_module(load_module(source), source, {"image": image})["classes"]
    assert got.dtype == np.float32
    assert 1e-5 < np.abs(got - want).max() < 0.05  # rounded, and no more


def test_several_outputs_keep_their_names_and_dtypes_in_16_bits(tmp_path: Path) -> None:
    feeds = {"mask": np.ones((3, 5), np.int64), "ids": np.arange(15).reshape(3, 5)}
    engine = engine_of(
        source_of("encoder", IDS, MASK),
        (EMBEDDING, TOKENS),
        "eager",
        tmp_path,
        Precision.BF16,
    )
    got = run(engine, feeds)
    assert [(name, array.shape, array.dtype.name) for name, array in got.items()] == [
        ("embedding", (3, 16), "float32"),
        ("tokens", (3, 5, 16), "float32"),
    ]


def test_an_exported_program_cannot_be_cast(tmp_path: Path) -> None:
    source = ModelSource(path=tmp_path / "model.pt2", inputs=(IMAGE,))
    with pytest.raises(UnsupportedError, match="cannot be cast to fp16") as error:
        engine_of(source, (CLASSES,), "eager", tmp_path, Precision.FP16)
    assert "`entrypoint`" in error.value.next_step


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [(Precision.FP32, False), (Precision.TF32, True), (Precision.FP16, False)],
)
def test_tf32_is_allowed_where_it_is_asked_for_and_nowhere_else(
    precision: Precision,
    allowed: bool,
) -> None:
    source = source_of("residual_cnn", IMAGE)
    try:
        in_precision(load_module(source), precision, (CLASSES,))
        flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        assert flags == (allowed, allowed)
        load_module(source)
        assert not torch.backends.cuda.matmul.allow_tf32  # the reference's
    finally:
        allow_tf32(False)


# --- what torch.compile needs ---


@pytest.mark.parametrize(
    ("variable", "on_gpu", "ahead", "language"),
    [("CC", True, False, "C"), ("CXX", False, False, "C++"), ("CXX", False, True, "C++")],
)
def test_the_compiler_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    on_gpu: bool,
    ahead: bool,
    language: str,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv(variable, "no-such-compiler")
    lack = lack_of_tools(on_gpu, ahead)
    assert lack
    assert lack.what == f"a {language} compiler, and there is no 'no-such-compiler'"


def test_a_package_for_a_gpu_needs_cudas_headers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "include").mkdir()
    assert CudaHeaders(tmp_path) != cuda_headers()  # it is empty
    (tmp_path / "include" / "crt").mkdir()
    for file in ("cuda_runtime.h", "crt/host_config.h"):
        (tmp_path / "include" / file).touch()
    assert cuda_headers() == CudaHeaders(tmp_path)


def test_the_compilers_are_told_where_headers_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_HOME", "elsewhere")
    monkeypatch.setenv("CPATH", "mine")
    CudaHeaders(tmp_path, tmp_path / "more").use()
    assert os.environ["CUDA_HOME"] == str(tmp_path)
    assert os.environ["CPATH"] == f"mine:{tmp_path / 'more'}"


def test_the_cache_of_an_engine_is_added_to_that_of_the_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = tmp_path / "engine", tmp_path / "process"
    for folder, names in ((ours, ("ab/one.so", "ab/two.so")), (theirs, ("ab/two.so",))):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{folder.name} {name}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    seed_cache(ours)
    assert {
        file.name: file.read_text()
        for file in theirs.rglob(
            "*.*",
        )
    } == {"one.so": "engine ab/one.so", "two.so": "process ab/two.so"}
    seed_cache(tmp_path / "nothing")
