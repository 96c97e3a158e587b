"""A compile that is disturbed, and what must come out of it all the same: `outcome` of the
disturbed and of an undisturbed one are equal.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.core.artifacts import CalibrationTable, OnnxModel
from pipeline.execution.store import MANIFEST
from pipeline.report.files import load_report
from pipeline.results.report import Report
from tests.builders.cli import Result, environment

TOLERANCE = 1e-6  # of accuracy figures: sums of float32 taken in another order
GRAPHS = ("export", "simplify", "convert")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root to mount a file system or to limit memory"
)


@dataclass(frozen=True)
class Outcome:
    """What two compiles of one plan must agree in; timings and the bytes of engines may differ."""

    graphs: dict[str, str]  # digest by stage and subject
    tables: dict[str, Any]  # calibrated ranges by subject
    candidates: tuple[tuple[str, str], ...]  # label and state
    verdict: str


def outcome(folder: Path, home: Path) -> Outcome:
    """Of the compile that wrote its report to `folder`."""
    report = load_report(folder)
    values = {
        f"{step.stage} {step.subject}".strip(): value_of(home, step.stage, step.digest)
        for step in report.steps
    }
    return Outcome(
        graphs={
            name: OnnxModel(**value, root=home).digest
            for name, value in values.items()
            if name.startswith(GRAPHS)
        },
        tables={
            name: CalibrationTable(**value, root=home).ranges
            for name, value in values.items()
            if name.startswith("calibrate")
        },
        candidates=tuple((candidate.label, candidate.state) for candidate in report.candidates),
        verdict=report.verdict,
    )


def value_of(home: Path, stage: str, digest: str) -> dict[str, Any]:
    value = json.loads((home / "artifacts" / stage / digest / MANIFEST).read_text())["value"]
    assert isinstance(value, dict)
    return value


def figures(report: Report) -> list[float]:
    """The accuracy of every candidate on the selection set: metric of reference and candidate, and
    the errors of each output.
    """
    values = []
    for candidate in report.candidates:
        assert candidate.selection is not None
        assert candidate.selection.metric is not None
        values += [candidate.selection.metric.reference, candidate.selection.metric.candidate]
        values += [
            number
            for output in candidate.selection.outputs
            for number in (output.max_abs, output.mean_abs, output.cosine)
        ]
    return values


def assert_same(folder: Path, home: Path, compiled: tuple[Path, Path]) -> Report:
    """The compile in (folder, home) came to what the undisturbed one came to; returns its
    report.
    """
    undisturbed, its_home = compiled
    report, expected = load_report(folder), load_report(undisturbed / "out")
    result = outcome(folder, home)
    assert result == outcome(undisturbed / "out", its_home)
    assert set(result.graphs) >= {"export", "simplify"}
    assert result.tables
    assert figures(report) == pytest.approx(figures(expected), abs=TOLERANCE)
    assert list((home / "tmp").iterdir()) == []
    return report


# -- disturbed runs ----------------------------------------------------------


def start(
    plan: Path, home: Path, out: Path, prefix: Sequence[str] = (), **more: str
) -> subprocess.Popen[str]:
    """`crucible compile` in the background, in a home of its own."""
    command = [
        *prefix,
        sys.executable,
        "-m",
        "pipeline.cli",
        "compile",
        str(plan),
        "--out",
        str(out),
    ]
    env = environment({"CRUCIBLE_HOME": str(home), **more})
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=_hear_ctrl_c,
    )


def _hear_ctrl_c() -> None:
    """A shell starts what is to run in the background deaf to Ctrl-C, and that is inherited: also
    by tests that are started so.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[str], timeout_s: float = 900) -> Result:
    out, err = process.communicate(timeout=timeout_s)
    return Result(process.returncode, out, err)


def started_stages(home: Path) -> list[str]:
    """`stage/first digits of its key` of every child that was started since the logs were removed,
    in order.
    """
    logs = sorted((home / "logs").glob("*-*.log"), key=lambda file: file.stat().st_ctime_ns)
    return [re.sub(r"-(\w+)\.log$", r"/\1", file.name) for file in logs]


def forget_starts(home: Path) -> None:
    shutil.rmtree(home / "logs", ignore_errors=True)


def forget_stage(home: Path, stage: str) -> None:
    """Let a stage run again, and remove the logs.

    Candidates are prepared side by side: one may have ended a stage before another is disturbed.
    """
    forget_starts(home)
    shutil.rmtree(home / "artifacts" / stage, ignore_errors=True)


def wait_for_stage(home: Path, stage: str, process: subprocess.Popen[str]) -> None:
    """Until the log of this stage is there: its child has been started."""
    while not list((home / "logs").glob(f"{stage}-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def unfinished(home: Path) -> set[str]:
    """The stages that were started, and have no artifact."""
    artifacts = {
        f"{folder.parent.name}/{folder.name[:12]}"
        for folder in (home / "artifacts").glob("*/*")
        if (folder / MANIFEST).exists()
    }
    return {name.partition("/")[0] for name in started_stages(home) if name not in artifacts}


def still_running(home: Path, patience_s: float = 60) -> list[psutil.Process]:
    """All that work in this home after so long; a child whose parent was killed while it started up
    ends once it has imported what it needs.
    """
    end = time.monotonic() + patience_s
    while (processes := _processes_of(home)) and time.monotonic() < end:
        time.sleep(0.1)
    return processes


def _processes_of(home: Path) -> list[psutil.Process]:
    """But for zombies, whose parent has yet to notice."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.environ().get("CRUCIBLE_HOME") == str(home)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                processes.append(process)
    return processes


# -- a host with less than one wants -----------------------------------------


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[None]:
    """A file system in memory at `place`; skips the test where none can be mounted."""
    place.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def small_memory(limit_bytes: int) -> Iterator[Path]:
    """A control group of so much memory (v2, or v1): whoever writes its process id to the file that
    comes belongs to it.
    """
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"crucible-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        try:
            limit.write_text(str(limit_bytes))
            if (swap := group / "memory.swap.max").exists():
                swap.write_text("0")
        except OSError as error:
            pytest.skip(f"cannot limit the memory of a control group: {error}")
        yield group / "cgroup.procs"
    finally:
        wait_until_empty(group / "cgroup.procs")
        group.rmdir()


def wait_until_empty(processes: Path) -> None:
    while processes.read_text().strip():
        time.sleep(0.05)
