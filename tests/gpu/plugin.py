"""Which GPU tests ran, how they ended and where, as JSON; and on a host that cannot run them, how
many were skipped and why.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.errors import BackendUnavailable
from pipeline.host.environment import environment
from pipeline.host.gpu import Gpus

WORST_FIRST = ("error", "failed", "skipped", "passed", "not run")
MAX_REASON = 500


@dataclass(frozen=True)
class Obstacle:
    """Why no GPU test can run here, empty if they can; then the version of TensorRT is known."""

    reason: str
    tensorrt: str = ""


def find_obstacle(gpus: Gpus) -> Obstacle:
    """A GPU comes first: without one, TensorRT is not even looked for."""
    if not gpus.devices:
        return Obstacle("no NVIDIA GPU")
    try:
        return Obstacle("", tensorrt_.probe().version)
    except BackendUnavailable as error:
        return Obstacle(error.message)


def revision_of(folder: Path) -> str:
    """The commit that is checked out there, with a `+` if its files have changed since; empty
    without git.
    """
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


@dataclass
class GpuTest:
    """One GPU test: its setup, call and teardown together."""

    outcome: str = "not run"
    seconds: float = 0.0
    reason: str = ""

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase; the worst outcome stays."""
        self.seconds = round(self.seconds + report.duration, 3)
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        if WORST_FIRST.index(outcome) < WORST_FIRST.index(self.outcome):
            self.outcome, self.reason = outcome, _reason(report)[:MAX_REASON]


def _reason(report: pytest.TestReport) -> str:
    """Why it was skipped, or the line that pytest prints of a failure; empty for what passed."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)


@dataclass(eq=False)  # pytest keeps its plugins in sets
class GpuTests:
    """A plugin of pytest. With a file for the results, a run on a GPU host in which no GPU test
    passed is a failure.
    """

    gpus: Gpus
    file: Path | None = None
    find_obstacle: Callable[[Gpus], Obstacle] = find_obstacle
    tests: dict[str, GpuTest] = field(default_factory=dict)

    @functools.cached_property
    def obstacle(self) -> Obstacle:
        return self.find_obstacle(self.gpus)

    @functools.cached_property
    def revision(self) -> str:
        return revision_of(Path(__file__).parent)

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        return environment().model_dump(mode="json")

    @pytest.hookimpl(trylast=True)  # after `-m` has chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.get_closest_marker("gpu")]
        self.tests = {item.nodeid: GpuTest() for item in chosen}
        if chosen and self.obstacle.reason:
            for item in chosen:
                item.add_marker(pytest.mark.skip(reason=f"GPU test: {self.obstacle.reason}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self.tests:
            self.tests[report.nodeid].add(report)
            if report.when == "teardown":
                self.write(finished=False)  # so that a run which is cut short leaves what it found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.write(finished=True)
        if (
            self.file
            and self.gpus.devices
            and not self.counts().get("passed")
            and session.exitstatus == pytest.ExitCode.OK
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.tests and self.obstacle.reason:
            terminalreporter.write_line(
                f"{self.counts().get('skipped', 0)} GPU tests skipped: {self.obstacle.reason}",
                yellow=True,
            )
        elif self.tests:
            message = ", ".join(f"{count} {outcome}" for outcome, count in self.counts().items())
            terminalreporter.write_line(
                f"{len(self.tests)} GPU tests: {message}"
                + f"; results in {self.file}" * bool(self.file)
            )

    def counts(self) -> dict[str, int]:
        outcomes = [test.outcome for test in self.tests.values()]
        return {
            outcome: outcomes.count(outcome)
            for outcome in reversed(WORST_FIRST)
            if outcome in outcomes
        }

    def write(self, finished: bool) -> None:
        """The results so far, with the environment they were taken in."""
        if self.file is None:
            return
        document = {
            "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "revision": self.revision,
            "finished": finished,
            "counts": self.counts(),
            "seconds": round(sum(test.seconds for test in self.tests.values()), 1),
            "tensorrt": self.obstacle.tensorrt,
            "gpus": [gpu.model_dump() for gpu in self.gpus.devices],
            "skipped_because": self.obstacle.reason,
            "environment": self.environment,
            "tests": [{"test": name, **vars(test)} for name, test in self.tests.items()],
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
