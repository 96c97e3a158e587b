"""torch.compile and AOTInductor: what they need on this host, and inductor's cache.

The cache is kept beside an engine: what was compiled once is not compiled again by the processes
that load it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.backends.base import Loaded, run_session
from pipeline.backends.pytorch.module import first_line, out_of_memory
from pipeline.backends.timing_cache import gpu_lock
from pipeline.core import CompileMode, Engine, Point, Profile, Progress
from pipeline.errors import ModelError
from pipeline.execution.exit_causes import DISK_FAULTS
from pipeline.host.gpu import find_gpus
from pipeline.onnx_graph.feeds import draw_feeds

if TYPE_CHECKING:
    import torch

CACHE = "inductor"
"""Folder of an engine that holds what inductor compiled for it."""

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = ("cuda_runtime.h", "crt/host_config.h")  # the second is in no package of CUDA's libraries
NV_TARGET = "*/include/nv/target"


@dataclass(frozen=True, slots=True)
class Lack:
    """What inductor needs and this host lacks."""

    what: str  # "a C++ compiler, and there is no 'g++'"
    install: str


def lack_of_tools(on_gpu: bool, ahead: bool = False) -> Lack | None:
    """What inductor lacks here; None if it has all.

    CPU code needs a C++ compiler. GPU code needs Triton, and a C compiler for its launchers. What
    is compiled `ahead` of time is a C++ library on both.
    """
    if on_gpu and importlib.util.find_spec("triton") is None:
        return Lack("Triton for the GPU, and it is not installed", "pip install triton")
    if on_gpu and ahead and cuda_headers() is None:
        return Lack(
            "CUDA's headers, and there are none",
            "install CUDA's toolkit, or set CUDA_HOME",
        )
    in_c = _lack_of_compiler("C", "CC", ("gcc", "clang")) if on_gpu else None
    in_cpp = _lack_of_compiler("C++", "CXX", ("g++",)) if ahead or not on_gpu else None
    return in_c or in_cpp


@dataclass(frozen=True, slots=True)
class CudaHeaders:
    """Where CUDA's headers are."""

    home: Path  # what torch calls CUDA_HOME
    more: Path | None = None  # a folder of headers that it lacks

    def use(self) -> None:
        """Have the compilers that this process starts find them."""
        os.environ["CUDA_HOME"] = str(self.home)
        if self.more:
            others = os.environ.get("CPATH")
            os.environ["CPATH"] = os.pathsep.join([*([others] if others else []), str(self.more)])


def cuda_headers() -> CudaHeaders | None:
    """CUDA's headers: of a toolkit, where torch looks for it, or else Triton's copy; None without.

    Triton's copy lacks `nv/target`, which comes with the packages of CUDA that torch needs.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    toolkits = [
        *([Path(named)] if named else []),
        *([Path(nvcc).resolve().parents[1]] if nvcc else []),
        Path("/usr/local/cuda"),
    ]
    if found := next(filter(_has_headers, toolkits), None):
        return CudaHeaders(found)
    copies = [folder / "backends" / "nvidia" for folder in _package_folders("triton")]
    packages = [file for folder in _package_folders("nvidia") for file in folder.glob(NV_TARGET)]
    copy = next(filter(_has_headers, copies), None)
    return CudaHeaders(copy, packages[0].parents[1]) if copy and packages else None


def _has_headers(place: Path) -> bool:
    return all((place / "include" / file).is_file() for file in HEADERS)


def _package_folders(name: str) -> list[Path]:
    found = importlib.util.find_spec(name)
    return [Path(folder) for folder in found.submodule_search_locations or ()] if found else []


def _lack_of_compiler(language: str, variable: str, usual: tuple[str, ...]) -> Lack | None:
    named = os.environ.get(variable)
    if any(shutil.which(compiler) for compiler in ([named] if named else usual)):
        return None
    what = f"a {language} compiler, and there is no '{named or usual[0]}'"
    return Lack(what, f"install {usual[0]}")


def compiled(module: Any, args: tuple[torch.Tensor, ...], mode: CompileMode | None) -> Any:
    """The module compiled at the shapes of `args`; another shape makes a graph for all others."""
    import torch

    function = torch.compile(module, mode=mode)
    with explained("torch.compile cannot compile this model here"), torch.inference_mode():
        function(*args)
    return function


@contextlib.contextmanager
def explained(cannot: str) -> Iterator[None]:
    """ModelError that begins with `cannot`, or OutOfDeviceMemory for a full GPU."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    except Exception as error:  # of the user's code, Triton, a C++ compiler: anything may come
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in DISK_FAULTS:
            raise
        advice = "leave it out, or see the log of this stage for what its compiler said"
        message = f"{cannot}: {type(error).__name__}: {first_line(error)}"
        raise ModelError(message, advice) from error


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """All that inductor compiles in here lies in `folder` afterwards."""
    before = os.environ.get(CACHE_DIR)
    os.environ[CACHE_DIR] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_DIR]
        else:
            os.environ[CACHE_DIR] = before
    for lock in folder.rglob("*.lock"):
        lock.unlink()


def seed_cache(folder: Path) -> None:
    """Give what lies in `folder` to the cache of this process, where it has no such file yet."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    place = Path(cache_dir())
    for file in (path for path in folder.rglob("*") if path.is_file()):
        target = place / file.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.{os.getpid()}")  # others may read it meanwhile
            shutil.copy(file, part)
            part.replace(target)


def gpu_turn(on_gpu: bool, progress: Progress) -> contextlib.AbstractContextManager[None]:
    """Hold the GPU against other builds of ours: inductor times kernels there, as TensorRT does."""
    gpus = find_gpus().devices if on_gpu else ()
    return gpu_lock(gpus[0].uuid, progress) if gpus else contextlib.nullcontext()


def fill_cache(engine: Engine, load: Callable[[Engine], Loaded], points: tuple[Point, ...]) -> None:
    """Compile the engine at these points of its profiles, into the cache beside it."""
    with cache_in(engine.root / CACHE), contextlib.closing(load(engine)) as loaded:
        for number, profile in enumerate(engine.profiles or (Profile(),)):
            with contextlib.closing(loaded.session(number)) as session:
                for point in points:
                    run_session(
                        session,
                        draw_feeds(
                            engine.inputs,
                            profile.sizes(point),
                            0,
                            profile.values_at(point),
                        ),
                    )
