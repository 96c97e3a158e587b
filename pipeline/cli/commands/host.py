"""Commands on this host: doctor and store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import typer

from pipeline.cli import terminal
from pipeline.cli.options import JsonOption
from pipeline.cli.running import open_runner
from pipeline.execution.remote_store import open_store
from pipeline.execution.store import bytes_of
from pipeline.plan import files as config

sandbox_lines: Callable[[], tuple[str, ...]] = tuple
"""What the service's sandbox holds on this host; the service sets it."""


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this CPU's peak FLOP/s and bytes/s first, and store them for reports.",
        ),
    ] = False,
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="With --measure: number of threads, as in benchmark.threads; 0: all cores."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what this host can build and run, and what to install for the rest.

    Lists the CPU with its flags, the GPUs, the versions of the backends, the precisions that each
    backend builds, what the service's sandbox stops, and problems of this installation with their
    remedies.

    Example: crucible doctor --measure
    """
    from pipeline.benchmark.cpu_peaks import measure_peaks, save_peaks
    from pipeline.cli.doctor import examine, lines

    if measure:
        with open_runner(as_json, "doctor") as runner:
            progress = runner.progress("peaks")
            save_peaks(runner.run(measure_peaks, threads, name="peaks", progress=progress), threads)
    examination = examine(config.home()).model_copy(update={"sandbox": sandbox_lines()})
    if as_json:
        print(examination.model_dump_json())
    else:
        terminal.print_text(terminal.console(), "\n".join(lines(examination)), markup=False)


def store(as_json: JsonOption = False) -> None:
    """Show the sizes of the local store and, if CRUCIBLE_STORE is set, of the shared one.

    Example: CRUCIBLE_STORE=s3://bucket/prefix crucible store
    """
    opened = open_store()
    folders = [folder for folder, _ in opened.artifacts()]
    sizes = [("local", str(opened.root), len(folders), sum(map(bytes_of, folders)))]
    if opened.remote:
        sizes.append(("remote", opened.remote.url, *opened.remote.size()))
    if as_json:
        names = ("place", "address", "artifacts", "bytes")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in sizes]))
        return
    for place, address, count, size in sizes:
        print(f"{place}: {count} artifacts, {size / 2**20:.1f} MiB, {address}")
