"""`crucible doctor`: examine what this host can build and run, and what is missing."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterable
from pathlib import Path

from pipeline import backends
from pipeline.backends.base import Backend
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.library import Feature
from pipeline.backends.tensorrt.rtx import why_not_run
from pipeline.benchmark.cpu_peaks import load_peaks
from pipeline.core.artifacts import Target
from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.amx import tiles_described
from pipeline.host.environment import Environment, environment
from pipeline.host.gpu import Gpu, Gpus, Peaks, find_gpus, peaks, with_hardware
from pipeline.plan.precisions import BF16_FLAGS, VNNI_FLAGS
from pipeline.report.performance_summary import peaks_text

LOW_DISK_BYTES = 5 * 2**30
"""With less free space there is a problem: a ResNet-50 compile stores about 1 GB."""

TYPICAL_TENSORRT = ("10.10", "11.4")
"""Versions for the tables of a GPU's features where no TensorRT is installed."""

NO_LEAN = "version compatibility needs the lean runtime (pip install tensorrt-lean)"


class BackendCheck(Frozen):
    """One backend on this host."""

    name: str
    version: str = ""
    builds: tuple[Precision, ...] = ()  # empty: the backend cannot build here
    runs: bool = False
    gpu: str = ""  # name of the GPU that runs its engines
    reason: str = ""  # why the backend does not build, or does not run, here
    install: str = ""  # next step


class FeatureTable(Frozen):
    """What one version of TensorRT can do on one GPU."""

    version: str
    installed: bool
    features: tuple[Feature, ...]


class GpuCheck(Frozen):
    """One GPU: its peaks, and what TensorRT can do on it."""

    gpu: Gpu
    peaks: Peaks
    # Of the installed version; if there is none, of typical versions, by the GPU's generation only.
    tensorrt: tuple[FeatureTable, ...]


class CpuCheck(Frozen):
    """How this CPU runs reduced precision."""

    int8: str
    bf16: str
    amx: str = ""  # why AMX is not usable although the flags show it


class Doctor(Frozen):
    """Result of an examination.

    `problems` is empty on a healthy host. A backend that is not installed is no problem.
    """

    environment: Environment
    cpu: CpuCheck
    cpu_peaks: Peaks | None  # as stored by `crucible doctor --measure`
    gpus: tuple[GpuCheck, ...]
    no_gpu: str  # why there is no GPU
    backends: tuple[BackendCheck, ...]
    onnxruntimes: tuple[str, ...]  # installed distributions that provide the module onnxruntime
    store: Path
    store_free_bytes: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # known problems of the installed versions
    sandbox: tuple[str, ...] = ()  # what the service's sandbox holds


def examine(store: Path) -> Doctor:
    """Examine this host and the disk of the store.

    Loads no heavy library, makes no CUDA context and writes nothing.
    """
    host = environment()
    gpus = with_hardware(find_gpus())
    onnxruntimes = onnxruntime_distributions()
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


def lines(examination: Doctor) -> tuple[str, ...]:
    """Return the examination as plain lines: the host, then each backend, then the problems."""
    host, cpu = examination.environment, examination.cpu
    cpu_peak = "not measured: the next compile does, or crucible doctor --measure"
    if examination.cpu_peaks:
        cpu_peak = peaks_text(examination.cpu_peaks)
    table = [
        ("CPU", f"{host.cpu}, {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB"),
        ("CPU flags", " ".join(host.cpu_flags) or "none that change the speed of inference"),
        ("int8 on the CPU", cpu.int8),
        ("bf16 on the CPU", cpu.bf16),
        ("CPU peak", cpu_peak),
    ]
    if cpu.amx:
        table.append(("AMX", cpu.amx))
    if examination.gpus:
        table += _gpu_lines(examination.gpus)
    else:
        table.append(("GPU", f"none: {examination.no_gpu}"))
    packages = ", ".join(f"{name} {version}" for name, version in host.packages.items())
    free = f"{examination.store_free_bytes / 2**30:.1f} GiB free"
    table += [
        ("system", f"{host.os}, Python {host.python}"),
        ("packages", packages),
        ("store", f"{examination.store} ({free})"),
    ]
    for check in examination.backends:
        table += _backend_lines(check)
    labels = ("sandbox", *[""] * len(examination.sandbox))
    table += zip(labels, examination.sandbox, strict=False)
    table += [("WARNING", text) for text in examination.warnings]
    table += [("PROBLEM", text) for text in examination.problems]
    width = max(len(label) for label, _ in table)
    return tuple(f"{label:<{width}}  {text}" for label, text in table)


def _gpu_lines(checks: tuple[GpuCheck, ...]) -> Iterable[tuple[str, str]]:
    """Yield the lines of each kind of GPU: its data, its peaks, and TensorRT's features on it."""
    kinds: dict[tuple[str, str], list[GpuCheck]] = {}
    for check in checks:
        kinds.setdefault((check.gpu.name, check.gpu.compute_capability), []).append(check)
    for same_kind in kinds.values():
        check, gpu = same_kind[0], same_kind[0].gpu
        count = f"{len(same_kind)} x " if len(same_kind) > 1 else ""
        memory = f", {gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else ""
        details = f"compute capability {gpu.compute_capability}, driver {gpu.driver}{memory}"
        yield "GPU", f"{count}{gpu.name} ({details})"
        yield "", f"peak: {_peak_text(gpu, check.peaks)}"
        for table in check.tensorrt:
            for line in _feature_lines(table):
                yield "", line


def _feature_lines(table: FeatureTable) -> Iterable[str]:
    available = ", ".join(feature.name for feature in table.features if feature.available)
    condition = "" if table.installed else ", if it were installed"
    yield f"TensorRT {table.version}{condition}: {available or 'nothing'}"
    reasons = [feature.why_not for feature in table.features if not feature.available]
    for reason in dict.fromkeys(reasons):
        yield f"  not: {reason}"


def _peak_text(gpu: Gpu, peak: Peaks) -> str:
    """`fp32 66.9, fp16 1070 TFLOP/s, dense, at 1980 MHz; memory 4813 GB/s`."""
    rates = []
    for precision, rate in peak.flops_per_s.items():
        digits = 1 if rate < 1e14 else 0
        rates.append(f"{precision} {rate / 1e12:.{digits}f}")
    arithmetic = "arithmetic not known for this GPU"
    if rates:
        arithmetic = f"{', '.join(rates)} TFLOP/s, dense, at {gpu.sm_clock_mhz} MHz"
    memory = f"{peak.bytes_per_s / 1e9:.0f} GB/s" if peak.bytes_per_s else "not known"
    return f"{arithmetic}; memory {memory}"


def _backend_lines(check: BackendCheck) -> Iterable[tuple[str, str]]:
    if not check.builds:
        yield check.name, f"not available: {check.reason}"
        yield "", f"-> {check.install}"
        return
    runs = f"does not run here: {check.reason}"
    if check.runs:
        runs = f"runs here, on {check.gpu}" if check.gpu else "runs here"
    yield check.name, f"{check.version}: builds {', '.join(check.builds)}; {runs}"


def check_backend(name: str, gpus: Gpus) -> BackendCheck:
    """Check whether a backend builds and runs on this host.

    Every backend runs what it builds, except TensorRT-RTX, which can build for other hosts.
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
    if precision not in backend.PRECISIONS:
        return False
    if name == "pytorch":  # a baseline, never a candidate: there is no recipe to check
        return True
    capability = "8.9" if name == "tensorrt_rtx" else None
    recipe = Recipe(
        backend=name,
        precision=precision,
        weight_only=precision is Precision.INT4,
        compute_capability=capability,
    )
    if name == "torch":
        # The only form that needs no compiler.
        recipe = recipe.model_copy(update={"form": "exported"})
    try:
        backend.check_recipe(recipe, target)
    except UnsupportedError:
        return False
    return True


def check_gpus(gpus: Gpus) -> tuple[GpuCheck, ...]:
    """Check every GPU: its peaks and TensorRT's features on it. Needs no TensorRT."""
    installed = installed_tensorrt()
    return tuple(
        GpuCheck(
            gpu=gpu, peaks=peaks(gpu), tensorrt=feature_tables(gpu.compute_capability, installed)
        )
        for gpu in gpus.devices
    )


def installed_tensorrt() -> str:
    """Return the version of the installed TensorRT, or "" if there is none."""
    try:
        return trt_library.version()
    except BackendUnavailable:
        return ""


def feature_tables(capability: str, installed: str) -> tuple[FeatureTable, ...]:
    """Return the features of the installed TensorRT on a GPU generation.

    If none is installed (""), return those of typical versions.
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
    """Return which instructions run int8 and bf16, from the CPU's flags.

    `tiles` tells whether CPUID describes AMX's tiles.
    """
    present = set(flags)
    hidden_amx = ""
    if "amx_tile" in present and not tiles:
        hidden_amx = (
            "the flags show it, but this (virtual) machine hides its tiles: OpenVINO runs without"
            " it"
        )
    if vnni := sorted(VNNI_FLAGS & present):
        int8 = f"native ({', '.join(vnni)}): 8-bit weights"
    elif "avx2" in present:
        int8 = (
            "AVX2 only: 8-bit dot products can saturate, so weights get 7 bits (chosen"
            " automatically); expect about half of VNNI's speedup"
        )
    else:
        int8 = "no dot-product instructions known: int8 may be slower than fp32"
    native = sorted(BF16_FLAGS & present)
    bf16 = "emulated: slower than fp32, not tried by default"
    if native:
        bf16 = f"native ({', '.join(native)})"
    return CpuCheck(int8=int8, bf16=bf16, amx=hidden_amx)


def onnxruntime_distributions() -> tuple[str, ...]:
    """Return name and version of each installed distribution with the module `onnxruntime`.

    Two such distributions overwrite each other's files.
    """
    names = set(importlib.metadata.packages_distributions().get("onnxruntime", ()))
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(names))


def find_problems(onnxruntimes: tuple[str, ...], store: Path, free: int) -> Iterable[str]:
    """Yield the problems of this installation, each with its next step."""
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
    """Return the free space on the disk of `folder`, which need not exist yet."""
    absolute = folder.absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    return shutil.disk_usage(existing).free
