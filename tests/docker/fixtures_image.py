"""An image built by buildah, and run without a container engine: in namespaces of its own, with a read-only root and 1 MB of /dev/shm."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "chroot")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
MIRRORS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "APT_MIRROR")
SUITE = "bookworm"  # Python 3.11, as the Dockerfile's own base
WITHIN_S = 300.0  # for what takes seconds on a quiet machine
START = """
set -eu
root=$1 view=$2 home=$3 key=$4 user=$5; shift 5
mount --bind "$root" "$view" && mount -o remount,bind,ro "$view"
mount -t proc proc "$view/proc"
mount -t tmpfs -o mode=755 tmpfs "$view/dev"
mknod -m 666 "$view/dev/null" c 1 3; mknod -m 666 "$view/dev/zero" c 1 5; mknod -m 666 "$view/dev/urandom" c 1 9
mkdir "$view/dev/shm" && mount -t tmpfs -o size=1m,mode=1777 tmpfs "$view/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$view/run" && touch "$view/run/admin.key" && mount --bind -o ro "$key" "$view/run/admin.key"
mount --bind "$home" "$view/var/lib/crucible"
exec chroot --userspec="$user" --groups= "$view" /usr/bin/env -i "$@"
"""


def lacking() -> str:
    """Why no image can be built and run here; empty if one can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}: apt-get install -y buildah debootstrap"
    if os.geteuid() != 0:
        return "only root may build in chroot isolation and mount"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: its files, and what its Dockerfile says of how to run it."""

    root: Path
    user: str
    environment: tuple[str, ...]  # NAME=value
    folder: str
    command: tuple[str, ...]  # entry point and command
    volumes: tuple[str, ...]
    healthcheck: tuple[str, ...]
    size_bytes: int


@contextmanager
def built(target: str) -> Iterator[Image]:
    """The target of docker/Dockerfile.cpu on a Debian of our own; all that buildah keeps lies in one folder, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="crucible-image-"))

    def buildah(command: str, *arguments: str | Path) -> str:
        store = ("--storage-driver", "vfs", "--root", str(folder / "storage"), "--runroot", str(folder / "run"))
        whole, environment = ["buildah", *store, command, *map(str, arguments)], {**os.environ, "TMPDIR": str(folder)}
        done = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"buildah {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    try:
        empty = buildah("from", "scratch")
        buildah("add", "--quiet", empty, base(folder), "/")
        buildah("commit", "--quiet", "--rm", empty, "localhost/base")
        given = {"BASE": "localhost/base"} | {name: os.environ[name] for name in MIRRORS if name in os.environ}
        certificates = ["--volume", f"{CERTIFICATES}:/etc/host-ca.crt:ro"] if CERTIFICATES.is_file() else []
        if certificates:
            given["PIP_CERT"] = "/etc/host-ca.crt"
        arguments = [part for name, value in given.items() for part in ("--build-arg", f"{name}={value}")]
        isolation = ("--isolation", "chroot", "--network", "host", "--pull-never", "--format", "docker")
        buildah("bud", *isolation, *arguments, *certificates, "--file", "docker/Dockerfile.cpu", "--target", target, "--tag", "crucible:test", ".")
        said = json.loads(buildah("inspect", "--type", "image", "localhost/crucible:test"))["Docker"]["config"]
        (size,) = json.loads(buildah("images", "--json", "localhost/crucible:test"))
        container = buildah("from", "--pull-never", "localhost/crucible:test")
        yield image_of(said, Path(buildah("mount", container)), size["size"])
    finally:
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="ascii").splitlines()]
        for place in reversed([each for each in mounted if Path(each).is_relative_to(folder)]):
            subprocess.run(["umount", place], check=True)
        shutil.rmtree(folder)


def base(folder: Path) -> Path:
    """A small Debian with Python as a tar, kept in the user's cache."""
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "crucible-image-test" / f"{SUITE}.tar"
    if not kept.is_file():
        root, work = folder / "debian", kept.with_suffix(f".{os.getpid()}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        include = "--include=python3,python3-venv,ca-certificates"
        done = subprocess.run(["debootstrap", "--variant=minbase", include, SUITE, root], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        subprocess.run(["tar", "-C", root, "--exclude=./var/cache/apt/archives/*.deb", "-cf", work, "."], check=True)
        work.rename(kept)
        shutil.rmtree(root)
    return kept


def image_of(config: Mapping[str, object], root: Path, size_bytes: object) -> Image:
    def listed(name: str) -> tuple[str, ...]:
        return tuple(config.get(name) or ())  # type: ignore[call-overload, no-any-return]

    health = config["Healthcheck"]
    assert isinstance(health, dict)
    kind, *command = health["Test"]
    assert kind == "CMD"
    assert isinstance(size_bytes, str)
    number, unit = size_bytes.split()
    return Image(
        root=root,
        user=str(config["User"]),
        environment=listed("Env"),
        folder=str(config["WorkingDir"]),
        command=listed("Entrypoint") + listed("Cmd"),
        volumes=listed("Volumes"),
        healthcheck=tuple(command),
        size_bytes=int(float(number) * {"MB": 10**6, "GB": 10**9}[unit]),
    )


@dataclass(frozen=True, slots=True)
class Container:
    """An image that runs."""

    image: Image
    process: "subprocess.Popen[bytes]"
    url: str
    rpc: str  # gRPC's address
    log: Path
    variables: tuple[str, ...]

    @property
    def init(self) -> psutil.Process:
        """Process 1 inside."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command inside, as `docker exec` does."""
        user, _, group = self.image.user.partition(":")
        enter = ("nsenter", "--target", str(self.init.pid), "--mount", "--pid", "--root", "--wd", "--setuid", user, "--setgid", group)
        return subprocess.run(
            [*enter, "/usr/bin/env", "-i", *self.variables, *command], capture_output=True, text=True, timeout=WITHIN_S, check=False
        )

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path).status_code == 200
        except httpx.TransportError:
            return False

    def terminate(self) -> None:
        """What `docker stop` sends."""
        self.init.send_signal(signal.SIGTERM)


@contextmanager
def running(image: Image, home: Path, key: Path, view: Path) -> Iterator[Container]:
    """The image's own command on `home`, ready for work: read-only root, no other place to write than the volume, 1 MB of /dev/shm."""
    port, rpc = free_ports()
    more = (f"CRUCIBLE_SERVICE_PORT={port}", f"CRUCIBLE_SERVICE_GRPC_PORT={rpc}", "CRUCIBLE_SERVICE_ADMIN_KEY_FILE=/run/admin.key")
    user, _, group = image.user.partition(":")
    home.mkdir(exist_ok=True)
    os.chown(home, int(user), int(group))
    view.mkdir(exist_ok=True)
    given = (image.root, view, home, key, image.user, f"--chdir={image.folder}", *image.environment, *more, *image.command)
    log = home.with_suffix(".log")
    unshare = ("unshare", "--mount", "--pid", "--fork", "--propagation", "private")
    with log.open("ab") as out:
        process = subprocess.Popen([*unshare, "sh", "-c", START, "sh", *map(str, given)], stdout=out, stderr=out)
    container = Container(image, process, f"http://127.0.0.1:{port}", f"127.0.0.1:{rpc}", log, (*image.environment, *more))
    try:
        until(lambda: process.poll() is not None or container.answers("/readyz"), log)
        assert process.poll() is None, log.read_text()
        yield container
    finally:
        for init in psutil.Process(process.pid).children() if process.poll() is None else []:
            init.kill()  # and with it all that runs inside
        process.wait()


def free_ports() -> tuple[int, int]:
    """The container has this machine's network."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def until(reached: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
