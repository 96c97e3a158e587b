"""An image built by buildah, and run without a container engine: in namespaces of its own, with a
read-only root and 1 MB of /dev/shm.
"""

import http.client
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "chroot")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
MIRRORS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "APT_MIRROR")
SUITE = "bookworm"  # Python 3.11, as the Dockerfile's own base
WITHIN_S = 300.0  # for what takes seconds on a quiet machine
START = """
set -eu
root=$1 view=$2 home=$3 volume=$4 key=$5 user=$6; shift 6
mount --bind "$root" "$view" && mount -o remount,bind,ro "$view"
mount -t proc proc "$view/proc"
mount -t tmpfs -o mode=755 tmpfs "$view/dev"
mknod -m 666 "$view/dev/null" c 1 3
mknod -m 666 "$view/dev/zero" c 1 5
mknod -m 666 "$view/dev/urandom" c 1 9
mkdir "$view/dev/shm" && mount -t tmpfs -o size=1m,mode=1777 tmpfs "$view/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$view/run" && touch "$view/run/admin.key" \\
  && mount --bind -o ro "$key" "$view/run/admin.key"
mount --bind "$home" "$view$volume"
exec chroot --userspec="$user" --groups= "$view" /usr/bin/env -i "$@"
"""


def lacking() -> str:
    """Why no image can be built and run here; empty if one can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}: apt-get install -y buildah debootstrap"
    if os.geteuid() != 0:
        return "only root may build in chroot isolation and mount"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is built from, and how the server in it is asked."""

    dockerfile: Path
    target: str = ""  # the last one
    context: Path = ROOT
    arguments: tuple[str, ...] = ()  # NAME=value
    named_contexts: tuple[tuple[str, Path], ...] = ()  # name and folder
    port: str = "CRUCIBLE_SERVICE_PORT"  # the variable that tells the server where to listen
    ready: str = "/readyz"


DOCKERFILE = ROOT / "docker" / "Dockerfile.cpu"
SERVE, FULL = Recipe(DOCKERFILE, "serve"), Recipe(DOCKERFILE, "full")


def gpu_recipe(libraries: Path, extras: str) -> Recipe:
    """The GPU image with TensorRT's libraries from a folder. NVIDIA's index is not asked."""
    return Recipe(
        ROOT / "docker" / "Dockerfile.gpu",
        arguments=(f"EXTRAS={extras}", "PIP_EXTRA_INDEX_URL="),
        named_contexts=(("tensorrt", libraries),),
    )


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: its files, and what its Dockerfile says of how to run it."""

    recipe: Recipe
    name: str
    root: Path
    user: str
    environment: tuple[str, ...]  # NAME=value
    folder: str
    command: tuple[str, ...]  # entry point and command
    volumes: tuple[str, ...]
    healthcheck: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Images:
    """Images on a Debian of our own, and all that buildah keeps of them, in one folder."""

    folder: Path

    def buildah(self, command: str, *arguments: str | Path) -> str:
        driver = os.environ.get("STORAGE_DRIVER", "vfs")
        store = (
            "--storage-driver",
            driver,
            "--root",
            str(self.folder / "storage"),
            "--runroot",
            str(self.folder / "run"),
        )
        full_command, environment = (
            ["buildah", *store, command, *map(str, arguments)],
            {**os.environ, "TMPDIR": str(self.folder)},
        )
        result = subprocess.run(
            full_command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, (
            f"buildah {command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        )
        return result.stdout.strip()

    def build(self, recipe: Recipe, name: str = "crucible:test") -> Image:
        name = f"localhost/{name}"
        options = [
            "BASE=localhost/base",
            *recipe.arguments,
            *(f"{each}={os.environ[each]}" for each in MIRRORS if each in os.environ),
        ]
        certificates = (
            ["--volume", f"{CERTIFICATES}:/etc/host-ca.crt:ro"] if CERTIFICATES.is_file() else []
        )
        if certificates:
            options.append("PIP_CERT=/etc/host-ca.crt")
        arguments = [part for option in options for part in ("--build-arg", option)]
        named = [
            part
            for each, folder in recipe.named_contexts
            for part in ("--build-context", f"{each}={folder}")
        ]
        isolation = (
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--pull-never",
            "--format",
            "docker",
        )
        what = (
            "--file",
            recipe.dockerfile,
            "--target",
            recipe.target,
            "--tag",
            name,
            recipe.context,
        )
        self.buildah("bud", *isolation, *arguments, *named, *certificates, *what)
        config = json.loads(self.buildah("inspect", "--type", "image", name))["Docker"]["config"]
        container = self.buildah("from", "--pull-never", name)
        return image_of(
            recipe, name, config, Path(self.buildah("mount", container)), self.size_bytes(name)
        )

    def size_bytes(self, name: str) -> int:
        """Of all layers, unpacked."""
        (entry,) = json.loads(self.buildah("images", "--json", name))
        number, unit = entry["size"].split()
        return int(float(number) * {"MB": 10**6, "GB": 10**9}[unit])

    def compressed_bytes(self, name: str) -> int:
        """Of all layers by gzip: what a registry sends."""
        packed = self.folder / "packed"
        self.buildah("push", name, f"oci:{packed}")
        total = sum(file.stat().st_size for file in packed.glob("blobs/sha256/*"))
        shutil.rmtree(packed)
        return total

    def remove(self, image: Image) -> None:
        """Its files; layers of others stay."""
        self.buildah("rm", "--all")
        self.buildah("rmi", image.name)


@contextmanager
def images() -> Iterator[Images]:
    """buildah's folder with the base in it, removed at the end. The environment's STORAGE_DRIVER
    says how it keeps layers: vfs runs everywhere.
    """
    builder = Images(Path(tempfile.mkdtemp(prefix="crucible-image-")))
    try:
        empty = builder.buildah("from", "scratch")
        builder.buildah("add", "--quiet", empty, base(builder.folder), "/")
        builder.buildah("commit", "--quiet", "--rm", empty, "localhost/base")
        yield builder
    finally:
        mounted = [
            line.split()[1]
            for line in Path("/proc/mounts").read_text(encoding="ascii").splitlines()
        ]
        for place in reversed(
            [folder for folder in mounted if Path(folder).is_relative_to(builder.folder)]
        ):
            subprocess.run(["umount", place], check=True)
        shutil.rmtree(builder.folder)


def base(folder: Path) -> Path:
    """A small Debian with Python as a tar, kept in the user's cache."""
    archive = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "crucible-image-test"
        / f"{SUITE}-without-lists.tar"
    )
    if not archive.is_file():
        root, work = folder / "debian", archive.with_suffix(f".{os.getpid()}")
        archive.parent.mkdir(parents=True, exist_ok=True)
        include = "--include=python3,python3-venv,ca-certificates"
        result = subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, root],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr
        fetched = ("--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*")
        subprocess.run(["tar", "-C", root, *fetched, "-cf", work, "."], check=True)
        work.rename(archive)
        shutil.rmtree(root)
    return archive


def image_of(
    recipe: Recipe, name: str, config: Mapping[str, Any], root: Path, size_bytes: int
) -> Image:
    def listed(name: str) -> tuple[str, ...]:
        return tuple(config.get(name) or ())

    health = config["Healthcheck"]
    assert isinstance(health, dict)
    kind, *command = health["Test"]
    assert kind == "CMD"
    return Image(
        recipe=recipe,
        name=name,
        root=root,
        user=str(config["User"]),
        environment=listed("Env"),
        folder=str(config["WorkingDir"]),
        command=listed("Entrypoint") + listed("Cmd"),
        volumes=listed("Volumes"),
        healthcheck=tuple(command),
        size_bytes=size_bytes,
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
    ready_s: float  # after the start

    @property
    def init(self) -> psutil.Process:
        """Process 1 inside."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command inside, as `docker exec` does."""
        user, _, group = self.image.user.partition(":")
        enter = (
            "nsenter",
            "--target",
            str(self.init.pid),
            "--mount",
            "--pid",
            "--root",
            "--wd",
            "--setuid",
            user,
            "--setgid",
            group,
        )
        return subprocess.run(
            [*enter, "/usr/bin/env", "-i", *self.variables, *command],
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )

    def answers(self, path: str) -> bool:
        """Asked without a client's start, so that it can be asked often."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=WITHIN_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def terminate(self) -> None:
        """What `docker stop` sends."""
        self.init.send_signal(signal.SIGTERM)


@contextmanager
def running(image: Image, home: Path, key: Path, view: Path) -> Iterator[Container]:
    """The image's own command on `home`, ready for work: read-only root, no other place to write
    than the volume, 1 MB of /dev/shm.
    """
    port, rpc = free_ports()
    more = (
        f"{image.recipe.port}={port}",
        f"CRUCIBLE_SERVICE_GRPC_PORT={rpc}",
        "CRUCIBLE_SERVICE_ADMIN_KEY_FILE=/run/admin.key",
    )
    user, _, group = image.user.partition(":")
    home.mkdir(exist_ok=True)
    os.chown(home, int(user), int(group))
    view.mkdir(exist_ok=True)
    (volume,) = image.volumes
    parameters = (
        image.root,
        view,
        home,
        volume,
        key,
        image.user,
        f"--chdir={image.folder}",
        *image.environment,
        *more,
        *image.command,
    )
    log = home.with_suffix(".log")
    unshare = ("unshare", "--mount", "--pid", "--fork", "--propagation", "private")
    start = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*unshare, "sh", "-c", START, "sh", *map(str, parameters)], stdout=out, stderr=out
        )
    container = Container(
        image,
        process,
        f"http://127.0.0.1:{port}",
        f"127.0.0.1:{rpc}",
        log,
        (*image.environment, *more),
        0.0,
    )
    try:
        until(lambda: process.poll() is not None or container.answers(image.recipe.ready), log)
        assert process.poll() is None, log.read_text()
        yield replace(container, ready_s=time.monotonic() - start)
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
        time.sleep(0.02)
