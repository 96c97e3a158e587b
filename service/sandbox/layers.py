"""The sandbox of a server: the layers that hold on this host, and the confinement of each child.

    own user         each child runs as a user of its own, without capabilities
    Landlock         files, and with newer kernels TCP, signals and abstract sockets
    seccomp          no sockets, no namespaces, no calls that a compile does not need
    control groups   memory and number of processes

Each layer is tried on its own before it is used: a host may have it, and a job could not run in it.
`proof.py` then tries, in all layers together, what they must prevent.
"""

from __future__ import annotations

import glob
import itertools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pipeline
import service
from pipeline.core.frozen import Frozen
from pipeline.execution.child_process import IMPORT_PATH
from pipeline.llm.plan import AnyPlan, LanguagePlan
from service.sandbox import landlock, seccomp
from service.sandbox.control_groups import ControlGroup, ControlGroups, unique
from service.sandbox.launch import Confinement, prctl
from service.storage.layout import Work

# systemd gives these to services that it starts, so that no package and no person has them
FIRST_UID, USERS = 64_000, 512
GROUP = FIRST_UID - 1  # of all children: may pass through the home's folders
MAX_PROCESSES = 4096  # with threads, of one child
RESERVED = 4  # RLIMIT_DATA counts memory that is reserved and never used
TRY_S = 30.0
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7, "PTRACE": 19}

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/proc", "/sys")
SETTINGS = (
    "alternatives",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "nvidia",
    "OpenCL",
    "os-release",
    "passwd",
    "ssl",
    "vulkan",
)
"""What children may read of /etc."""
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
# CUDA names its threads in /proc/PID/task/TID/comm, and opens no GPU where it cannot. A rule for
# /proc/self would not hold for the children of the process that makes it.
GPU_FILES = ("/dev/nvidia*", "/dev/dri", "/proc")
GPU_CONTROL = Path("/dev/nvidiactl")
GPU = "gpu:0"
PR_SET_DUMPABLE = 4  # linux/prctl.h
IMPORT = "import service, numpy, pydantic"
OPEN_GPU = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""
LIBRARIES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")


class Layer(Frozen):
    """One layer of the sandbox on this host."""

    name: str
    held: bool
    detail: str  # what it holds, or why it is not used


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that a child runs in."""

    own_user: bool = False
    landlock: bool = False
    seccomp: bool = False


@dataclass(slots=True)
class Box:
    """The confinement of one child. Call `close` when its processes have ended."""

    confinement: Confinement
    _folder: Path
    _read: Sequence[Path]  # that only this child may read
    _group: ControlGroup | None
    _users: set[int]

    def command(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Return the command that runs `command` in the confinement; in an environment of its own,
        if there is one.
        """
        return replace(self.confinement, environment=environment).command(command)

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the kernel has killed a process of the child for its limit."""
        return self._group is not None and self._group.memory_kills > 0

    def close(self) -> None:
        """Give the child's files to the server's user, and free what the confinement used."""
        if self.confinement.uid:
            give_tree(self._folder, os.geteuid(), os.getegid())
            for path in self._read:  # before another child gets this user
                os.chown(path, -1, os.getegid())
            self._users.discard(self.confinement.uid)
        if self._group is not None:
            self._group.remove()


class Sandbox:
    """The sandbox of one server. It holds nothing before `find`."""

    def __init__(self, home: Path) -> None:
        self.home, self.layers = home, Layers()
        self.gpu_fault = ""  # why children that use a GPU run without these layers
        self.table: tuple[Layer, ...] = ()
        self._groups: ControlGroups | None = None
        self._users: set[int] = set()
        self._numbers = itertools.count()

    def find(self) -> None:
        """Use each layer that this host can. The first call in a process runs child processes for
        about a second.
        """
        (own_user, *others), self._groups = find_layers()
        closed = [path for path in self.home.absolute().parents if not path.stat().st_mode & 0o001]
        if own_user.held and closed:
            why = f"other users cannot pass through '{closed[0]}', which holds the home"
            own_user = own_user.model_copy(update={"held": False, "detail": why})
        self.table = (own_user, *others)
        self.layers = Layers(*(layer.held for layer in self.table[:3]))
        if GPU_CONTROL.exists():
            confinement = self._confinement(self.layers, None, GPU, ())
            self.gpu_fault = why_it_fails(confinement, OPEN_GPU)
            if not self.layers.own_user:
                # Children that use a GPU may write below /proc what their user may. The files there
                # of a process that cannot be dumped belong to root.
                prctl(PR_SET_DUMPABLE, 0)
            detail = f"children that use it run without Landlock and seccomp: {self.gpu_fault}"
            self.table += (
                Layer(
                    name="GPU",
                    held=not self.gpu_fault,
                    detail=detail if self.gpu_fault else "opens in all layers",
                ),
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """One device of each kind that has layers of its own."""
        return ("cpu", GPU) if GPU_CONTROL.exists() else ("cpu",)

    def held(self, device: str) -> tuple[str, ...]:
        """Return the names of the layers that hold for children on a device."""
        absent = {"Landlock", "seccomp"} if self._is_open(device) else set()
        return tuple(layer.name for layer in self.table if layer.held and layer.name not in absent)

    def enter(
        self,
        name: str,
        work: Work,
        device: str,
        read: Sequence[Path] = (),
        shared: Sequence[Path] = (),
        memory_bytes: int | None = None,
        cpu_s: float | None = None,
    ) -> Box:
        """Confine a child to its work directory, which becomes its own. It may read the folders and
        files of its task: `read` only this child, `shared` others, too. OSError if that fails.
        """
        group = None
        if self._groups is not None:
            group_name = unique(f"{name}-{next(self._numbers)}")
            group = self._groups.create(group_name, memory_bytes, MAX_PROCESSES)
        confinement = replace(
            self._confinement(self.layers, work.root, device, (*read, *shared)),
            control_groups=group.entrances if group else (),
            # A control group counts what is used, so it is better than this limit.
            data_bytes=RESERVED * memory_bytes if memory_bytes and not group else 0,
            cpu_s=int(cpu_s * (os.cpu_count() or 1)) if cpu_s else 0,
        )
        own = tuple(path for path in read if path.is_dir() and self._is_in_home(path))
        box = Box(confinement, work.root, own, group, self._users)
        try:
            if self.layers.own_user:
                uid = self._free_user()
                box.confinement = replace(confinement, uid=uid, group=GROUP)
                give_tree(work.root, uid, uid)
                for path in (work.root, *own):
                    self._let_through(path, uid)
                for path in shared:
                    self._let_through(path, GROUP)
        except BaseException:
            box.close()
            raise
        return box

    def of_helper(self, read: Sequence[Path] = ()) -> Confinement:
        """Return the confinement of a helper, which works on its standard input and output, and on
        what lies below `read`.
        """
        confinement = self._confinement(self.layers, None, "cpu", read)
        if self.layers.own_user:
            for path in read:
                self._let_through(path, GROUP)
        # No folder is its own, so all helpers may share one user.
        user = FIRST_UID + USERS if self.layers.own_user else 0
        return replace(confinement, uid=user, group=GROUP if user else 0)

    def _confinement(
        self, layers: Layers, work: Path | None, device: str, read: Iterable[Path]
    ) -> Confinement:
        if self._is_open(device):
            return Confinement()
        gpu = device.startswith("gpu:")
        if not layers.landlock:
            return Confinement(seccomp=layers.seccomp, gpu=gpu)
        devices = DEVICES
        if gpu:
            devices += tuple(itertools.chain.from_iterable(map(glob.glob, GPU_FILES)))
        readable = (*program_files(self.home), *map(str, read))
        write = (str(work),) if work else ()
        return Confinement(readable, write, devices, layers.seccomp, gpu)

    def _is_open(self, device: str) -> bool:
        return device.startswith("gpu:") and bool(self.gpu_fault)

    def _free_user(self) -> int:
        """Choose a user that runs no process of this host."""
        running = set()
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    running.add(entry.stat().st_uid)
                except OSError:  # it has ended
                    continue
        for uid in range(FIRST_UID, FIRST_UID + USERS):
            if uid not in self._users and uid not in running:
                self._users.add(uid)
                return uid
        raise OSError(0, f"all {USERS} users of the sandbox are in use")

    def _let_through(self, path: Path, group: int) -> None:
        """Let a group read a path below the home, and all children pass through the folders above
        it.
        """
        if not self._is_in_home(path):
            return
        for folder in path.absolute().parents:
            if self._is_in_home(folder):
                _open_to(folder, GROUP, 0o710)
        if path.is_dir():
            _open_to(path, group, 0o750)

    def _is_in_home(self, path: Path) -> bool:
        return path.absolute().is_relative_to(self.home.absolute())


def _open_to(folder: Path, group: int, mode: int) -> None:
    """Give a folder to its owner and a group, and to nobody else."""
    os.chown(folder, -1, group)
    folder.chmod(mode)


@cache
def find_layers() -> tuple[tuple[Layer, ...], ControlGroups | None]:
    """Try each layer on this host: return all layers, and where control groups can be made."""
    abi = landlock.version()
    no_landlock = f"the kernel has version {abi}, expected at least {landlock.MIN_VERSION}"
    no_seccomp = "the kernel has no filters, or the architecture is not known"
    nowhere = Path("/nonexistent")
    user = Confinement(uid=FIRST_UID + USERS - 1, group=GROUP)
    tries = (
        ("own user", user, why_no_users(), "a user and a group for each job"),
        (
            "Landlock",
            Confinement(program_files(nowhere), (), DEVICES),
            "" if abi >= landlock.MIN_VERSION else no_landlock,
            f"version {abi}: {landlock.held_by(abi)}",
        ),
        (
            "seccomp",
            Confinement(seccomp=True),
            "" if seccomp.is_available() else no_seccomp,
            "sockets, namespaces, tracing, io_uring, mounts and others",
        ),
    )
    table = []
    for name, confinement, reason, detail in tries:
        why = reason or why_it_fails(confinement)
        table.append(Layer(name=name, held=not why, detail=why or detail))
    groups = ControlGroups.find()
    if isinstance(groups, str):
        return (*table, Layer(name="control groups", held=False, detail=groups)), None
    detail = f"version {groups.version}: memory, number of processes"
    return (*table, Layer(name="control groups", held=True, detail=detail)), groups


def why_it_fails(confinement: Confinement, code: str = IMPORT) -> str:
    """Run Python code in a confinement. Return why it does not work; "" if it does."""
    try:
        run = subprocess.run(
            confinement.command((sys.executable, "-c", code)),
            env={**os.environ, "PYTHONPATH": IMPORT_PATH, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            timeout=TRY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a process in it did not start: {error}"
    last = run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
    return f"a process in it failed: {last[0]}" if run.returncode else ""


def why_no_users() -> str:
    """Return why this process cannot run others as users of their own; "" if it can."""
    if os.geteuid() != 0:
        return "the server does not run as root"
    status = Path("/proc/self/status").read_text("ascii")
    effective = next(int(line[7:], 16) for line in status.splitlines() if line[:7] == "CapEff:")
    missing = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    return f"the server has no capability {', '.join(missing)}" if missing else ""


def program_files(home: Path) -> tuple[str, ...]:
    """Return what children may read to run this program, without the home."""
    python = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent))
    # An editable installation finds its packages without a path.
    packages = (str(Path(package.__path__[0])) for package in (pipeline, service))
    modules = (*IMPORT_PATH.split(os.pathsep), *sysconfig.get_paths().values())
    libraries = itertools.chain.from_iterable(
        os.environ.get(name, "").split(os.pathsep) for name in LIBRARIES
    )
    settings = (f"/etc/{name}" for name in SETTINGS)
    paths = dict.fromkeys(
        filter(None, (*SYSTEM, *settings, *python, *packages, *modules, *libraries))
    )
    hidden = home.resolve()
    return tuple(
        str(part)
        for path in paths
        if Path(path).exists()
        for part in without(Path(path).resolve(), hidden)
    )


def without(path: Path, hidden: Path) -> Iterator[Path]:
    """Yield `path`, or what it contains besides `hidden`."""
    if not hidden.is_relative_to(path):
        yield path
    elif path != hidden:
        for child in path.iterdir():
            yield from without(child, hidden)


def named_files(plan: AnyPlan, home: Path) -> tuple[Path, ...]:
    """Return the files and folders outside the home that a plan names."""
    hidden = home.resolve()
    paths = list(_paths(plan.model_dump()))
    if isinstance(plan, LanguagePlan):  # its model is a text, since it may lie in a package
        paths.append(Path(plan.language_model.path))
    return tuple(
        part
        for path in paths
        if path.is_absolute() and path.exists() and not path.resolve().is_relative_to(hidden)
        for part in without(path, hidden)
    )


def shared_files(home: Path) -> tuple[Path, ...]:
    """Return what all jobs may read: the store of the home."""
    return tuple(home / name for name in ("artifacts", "timing", "history.jsonl"))


def _paths(value: object) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item)


def give_tree(folder: Path, uid: int, gid: int) -> None:
    """Change the owner of a folder with its content. Links are not followed; a file with several
    names keeps its owner, because another name may lie outside.
    """
    os.chown(folder, uid, gid, follow_symlinks=False)
    for _, folders, files, descriptor in os.fwalk(folder, follow_symlinks=False):
        for name in folders:
            os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)
        for name in files:
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_nlink == 1:
                os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)
