"""What this host can build and run, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from pipeline import backends
from pipeline.backends.amx import tiles_described
from pipeline.backends.base import Backend
from pipeline.backends.tensorrt_rtx_ import why_not_run
from pipeline.core import Frozen, Precision, Recipe, Target
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.gpu import Gpus, find_gpus
from pipeline.measure import Environment, environment
from pipeline.recipes import BF16_FLAGS, VNNI_FLAGS

LOW_DISK_BYTES = 5 * 2**30  # a ResNet-50 compile with its candidates leaves about 1 GB


class BackendCheck(Frozen):
    """One backend on this host."""

    name: str
    version: str = ""
    builds: tuple[Precision, ...] = ()  # empty: it cannot build here
    runs: bool = False
    reason: str = ""  # why it does not build, or does not run, here
    install: str = ""  # the next step


class CpuCheck(Frozen):
    """How this CPU runs reduced precision."""

    int8: str
    bf16: str
    amx: str = ""  # why it cannot be used although the flags show it


class Doctor(Frozen):
    """The whole examination. `problems` is empty on a healthy host; a backend that is not installed is no problem."""

    environment: Environment
    cpu: CpuCheck
    gpus: Gpus
    backends: tuple[BackendCheck, ...]
    onnxruntimes: tuple[str, ...]  # installed distributions that provide the module onnxruntime
    store: Path
    store_free_bytes: int
    problems: tuple[str, ...]


def examine(store: Path) -> Doctor:
    """Look at this host, and at the disk of the store; loads no heavy library and writes nothing."""
    host, gpus, onnxruntimes = environment(), find_gpus(), onnxruntime_distributions()
    free = free_bytes(store)
    return Doctor(
        environment=host,
        cpu=check_cpu(host.cpu_flags, tiles_described()),
        gpus=gpus,
        backends=tuple(check_backend(name, gpus) for name in backends.BACKENDS),
        onnxruntimes=onnxruntimes,
        store=store,
        store_free_bytes=free,
        problems=tuple(find_problems(onnxruntimes, store, free)),
    )


def lines(found: Doctor) -> tuple[str, ...]:
    """The examination as plain lines: the host, then each backend, then the problems."""
    host = found.environment
    gpus = ", ".join(f"{gpu.name} (compute capability {gpu.compute_capability}, driver {gpu.driver})" for gpu in found.gpus.devices)
    table = [
        ("CPU", f"{host.cpu}, {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB"),
        ("CPU flags", " ".join(host.cpu_flags) or "none that matter"),
        ("int8 on the CPU", found.cpu.int8),
        ("bf16 on the CPU", found.cpu.bf16),
        *((("AMX", found.cpu.amx),) if found.cpu.amx else ()),
        ("GPU", gpus or f"none: {found.gpus.reason}"),
        ("system", f"{host.os}, Python {host.python}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in host.packages.items())),
        ("store", f"{found.store} ({found.store_free_bytes / 2**30:.1f} GiB free)"),
        *chain.from_iterable(_backend_lines(check) for check in found.backends),
        *(("PROBLEM", text) for text in found.problems),
    ]
    width = max(len(label) for label, _ in table)
    return tuple(f"{label:<{width}}  {text}" for label, text in table)


def _backend_lines(check: BackendCheck) -> Iterable[tuple[str, str]]:
    if not check.builds:
        yield check.name, f"not available: {check.reason}"
        yield "", f"-> {check.install}"
        return
    runs = "runs here" if check.runs else f"does not run here: {check.reason}"
    yield check.name, f"{check.version}: builds {', '.join(check.builds)}; {runs}"


def check_backend(name: str, gpus: Gpus) -> BackendCheck:
    """Whether a backend builds and runs here. All of them run what they build, but for TensorRT-RTX, which builds for other hosts."""
    backend = backends.backend(name)
    try:
        target = backend.probe()
    except BackendUnavailable as error:
        return BackendCheck(name=name, reason=error.message, install=error.next_step)
    reason = why_not_run(None, gpus) if name == "tensorrt_rtx" else ""
    builds = tuple(precision for precision in Precision if _builds(backend, name, precision, target))
    return BackendCheck(name=name, version=target.version, builds=builds, runs=not reason, reason=reason)


def _builds(backend: Backend, name: str, precision: Precision, target: Target) -> bool:
    if name == "pytorch":
        return precision in backend.PRECISIONS  # a baseline, never a candidate
    try:
        backend.check_recipe(Recipe(backend=name, precision=precision, compute_capability="8.9" if name == "tensorrt_rtx" else None), target)
    except UnsupportedError:
        return False
    return True


def check_cpu(flags: Iterable[str], tiles: bool = True) -> CpuCheck:
    """What int8 and bf16 run on, from the CPU's flags; `tiles`: whether CPUID describes AMX's tiles."""
    present = set(flags)
    hidden = "the flags show it, but this (virtual) machine hides its tiles: OpenVINO runs without it" if "amx_tile" in present and not tiles else ""
    if vnni := sorted(VNNI_FLAGS & present):
        int8 = f"native ({', '.join(vnni)}): 8-bit weights"
    elif "avx2" in present:
        int8 = "AVX2 only: 8-bit dot products can saturate, so weights get 7 bits (chosen by itself); expect about half of VNNI's gain"
    else:
        int8 = "no dot-product instructions known: int8 may be slower than fp32"
    native = sorted(BF16_FLAGS & present)
    return CpuCheck(int8=int8, bf16=f"native ({', '.join(native)})" if native else "emulated: slower than fp32, not tried by default", amx=hidden)


def onnxruntime_distributions() -> tuple[str, ...]:
    """Name and version of every installed distribution that provides the module `onnxruntime`: two overwrite each other's files."""
    names = set(importlib.metadata.packages_distributions().get("onnxruntime", ()))
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(names))


def find_problems(onnxruntimes: tuple[str, ...], store: Path, free: int) -> Iterable[str]:
    """What keeps this installation from working, each with the next step."""
    if not onnxruntimes:
        yield "onnxruntime is not installed: pip install onnxruntime"
    if len(onnxruntimes) > 1:
        names = ", ".join(onnxruntimes)
        yield f"expected one distribution of onnxruntime, found {names}: they overwrite each other; uninstall all, then install one again"
    if free < LOW_DISK_BYTES:
        yield f"only {free / 2**30:.1f} GiB free for the store at '{store}': free some space, or set CRUCIBLE_HOME to a larger disk"


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or would be made."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free
