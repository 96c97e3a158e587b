"""The faults: each is brought about, what must hold meanwhile is checked, and it is taken back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.faults.host import Host
from benchmarks.faults.load import Kind
from benchmarks.serving.crucible import MODEL
from benchmarks.serving.models import write_small
from service.client import Client, RemoteError
from service.storage.layout import Folders

HOLD_S = 3.0  # for which a fault that does not end by itself lasts
ANSWER_S = 30.0
CLOCK_JUMPS_S = (400 * 86400, -30 * 86400)
WRITE_US = 20_000
# Below the reserve nothing is begun; a write that fails in spite of free space is found later.
BELOW_RESERVE, DISK_FULL = (507, "service.storage_full"), (507, "host.disk_full")
DAMAGED = (500, "host.damaged")


class NotHeld(Exception):
    """What must hold during a fault did not hold; the message tells what happened."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`run` brings it about and checks `holds`; it raises NotHeld, or NotRun where it cannot be."""

    name: str
    holds: str
    run: Callable[[Host], None]
    kind: Kind = "binary"  # of the requests whose recovery is measured


def kill_server(host: Host) -> None:
    host.process.kill()


def kill_worker(host: Host) -> None:
    _kill(host, "service.serving.worker", is_guardian=False)


def kill_guardian(host: Host) -> None:
    _kill(host, "service.serving.worker", is_guardian=True)


def kill_decoder(host: Host) -> None:
    _kill(host, "service.offload.worker", is_guardian=False)


def _kill(host: Host, module: str, is_guardian: bool) -> None:
    """Kill a process that runs this module, or its guardian, whose command line names it too."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        for each in host.processes(module):
            with contextlib.suppress(psutil.NoSuchProcess):
                if ("service.sandbox.guardian" in each.cmdline()) == is_guardian:
                    each.kill()
                    return
        time.sleep(0.05)
    raise NotHeld(f"no process of {module} within {ANSWER_S:g} s")


def fill_disk(host: Host) -> None:
    with host.disk.full():
        _check_upload_is_refused(host, BELOW_RESERVE)
        time.sleep(HOLD_S)


def refuse_writes(host: Host) -> None:
    with host.library.fault(no_space=True):
        _check_upload_is_refused(host, DISK_FULL)
        time.sleep(HOLD_S)


def slow_writes(host: Host) -> None:
    with host.library.fault(write_us=WRITE_US):
        _check_alive(host)
        time.sleep(HOLD_S)
        _check_alive(host)


def change_clock(host: Host) -> None:
    for jump_s in CLOCK_JUMPS_S:
        with host.library.fault(clock_s=jump_s):
            time.sleep(HOLD_S / len(CLOCK_JUMPS_S))
            _check_alive(host)


def damage_engine(host: Host) -> None:
    """A byte of the served engine's largest file is flipped."""
    with Client(host.url) as client:
        with flipped(largest_file(Folders(host.home).version(MODEL, 1))):
            try:
                client.load(MODEL)
            except RemoteError as error:
                if (error.status, error.code) != DAMAGED or MODEL not in str(error):
                    raise NotHeld(f"the reload was {error.status}: {error}") from error
            else:
                raise NotHeld("a damaged engine was loaded")
        client.load(MODEL)


def largest_file(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@contextlib.contextmanager
def flipped(file: Path) -> Iterator[None]:
    """The byte in the middle of the file is another one until the block ends."""
    place = file.stat().st_size // 2
    _flip(file, place)
    try:
        yield
    finally:
        _flip(file, place)


def _flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def _check_upload_is_refused(host: Host, expected: tuple[int, str]) -> None:
    model = write_small(host.log.with_name("refused.onnx"), seed=time.monotonic_ns())
    with model.open("rb") as file:
        answer = httpx.post(f"{host.url}/compile", files={"model": file}, timeout=ANSWER_S)
    found = (answer.status_code, answer.json().get("code"))
    if found != expected:
        raise NotHeld(f"an upload without space on the disk was {found}")


def _check_alive(host: Host) -> None:
    answer = httpx.get(f"{host.url}/readyz", timeout=ANSWER_S)
    if not answer.is_success:
        raise NotHeld(f"/readyz is {answer.status_code}: {answer.text[:200]}")


FAULTS = (
    Fault("SIGKILL of the server", "a supervisor starts it again", kill_server),
    Fault("SIGKILL of the worker", "the server starts it again", kill_worker),
    Fault("SIGKILL of the worker's guardian", "the server starts both again", kill_guardian),
    Fault("SIGKILL of a decoder", "another one decodes", kill_decoder, "json"),
    Fault("full disk", f"answers go on; an upload is {DISK_FULL[0]}", fill_disk),
    Fault("writes fail with ENOSPC", f"answers go on; an upload is {DISK_FULL[0]}", refuse_writes),
    Fault("slow disk", "answers go on", slow_writes),
    Fault("clock jumps by 400 and -30 days", "answers go on", change_clock),
    Fault("damaged engine file", f"answers go on; a reload is {DAMAGED[1]}", damage_engine),
)
