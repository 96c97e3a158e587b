"""torch.compile and AOTInductor: their tools on this host, and inductor's cache.

The cache is stored beside an engine, so that processes that load it do not compile again.
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
from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress
from pipeline.core.recipe import CompileMode
from pipeline.core.shapes import Point, Profile
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
    """A tool that inductor needs and this host lacks."""

    what: str  # "a C++ compiler, and there is no 'g++'"
    install: str


def lack_of_tools(on_gpu: bool, ahead: bool = False) -> Lack | None:
    """Return the first tool that inductor lacks here; None if it has all.

    CPU code needs a C++ compiler. GPU code needs Triton, and a C compiler for its launchers. Code
    that is compiled `ahead` of time is a C++ library on both.
    """
    if on_gpu and importlib.util.find_spec("triton") is None:
        return Lack("Triton for the GPU, and it is not installed", "pip install triton")
    if on_gpu and ahead and cuda_headers() is None:
        return Lack(
            "CUDA's headers, and there are none",
            "install CUDA's toolkit, or set CUDA_HOME",
        )
    lack = _lack_of_compiler("C", "CC", ("gcc", "clang")) if on_gpu else None
    if lack is None and (ahead or not on_gpu):
        lack = _lack_of_compiler("C++", "CXX", ("g++",))
    return lack


@dataclass(frozen=True, slots=True)
class CudaHeaders:
    """The folders of CUDA's headers."""

    home: Path  # torch's CUDA_HOME
    more: Path | None = None  # a folder with headers that are missing there

    def use(self) -> None:
        """Set the environment in which the compilers of this process find the headers."""
        os.environ["CUDA_HOME"] = str(self.home)
        if self.more:
            before = os.environ.get("CPATH")
            paths = [before, str(self.more)] if before else [str(self.more)]
            os.environ["CPATH"] = os.pathsep.join(paths)


def cuda_headers() -> CudaHeaders | None:
    """Return CUDA's headers, of a toolkit where torch looks for one, else Triton's copy; or None.

    Triton's copy lacks `nv/target`, which is in the packages of CUDA that torch requires.
    """
    variable = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    toolkits = [Path("/usr/local/cuda")]
    if nvcc:
        toolkits.insert(0, Path(nvcc).resolve().parents[1])
    if variable:
        toolkits.insert(0, Path(variable))
    toolkit = next(filter(_has_headers, toolkits), None)
    if toolkit:
        return CudaHeaders(toolkit)
    copies = [folder / "backends" / "nvidia" for folder in _package_folders("triton")]
    packages = [file for folder in _package_folders("nvidia") for file in folder.glob(NV_TARGET)]
    copy = next(filter(_has_headers, copies), None)
    return CudaHeaders(copy, packages[0].parents[1]) if copy and packages else None


def _has_headers(folder: Path) -> bool:
    return all((folder / "include" / file).is_file() for file in HEADERS)


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _lack_of_compiler(language: str, variable: str, usual: tuple[str, ...]) -> Lack | None:
    chosen = os.environ.get(variable)
    compilers = [chosen] if chosen else usual
    if any(shutil.which(compiler) for compiler in compilers):
        return None
    what = f"a {language} compiler, and there is no '{compilers[0]}'"
    return Lack(what, f"install {usual[0]}")


def compiled(module: Any, args: tuple[torch.Tensor, ...], mode: CompileMode | None) -> Any:
    """Compile a module at the shapes of `args`. Another shape compiles a graph for all others."""
    import torch

    function = torch.compile(module, mode=mode)
    with explained("torch.compile cannot compile this model here"), torch.inference_mode():
        function(*args)
    return function


@contextlib.contextmanager
def explained(cannot: str) -> Iterator[None]:
    """Turn errors into a ModelError that begins with `cannot`, or into OutOfDeviceMemory.

    MemoryError and errors of the disk are passed on.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    except Exception as error:  # the user's code, Triton and compilers may raise anything
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in DISK_FAULTS:
            raise
        advice = "leave it out, or see the compiler's output in the log of this stage"
        message = f"{cannot}: {type(error).__name__}: {first_line(error)}"
        raise ModelError(message, advice) from error


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Make inductor store everything that it compiles in this context in `folder`."""
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
    """Copy the files in `folder` that are missing in the cache of this process to the cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache = Path(cache_dir())
    for file in (path for path in folder.rglob("*") if path.is_file()):
        target = cache / file.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            # other processes may read the cache meanwhile
            part = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy(file, part)
            part.replace(target)


def gpu_turn(on_gpu: bool, progress: Progress) -> contextlib.AbstractContextManager[None]:
    """Lock the GPU against our other builds: inductor times kernels on it, as TensorRT does."""
    gpus = find_gpus().devices if on_gpu else ()
    return gpu_lock(gpus[0].uuid, progress) if gpus else contextlib.nullcontext()


def fill_cache(engine: Engine, load: Callable[[Engine], Loaded], points: tuple[Point, ...]) -> None:
    """Compile the engine at these points of its profiles, into the cache beside it."""
    with cache_in(engine.root / CACHE), contextlib.closing(load(engine)) as loaded:
        for number, profile in enumerate(engine.profiles or (Profile(),)):
            with contextlib.closing(loaded.session(number)) as session:
                for point in points:
                    values = profile.values_at(point)
                    feeds = draw_feeds(engine.inputs, profile.sizes(point), 0, values)
                    run_session(session, feeds)
