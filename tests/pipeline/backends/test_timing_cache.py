"""The timing cache's files, and who has the GPU to himself. TensorRT's own part is in
tensorrt/test_backend.py: it needs the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from pipeline.backends import timing_cache
from pipeline.backends.timing_cache import (
    ABOUT,
    FILE,
    Attached,
    CacheScope,
    CpuTime,
    OtherProcesses,
    attach,
    cpu_time,
    folder,
    gpu_lock,
    keep,
    merge,
    other_processes,
    read,
    write,
)
from pipeline.core.artifacts import NoteCode, Target
from pipeline.plan.files import home
from tests.builders.nvml import Device, Nvml, NVMLError, NVMLError_LibraryNotFound

TARGET = Target(
    backend="tensorrt",
    version="10.6.0",
    device="NVIDIA H200",
    compute_capability="9.0",
    driver="580.95.05",
)
TIMED = CacheScope(TARGET, 8)
H200, OTHER = "GPU-6d5a129b", "GPU-11111111"


@dataclass
class Cache:
    """A timing cache as TensorRT's behaves: entries that are combined, where the first of two equal
    keys stays.
    """

    entries: dict[str, str] = field(default_factory=dict)

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        self.entries = other.entries | self.entries
        return True

    def serialize(self) -> bytes:
        return json.dumps(self.entries, sort_keys=True).encode()


@dataclass
class Config:
    """A builder's config that makes such caches; it refuses those of another device."""

    device: str = "H200"
    cache: Cache | None = None

    def create_timing_cache(self, data: bytes) -> Cache | None:
        try:
            return Cache(json.loads(data or b"{}"))
        except ValueError:
            return None

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        self.cache = cache if cache.entries.get("device", self.device) == self.device else None
        return self.cache is not None


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this host does."""
    monkeypatch.setattr(timing_cache, "cpu_time", lambda: CpuTime(100.0, 50.0, 10.0))
    monkeypatch.setattr(timing_cache, "other_processes", lambda gpu: OtherProcesses())


def nvml_of(*pids: int, **others: tuple[int, ...]) -> Nvml:
    """An NVML with the GPU of these tests, on which these processes compute, and another."""
    other = Device("H200", OTHER, pids=others.get("other", ()))
    return Nvml(Device("H200", H200, pids=pids), other)


# -- files -------------------------------------------------------------------


def test_what_is_written_is_read(own_home: Path) -> None:
    assert read(TIMED) == b""
    write(TIMED, b"\x00timings\xff")
    assert read(TIMED) == b"\x00timings\xff"
    assert sorted(file.name for file in folder(TIMED).iterdir()) == [FILE, ABOUT]
    assert folder(TIMED).parent == own_home / "timing"


def test_drivers_share_a_cache_but_gpus_versions_and_timing_counts_do_not() -> None:
    assert folder(CacheScope(TARGET.model_copy(update={"driver": "590.1"}), 8)) == folder(TIMED)
    others = [
        {"version": "10.8.0"},
        {"device": "NVIDIA H100"},
        {"compute_capability": "8.0"},
        {"backend": "tensorrt_rtx"},
    ]
    assert (
        len(
            {
                folder(TIMED),
                *(folder(CacheScope(TARGET.model_copy(update=other), 8)) for other in others),
                folder(CacheScope(TARGET, 1)),
            }
        )
        == 6
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (FILE, b"cut o"),
        (ABOUT, b"{"),
        (ABOUT, b"[]"),
        (ABOUT, b'{"sha256": "0"}'),
        (ABOUT, b"\xff"),
    ],
)
def test_a_damaged_cache_is_no_cache(file: str, content: bytes) -> None:
    write(TIMED, b"timings")
    (folder(TIMED) / file).write_bytes(content)
    assert read(TIMED) == b""
    attached = attach(Config(), TIMED)
    assert attached.cache.entries == {}
    assert "was damaged and was created again" in attached.notes[0].text


def test_a_cache_without_its_description_is_no_cache() -> None:
    write(TIMED, b"timings")
    (folder(TIMED) / ABOUT).unlink()
    assert read(TIMED) == b""


# -- a build's use of it -----------------------------------------------------


def test_the_first_build_starts_with_an_empty_cache_and_leaves_its_own() -> None:
    config = Config()
    attached = attach(config, TIMED)
    assert (attached.cache.entries, attached.notes) == ({}, ())
    attached.cache.entries["conv"] = "tactic 1"
    assert keep(config, TIMED, attached) == ()
    assert attach(Config(), TIMED).cache.entries == {"conv": "tactic 1"}


@pytest.mark.parametrize("stored", [b"not a cache", b'{"device": "another"}'])
def test_a_cache_that_tensorrt_does_not_take_is_replaced(stored: bytes) -> None:
    write(TIMED, stored)
    config = Config()
    attached = attach(config, TIMED)
    assert "was damaged" in attached.notes[0].text
    assert config.cache is attached.cache is not None
    attached.cache.entries["conv"] = "tactic 1"
    assert keep(config, TIMED, attached) == attached.notes
    assert json.loads(read(TIMED))["conv"] == "tactic 1"


def test_what_another_build_wrote_meanwhile_stays() -> None:
    config = Config()
    mine = attach(config, TIMED)
    write(TIMED, b'{"gemm": "tactic 2"}')
    mine.cache.entries["conv"] = "tactic 1"
    merge(config, TIMED, mine.cache)
    assert json.loads(read(TIMED)) == {"conv": "tactic 1", "gemm": "tactic 2"}


def test_a_build_that_timed_nothing_new_writes_nothing() -> None:
    write(TIMED, b'{"conv": "tactic 1"}')

    def published() -> tuple[int, int]:
        status = (folder(TIMED) / FILE).stat()
        return status.st_ino, status.st_mtime_ns  # not atime, which reading changes

    before, config = published(), Config()
    merge(config, TIMED, attach(config, TIMED).cache)
    assert published() == before


def test_times_taken_beside_another_process_are_not_kept() -> None:
    config = Config()
    attached = attach(config, TIMED)
    attached.cache.entries["conv"] = "slower than it is"
    here, gone = os.getppid(), 4194301
    (note,) = keep(config, TIMED, Attached(attached.cache, others=OtherProcesses((here,))))
    assert note.text == f"timing cache not filled: another process used the GPU (process {here})"
    assert note.code is NoteCode.GPU_SHARED
    (note,) = keep(config, TIMED, Attached(attached.cache, others=OtherProcesses((gone, here))))
    assert note.text.startswith(
        f"timing cache not filled: another process used the GPU (process {here}, {gone}); a process"
        " that does not exist here may be"
    )
    assert read(TIMED) == b""


@pytest.mark.parametrize(("before", "after"), [("no answer", ""), ("", "no answer")])
def test_times_are_not_kept_where_nobody_tells_who_else_computes(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setattr(timing_cache, "other_processes", lambda gpu: OtherProcesses(unknown=before))
    attached = attach(config := Config(), TIMED)
    attached.cache.entries["conv"] = "slower than it is"
    monkeypatch.setattr(timing_cache, "other_processes", lambda gpu: OtherProcesses(unknown=after))
    (note,) = keep(config, TIMED, attached)
    assert note.text == (
        "timing cache not filled: it is not known whether another process used the GPU: no answer"
    )
    assert note.code is NoteCode.GPU_SHARED
    assert read(TIMED) == b""


def test_a_process_that_shares_its_one_cpu_with_another_is_not_alone() -> None:
    assert CpuTime(110.0, 50.0, 15.0).shares_since(CpuTime(100.0, 50.0, 10.0)) == (0.5, 0.0)


def test_times_taken_while_others_took_the_cpus_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attached = attach(config := Config(), TIMED)
    attached.cache.entries["conv"] = "slower than it is"
    monkeypatch.setattr(timing_cache, "cpu_time", lambda: CpuTime(200.0, 54.0, 31.0))
    (note,) = keep(config, TIMED, attached)
    assert note.text.startswith(
        "timing cache not filled: other work took 75% of the CPUs and left 4% idle"
    )
    assert read(TIMED) == b""


@pytest.mark.parametrize(
    "after",
    [
        CpuTime(100.0, 50.0, 10.0),
        CpuTime(200.0, 50.0, 90.0),
        CpuTime(200.0, 70.0, 10.0),
        CpuTime(200.0, 148.0, 10.0),
    ],
    ids=["no time", "most taken by the build itself", "others and some idle", "idle"],
)
def test_times_are_kept_where_the_cpus_kept_up(
    monkeypatch: pytest.MonkeyPatch, after: CpuTime
) -> None:
    attached = attach(config := Config(), TIMED)
    attached.cache.entries["conv"] = "tactic 1"
    monkeypatch.setattr(timing_cache, "cpu_time", lambda: after)
    assert keep(config, TIMED, attached) == ()
    assert json.loads(read(TIMED))["conv"] == "tactic 1"


def test_work_of_others_on_the_cpus_is_seen() -> None:
    """In seconds: shares depend on how many CPUs there are and on what else runs."""
    burn = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    before = cpu_time()
    with subprocess.Popen([sys.executable, "-c", burn]) as other:
        try:
            while psutil.Process(other.pid).cpu_times().user < 0.3:
                time.sleep(0.01)
            after = cpu_time()
        finally:
            other.kill()
    share, _ = after.shares_since(before)
    assert share * (after.total - before.total) > 0.2


def test_only_cpus_that_may_be_used_count() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        total = cpu_time()
        os.sched_setaffinity(0, {min(allowed)})
        one = cpu_time()
    finally:
        os.sched_setaffinity(0, allowed)
    assert one.total < total.total or len(allowed) == 1


# -- the GPU to itself -------------------------------------------------------


def test_other_processes_are_found_on_the_gpu_that_is_used() -> None:
    nvml = nvml_of(4194301, other=(4194302,))
    assert other_processes(H200, nvml) == OtherProcesses((4194301,))
    assert other_processes("", nvml) == OtherProcesses((4194301, 4194302))
    assert other_processes("GPU-idle", nvml) == OtherProcesses()
    assert nvml.open == 0


def test_this_process_its_parents_and_its_children_are_not_others() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        nvml = nvml_of(os.getpid(), os.getppid(), child.pid)
        others = other_processes(H200, nvml)
        child.kill()
    assert others == OtherProcesses()


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (nvml_of(2**32 - 1, 4194301), "NVML lists a process without its number"),
        (nvml_of(0, 4194301), "NVML lists a process without its number"),
        (Nvml(Device("H200", H200, pids=None)), f"NVML lists no processes of GPU '{H200}'"),
        (
            Nvml(failure=NVMLError("Driver/library version mismatch")),
            "NVML failed: Driver/library version mismatch",
        ),
        (Nvml(failure=NVMLError_LibraryNotFound()), ""),
        (Nvml(), "NVML lists no GPU"),
    ],
)
def test_an_answer_that_tells_nothing_is_not_taken_for_nobody(nvml: Nvml, reason: str) -> None:
    others = other_processes(H200, nvml)
    assert others.pids == ()
    assert others.unknown.startswith(reason)
    assert others.unknown != ""


def test_a_second_build_on_one_gpu_waits_and_says_so(own_home: Path) -> None:
    events, waiting, done = [], threading.Event(), threading.Event()

    def progress(fraction: float | None, text: str, figures: object = None) -> None:
        events.append((fraction, text))
        waiting.set()

    def second() -> None:
        with gpu_lock(H200, progress):
            done.set()

    (own_home / "locks").mkdir()
    with FileLock(own_home / "locks" / f"gpu-{H200}.lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        assert not done.is_set()
    assert done.wait(60)
    thread.join()
    assert events == [(None, "another build uses this GPU; waiting")]


def test_a_gpu_that_is_free_is_taken_without_a_word_and_given_back() -> None:
    messages: list[str] = []
    for _ in range(2):
        with (
            gpu_lock(H200, lambda fraction, text, figures=None: messages.append(text)),
            gpu_lock(OTHER, lambda fraction, text, figures=None: messages.append(text)),
        ):
            pass
    assert messages == []
    assert home().joinpath("locks").is_dir()
