"""Finds and imports TensorRT, says by name what is missing, and knows what a version and a GPU
generation lack.

Nothing here makes a `trt.Builder`: TensorRT 10 ends the whole process if it does so without a
driver.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.backends import cuda
from pipeline.core import CalibrationMethod, Placement, Precision, Recipe
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.gpu import Gpu, Gpus, find_gpus

DISTRIBUTIONS = (
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "tensorrt-cu12-bindings",
    "tensorrt-cu13-bindings",
)
BINDINGS = ("tensorrt-cu12-bindings", "tensorrt-cu13-bindings")
"""Two packages that provide the same module: who has both has the files of the one installed
last.
"""

LEAN_FOLDERS = ("tensorrt_lean_libs", "tensorrt_libs")  # where wheels put libnvinfer_lean.so
INSTALL = install_command("tensorrt")
REQUIREMENT = "tensorrt-cu12>=10.6,<10.11"
"""As in pyproject.toml: from the release that our GPU tests and figures are of, to the first one in
WRONG_RELEASES.
"""
RUN_BY_US = "10.6"
ELSEWHERE = (
    " on a host with an NVIDIA GPU and its driver; here, use onnxruntime or openvino, or build for"
    " tensorrt_rtx"
)
ANOTHER = "use another GPU, or a version of TensorRT that supports this one"
OLDEST = (10, 0)
IMPORTED = (  # the environment's: the file of the module that was imported once
    "CRUCIBLE_TENSORRT_IMPORTED"
)
IMPORT_LIMIT_S = 120  # the first import maps some GB of libraries, maybe off a slow disk
DRIVERS = {(10, 12): 525, (11, 12): 535, (10, 13): 580, (11, 13): 580}
"""Oldest driver by major version of TensorRT and of the CUDA it was built with. Sources: CUDA's
table of minor-version compatibility (525 for 12.x, 580 for 13.x); TensorRT 11's prerequisites (535
with CUDA 12).
"""

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that TensorRT can do, and whether this version does it on this GPU."""

    name: str
    available: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """What a feature needs."""

    capability: Version = (7, 0)  # the first GPU generation that has it
    until: Version | None = None  # the first version of TensorRT without it
    instead: str = ""  # what to do where it is lacking


@dataclass(frozen=True, slots=True)
class WrongReleases:
    """Releases of TensorRT that were reported to build engines with wrong answers."""

    first: Version
    last: Version  # with all its patch releases
    fault: str
    issues: tuple[str, ...]

    def holds(self, version: Version) -> bool:
        """Whether a version is one of these releases."""
        return self.first <= version[:2] <= self.last


WRONG_RELEASES = (
    WrongReleases(
        (10, 11),
        (11, 2),
        "engines with wrong answers at some batch sizes, in fp32 too",
        ("NVIDIA/TensorRT#4813", "NVIDIA/TensorRT#4853"),
    ),
)
"""Sources: the issues name 10.11 and 11.1. Of which others up to 11.2 it is true is not known."""

VERSION_COMPATIBLE = "version compatibility"

NEEDS: dict[str, Need] = {
    "fp32": Need(instead=ANOTHER),
    "tf32": Need((8, 0), instead="take fp32 or fp16"),
    "fp16": Need(instead=ANOTHER),
    "bf16": Need((8, 0), instead="take fp16"),
    "int8 (Q/DQ in the graph)": Need(instead=ANOTHER),
    "int8 implicit (calibrators)": Need(
        until=(11, 0), instead="take int8 written into the graph (`realised_in: graph`)"
    ),
    "fp8": Need((8, 9), instead="take int8 or fp16"),
    "precision by builder flags (weakly typed)": Need(
        until=(11, 0), instead="take the precision written into the graph (`realised_in: graph`)"
    ),
    "hardware compatibility": Need((8, 0), instead="leave `hardware_compatible` out"),
    VERSION_COMPATIBLE: Need(instead="leave `version_compatible` out"),
}
"""Sources: the support matrices of TensorRT 10.1 to 11.4 (hardware and precision), the migration
guide from 10.x to 11.x.
"""

GENERATIONS: tuple[tuple[Version, Version, Version | None], ...] = (
    ((7, 0), (10, 0), (10, 5)),  # Volta: removed in 10.5
    ((7, 5), (10, 0), None),
    ((10, 0), (10, 8), None),  # Blackwell: added in 10.8
)
"""From this compute capability on: the first version that supports it, and the first that does not
any more (release notes).
"""


def numbers(text: str) -> Version:
    """The leading numbers of a version or of a compute capability: "10.13.3.9.post1" -> (10, 13, 3,
    9).
    """
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def version() -> str:
    """The installed version, without importing it; BackendUnavailable where there is none, or where
    two packages provide the module.
    """
    installed = {name: text for name in DISTRIBUTIONS if (text := _installed(name))}
    both = [f"{name} {installed[name]}" for name in BINDINGS if name in installed]
    if len(both) > 1:
        message = (
            "expected one distribution that provides the module tensorrt, found"
            f" {' and '.join(both)}: they overwrite each other's files"
        )
        raise BackendUnavailable(message, f"pip uninstall {' '.join(BINDINGS)}, then {INSTALL}")
    if len({numbers(text)[:3] for text in installed.values()}) > 1:
        listed = ", ".join(f"{name} {text}" for name, text in installed.items())
        raise BackendUnavailable(
            f"TensorRT is installed in two versions: {listed}",
            f"pip uninstall {' '.join(installed)}, then {INSTALL}",
        )
    exact = [
        installed[name] for name in BINDINGS if name in installed
    ]  # the metapackage's version may lag behind
    found = next(iter([*exact, *installed.values()]), "") or _unpacked_version()
    if not found:
        raise BackendUnavailable("the library `tensorrt` is not installed", INSTALL)
    return found


def release_warnings(version: str) -> tuple[str, ...]:
    """What was reported of the answers of this version's engines, with the sources and the next
    step.
    """
    return tuple(
        _release_warning(version, wrong)
        for wrong in WRONG_RELEASES
        if wrong.holds(numbers(version))
    )


def _release_warning(version: str, wrong: WrongReleases) -> str:
    releases = f"{_dotted(wrong.first)} to {_dotted(wrong.last)}"
    return (
        f"TensorRT {version} is one of {releases}: "
        f"of releases in this range {wrong.fault} were reported "
        f"({', '.join(wrong.issues)}); run by us: {RUN_BY_US}; next: pip install '{REQUIREMENT}', "
        "or check the answers at every batch size that you use"
    )


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unpacked_version() -> str:
    """The version of a library that was unpacked by hand: read off its source, since no package
    tells.
    """
    for module in ("tensorrt_bindings", "tensorrt"):
        spec = importlib.util.find_spec(module)
        if (
            spec
            and spec.origin
            and (
                found := re.search(
                    r'^__version__ = "([^"]+)"',
                    Path(spec.origin).read_text(encoding="utf-8"),
                    re.MULTILINE,
                )
            )
        ):
            return found[1]
    return ""


def cuda_of(version: str) -> int:
    """The major version of CUDA that the installed library was built with."""
    for major in (12, 13):
        if any(
            _installed(name) for name in (f"tensorrt-cu{major}-bindings", f"tensorrt-cu{major}")
        ):
            return major
    return 12 if numbers(version) < (11, 0) else 13


def host() -> tuple[Gpu, str]:
    """The GPU that TensorRT would use and the installed version, without importing it.

    BackendUnavailable says what is missing, in the order in which a user meets it: GPU, package,
    driver.
    """
    gpus = find_gpus()
    try:
        found = version()
    except BackendUnavailable:
        if not gpus.reason:
            raise
        found = ""  # said together with the missing GPU
    if missing := tuple(faults(gpus, found, cuda_of(found))):
        message = (
            f"TensorRT cannot be used on this host: {'; '.join(fault for fault, _ in missing)}"
        )
        raise BackendUnavailable(
            message,
            (
                INSTALL + ELSEWHERE
                if gpus.reason
                else "; ".join(dict.fromkeys(step for _, step in missing))
            ),
        )
    return gpus.devices[0], found


def faults(gpus: Gpus, version: str, cuda: int) -> Iterator[tuple[str, str]]:
    """What keeps this version from running on this host, each with the next step."""
    here = numbers(version)
    if gpus.reason:
        yield gpus.reason, ELSEWHERE
    if not version:
        yield "the library `tensorrt` is not installed", INSTALL
    elif here < OLDEST:
        yield f"expected TensorRT {_dotted(OLDEST)} or later, found {version}", INSTALL
    elif gpus.devices:
        gpu, needed = gpus.devices[0], DRIVERS[min(here[0], 11), cuda]
        if numbers(gpu.driver) < (needed,):
            older = (
                f", or take a TensorRT for CUDA 12: pip install '{REQUIREMENT}'"
                if cuda > 12
                else ""
            )
            fault = (
                f"TensorRT {version} for CUDA {cuda} needs the NVIDIA driver {needed} or later,"
                f" this host has {gpu.driver}"
            )
            yield fault, f"install the driver {needed} or later{older}"
        if reason := unsupported_gpu(here, numbers(gpu.compute_capability)):
            yield f"{reason} ({gpu.name})", "install a version of TensorRT that supports this GPU"


def library() -> Any:
    """The imported module, on a GPU that works: TensorRT ends the process where it finds none, and
    gives null pointers where it is full.

    BackendUnavailable says what is missing: what `host` checks, then the files, then two versions
    of them. OutOfDeviceMemory and CudaError come from CUDA itself.
    """
    host()
    trt = import_library()
    rt = cuda.runtime()
    cuda.use_device(rt, 0)
    cuda.check(rt, rt.cudaFree(0))  # makes the context
    return trt


def import_library() -> Any:
    """Import the module and check that bindings and libnvinfer are of one version; needs no GPU."""
    try:
        trt = importlib.import_module("tensorrt")
    except (
        ImportError,
        OSError,
    ) as error:  # ImportError: the extension's own way to say that a shared library is missing
        raise _unloadable(str(error)) from error
    check_loaded(trt.__version__, loaded_version(int(trt.__version__.split(".")[0])))
    return trt


def check_import() -> None:
    """BackendUnavailable if the module cannot be imported: a missing library is named before any
    work is done, and this process stays free of it.

    What was found good is told to the processes that this one starts, of which there are many.
    """
    if "tensorrt" in sys.modules:
        return
    spec = importlib.util.find_spec("tensorrt")
    place = (spec.origin if spec else None) or "nowhere"
    if place == os.environ.get(IMPORTED):
        return
    if fault := _import_fault(tuple(sys.path)):
        raise _unloadable(fault)
    os.environ[IMPORTED] = place


@cache
def _import_fault(path: tuple[str, ...]) -> str:
    """What an import in a process of its own, with this `sys.path`, fails with; "" where it
    works.
    """
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path[:] = sys.argv[1:]; import tensorrt",
        *path,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its import did not end in {IMPORT_LIMIT_S} s"
    if not done.returncode:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[
        -1
    ]  # "ImportError: libnvinfer.so.10: cannot open shared object file: ..."
    return (
        last.partition("Error: ")[2] or last or f"its import ended with exit code {done.returncode}"
    )


def _unloadable(fault: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"TensorRT is installed and cannot be loaded: {fault}",
        f"pip install --force-reinstall '{REQUIREMENT}'",
    )


def loaded_version(major: int) -> Version:
    """The version of the libnvinfer that this process has loaded."""
    try:
        code = ctypes.CDLL(f"libnvinfer.so.{major}").getInferLibVersion()
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"libnvinfer.so.{major} cannot be loaded: {error}", INSTALL
        ) from error
    return code // 10000, code // 100 % 100, code % 100  # 100600 is 10.6.0


def check_loaded(bindings: str, loaded: Version) -> None:
    """BackendUnavailable unless the Python bindings and the shared library are of one version."""
    if numbers(bindings)[:3] != loaded:
        message = (
            f"TensorRT is here in two versions: the Python bindings are {bindings}, the loaded"
            f" libnvinfer is {_dotted(loaded)}"
        )
        raise BackendUnavailable(
            message,
            "remove the other one from LD_LIBRARY_PATH and /etc/ld.so.conf.d, or install both in"
            " one version",
        )


def unsupported_gpu(version: Version, capability: Version) -> str:
    """Why this version does not support this GPU generation at all, or ""."""
    rules = [rule for rule in GENERATIONS if capability >= rule[0]]
    if not rules:
        return (
            "TensorRT needs a GPU of compute capability 7.5 or later, this one has"
            f" {_dotted(capability)}"
        )
    _, since, until = rules[-1]
    if version < since:
        return (
            f"GPUs of compute capability {_dotted(capability)} need TensorRT {_dotted(since)} or"
            f" later, this is {_dotted(version)}"
        )
    if until and version >= until:
        return (
            f"TensorRT supports GPUs of compute capability {_dotted(capability)} only before"
            f" {_dotted(until)}, this is {_dotted(version)}"
        )
    return ""


def features(version: str, capability: str, lean: str | None = None) -> tuple[Feature, ...]:
    """All that TensorRT can do, each with why this version or this GPU cannot. `lean`: why the lean
    runtime is missing; None: look for it here.
    """
    reasons = {name: why_not(name, version, capability, lean) for name in NEEDS}
    return tuple(Feature(name, not reason, reason) for name, reason in reasons.items())


def why_not(name: str, version: str, capability: str, lean: str | None = None) -> str:
    """Why a feature of NEEDS is lacking, or ""."""
    need, here, gpu = NEEDS[name], numbers(version), numbers(capability)
    if reason := unsupported_gpu(here, gpu):
        return reason
    if gpu < need.capability:
        return (
            f"{name} needs a GPU of compute capability {_dotted(need.capability)} or later, this"
            f" one has {capability}"
        )
    if need.until and here >= need.until:
        return f"{name} ended with TensorRT {need.until[0]}, this is {version}"
    if name != VERSION_COMPATIBLE:
        return ""
    return missing_lean(here[0]) if lean is None else lean


def check_recipe(version: str, capability: str, recipe: Recipe, lean: str | None = None) -> None:
    """UnsupportedError that names what this version or this GPU lacks for a recipe, with what to do
    instead.
    """
    reason, instead = _lack(version, capability, recipe, lean)
    if reason:
        raise UnsupportedError(
            reason, f"{instead}; `crucible doctor` lists what TensorRT can do here"
        )


def _lack(version: str, capability: str, recipe: Recipe, lean: str | None) -> tuple[str, str]:
    for name in _needed(recipe):
        if reason := why_not(name, version, capability, lean):
            return reason, NEEDS[name].instead
    return _contradiction(recipe, capability)


def _needed(recipe: Recipe) -> list[str]:
    """The features that a recipe uses, the most telling first."""
    implicit = recipe.realised_in == "flags"
    names = []
    if recipe.precision is Precision.INT8:
        names.append("int8 implicit (calibrators)" if implicit else "int8 (Q/DQ in the graph)")
    else:
        names.append(str(recipe.precision))
        names += ["precision by builder flags (weakly typed)"] if implicit else []
    names += ["hardware compatibility"] if recipe.hardware_compatible else []
    return names + ([VERSION_COMPATIBLE] if recipe.version_compatible else [])


def _contradiction(recipe: Recipe, capability: str) -> tuple[str, str]:
    """What no version of TensorRT does."""
    in_flags, precision = recipe.realised_in == "flags", recipe.precision
    if recipe.compute_capability not in (None, capability):
        wanted = (
            f"TensorRT builds only for the GPU that is here ({capability}), the candidate names"
            f" {recipe.compute_capability}"
        )
        return wanted, "leave `compute_capability` out, or set `hardware_compatible: true`"
    if in_flags and precision is Precision.TF32:
        return (
            (
                "tf32 is the fp32 graph with one builder flag set, which leaves TensorRT no choice"
                " between precisions"
            ),
            "take `precision: tf32` with `realised_in: graph`",
        )
    if in_flags and precision not in (Precision.FP16, Precision.BF16, Precision.INT8):
        return (
            f"there is no builder flag for {precision} that lets TensorRT choose",
            "leave `realised_in: flags` out",
        )
    if in_flags and recipe.keep_fp32:
        return (
            "`keep_fp32` is written into the graph, and builder flags leave the choice to TensorRT",
            "leave `realised_in: flags` out",
        )
    if in_flags and precision is Precision.INT8 and recipe.method is CalibrationMethod.PERCENTILE:
        return (
            "TensorRT's own calibrators choose ranges by entropy or minmax, not by percentile",
            "take one of these, or `realised_in: graph`",
        )
    if recipe.realised_in == "runtime" and precision is not Precision.TF32:
        return (
            (
                f"of all precisions only tf32 is told to TensorRT at build time, {precision} is"
                " written into the graph"
            ),
            "leave `realised_in` out",
        )
    if precision is Precision.INT8 and not in_flags and recipe.activation != "int8":
        return (
            "TensorRT quantises to int8 with zero point 0, not to uint8",
            "take `activation: int8`",
        )
    return _unheard(recipe)


def _unheard(recipe: Recipe) -> tuple[str, str]:
    """What is asked of a quantizer that would not hear it: the label would tell of it, and the
    engine would be another's.
    """
    implicit = recipe.realised_in == "flags"
    if recipe.precision not in (Precision.INT8, Precision.FP8) or not (
        implicit or recipe.quantizer == "modelopt"
    ):
        return "", ""
    if implicit and recipe.quantizer != "crucible":
        return (
            f"implicit int8 is calibrated by TensorRT itself, not by {recipe.quantizer}",
            "leave `quantizer` out, or `realised_in: flags`",
        )
    if recipe.placement != Placement() or recipe.weight_bits != 8:
        who = "TensorRT" if implicit else "ModelOpt"
        return (
            (
                f"`placement` and `weight_bits` are rules of the quantizer `crucible`, {who} has"
                " its own"
            ),
            "leave them out",
        )
    return "", ""


def missing_lean(major: int) -> str:
    """Why version-compatible engines cannot be built here: the lean runtime's name; "" where it is,
    and then it stays loaded.
    """
    name = f"libnvinfer_lean.so.{major}"
    folders = [
        Path(spec.origin).parent
        for module in LEAN_FOLDERS
        if (spec := importlib.util.find_spec(module)) and spec.origin
    ]
    for place in (name, *(str(folder / name) for folder in folders)):
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return ""
    return (
        f"version compatibility needs the lean runtime {name}, which is not on this host (pip"
        " install tensorrt-lean brings it)"
    )


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
