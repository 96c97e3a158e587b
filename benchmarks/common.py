"""What the benchmarks share: the graph of a plan, tables, and results with the environment
they were taken in.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.compiler.context import open_context
from pipeline.compiler.graph import export_model, simplify_model
from pipeline.core.artifacts import OnnxModel
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.host.environment import environment
from pipeline.plan.files import home, load_plan
from pipeline.plan.schema import Plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RESNET50 = ROOT / "configs" / "resnet50.yaml"
DIGITS = ROOT / "configs" / "digits.yaml"

Cell = str | float | int | bool | None
Row = Mapping[str, Cell]


def argument_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks NAME`, whose help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def takes_no_arguments(name: str, description: str | None, words: Sequence[str]) -> None:
    """`--help` prints what the benchmark measures. Any other argument is an error, and nothing is
    measured.
    """
    argument_parser(name, description).parse_args(words)


def graph_of(plan_path: Path) -> tuple[Plan, OnnxModel]:
    """A plan and its exported, simplified graph; from the store if `crucible compile` has been
    there.
    """
    context = open_context(load_plan(plan_path), Runner(Store(home())))
    return context.plan, simplify_model(context, export_model(context))


def publish(
    name: str,
    rows: Sequence[Row],
    targets: Mapping[str, bool],
    into: Path = RESULTS,
    run: Row | None = None,
    details: Mapping[str, Sequence[Row]] | None = None,
) -> None:
    """Print a table, keep the result with its environment and what the run was asked for, and end
    with one JSON document on a line of its own.

    `details` are further tables, by name, that are kept and not printed.
    """
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(text_of(cell) for cell in row.values()))
    console = Console(width=140)
    console.print(table)
    for target, met in targets.items():
        console.print(f"{'met   ' if met else 'MISSED'}  {target}", highlight=False)
    print(json.dumps(keep(name, rows, targets, into, run, details)))


def keep(
    name: str,
    rows: Sequence[Row],
    targets: Mapping[str, bool],
    into: Path = RESULTS,
    run: Row | None = None,
    details: Mapping[str, Sequence[Row]] | None = None,
) -> dict[str, Any]:
    """Write a result with its environment, in place of the one before it, and return it.

    A long run keeps what it has so far: one that is stopped leaves its last result.
    """
    document = {
        "benchmark": name,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "rows": [dict(row) for row in rows],
        "targets": dict(targets),
        **({"run": dict(run)} if run else {}),
        **{name: [dict(row) for row in table] for name, table in (details or {}).items()},
        "environment": environment().model_dump(),
    }
    into.mkdir(parents=True, exist_ok=True)
    part = into / f"{name}.json.part"
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(into / f"{name}.json")
    return document


def text_of(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:,.4g}" if isinstance(cell, float) else str(cell)


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Do this again and again in a thread until the block ends. The last time is waited for; work
    that failed is raised then.
    """
    stop, failed = threading.Event(), list[BaseException]()

    def again() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001  raised below, in the thread that measures
            failed.append(error)

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
