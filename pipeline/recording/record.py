"""Run a Python command with the recorder in its process, and write a plan with its data.

    claim the folder -> run the command -> outcome -> data sets -> plan, checked as a compile does

The script runs in an interpreter of its own, as the command says. The recorder comes in through
PYTHONPATH (startup/sitecustomize.py), so the script has its own arguments, `__main__`, output and
exit code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.data.samples import (
    CalibrationSet,
    SelectionSet,
    ValidationSet,
    check_disjoint,
    open_set,
)
from pipeline.distribution import install_command
from pipeline.errors import CrucibleError, HostError, PlanError
from pipeline.plan.files import load_plan
from pipeline.plan.source import source_from_config
from pipeline.recording.datasets import WANTED, DataSets, write_sets
from pipeline.recording.outcome import ENTRYPOINT, PICKLE, PROGRAM, Outcome, Recording
from pipeline.recording.recorder import OUTCOME
from pipeline.report.bundle import check_folder

PLAN = "plan.yaml"
CALLS = ".calls"  # folder of the recorded calls while the script runs
STARTUP = Path(__file__).with_name("startup")
INTERPRETER = re.compile(r"python[\w.-]*")
WITHOUT_RECORDER = re.compile(r"-(?![WX])\w*[EIS]\w*")
"""Options with which Python reads neither PYTHONPATH nor sitecustomize."""
NEEDED = ("torch", "numpy", "pydantic", "onnx", "ml_dtypes")  # what storing.py imports


@dataclass(frozen=True, slots=True)
class Options:
    """What to record, and how much of it."""

    module: str = ""  # name or dotted path of a class; "": the outermost module called most
    samples: int = sum(WANTED.values())
    max_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the script: its exit code, and the outcome unless its process was killed."""

    exit_code: int  # minus the signal that ended the process
    outcome: Outcome | None


def default_folder(command: Sequence[str]) -> Path:
    """Return crucible-recordings/NAME, by the script or module of the command."""
    for before, word in zip(("", *command), command, strict=False):
        if before == "-m" or word.endswith(".py"):
            return Path("crucible-recordings") / Path(word).name.removesuffix(".py")
    return Path("crucible-recordings") / "script"


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create the folder, and remove it again if no plan is in it at the end.

    PlanError if it exists: its plan may have been edited, or another recording is running.
    """
    check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise PlanError(
            f"'{folder}' exists, and `crucible record` replaces nothing",
            "name another folder with --out, or remove this one",
        ) from error
    try:
        yield
    finally:
        shutil.rmtree(folder / CALLS, ignore_errors=True)
        if not (folder / PLAN).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def check_command(command: Sequence[str]) -> None:
    """PlanError unless the command is a Python interpreter with arguments.

    HostError if that interpreter lacks packages that the recorder needs.
    """
    if not command or not INTERPRETER.fullmatch(Path(command[0]).name):
        raise PlanError(
            f"expected a Python command, got '{' '.join(command)}'",
            "for example `crucible record -- python SCRIPT.py`, or `python -m my_package`",
        )
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    for option in filter(WITHOUT_RECORDER.fullmatch, options):
        raise PlanError(
            f"with Python's option {option} the recorder cannot start",
            "leave -E, -I and -S out",
        )
    path = shutil.which(command[0])
    if path is None:
        raise PlanError(f"no program '{command[0]}'", "give the path of a Python interpreter")
    code = (
        "import importlib.util, sys;"
        f"sys.exit(', '.join(n for n in {NEEDED} if not importlib.util.find_spec(n)) or None)"
    )
    process = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    if process.returncode:
        lacks = process.stderr.strip().rpartition("\n")[2]
        raise HostError(
            f"'{path}' cannot run the recorder: it lacks {lacks}",
            "install Crucible in the environment of this interpreter, or start the `crucible` of"
            f" that environment: {install_command('torch')}",
        )


def run_command(command: Sequence[str], folder: Path, options: Options) -> Ended:
    """Run the command with the recorder. Its input, output and exit code are its own.

    Ctrl-C goes to the script, as without the recorder.
    """
    calls = (folder / CALLS).absolute()
    calls.mkdir()
    python_path = os.environ.get("PYTHONPATH")
    settings = {
        "folder": str(calls),
        "samples": options.samples,
        "max_bytes": options.max_bytes,
        "module": options.module,
        "python_path": python_path,
    }
    path = os.pathsep.join(filter(None, (str(STARTUP), python_path)))
    env = {**os.environ, "PYTHONPATH": path, "CRUCIBLE_RECORD": json.dumps(settings)}
    with _interrupts_ignored(), subprocess.Popen(command, env=env) as process:
        try:
            code = process.wait()
        except BaseException:  # SIGTERM
            process.terminate()
            raise
    file = calls / OUTCOME
    outcome = pickle.loads(file.read_bytes()) if file.is_file() else None
    return Ended(code, outcome)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in this process. A child started meanwhile still gets it."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def no_outcome(ended: Ended) -> CrucibleError:
    """Return why the script's process left no outcome."""
    how = (
        f"was ended by {signal.Signals(-ended.exit_code).name}"
        if ended.exit_code < 0
        else f"ended with exit code {ended.exit_code}"
    )
    return HostError(
        f"nothing was recorded: the script's process {how} before the module was stored",
        "let the script end by itself, by an exception or by one Ctrl-C",
    )


def write_recording(recording: Recording, most: int, folder: Path) -> DataSets:
    """Write the model, the data sets and last the plan into `folder`.

    What was written is read again with the checks of a compile.
    """
    recording.model.replace(folder / recording.model.name)
    sets = write_sets(recording, most, folder)
    draft = folder / f".{PLAN}"
    draft.write_text(plan_text(recording, sets, folder.resolve().name), encoding="utf-8")
    plan = load_plan(draft)
    source = source_from_config(plan.model, plan.profiles)
    opened = [
        open_set(kind, getattr(plan.data, kind.role), source.inputs, plan.profiles)
        for kind in (CalibrationSet, SelectionSet, ValidationSet)
    ]
    check_disjoint(*opened)
    draft.rename(folder / PLAN)
    return sets


def plan_text(recording: Recording, sets: DataSets, name: str) -> str:
    """Return the plan as YAML, with comments for the user."""
    inputs = [
        {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
        for spec in recording.inputs
    ]
    ranges = {symbol: [dim.min, dim.opt, dim.max] for symbol, dim in recording.profile.dims.items()}
    data = {
        role: files[0] if len(files) == 1 else list(files) for role, files in sets.files.items()
    }
    if recording.model.name == PROGRAM:
        how, stored = "as torch.export captured it", {"path": recording.model.name}
    else:
        how = f"pickled, with the script's own modules, in {recording.model.name}/"
        stored = {
            "entrypoint": ENTRYPOINT,
            "python_path": recording.model.name,
            "weights_from": f"{PICKLE} in that folder, as at the end of the script",
        }
    model = {**stored, "inputs": inputs, "outputs": list(recording.outputs)}
    sections: list[tuple[str, dict[str, object]]] = [
        (
            f"Written by `crucible record`: {recording.name}, {how}.",
            {"name": _plan_name(name), "model": model},
        ),
        (
            "The sizes seen: smallest, most frequent, largest. A batch starts at 1.",
            {"profiles": [ranges]} if ranges else {},
        ),
        ("Recorded inputs. No sample is in two sets.", {"data": data}),
        (
            "Labels are unknown, so outputs are compared with those of the original model.",
            {"accuracy": {"metric": "cosine"}},
        ),
    ]
    written = (
        f"# {comment}\n{yaml.safe_dump(section, sort_keys=False, default_flow_style=None)}"
        for comment, section in sections
        if section
    )
    return "\n".join(written)


def _plan_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip(".")
