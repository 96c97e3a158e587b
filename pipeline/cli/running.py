"""How commands run stages, and how they end."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator

from rich.markup import escape

from pipeline.api import MAX_WORKERS
from pipeline.cli import terminal
from pipeline.cli.stage_progress import StageProgress
from pipeline.execution.remote_store import open_store
from pipeline.execution.stage_runner import Runner
from pipeline.host.environment import usable_cores
from pipeline.results.report import Verdict


@contextlib.contextmanager
def open_runner(quiet: bool, plan: str) -> Iterator[Runner]:
    """Provide the runner of a command. It shows progress on stderr, unless `quiet`."""
    console = terminal.console(stderr=True)
    with StageProgress(console, quiet) as progress:
        store = open_store(
            on_wait=lambda text: (
                None if quiet else console.print(f"[yellow]{escape(text)}", highlight=False)
            ),
        )
        yield Runner(store, progress, plan=plan, workers=min(usable_cores(), MAX_WORKERS))


def exit_code(verdict: Verdict) -> int:
    """Return the exit code of a compile with this verdict."""
    return 2 if verdict == "rejected" else 0


def command_line() -> str:
    """Return the command line of this process, for reports."""
    return shlex.join(["crucible", *sys.argv[1:]])
