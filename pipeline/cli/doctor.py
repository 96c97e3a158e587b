"""What this host can build and run, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from pipeline import backends
from pipeline.backends.base import Backend
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.library import Feature
from pipeline.backends.tensorrt.rtx import why_not_run
from pipeline.benchmark.cpu_peaks import load_peaks
from pipeline.core import Frozen, Precision, Recipe, Target
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.amx import tiles_described
from pipeline.host.environment import Environment, environment
from pipeline.host.gpu import Gpu, Gpus, Peaks, find_gpus, peaks, with_hardware
from pipeline.plan.recipes import BF16_FLAGS, VNNI_FLAGS
from pipeline.report.performance_summary import peaks_text

LOW_DISK_BYTES = 5 * 2**30  # a ResNet-50 compile with its candidates leaves about 1 GB
TYPICAL_TENSORRT = (
    "10.10",
    "11.4",
)  # what the GPU's generation allows is told of these where none is installed
NO_LEAN = "version compatibility needs the lean runtime (pip install tensorrt-lean)"


class BackendCheck(Frozen):
    """One backend on this host."""

    name: str
    version: str = ""
    builds: tuple[Precision, ...] = ()  # empty: it cannot build here
    runs: bool = False
    gpu: str = ""  # that it runs on
    reason: str = ""  # why it does not build, or does not run, here
    install: str = ""  # the next step


class FeatureTable(Frozen):
    """What one version of TensorRT can do on one GPU."""

    version: str
    installed: bool
    features: tuple[Feature, ...]


class GpuCheck(Frozen):
    """One GPU: what it could reach, and what TensorRT can do on it."""

    gpu: Gpu
    peaks: Peaks
    tensorrt: tuple[
        FeatureTable, ...
    ]  # of the installed version, else of typical ones, by the GPU's generation only


class CpuCheck(Frozen):
    """How this CPU runs reduced precision."""

    int8: str
    bf16: str
    amx: str = ""  # why it cannot be used although the flags show it


class Doctor(Frozen):
    """The whole examination. `problems` is empty on a healthy host; a backend that is not installed
    is no problem.
    """

    environment: Environment
    cpu: CpuCheck
    cpu_peaks: Peaks | None  # as `crucible doctor --measure` found them
    gpus: tuple[GpuCheck, ...]
    no_gpu: str  # why there is none
    backends: tuple[BackendCheck, ...]
    onnxruntimes: tuple[str, ...]  # installed distributions that provide the module onnxruntime
    store: Path
    store_free_bytes: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # what was reported of the installed versions


def examine(store: Path) -> Doctor:
    """Look at this host, and at the disk of the store; loads no heavy library, makes no CUDA
    context and writes nothing.
    """
    host, gpus, onnxruntimes = (
        environment(),
        with_hardware(find_gpus()),
        onnxruntime_distributions(),
    )
    free = free_bytes(store)
    return Doctor(
        environment=host,
        cpu=check_cpu(host.cpu_flags, tiles_described()),
        cpu_peaks=load_peaks(),
        gpus=check_gpus(gpus),
        no_gpu=gpus.reason,
        backends=tuple(check_backend(name, gpus) for name in backends.BACKENDS),
        onnxruntimes=onnxruntimes,
        store=store,
        store_free_bytes=free,
        problems=tuple(find_problems(onnxruntimes, store, free)),
        warnings=trt_library.release_warnings(installed_tensorrt()),
    )


def lines(found: Doctor) -> tuple[str, ...]:
    """The examination as plain lines: the host, then each backend, then the problems."""
    host = found.environment
    table = [
        ("CPU", f"{host.cpu}, {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB"),
        ("CPU flags", " ".join(host.cpu_flags) or "none that matter"),
        ("int8 on the CPU", found.cpu.int8),
        ("bf16 on the CPU", found.cpu.bf16),
        (
            "CPU peak",
            (
                peaks_text(found.cpu_peaks)
                if found.cpu_peaks
                else "not measured: crucible doctor --measure"
            ),
        ),
        *((("AMX", found.cpu.amx),) if found.cpu.amx else ()),
        *(_gpu_lines(found.gpus) if found.gpus else [("GPU", f"none: {found.no_gpu}")]),
        ("system", f"{host.os}, Python {host.python}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in host.packages.items())),
        ("store", f"{found.store} ({found.store_free_bytes / 2**30:.1f} GiB free)"),
        *chain.from_iterable(_backend_lines(check) for check in found.backends),
        *(("WARNING", text) for text in found.warnings),
        *(("PROBLEM", text) for text in found.problems),
    ]
    width = max(len(label) for label, _ in table)
    return tuple(f"{label:<{width}}  {text}" for label, text in table)


def _gpu_lines(checks: tuple[GpuCheck, ...]) -> Iterable[tuple[str, str]]:
    """What each kind of GPU is, could reach, and can do with TensorRT."""
    for kind in dict.fromkeys((check.gpu.name, check.gpu.compute_capability) for check in checks):
        same = [check for check in checks if (check.gpu.name, check.gpu.compute_capability) == kind]
        check, gpu, times = same[0], same[0].gpu, f"{len(same)} x " if len(same) > 1 else ""
        memory = f", {gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else ""
        yield (
            "GPU",
            (
                f"{times}{gpu.name} (compute capability {gpu.compute_capability}, driver"
                f" {gpu.driver}{memory})"
            ),
        )
        yield "", f"peak: {_peak_text(gpu, check.peaks)}"
        for table in check.tensorrt:
            able = ", ".join(feature.name for feature in table.features if feature.available)
            yield (
                "",
                (
                    "TensorRT"
                    f" {table.version}{'' if table.installed else ', if it were installed'}:"
                    f" {able or 'nothing'}"
                ),
            )
            for reason in dict.fromkeys(
                feature.why_not for feature in table.features if not feature.available
            ):
                yield "", f"  not: {reason}"


def _peak_text(gpu: Gpu, peak: Peaks) -> str:
    """`fp32 66.9, fp16 1070 TFLOP/s, dense, at 1980 MHz; memory 4813 GB/s`."""
    rates = ", ".join(
        f"{precision} {rate / 1e12:.{1 if rate < 1e14 else 0}f}"
        for precision, rate in peak.flops_per_s.items()
    )
    arithmetic = (
        f"{rates} TFLOP/s, dense, at {gpu.sm_clock_mhz} MHz"
        if rates
        else "arithmetic not known for this GPU"
    )
    return f"{arithmetic}; memory " + (
        f"{peak.bytes_per_s / 1e9:.0f} GB/s" if peak.bytes_per_s else "not known"
    )


def _backend_lines(check: BackendCheck) -> Iterable[tuple[str, str]]:
    if not check.builds:
        yield check.name, f"not available: {check.reason}"
        yield "", f"-> {check.install}"
        return
    runs = (
        f"runs here{f', on {check.gpu}' if check.gpu else ''}"
        if check.runs
        else f"does not run here: {check.reason}"
    )
    yield check.name, f"{check.version}: builds {', '.join(check.builds)}; {runs}"


def check_backend(name: str, gpus: Gpus) -> BackendCheck:
    """Whether a backend builds and runs here. All of them run what they build, but for
    TensorRT-RTX, which builds for other hosts.
    """
    backend = backends.backend(name)
    try:
        target = backend.probe()
    except BackendUnavailable as error:
        return BackendCheck(name=name, reason=error.message, install=error.next_step)
    reason = why_not_run(None, gpus) if name == "tensorrt_rtx" else ""
    builds = tuple(
        precision for precision in Precision if _builds(backend, name, precision, target)
    )
    gpu = target.device if target.compute_capability else ""
    return BackendCheck(
        name=name, version=target.version, builds=builds, runs=not reason, gpu=gpu, reason=reason
    )


def _builds(backend: Backend, name: str, precision: Precision, target: Target) -> bool:
    if name == "pytorch" or precision not in backend.PRECISIONS:
        return (
            precision in backend.PRECISIONS
        )  # pytorch is a baseline, never a candidate, so there is no recipe to check
    capability = "8.9" if name == "tensorrt_rtx" else None
    asked = Recipe(
        backend=name,
        precision=precision,
        weight_only=precision is Precision.INT4,
        compute_capability=capability,
    )
    if name == "torch":
        asked = asked.model_copy(update={"form": "exported"})  # the one form that needs no compiler
    try:
        backend.check_recipe(asked, target)
    except UnsupportedError:
        return False
    return True


def check_gpus(gpus: Gpus) -> tuple[GpuCheck, ...]:
    """Every GPU with its peaks and the table of what TensorRT can do on it; needs no TensorRT."""
    installed = installed_tensorrt()
    return tuple(
        GpuCheck(
            gpu=gpu, peaks=peaks(gpu), tensorrt=feature_tables(gpu.compute_capability, installed)
        )
        for gpu in gpus.devices
    )


def installed_tensorrt() -> str:
    """The version of TensorRT that is installed here, or ""."""
    try:
        return trt_library.version()
    except BackendUnavailable:
        return ""


def feature_tables(capability: str, installed: str) -> tuple[FeatureTable, ...]:
    """What the installed TensorRT can do on this generation, or what typical versions could where
    none is installed ("").
    """
    if installed:
        return (
            FeatureTable(
                version=installed,
                installed=True,
                features=trt_library.features(installed, capability),
            ),
        )
    return tuple(
        FeatureTable(
            version=version,
            installed=False,
            features=trt_library.features(version, capability, NO_LEAN),
        )
        for version in TYPICAL_TENSORRT
    )


def check_cpu(flags: Iterable[str], tiles: bool = True) -> CpuCheck:
    """What int8 and bf16 run on, from the CPU's flags; `tiles`: whether CPUID describes AMX's
    tiles.
    """
    present = set(flags)
    hidden = (
        "the flags show it, but this (virtual) machine hides its tiles: OpenVINO runs without it"
        if "amx_tile" in present and not tiles
        else ""
    )
    if vnni := sorted(VNNI_FLAGS & present):
        int8 = f"native ({', '.join(vnni)}): 8-bit weights"
    elif "avx2" in present:
        int8 = (
            "AVX2 only: 8-bit dot products can saturate, so weights get 7 bits (chosen by itself);"
            " expect about half of VNNI's gain"
        )
    else:
        int8 = "no dot-product instructions known: int8 may be slower than fp32"
    native = sorted(BF16_FLAGS & present)
    return CpuCheck(
        int8=int8,
        bf16=(
            f"native ({', '.join(native)})"
            if native
            else "emulated: slower than fp32, not tried by default"
        ),
        amx=hidden,
    )


def onnxruntime_distributions() -> tuple[str, ...]:
    """Name and version of every installed distribution that provides the module `onnxruntime`: two
    overwrite each other's files.
    """
    names = set(importlib.metadata.packages_distributions().get("onnxruntime", ()))
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(names))


def find_problems(onnxruntimes: tuple[str, ...], store: Path, free: int) -> Iterable[str]:
    """What keeps this installation from working, each with the next step."""
    if not onnxruntimes:
        yield "onnxruntime is not installed: pip install onnxruntime"
    if len(onnxruntimes) > 1:
        names = ", ".join(onnxruntimes)
        yield (
            f"expected one distribution of onnxruntime, found {names}: they overwrite each other;"
            " uninstall all, then install one again"
        )
    if free < LOW_DISK_BYTES:
        yield (
            f"only {free / 2**30:.1f} GiB free for the store at '{store}': free some space, or set"
            " CRUCIBLE_HOME to a larger disk"
        )


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or would be made."""
    existing = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
    )
    return shutil.disk_usage(existing).free
