"""What is said of a TensorRT that is missing, broken or there twice, and of what a version or a GPU
generation lacks; nothing needs a GPU.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.library import (
    VERSION_COMPATIBLE,
    _dotted,
    check_recipe,
    faults,
    features,
)
from pipeline.cli.doctor import check_backend
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.gpu import Gpu, Gpus

H200 = Gpu(name="NVIDIA H200", compute_capability="9.0", driver="580.95.05", memory_bytes=2**37)
ROOT = Path(__file__).parents[4]
NO_LEAN = "version compatibility needs the lean runtime libnvinfer_lean.so.10"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **distributions: str) -> None:
    """Only these distributions, as pip leaves them."""
    for name, version in distributions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    monkeypatch.setattr(sys, "path", [str(folder)])


def recipe(precision: str, **more: object) -> Recipe:
    return Recipe.model_validate({"backend": "tensorrt", "precision": precision, **more})


# -- what is installed -------------------------------------------------------


def test_the_bindings_tell_the_exact_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, tensorrt="10.13.3.9.post1", tensorrt_cu13_bindings="10.13.3.9")
    assert (trt_library.version(), trt_library.cuda_of("10.13.3.9")) == ("10.13.3.9", 13)


def test_bindings_alone_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, tensorrt_cu12_bindings="10.6.0")
    assert (trt_library.version(), trt_library.cuda_of("10.6.0")) == ("10.6.0", 12)


def test_a_library_unpacked_by_hand_tells_its_version_in_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    (tmp_path / "tensorrt_bindings").mkdir()
    (tmp_path / "tensorrt_bindings" / "__init__.py").write_text(
        'raise ImportError("not to be imported")\n__version__ = "11.2.1.2"\n'
    )
    monkeypatch.delitem(sys.modules, "tensorrt_bindings", raising=False)
    assert (trt_library.version(), trt_library.cuda_of("11.2.1.2")) == ("11.2.1.2", 13)


def test_no_library_is_said_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    for module in ("tensorrt", "tensorrt_bindings"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(
        BackendUnavailable,
        match=r"`tensorrt` is not installed\n  next: pip install -e '\.\[tensorrt\]'",
    ):
        trt_library.version()


def test_two_packages_of_one_module_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, tensorrt_cu12_bindings="10.6.0", tensorrt_cu13_bindings="10.6.0")
    with pytest.raises(
        BackendUnavailable,
        match=r"found tensorrt-cu12-bindings 10.6.0 and tensorrt-cu13-bindings 10.6.0",
    ) as error:
        trt_library.version()
    assert error.value.next_step.startswith(
        "pip uninstall tensorrt-cu12-bindings tensorrt-cu13-bindings"
    )


def test_two_versions_among_the_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, tensorrt="10.8.0", tensorrt_cu12_bindings="10.6.0")
    with pytest.raises(
        BackendUnavailable, match=r"two versions: tensorrt 10.8.0, tensorrt-cu12-bindings 10.6.0"
    ):
        trt_library.version()


@pytest.mark.parametrize(
    "version", ["10.11.0.33", "10.13.3.9.post1", "10.16.1.11", "11.0.0.114", "11.2.1.2"]
)
def test_releases_with_reported_wrong_answers_are_warned_of(version: str) -> None:
    (warning,) = trt_library.release_warnings(version)
    assert warning.startswith(f"TensorRT {version} is one of 10.11 to 11.2: ")
    for part in (
        "NVIDIA/TensorRT#4813",
        "NVIDIA/TensorRT#4853",
        "tested by us: 10.6;",
        trt_library.REQUIREMENT,
    ):
        assert part in warning


@pytest.mark.parametrize("version", ["", "10.6.0.post1", "10.10.0.31", "11.3.0.99", "12.0"])
def test_other_releases_are_not(version: str) -> None:
    assert trt_library.release_warnings(version) == ()


def test_the_extra_installs_a_release_without_such_reports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert trt_library.REQUIREMENT in project["optional-dependencies"]["tensorrt"]
    wrong = _dotted(min(release.first for release in trt_library.WRONG_RELEASES))
    assert f"tensorrt-cu12>={trt_library.RUN_BY_US},<{wrong}" == trt_library.REQUIREMENT
    for page in ("README.md", "docs/explain/tensorrt.md"):
        assert trt_library.REQUIREMENT in (ROOT / page).read_text(encoding="utf-8")


def test_a_shared_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text('import ctypes\nctypes.CDLL("libnvinfer.so.98")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(
        BackendUnavailable,
        match=r"cannot be loaded: libnvinfer.so.98: cannot open shared object file",
    ):
        trt_library.import_library()


def broken_library(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """A host with a GPU and a TensorRT 98 whose import runs this."""
    (folder / "tensorrt.py").write_text(f'{source}\n__version__ = "98.0.0"\n')
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.setattr(trt_library, "host", lambda: (H200, "98.0.0"))
    monkeypatch.setenv(trt_library.IMPORTED, "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            'import ctypes\nctypes.CDLL("libnvinfer_plugin.so.98")',
            r"cannot be loaded: libnvinfer_plugin.so.98: cannot open shared object file",
        ),
        ("import os\nos._exit(7)", "cannot be loaded: its import ended with exit code 7"),
        ("raise SystemExit('no such thing')", "cannot be loaded: no such thing"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_known_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    broken_library(tmp_path, monkeypatch, source)
    with pytest.raises(BackendUnavailable, match=message):
        tensorrt_.probe()
    assert "tensorrt" not in sys.modules
    check = check_backend("tensorrt", Gpus(devices=(H200,)))
    assert not check.builds
    assert re.search(message, check.reason)


def test_a_library_that_loads_is_imported_once_and_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_library(
        tmp_path, monkeypatch, f'open({str(tmp_path / "imports")!r}, "a").write("once ")'
    )
    assert {tensorrt_.probe().version for _ in range(3)} == {"98.0.0"}
    trt_library._import_fault.cache_clear()  # as in a process that this one starts
    assert tensorrt_.probe().version == "98.0.0"
    assert (tmp_path / "imports").read_text() == "once "
    assert "tensorrt" not in sys.modules


def test_bindings_without_their_libnvinfer_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text('__version__ = "98.0.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(BackendUnavailable, match=r"libnvinfer.so.98 cannot be loaded"):
        trt_library.import_library()
    del sys.modules["tensorrt"]  # the stand-in


def test_bindings_and_library_of_two_versions_are_both_named() -> None:
    trt_library.check_loaded("10.13.3.9", (10, 13, 3))
    with pytest.raises(
        BackendUnavailable, match=r"bindings are 10.8.0.43, the loaded libnvinfer is 10.6.0"
    ):
        trt_library.check_loaded("10.8.0.43", (10, 6, 0))


# -- the host ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "version", "cuda", "expected"),
    [
        ({}, "10.6.0", 12, ""),
        ({}, "11.2.1", 13, ""),
        ({}, "", 12, "the library `tensorrt` is not installed"),
        ({}, "8.6.1", 12, "expected TensorRT 10.0 or later, found 8.6.1"),
        (
            {"driver": "520.61"},
            "10.6.0",
            12,
            (
                "TensorRT 10.6.0 for CUDA 12 needs the NVIDIA driver 525 or later, this host has"
                " 520.61"
            ),
        ),
        (
            {"driver": "575.57"},
            "11.2.1",
            13,
            (
                "TensorRT 11.2.1 for CUDA 13 needs the NVIDIA driver 580 or later, this host has"
                " 575.57"
            ),
        ),
        (
            {"compute_capability": "6.1"},
            "10.6.0",
            12,
            "needs a GPU of compute capability 7.5 or later, this one has 6.1 (NVIDIA H200)",
        ),
        ({"compute_capability": "7.0"}, "10.4.0", 12, ""),
        ({"compute_capability": "7.0"}, "10.6.0", 12, "only before 10.5, this is 10.6.0"),
        (
            {"compute_capability": "12.0"},
            "10.6.0",
            12,
            "GPUs of compute capability 12.0 need TensorRT 10.8 or later, this is 10.6.0",
        ),
        ({"compute_capability": "12.0"}, "10.8.0", 12, ""),
    ],
)
def test_what_keeps_a_version_from_a_host(
    gpu: dict[str, str], version: str, cuda: int, expected: str
) -> None:
    problems = tuple(faults(Gpus(devices=(H200.model_copy(update=gpu),)), version, cuda))
    assert len(problems) == bool(expected)
    assert all(expected in fault and advice for fault, advice in problems)


def test_a_host_without_gpu_and_library_is_told_of_both_in_order() -> None:
    problems = [fault for fault, _ in faults(Gpus(reason="no NVIDIA driver"), "", 12)]
    assert problems == ["no NVIDIA driver", "the library `tensorrt` is not installed"]


# -- what a version and a generation lack ------------------------------------


@pytest.mark.parametrize(
    ("version", "capability", "lean", "missing"),
    [
        ("10.6.0", "9.0", "", set()),
        ("10.6.0", "9.0", NO_LEAN, {VERSION_COMPATIBLE}),
        ("10.6.0", "8.6", "", {"fp8"}),
        ("10.6.0", "7.5", "", {"tf32", "bf16", "fp8", "hardware compatibility"}),
        (
            "11.2.1",
            "9.0",
            "",
            {"int8 implicit (calibrators)", "precision by builder flags (weakly typed)"},
        ),
        ("10.6.0", "12.0", "", set(trt_library.REQUIREMENTS)),
    ],
)
def test_the_table_of_features(version: str, capability: str, lean: str, missing: set[str]) -> None:
    table = features(version, capability, lean)
    assert {feature.name for feature in table} == set(trt_library.REQUIREMENTS)
    assert {feature.name for feature in table if not feature.available} == missing
    assert all(bool(feature.why_not) != feature.available for feature in table)


@pytest.mark.parametrize(
    ("version", "capability", "recipe", "reason"),
    [
        (
            "10.6.0",
            "7.5",
            recipe("bf16"),
            "bf16 needs a GPU of compute capability 8.0 or later, this one has 7.5",
        ),
        (
            "10.6.0",
            "7.5",
            recipe("tf32", realised_in="runtime"),
            "tf32 needs a GPU of compute capability 8.0",
        ),
        (
            "10.6.0",
            "8.6",
            recipe("fp8"),
            "fp8 needs a GPU of compute capability 8.9 or later, this one has 8.6",
        ),
        (
            "11.2.1",
            "9.0",
            recipe("int8", realised_in="flags"),
            "int8 implicit (calibrators) ended with TensorRT 11, this is 11.2.1",
        ),
        (
            "11.2.1",
            "9.0",
            recipe("fp16", realised_in="flags"),
            "builder flags (weakly typed) ended with TensorRT 11",
        ),
        (
            "10.6.0",
            "7.5",
            recipe("fp16", hardware_compatible=True),
            "hardware compatibility needs a GPU of compute capability 8.0",
        ),
        ("10.6.0", "9.0", recipe("fp16", version_compatible=True), NO_LEAN),
        (
            "10.6.0",
            "9.0",
            recipe("fp16", compute_capability="8.9"),
            "builds only for the GPU that is here (9.0), the candidate names 8.9",
        ),
        ("10.6.0", "9.0", recipe("fp32", realised_in="flags"), "no builder flag for fp32"),
        (
            "10.6.0",
            "9.0",
            recipe("tf32", realised_in="flags"),
            "tf32 is the fp32 graph with one builder flag set",
        ),
        (
            "10.6.0",
            "9.0",
            recipe("fp16", realised_in="runtime"),
            "only tf32 is a setting of TensorRT at build time",
        ),
        (
            "10.6.0",
            "9.0",
            recipe("fp16", realised_in="flags", keep_fp32=("norm*",)),
            "`keep_fp32` is written into the graph",
        ),
        (
            "10.6.0",
            "9.0",
            recipe("int8", realised_in="flags", method=CalibrationMethod.PERCENTILE),
            "by entropy or minmax, not by percentile",
        ),
        ("10.6.0", "9.0", recipe("int8", activation="uint8"), "not to uint8"),
        (
            "10.6.0",
            "9.0",
            recipe("int8", realised_in="flags", quantizer="modelopt"),
            "calibrated by TensorRT itself, not by modelopt",
        ),
        (
            "10.6.0",
            "9.0",
            recipe("int8", realised_in="flags", weight_bits=7),
            "rules of the quantizer `crucible`, TensorRT has its own",
        ),
        (
            "10.6.0",
            "9.0",
            recipe("int8", quantizer="modelopt", placement={"last_layer": True}),
            "rules of the quantizer `crucible`, ModelOpt has",
        ),
        (
            "10.6.0",
            "9.0",
            recipe("int8", realised_in="flags", placement={"first_layer": False}),
            "rules of the quantizer `crucible`, TensorRT has",
        ),
    ],
)
def test_what_a_recipe_asks_for_in_vain_is_named(
    version: str, capability: str, recipe: Recipe, reason: str
) -> None:
    with pytest.raises(UnsupportedError) as error:
        check_recipe(version, capability, recipe, NO_LEAN)
    assert reason in error.value.message
    assert not error.value.next_step.startswith(";")


@pytest.mark.parametrize("precision", sorted(tensorrt_.PRECISIONS))
def test_an_h200_with_10_6_runs_every_precision(precision: Precision) -> None:
    check_recipe("10.6.0", "9.0", Recipe(backend="tensorrt", precision=precision), NO_LEAN)


@pytest.mark.parametrize("method", [CalibrationMethod.ENTROPY, CalibrationMethod.MINMAX])
def test_10_6_has_both_calibrators(method: CalibrationMethod) -> None:
    check_recipe("10.6.0", "9.0", recipe("int8", realised_in="flags", method=method), NO_LEAN)


def test_a_lean_runtime_that_is_missing_is_named() -> None:
    assert "libnvinfer_lean.so.98" in trt_library.missing_lean(98)


@pytest.mark.gpu
def test_the_library_of_this_host_imports() -> None:
    trt = trt_library.library()
    assert trt_library.numbers(trt.__version__) == trt_library.numbers(trt_library.version())
    assert (
        trt_library.loaded_version(int(trt.__version__.split(".")[0]))
        == trt_library.numbers(trt.__version__)[:3]
    )
