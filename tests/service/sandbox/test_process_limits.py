"""The watchdog: what is too much, and what is counted."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.sandbox.process_limits import (
    GIB,
    Limits,
    Sample,
    disk_use,
    limits_from,
    machine_memory,
    sample,
    verdict,
)
from service.settings import Settings

LIMITS = Limits(4 * GIB, 2 * GIB, 100)


def test_a_job_within_its_limits_goes_on() -> None:
    assert verdict(Sample(0, 0, 101), LIMITS) is None
    assert verdict(Sample(4 * GIB, 2 * GIB, 101), LIMITS) is None


@pytest.mark.parametrize(
    ("taken", "code", "message"),
    [
        (
            Sample(5 * GIB, 0, GIB),
            "job.memory",
            "used 5.00 GiB of memory, more than its limit of 4.00 GiB",
        ),
        (
            Sample(0, 3 * GIB, GIB),
            "job.disk",
            "used 3.00 GiB of disk, more than its limit of 2.00 GiB",
        ),
        (Sample(5 * GIB, 3 * GIB, GIB), "job.memory", "memory"),
    ],
)
def test_a_job_over_a_limit_ends_and_both_numbers_are_told(
    taken: Sample, code: str, message: str
) -> None:
    failure = verdict(taken, LIMITS)
    assert failure is not None
    assert failure.code == code
    assert message in failure.message
    assert code.replace(".", "_") in failure.next_step


def test_a_job_ends_while_the_disk_still_takes_its_last_event() -> None:
    failure = verdict(Sample(0, 0, 100), LIMITS)
    assert failure is not None
    assert failure.code == "host.disk_full"
    assert "100 bytes are free, and a job needs more than 100" in failure.message
    assert "disk_reserve_bytes" in failure.message


def test_limits_are_the_settings_or_a_share_of_the_machine(tmp_path: Path) -> None:
    assert limits_from(Settings(home=tmp_path), 1000) == Limits(800, 50 * GIB, 2 * GIB // 10)
    assert limits_from(
        Settings(home=tmp_path, job_memory_bytes=7, job_disk_bytes=9, disk_reserve_bytes=0), 1000
    ) == Limits(7, 9, 0)


def test_a_container_counts_by_its_own_limit(tmp_path: Path) -> None:
    total, file = psutil.virtual_memory().total, tmp_path / "memory.max"
    assert machine_memory(file) == total
    for text, expected in (("max\n", total), ("1024\n", 1024), (str(2 * total), total)):
        file.write_text(text)
        assert machine_memory(file) == expected


def test_disk_counts_what_lies_there_and_follows_no_links(tmp_path: Path) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    for folder in (work / "a" / "b", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(os.urandom(1_000_000))
    before = disk_use(work)
    (work / "link").symlink_to(elsewhere)
    (work / "file-link").symlink_to(elsewhere / "file")
    assert 1_000_000 <= before <= 1_010_000
    assert disk_use(work) - before < 10_000
    with (work / "sparse").open("wb") as file:
        file.truncate(10**12)
    assert disk_use(work) - before < 10_000
    assert disk_use(tmp_path / "nothing") == 0


def test_memory_counts_all_descendants_and_shared_pages_once(tmp_path: Path) -> None:
    grandchild = (
        "import os, time; data = b'x' * 100_000_000; os.fork(); os.write(1, b'ready\\n');"
        " time.sleep(60)"
    )
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        try:
            resident = sample(process.pid, tmp_path, Limits(10**12, 0, 0)).memory_bytes
            proportional = sample(process.pid, tmp_path, Limits(0, 0, 0)).memory_bytes
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
    assert resident > 200_000_000 > proportional > 100_000_000
    ended = sample(process.pid, tmp_path, LIMITS)
    assert (ended.memory_bytes, ended.disk_bytes) == (0, 0)
    assert 0 < ended.free_bytes <= psutil.disk_usage(str(tmp_path)).total
