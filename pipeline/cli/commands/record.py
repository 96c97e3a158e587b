"""`crucible record`: run a user's script, and write a plan with data from the calls of a module."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.cli import terminal
from pipeline.errors import CrucibleError
from pipeline.recording.datasets import WANTED, DataSets
from pipeline.recording.outcome import ModuleCalls, Outcome, Recording
from pipeline.recording.record import (
    PLAN,
    Ended,
    Options,
    check_command,
    claimed,
    default_folder,
    no_outcome,
    run_command,
    write_recording,
)

SHOWN_MODULES, SHOWN_SHAPES = 10, 5


def record(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="Python command: a script, or `python -m package`, with its arguments.",
        ),
    ],
    module: Annotated[
        str,
        typer.Option(
            metavar="CLASS",
            help="Record this class, by its name or dotted path, at any depth. Default: of the"
            " modules that no other module calls, the one with the most calls; modules without"
            " parameters, such as a loss, come last.",
            show_default=False,
        ),
    ] = "",
    samples: Annotated[
        int,
        typer.Option(
            min=len(WANTED),
            help="Most samples to keep, chosen at random from all calls, for the three data sets"
            " together.",
        ),
    ] = Options().samples,
    max_mib: Annotated[
        int,
        typer.Option(min=1, help="Most disk space for recorded calls, MiB."),
    ] = Options().max_bytes >> 20,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="New folder for the plan, the model and the data;"
            " crucible-recordings/SCRIPT if left out.",
        ),
    ] = None,
) -> None:
    """Run your own script, and write a plan with data from the calls of its model.

    The script runs as always, with its own arguments, output and exit code. Meanwhile the calls of
    its nn.Modules are counted, and the inputs of a random sample of them are kept. Calls in
    training mode do not count. When the script has ended, also by an exception or Ctrl-C, DIR gets:

    plan.yaml, a plan for `crucible compile`; model/ or model.pt2, the module with the weights that
    it has at the end; calibration, selection and validation sets, the recorded inputs. Sizes that
    varied become dimensions of a profile: smallest, most frequent, largest.

    Exit codes: the script's own; 1 if it is 0 and nothing could be recorded.

    Example: crucible record -- python SCRIPT.py --images photos

    Example: crucible record --module BertModel --out bert -- python -m my_package
    """
    folder = out or default_folder(command)
    check_command(command)
    console = terminal.console(stderr=True)
    with claimed(folder):
        _say(console, f"recording: {shlex.join(command)}")
        ended = run_command(command, folder, Options(module, samples, max_mib << 20))
        _say(console, _how(ended))
        error = _finish(console, ended, samples, folder)
    code = ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code  # as in shells
    if error is not None and code == 0:
        raise error
    if error is not None:
        _say(console, f"not recorded: {error}")
    sys.exit(code)  # it is not ours: 130 does not mean that this process was interrupted


def _finish(console: Console, ended: Ended, samples: int, folder: Path) -> CrucibleError | None:
    """Print what was seen and write the recording. Return the error if that is not possible."""
    if ended.outcome is None:
        return no_outcome(ended)
    result = ended.outcome.result
    if ended.outcome.modules:
        console.print(_module_table(ended.outcome))
    if isinstance(result, CrucibleError):
        return result
    _say(console, f"writing {folder}")
    try:
        sets = write_recording(result, samples, folder)
    except CrucibleError as error:
        return error
    for line in _lines(result, sets):
        _say(console, line)
    _say(console, f"next: crucible compile {shlex.quote(str(folder / PLAN))}")
    return None


def _say(console: Console, text: str) -> None:
    terminal.print_text(console, text, markup=False)


def _how(ended: Ended) -> str:
    if ended.exit_code < 0:
        return f"the script was ended by {signal.Signals(-ended.exit_code).name}"
    return f"the script ended with exit code {ended.exit_code}"


def _module_table(outcome: Outcome) -> Table:
    recorded = outcome.result.name if isinstance(outcome.result, Recording) else ""
    table = Table("module", "calls", "inputs: recorded calls", title="modules called")
    modules = sorted(outcome.modules, key=lambda each: (each.name != recorded, -each.calls))
    for module in modules[:SHOWN_MODULES]:
        table.add_row(*map(escape, (module.name, f"{module.calls:,}", _shapes_text(module))))
    others = sum(module.calls for module in modules[SHOWN_MODULES:]) + outcome.uncounted
    if others:
        table.add_row("others", f"{others:,}", "")
    return table


def _shapes_text(module: ModuleCalls) -> str:
    lines = [f"{shape}: {calls:,}" for shape, calls in module.shapes.items()]
    if len(lines) > SHOWN_SHAPES:
        lines[SHOWN_SHAPES:] = [f"{len(lines) - SHOWN_SHAPES} other shapes"]
    left_out = [f"{calls:,} left out: {reason}" for reason, calls in module.left_out.items()]
    return "\n".join((*lines, *left_out))


def _lines(recording: Recording, sets: DataSets) -> Iterator[str]:
    inputs = (f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in recording.inputs)
    yield f"recorded: {recording.name}, {'; '.join(inputs)}".replace("'", "")
    if recording.profile.dims:
        yield f"profile: {recording.profile.in_words()}"
    else:
        yield (
            "note: all calls had the same sizes, so the engine will take these only; for others,"
            " run the script with other sizes too"
        )
    counts = ", ".join(f"{role} {count}" for role, count in sets.samples.items())
    unit = "rows" if recording.has_rows else "whole calls"
    yield f"samples ({unit}): {counts}"
    if sets.repeated or sets.invalid:
        yield (
            f"left out: {sets.repeated} samples that equal another one, {sets.invalid} with NaN or"
            " an infinity"
        )
    for note in recording.notes:
        yield f"note: {note}"
    if sum(sets.samples.values()) < sum(WANTED.values()):
        wanted = ", ".join(f"{role} {count}" for role, count in WANTED.items())
        yield (
            f"warning: few samples prove little; recommended are {wanted} (docs/howto/own-data.md)"
        )
