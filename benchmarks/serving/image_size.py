"""The images of Crucible and one of LitServe, built alike on the same Debian: how large they are,
and how soon they are ready.

    STORAGE_DRIVER=overlay python -m benchmarks image_size

runs in the folder of the repository, as root, with buildah and debootstrap; it takes 35 GB of disk,
and with STORAGE_DRIVER=vfs more. A start is from the first process to the first answer that it is
ready, after `docker stop`'s signal had ended the start before it: the files are in the page cache.
Both serve the same small CNN, by ONNX Runtime.
"""

from __future__ import annotations

import io
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks.common import ROOT, Row, publish, takes_no_arguments
from benchmarks.serving.models import image as picture
from benchmarks.serving.models import write_small
from benchmarks.serving.peers_list import PEERS
from service.client import Client, Upload
from tests.docker.fixtures_image import (
    FULL,
    SERVE,
    Container,
    Image,
    Images,
    Recipe,
    images,
    lacking,
    running,
)

STARTS = 5
START_PERIOD_S = 60.0  # of the images' HEALTHCHECK
SIDE = 16
PLAN = (
    "profiles: [{batch: [1, 8, 16]}]\ncandidates: [{backend: onnxruntime, precision:"
    " fp32}]\nbenchmark: {duration_s: 0.3}\n"
)
PEER = next(peer for peer in PEERS if peer.name == "LitServe")
LITSERVE = Recipe(
    ROOT / "benchmarks" / "serving" / "Dockerfile.litserve",
    context=ROOT / "benchmarks" / "serving" / "peers",
    arguments=(f"PACKAGES={' '.join(PEER.packages)}",),
    port="PORT",
    ready="/health",
)
GPU_FILES = ("nvidia/*", "triton/*", "torch/lib/*cuda*")  # below site-packages


def main(words: Sequence[str]) -> None:
    takes_no_arguments("image_size", __doc__, words)
    if reason := lacking():
        raise SystemExit(f"no image can be built here: {reason}")
    with tempfile.TemporaryDirectory() as folder, images() as kept:
        rows = list(measured(kept, Path(folder)))
    slowest = max(row["most_s"] for row in rows if isinstance(row["most_s"], float))
    target = (
        f"every start is ready within HEALTHCHECK's start period, {START_PERIOD_S:.0f} s (slowest"
        f" {slowest:.1f} s)"
    )
    publish("image_size", rows, {target: slowest <= START_PERIOD_S})


def measured(kept: Images, folder: Path) -> Iterator[Row]:
    model = write_small(folder / "model.onnx", seed=0, side=SIDE)
    key = folder / "admin.key"
    key.write_text(f"cru_{secrets.token_hex(5)}_{secrets.token_urlsafe(32)}\n", encoding="utf-8")
    key.chmod(0o644)
    yield row(
        "base: Debian with Python",
        None,
        kept.size_bytes("localhost/base"),
        kept.compressed_bytes("localhost/base"),
    )
    for name, recipe in (
        ("Crucible, serve", SERVE),
        (f"LitServe {PEER.version}", LITSERVE),
        ("Crucible, full", FULL),
    ):
        built = kept.build(recipe, recipe.target or "litserve")
        sizes = built.size_bytes, kept.compressed_bytes(built.name)
        home = folder / built.name.replace("/", "-")
        if recipe is LITSERVE:
            home.mkdir()
            (home / "model.onnx").write_bytes(model.read_bytes())
            yield row(name, "one model", *sizes, starts(built, home, key, asked_litserve))
        else:
            yield row(name, "nothing", *sizes, starts(built, home, key, lambda container: None))
            with running(built, home, key, folder / "view") as container:
                deploy(container, key, model)
                stop(container)
            yield row(
                name,
                "one model",
                *sizes,
                starts(built, home, key, lambda container: asked(container, key)),
            )
        if unused := bytes_of(built, GPU_FILES):
            yield row(f"{name}: what in it is for GPUs", None, unused, None)
        kept.remove(built)


def row(
    image: str,
    serves: str | None,
    unpacked: int,
    compressed: int | None,
    found: Sequence[tuple[float, float]] = (),
) -> Row:
    seconds, memory = [each[0] for each in found], [each[1] for each in found]
    return {
        "image": image,
        "serves": serves,
        "unpacked_mb": unpacked / 1e6,
        "compressed_mb": compressed / 1e6 if compressed else None,
        "starts": len(seconds),
        "start_s": statistics.median(seconds) if seconds else None,
        "least_s": min(seconds, default=None),
        "most_s": max(seconds, default=None),
        "memory_mb": statistics.median(memory) if memory else None,
    }


def starts(
    image: Image, home: Path, key: Path, ask: Callable[[Container], None]
) -> list[tuple[float, float]]:
    """Seconds until ready and MB held then, of each start but the first, which fills the page
    cache.
    """
    found = []
    for _ in range(STARTS + 1):
        with running(image, home, key, home.with_suffix(".view")) as container:
            found.append((container.ready_s, memory_mb(container)))
            ask(container)
            stop(container)
    return found[1:]


def memory_mb(container: Container) -> float:
    """Of all processes; pages that they share count once."""
    total = 0
    for process in container.init.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            total += process.memory_full_info().pss
    return total / 1e6


def stop(container: Container) -> None:
    container.terminate()
    container.process.wait()


def deploy(container: Container, key: Path, model: Path) -> None:
    """Compile the model in the container, and load what came out."""
    with Client(container.url, key.read_text(encoding="utf-8")) as client:
        job = client.submit(Upload(model, PLAN))
        *_, last = client.events(job.id)
        if last.kind != "succeeded":
            raise RuntimeError(f"the model was not compiled: {last.data}")
        client.promote("small", job.id, override=True)
        client.load("small")


def asked(container: Container, key: Path) -> None:
    file = io.BytesIO()
    np.save(file, picture(SIDE))
    with Client(container.url, key.read_text(encoding="utf-8")) as client:
        client.infer(file.getvalue(), "application/x-npy", "small")


def asked_litserve(container: Container) -> None:
    httpx.post(f"{container.url}{PEER.path}", content=picture(SIDE).tobytes()).raise_for_status()


def bytes_of(image: Image, patterns: Sequence[str]) -> int:
    site = next(image.root.glob("opt/*/lib/python3*/site-packages"))
    found = {
        file
        for pattern in patterns
        for each in site.glob(pattern)
        for file in (each, *each.rglob("*"))
    }
    return sum(file.stat().st_size for file in found if file.is_file() and not file.is_symlink())
