"""PyTorch programs on the CPU: they answer as the module does, and what cannot be had is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.backends.base import run_session
from pipeline.backends.pytorch import programs as torch_programs
from pipeline.backends.pytorch.module import load_module, run_module
from pipeline.backends.pytorch.programs import PACKAGE, capture_sizes, check_recipe
from pipeline.core.artifacts import BuildOptions, Engine, ModelSource, OnnxModel, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CompileMode, Precision, ProgramForm, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import (
    BackendUnavailable,
    ChildDied,
    ChildKilled,
    DataError,
    LoadCrashed,
    ModelError,
    StoreError,
    UnsupportedError,
)
from pipeline.execution.child_process import call_in_child
from pipeline.host.environment import cpu_flags
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.plan.source import digest_of_source
from tests.pipeline.backends.pytorch.builders import (
    CLASSES,
    EMBEDDING,
    IDS,
    IMAGE,
    MASK,
    PROFILE,
    TOKENS,
    source_of,
)

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
CPU = Target(backend="torch", version="2", device="cpu", cpu_flags=("avx2",))
BF16_CPU = CPU.model_copy(update={"cpu_flags": ("avx2", "avx512_bf16")})
GPU = Target(backend="torch", version="2", device="gpu", compute_capability="9.0")
HAS_BF16 = bool({"avx512_bf16", "amx_bf16"} & set(cpu_flags()))
Feeds = dict[str, np.ndarray]


def recipe_of(
    form: ProgramForm | None,
    precision: Precision = Precision.FP32,
    mode: CompileMode | None = None,
    **more: object,
) -> Recipe:
    fields = {
        "backend": "torch",
        "precision": precision,
        "realised_in": "runtime",
        "form": form,
        "mode": mode,
        **more,
    }
    return Recipe.model_validate(fields)


def build(
    source: ModelSource,
    outputs: tuple[TensorSpec, ...],
    recipe: Recipe,
    out: Path,
    profiles: tuple[Profile, ...] = (PROFILE,),
) -> Engine:
    out.mkdir(parents=True, exist_ok=True)
    model = OnnxModel(
        root=out,
        file="model.onnx",
        digest="d",
        opset=20,
        inputs=source.inputs,
        outputs=outputs,
    )
    return torch_programs.build(
        model,
        recipe,
        BuildOptions(profiles=profiles, threads=1, source=source),
        out,
    )


def answers(engine: Engine, feeds: list[Feeds], progress: Progress) -> list[Feeds]:
    """What one session says to each in turn; in a child, for torch leaves threads behind."""
    loaded = torch_programs.load(engine)
    session = loaded.session()
    outputs = [dict(run_session(session, feed)) for feed in feeds]
    session.close()
    loaded.close()
    return outputs


def build_and_answer(
    source: ModelSource,
    outputs: tuple[TensorSpec, ...],
    recipe: Recipe,
    out: Path,
    feeds: list[Feeds],
    progress: Progress,
) -> tuple[Engine, list[Feeds]]:
    engine = build(source, outputs, recipe, out)
    return engine, answers(engine, feeds, progress)


def images(*batches: int) -> list[Feeds]:
    return [dict(draw_feeds((IMAGE,), {"batch": batch}, batch)) for batch in batches]


def assert_as_the_module(
    source: ModelSource,
    feeds: list[Feeds],
    got: list[Feeds],
    atol: float = 1e-5,
) -> None:
    module = load_module(source)
    for feed, outputs in zip(feeds, got, strict=True):
        for name, want in run_module(module, source, feed).items():
            assert (outputs[name].dtype, outputs[name].shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(outputs[name], want, rtol=1e-4, atol=atol)


# --- what is refused, before anything is built ---


@pytest.mark.parametrize(
    ("recipe", "target", "words"),
    [
        (recipe_of(None), CPU, "no form 'None'"),
        (
            recipe_of("aoti", mode="max-autotune"),
            CPU,
            "`mode` is torch.compile's, and this form is aoti",
        ),
        (recipe_of("exported", Precision.INT8), CPU, "not made in int8"),
        (recipe_of("exported", keep_fp32=("conv",)), CPU, "no node stays in fp32"),
        (recipe_of("exported", Precision.TF32), CPU, "TF32 is a format of NVIDIA GPUs"),
        (recipe_of("exported", Precision.BF16), CPU, "computes in bf16 by way of fp32 only"),
        (recipe_of("exported", Precision.FP16), BF16_CPU, "computes in fp16 by way of fp32 only"),
    ],
)
def test_what_pytorch_lacks_is_named(recipe: Recipe, target: Target, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        check_recipe(recipe, target)


@pytest.mark.parametrize(
    ("form", "target", "variable", "words"),
    [
        ("aoti", CPU, "CXX", r"AOTInductor needs a C\+\+ compiler"),
        ("aoti", GPU, "CXX", r"AOTInductor needs a C\+\+ compiler"),
        ("compile", CPU, "CXX", r"torch.compile needs a C\+\+ compiler"),
        ("compile", GPU, "CC", r"torch.compile needs a C compiler"),
    ],
)
def test_without_a_compiler_only_the_program_itself_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    form: ProgramForm,
    target: Target,
    variable: str,
    words: str,
) -> None:
    if target is GPU:
        pytest.importorskip("triton")
    (tmp_path / "include" / "crt").mkdir(parents=True)
    for file in ("cuda_runtime.h", "crt/host_config.h"):
        (tmp_path / "include" / file).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(UnsupportedError, match=words) as error:
        check_recipe(recipe_of(form), target)
    assert "take `form: exported`" in error.value.next_step
    check_recipe(recipe_of("exported"), target)


def test_a_source_that_has_no_program_or_cannot_be_cast_is_refused(tmp_path: Path) -> None:
    onnx = ModelSource(path=tmp_path / "model.onnx")
    with pytest.raises(UnsupportedError, match="an ONNX file has no PyTorch program"):
        build(onnx, (CLASSES,), recipe_of("exported"), tmp_path)
    if HAS_BF16:
        pt2 = ModelSource(path=tmp_path / "model.pt2", inputs=(IMAGE,))
        with pytest.raises(UnsupportedError, match="cannot be cast to bf16"):
            build(pt2, (CLASSES,), recipe_of("exported", Precision.BF16), tmp_path)


def test_a_branch_on_data_is_named_with_its_line(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
    with pytest.raises(ModelError, match=r"models.py:\d+ in forward: if x.sum\(\) < 0"):
        build(
            source_of("frozen_branch", x),
            (x.model_copy(update={"name": "output_0"}),),
            recipe_of("exported"),
            tmp_path,
        )


def test_a_dimension_that_the_code_fixes_is_named(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 2, 3))
    y = TensorSpec(name="output_0", dtype="float32", shape=("batch", 2))
    profile = Profile.model_validate({"dims": {"batch": [1, 4, 8]}})
    with pytest.raises(
        ModelError,
        match="cannot capture this model: the model's code fixes 'batch' at its example's 4",
    ):
        build(source_of("baked_batch", x), (y,), recipe_of("exported"), tmp_path, (profile,))


# --- at which sizes it is captured ---


@pytest.mark.parametrize(
    ("ranges", "sizes"),
    [
        (
            [{"batch": [1, 8, 64], "sequence": [1, 128, 512]}],
            {"batch": 8, "sequence": 128},
        ),  # where it is to be fast
        (
            [{"batch": [1, 1, 16], "sequence": [1, 1, 2]}],
            {"batch": 16, "sequence": 2},
        ),  # 0 and 1 would be taken to be fixed
        (
            [{"batch": [1, 8, 64], "sequence": [1, 8, 8]}],
            {"batch": 8, "sequence": 3},
        ),  # equal sizes would look like one dimension
        ([{"batch": [1, 1, 1], "sequence": [4, 4, 4]}], {"batch": 1, "sequence": 4}),  # never vary
        (
            [
                {"batch": [1, 1, 1], "sequence": [4, 4, 4]},
                {"batch": [2, 4, 8], "sequence": [4, 4, 4]},
            ],
            {"batch": 8, "sequence": 4},
        ),
    ],
)
def test_the_usual_sizes_are_captured_unless_they_would_be_taken_for_others(
    ranges: list[dict[str, list[int]]],
    sizes: dict[str, int],
) -> None:
    profiles = tuple(Profile.model_validate({"dims": bounds}) for bounds in ranges)
    assert capture_sizes((IDS, MASK), profiles) == sizes


# --- the program as it is ---


def test_an_exported_program_answers_as_the_module_at_every_size(tmp_path: Path) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    feeds = images(2, 5, 1)
    engine, got = call_in_child(
        build_and_answer,
        source,
        (CLASSES,),
        recipe_of("exported"),
        tmp_path,
        feeds,
        name="exported",
    )
    assert_as_the_module(source, feeds, got)
    assert (engine.target.backend, engine.cold_start_s, engine.notes) == ("torch", None, ())
    assert engine.size_bytes == (tmp_path / "program.pt2").stat().st_size


def test_it_needs_none_of_the_users_code(tmp_path: Path) -> None:
    code = """
        import torch
        from dataclasses import dataclass
        @dataclass
        class Answer:
            logits: torch.Tensor
            hidden: tuple[torch.Tensor, ...]
            loss: torch.Tensor | None = None
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)
            def forward(self, x):
                y = self.layer(x)
                return Answer(y, (x + 1, (y > 0).sum()))
        def make(): return Model()
    """
    place = tmp_path / "code"
    place.mkdir()
    (place / "answering.py").write_text(textwrap.dedent(code))
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
    dtypes = {"logits": "float32", "more": "float32", "count": "int64"}
    outputs = tuple(TensorSpec(name=name, dtype=dtype, shape=()) for name, dtype in dtypes.items())
    source = source_of("answering:make", x, outputs=("logits", "more", "count"), folder=place)
    feeds = [{"x": np.arange(batch * 4, dtype=np.float32).reshape(batch, 4)} for batch in (2, 5)]
    engine, got = call_in_child(
        build_and_answer,
        source,
        outputs,
        recipe_of("exported"),
        tmp_path / "engine",
        feeds,
        name="dataclass",
    )
    assert_as_the_module(source, feeds, got)
    shutil.rmtree(place)
    again = call_in_child(answers, engine, feeds, name="without the code")
    for one, other in zip(got, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")
def test_in_bf16_the_interface_stays_as_it_was(tmp_path: Path) -> None:
    source = source_of("encoder", IDS, MASK)
    feeds = [{"ids": np.arange(15).reshape(3, 5), "mask": np.ones((3, 5), np.int64)}]
    recipe = recipe_of("exported", Precision.BF16)
    engine, got = call_in_child(
        build_and_answer,
        source,
        (EMBEDDING, TOKENS),
        recipe,
        tmp_path,
        feeds,
        name="bf16",
    )
    assert engine.recipe.label == "torch exported bf16"
    assert_as_the_module(source, feeds, got, atol=0.05)
    exact = run_module(load_module(source), source, feeds[0])
    assert np.abs(got[0]["tokens"] - exact["tokens"]).max() > 1e-4  # no fp32 by another name


def test_a_fixed_batch_of_one_is_captured_as_such(tmp_path: Path) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    one = (Profile.model_validate({"dims": {"batch": [1, 1, 1]}}),)
    engine = build(source, (CLASSES,), recipe_of("exported"), tmp_path, one)
    session = torch_programs.load(engine).session()
    assert run_session(session, images(1)[0])["classes"].shape == (1, 10)
    with pytest.raises(DataError, match="no profile of this engine holds batch = 2"):
        session.bind(images(2)[0])


def test_a_program_of_a_pt2_and_two_sources_with_one_export(tmp_path: Path) -> None:
    import torch

    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    program = torch.export.export(
        load_module(source),
        (torch.ones(2, 1, 8, 8),),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )
    torch.export.save(program, tmp_path / "model.pt2")
    saved = ModelSource(path=tmp_path / "model.pt2", inputs=(IMAGE,), outputs=("classes",))
    saved = saved.model_copy(update={"digest": digest_of_source(saved)})
    feeds = images(2, 5)
    engine, got = call_in_child(
        build_and_answer,
        saved,
        (CLASSES,),
        recipe_of("exported"),
        tmp_path / "pt2",
        feeds,
        name="pt2",
    )
    assert_as_the_module(source, feeds, got)
    other, _ = call_in_child(
        build_and_answer,
        source,
        (CLASSES,),
        recipe_of("exported"),
        tmp_path / "other",
        feeds[:1],
        name="other",
    )
    assert engine.digest != other.digest


def test_a_foreign_host_another_device_and_damaged_files_are_refused(tmp_path: Path) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    engine = build(source, (CLASSES,), recipe_of("exported"), tmp_path)
    for update, words in (
        ({"version": "1.0"}, "engine needs version 1.0"),
        ({"compute_capability": "9.0"}, r"compute capability 9\.0, this host has none"),
        ({"cpu_flags": ("amx_of_the_future",)}, "CPU flags amx_of_the_future"),
    ):
        with pytest.raises(BackendUnavailable, match=words):
            torch_programs.load(
                engine.model_copy(update={"target": engine.target.model_copy(update=update)}),
            )
    with pytest.raises(UnsupportedError, match="not on 'cuda'"):
        torch_programs.load(engine, "cuda")
    engine.path.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="cannot be opened"):
        torch_programs.load(engine)


# --- compiled ---


@COMPILER
@pytest.mark.slow
def test_a_package_of_machine_code_answers_as_the_module_and_leaves_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # what stays, by design
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    feeds = images(2, 5, 1)
    engine, got = call_in_child(
        build_and_answer,
        source,
        (CLASSES,),
        recipe_of("aoti"),
        tmp_path / "engine",
        feeds,
        name="aoti",
    )
    assert engine.recipe.label == "torch aoti fp32"
    assert engine.cold_start_s  # it was loaded once where it was built
    assert_as_the_module(source, feeds, got)
    assert list((tmp_path / "tmp").rglob("*.wrapper.so")) == []  # unpacked, loaded and removed
    assert PACKAGE["cpp.dynamic_threads"]
    for threads in (1, 2):  # one package for all
        again = call_in_child(
            answers,
            engine.model_copy(update={"threads": threads}),
            feeds,
            name="again",
        )
        assert_as_the_module(source, feeds, again)
    engine.path.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="cannot be opened"):
        call_in_child(answers, engine, feeds, name="damaged")


CRASH = """
#include <csignal>
__attribute__((constructor)) static void crash() { std::raise(%s); }
"""
IN_PACKAGE = "program/data/aotinductor/model/x.wrapper"


def package_that_dies(out: Path, number: str) -> Engine:
    """An AOTInductor package whose machine code ends the process that loads it."""
    out.mkdir()
    (out / "crash.cpp").write_text(CRASH % number)
    compiler = ["g++", "-shared", "-fPIC", "-o", str(out / "crash.so"), str(out / "crash.cpp")]
    subprocess.run(compiler, check=True)
    target = torch_programs.probe()
    files = {
        f"{IN_PACKAGE}.so": (out / "crash.so").read_bytes(),
        f"{IN_PACKAGE}_metadata.json": json.dumps({"AOTI_DEVICE_KEY": "cpu"}).encode(),
        "program/archive_format": b"pt2",
        "program/archive_version": b"0",
        "program/.data/version": b"6",
        "program/byteorder": b"little",
    }
    with zipfile.ZipFile(out / torch_programs.FILE, "w") as package:
        for name, content in files.items():
            package.writestr(name, content)
    return Engine(
        root=out,
        file=torch_programs.FILE,
        digest="d",
        target=target,
        recipe=recipe_of("aoti"),
        inputs=(IMAGE,),
        outputs=(CLASSES,),
        profiles=(PROFILE,),
        threads=1,
        size_bytes=0,
    )


@COMPILER
@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        ("SIGSEGV", LoadCrashed, "the process that loaded it crashed: .*SIGSEGV"),
        ("SIGKILL", ChildKilled, "SIGKILL"),
    ],
)
def test_a_package_that_crashes_is_named_but_not_one_that_was_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: str,
    error: type[ChildDied],
    words: str,
) -> None:
    """A process that is killed has run out of memory: that says nothing of the package. Neither
    leaves what torch has extracted.
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
    engine = package_that_dies(tmp_path / "engine", number)
    with pytest.raises(error, match=words) as failure:
        torch_programs._loaded_once(engine, silent)
    assert type(failure.value) is error
    assert failure.value.may_pass is (number == "SIGKILL")
    assert list(temporary.iterdir()) == []


def cache_hits(engine: Engine, progress: Progress) -> tuple[int, int]:
    """How often a new process finds a compiled graph at its usual size, and how often none."""
    from torch._dynamo.utils import counters

    torch_programs.load(engine).session().close()
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@COMPILER
@pytest.mark.slow
def test_what_is_compiled_at_load_comes_with_its_cache_and_tells_its_cold_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    feeds = images(2, 5, 1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    engine, got = call_in_child(
        build_and_answer,
        source,
        (CLASSES,),
        recipe_of("compile"),
        tmp_path / "engine",
        feeds,
        name="compile",
    )
    assert_as_the_module(source, feeds, got)
    assert engine.cold_start_s
    assert "from the start of a process to its first answer" in engine.notes[0].text
    cache = tmp_path / "engine" / "inductor"
    assert list(cache.rglob("*.so"))
    assert list(cache.rglob("*.lock")) == []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    assert call_in_child(cache_hits, engine, name="hits") == (1, 0)
