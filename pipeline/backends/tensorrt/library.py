"""Find and import TensorRT, report what is missing, and list the features of a version on a GPU.

Nothing here creates a `trt.Builder`: without a driver TensorRT 10 would end the whole process.
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
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
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
"""Two packages that provide the same module. If both are installed, the later one overwrote files
of the other.
"""

LEAN_FOLDERS = ("tensorrt_lean_libs", "tensorrt_libs")  # where wheels put libnvinfer_lean.so
INSTALL = install_command("tensorrt")
REQUIREMENT = "tensorrt-cu12>=10.6,<10.11"
"""The same as in pyproject.toml: from the release of our GPU tests and figures to the last one
before WRONG_RELEASES.
"""
RUN_BY_US = "10.6"
ELSEWHERE = (
    " on a host with an NVIDIA GPU and its driver; here, use onnxruntime or openvino, or build for"
    " tensorrt_rtx"
)
ANOTHER = "use another GPU, or a version of TensorRT that supports this one"
OLDEST = (10, 0)
# Environment variable with the file of the module whose import succeeded.
IMPORTED = "CRUCIBLE_TENSORRT_IMPORTED"
IMPORT_LIMIT_S = 120  # the first import maps some GB of libraries, possibly from a slow disk
DRIVERS = {(10, 12): 525, (11, 12): 535, (10, 13): 580, (11, 13): 580}
"""The oldest driver, by the major versions of TensorRT and of its CUDA.

Sources: CUDA's table of minor-version compatibility (525 for 12.x, 580 for 13.x); TensorRT 11's
prerequisites (535 with CUDA 12).
"""

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of TensorRT, and whether this version supports it on this GPU."""

    name: str
    available: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """The requirements of a feature."""

    capability: Version = (7, 0)  # the first GPU generation with it
    until: Version | None = None  # the first version of TensorRT without it
    instead: str = ""  # the next step where it is missing


@dataclass(frozen=True, slots=True)
class WrongReleases:
    """A range of releases of TensorRT that reportedly build engines with wrong outputs."""

    first: Version
    last: Version  # with all its patch releases
    fault: str
    issues: tuple[str, ...]

    def holds(self, version: Version) -> bool:
        """Return True if a version is one of these releases."""
        return self.first <= version[:2] <= self.last


WRONG_RELEASES = (
    WrongReleases(
        (10, 11),
        (11, 2),
        "engines with wrong outputs at some batch sizes, in fp32 too",
        ("NVIDIA/TensorRT#4813", "NVIDIA/TensorRT#4853"),
    ),
)
"""Sources: the issues name 10.11 and 11.1. Which other releases up to 11.2 are wrong is unknown."""

VERSION_COMPATIBLE = "version compatibility"

REQUIREMENTS: dict[str, Requirement] = {
    "fp32": Requirement(instead=ANOTHER),
    "tf32": Requirement((8, 0), instead="take fp32 or fp16"),
    "fp16": Requirement(instead=ANOTHER),
    "bf16": Requirement((8, 0), instead="take fp16"),
    "int8 (Q/DQ in the graph)": Requirement(instead=ANOTHER),
    "int8 implicit (calibrators)": Requirement(
        until=(11, 0), instead="take int8 written into the graph (`precision_from: graph`)"
    ),
    "fp8": Requirement((8, 9), instead="take int8 or fp16"),
    "precision by builder flags (weakly typed)": Requirement(
        until=(11, 0), instead="take the precision written into the graph (`precision_from: graph`)"
    ),
    "hardware compatibility": Requirement((8, 0), instead="leave `hardware_compatible` out"),
    VERSION_COMPATIBLE: Requirement(instead="leave `version_compatible` out"),
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
support it any more (release notes).
"""


def numbers(text: str) -> Version:
    """Return the leading numbers of a version or of a compute capability.

    "10.13.3.9.post1" gives (10, 13, 3, 9).
    """
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def version() -> str:
    """Return the installed version without importing it.

    BackendUnavailable if there is none, or if two packages provide the module.
    """
    versions = {name: _installed(name) for name in DISTRIBUTIONS}
    installed = {name: text for name, text in versions.items() if text}
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
    # The bindings come first: the version of the metapackage may be older.
    of_bindings = [installed[name] for name in BINDINGS if name in installed]
    candidates = [*of_bindings, *installed.values()]
    result = candidates[0] if candidates else _unpacked_version()
    if not result:
        raise BackendUnavailable("the library `tensorrt` is not installed", INSTALL)
    return result


def release_warnings(version: str) -> tuple[str, ...]:
    """Return warnings of reported wrong outputs of this version, with sources and the next step."""
    return tuple(
        _release_warning(version, wrong)
        for wrong in WRONG_RELEASES
        if wrong.holds(numbers(version))
    )


def _release_warning(version: str, wrong: WrongReleases) -> str:
    releases = f"{_dotted(wrong.first)} to {_dotted(wrong.last)}"
    return (
        f"TensorRT {version} is one of {releases}: "
        f"for releases in this range {wrong.fault} were reported "
        f"({', '.join(wrong.issues)}); tested by us: {RUN_BY_US}; next step: pip install "
        f"'{REQUIREMENT}', or check the outputs at every batch size that you use"
    )


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unpacked_version() -> str:
    """Return the version of a library that was unpacked by hand, from its source; "" if none.

    Such a library has no package metadata.
    """
    for module in ("tensorrt_bindings", "tensorrt"):
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.origin:
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        match = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
        if match:
            return match[1]
    return ""


def cuda_of(version: str) -> int:
    """Return the major version of CUDA that the installed library was built with."""
    for major in (12, 13):
        if _installed(f"tensorrt-cu{major}-bindings") or _installed(f"tensorrt-cu{major}"):
            return major
    return 12 if numbers(version) < (11, 0) else 13


def host() -> tuple[Gpu, str]:
    """Return the GPU that TensorRT would use and the installed version, without importing it.

    BackendUnavailable names everything that is missing, in this order: GPU, package, driver.
    """
    gpus = find_gpus()
    try:
        installed = version()
    except BackendUnavailable:
        if not gpus.reason:
            raise
        installed = ""  # reported below, together with the missing GPU
    missing = tuple(faults(gpus, installed, cuda_of(installed)))
    if missing:
        reasons = "; ".join(fault for fault, _ in missing)
        if gpus.reason:
            next_step = INSTALL + ELSEWHERE
        else:
            next_step = "; ".join(dict.fromkeys(step for _, step in missing))
        raise BackendUnavailable(f"TensorRT cannot be used on this host: {reasons}", next_step)
    return gpus.devices[0], installed


def faults(gpus: Gpus, version: str, cuda: int) -> Iterator[tuple[str, str]]:
    """Yield the reasons why this version cannot run on this host, each with the next step."""
    installed = numbers(version)
    if gpus.reason:
        yield gpus.reason, ELSEWHERE
    if not version:
        yield "the library `tensorrt` is not installed", INSTALL
    elif installed < OLDEST:
        yield f"expected TensorRT {_dotted(OLDEST)} or later, found {version}", INSTALL
    elif gpus.devices:
        gpu = gpus.devices[0]
        needed = DRIVERS[min(installed[0], 11), cuda]
        if numbers(gpu.driver) < (needed,):
            alternative = ""
            if cuda > 12:
                alternative = f", or take a TensorRT for CUDA 12: pip install '{REQUIREMENT}'"
            fault = (
                f"TensorRT {version} for CUDA {cuda} needs the NVIDIA driver {needed} or later,"
                f" this host has {gpu.driver}"
            )
            yield fault, f"install the driver {needed} or later{alternative}"
        reason = unsupported_gpu(installed, numbers(gpu.compute_capability))
        if reason:
            yield f"{reason} ({gpu.name})", "install a version of TensorRT that supports this GPU"


def library() -> Any:
    """Import the module after a check that the GPU works.

    TensorRT ends the process if it finds no GPU, and returns null pointers if the GPU is full.
    BackendUnavailable names what is missing: first the checks of `host`, then the files, then files
    of two versions. OutOfDeviceMemory and CudaError come from CUDA itself.
    """
    host()
    trt = import_library()
    rt = cuda.runtime()
    cuda.use_device(rt, 0)
    cuda.check(rt, rt.cudaFree(0))  # creates the context
    return trt


def import_library() -> Any:
    """Import the module and check that bindings and libnvinfer have the same version.

    Needs no GPU. BackendUnavailable if either fails.
    """
    try:
        trt = importlib.import_module("tensorrt")
    # The extension raises ImportError if a shared library is missing.
    except (ImportError, OSError) as error:
        raise _unloadable(str(error)) from error
    check_loaded(trt.__version__, loaded_version(int(trt.__version__.split(".")[0])))
    return trt


def check_import() -> None:
    """Raise BackendUnavailable if the module cannot be imported, without importing it here.

    So a missing library is named before any work is done. Child processes, of which there are many,
    get the result through the environment.
    """
    if "tensorrt" in sys.modules:
        return
    spec = importlib.util.find_spec("tensorrt")
    file = (spec.origin if spec else None) or "nowhere"
    if file == os.environ.get(IMPORTED):
        return
    fault = _import_fault(tuple(sys.path))
    if fault:
        raise _unloadable(fault)
    os.environ[IMPORTED] = file


@cache
def _import_fault(path: tuple[str, ...]) -> str:
    """Import the module in a process of its own with this `sys.path`. Return the error, or ""."""
    code = "import sys; sys.path[:] = sys.argv[1:]; import tensorrt"
    command = [sys.executable, "-c", code, *path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its import did not end in {IMPORT_LIMIT_S} s"
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    if not lines or not lines[-1]:
        return f"its import ended with exit code {done.returncode}"
    # "ImportError: libnvinfer.so.10: cannot open shared object file: ..."
    return lines[-1].partition("Error: ")[2] or lines[-1]


def _unloadable(fault: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"TensorRT is installed and cannot be loaded: {fault}",
        f"pip install --force-reinstall '{REQUIREMENT}'",
    )


def loaded_version(major: int) -> Version:
    """Return the version of the libnvinfer that this process has loaded."""
    try:
        code = ctypes.CDLL(f"libnvinfer.so.{major}").getInferLibVersion()
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"libnvinfer.so.{major} cannot be loaded: {error}", INSTALL
        ) from error
    return code // 10000, code // 100 % 100, code % 100  # 100600 is 10.6.0


def check_loaded(bindings: str, loaded: Version) -> None:
    """Raise BackendUnavailable unless the Python bindings and libnvinfer have the same version."""
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
    """Return why this version does not support this GPU generation at all, or ""."""
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
    """Return all features of TensorRT, each with the reason if it is missing here.

    `lean` is the reason why the lean runtime is missing; None: look for it on this host.
    """
    reasons = {name: why_not(name, version, capability, lean) for name in REQUIREMENTS}
    return tuple(Feature(name, not reason, reason) for name, reason in reasons.items())


def why_not(name: str, version: str, capability: str, lean: str | None = None) -> str:
    """Return why a feature of REQUIREMENTS is missing, or ""."""
    required, installed, gpu = REQUIREMENTS[name], numbers(version), numbers(capability)
    reason = unsupported_gpu(installed, gpu)
    if reason:
        return reason
    if gpu < required.capability:
        return (
            f"{name} needs a GPU of compute capability {_dotted(required.capability)} or later,"
            f" this one has {capability}"
        )
    if required.until and installed >= required.until:
        return f"{name} ended with TensorRT {required.until[0]}, this is {version}"
    if name != VERSION_COMPATIBLE:
        return ""
    return missing_lean(installed[0]) if lean is None else lean


def check_recipe(version: str, capability: str, recipe: Recipe, lean: str | None = None) -> None:
    """Raise UnsupportedError if this version or this GPU cannot build a recipe.

    It names the missing feature and the next step.
    """
    reason, instead = _lack(version, capability, recipe, lean)
    if reason:
        raise UnsupportedError(
            reason, f"{instead}; `crucible doctor` lists what TensorRT can do here"
        )


def _lack(version: str, capability: str, recipe: Recipe, lean: str | None) -> tuple[str, str]:
    for name in _needed(recipe):
        if reason := why_not(name, version, capability, lean):
            return reason, REQUIREMENTS[name].instead
    return _contradiction(recipe, capability)


def _needed(recipe: Recipe) -> list[str]:
    """Return the features that a recipe uses, the most informative one first."""
    implicit = recipe.realised_in == "flags"
    names = []
    if recipe.precision is Precision.INT8:
        names.append("int8 implicit (calibrators)" if implicit else "int8 (Q/DQ in the graph)")
    else:
        names.append(str(recipe.precision))
        if implicit:
            names.append("precision by builder flags (weakly typed)")
    if recipe.hardware_compatible:
        names.append("hardware compatibility")
    if recipe.version_compatible:
        names.append(VERSION_COMPATIBLE)
    return names


def _contradiction(recipe: Recipe, capability: str) -> tuple[str, str]:
    """Return the reason and the next step for a recipe that no version supports, or two ""."""
    in_flags, precision = recipe.realised_in == "flags", recipe.precision
    if recipe.compute_capability not in (None, capability):
        reason = (
            f"TensorRT builds only for the GPU that is here ({capability}), the candidate names"
            f" {recipe.compute_capability}"
        )
        return reason, "leave `compute_capability` out, or set `hardware_compatible: true`"
    if in_flags and precision is Precision.TF32:
        return (
            (
                "tf32 is the fp32 graph with one builder flag set, which leaves TensorRT no choice"
                " between precisions"
            ),
            "take `precision: tf32` with `precision_from: graph`",
        )
    if in_flags and precision not in (Precision.FP16, Precision.BF16, Precision.INT8):
        return (
            f"there is no builder flag for {precision} that lets TensorRT choose",
            "leave `precision_from: flags` out",
        )
    if in_flags and recipe.keep_fp32:
        return (
            "`keep_fp32` is written into the graph, and builder flags leave the choice to TensorRT",
            "leave `precision_from: flags` out",
        )
    if in_flags and precision is Precision.INT8 and recipe.method is CalibrationMethod.PERCENTILE:
        return (
            "TensorRT's own calibrators choose ranges by entropy or minmax, not by percentile",
            "take one of these, or `precision_from: graph`",
        )
    if recipe.realised_in == "runtime" and precision is not Precision.TF32:
        return (
            (
                f"only tf32 is a setting of TensorRT at build time, {precision} is"
                " written into the graph"
            ),
            "leave `precision_from` out",
        )
    if precision is Precision.INT8 and not in_flags and recipe.activation != "int8":
        return (
            "TensorRT quantises to int8 with zero point 0, not to uint8",
            "take `activation: int8`",
        )
    return _ignored_option(recipe)


def _ignored_option(recipe: Recipe) -> tuple[str, str]:
    """Return the reason and the next step for an option that the quantizer would ignore, or two "".

    The label of the engine would name an option that it was built without.
    """
    implicit = recipe.realised_in == "flags"
    if recipe.precision not in (Precision.INT8, Precision.FP8) or not (
        implicit or recipe.quantizer == "modelopt"
    ):
        return "", ""
    if implicit and recipe.quantizer != "crucible":
        return (
            f"implicit int8 is calibrated by TensorRT itself, not by {recipe.quantizer}",
            "leave `quantizer` out, or `precision_from: flags`",
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
    """Return why version-compatible engines cannot be built here; "" if the lean runtime is there.

    The lean runtime stays loaded.
    """
    name = f"libnvinfer_lean.so.{major}"
    paths = [name]
    for module in LEAN_FOLDERS:
        spec = importlib.util.find_spec(module)
        if spec and spec.origin:
            paths.append(str(Path(spec.origin).parent / name))
    for path in paths:
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return ""
    return (
        f"version compatibility needs the lean runtime {name}, which is not on this host (pip"
        " install tensorrt-lean brings it)"
    )


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
