"""The two forms in which a recorded module is stored, both as plans take them.

    entrypoint   model/: the pickled module, the script's own modules, and a function that loads it
    program      model.pt2: the module as torch.export captured it

An entrypoint is tried first: a compile then measures the module itself as its baseline, in all
precisions. It needs classes that can be imported, and is loaded once in a fresh interpreter to
prove it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.backends.pytorch.export import Job, Refused, captured, example_sizes, feeds_at
from pipeline.backends.pytorch.module import first_line, leaves_of, load_module, run_module
from pipeline.core.artifacts import ModelSource
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import CrucibleError
from pipeline.onnx_graph.compare import compare_outputs
from pipeline.recording.outcome import ENTRYPOINT, PACKAGE, PICKLE, PROGRAM
from pipeline.recording.recorder import Form
from pipeline.stages.export import TOLERANCE

if TYPE_CHECKING:
    import torch

CHECKS = "checks"  # a pickled Checks
ENTRY_TEXT = '''"""Written by `crucible record`: the recorded {name}."""

import hashlib
from pathlib import Path

import torch
from torch.utils._pytree import tree_unflatten
{imports}
FILE = Path(__file__).with_name("{file}")
# a compile stores results by this text, so a change of the file must change it
SHA256 = "{sha256}"


class Recorded(torch.nn.Module):
    """Takes the tensors of a call. All other arguments are those of the script."""

    def __init__(self, module, spec, constants, positions):
        super().__init__()
        self.module = module
        self.spec, self.constants, self.positions = spec, constants, positions

    def forward(self, {inputs}):
        return self.call(({inputs},))

    def call(self, tensors):
        leaves = list(self.constants)
        for position, tensor in zip(self.positions, tensors):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.module(*args, **kwargs)


def build():
    with FILE.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{{FILE}} is not the file that was recorded; record it again")
    return Recorded(**torch.load(FILE, weights_only=False))
'''


class NotStored(Exception):
    """The reason, in one line, why a module cannot be stored in a form."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Recorded calls, and what the module answered to them on the CPU in fp32."""

    source: ModelSource
    calls: tuple[tuple[Tensors, Tensors], ...]


def flat(module: torch.nn.Module, form: Form) -> torch.nn.Module:
    """Return a module that takes the tensors of a call as *args and returns a flat tuple.

    Its method `call` returns the result as the module gives it.
    """
    import torch
    from torch.utils import _pytree as pytree

    class Flat(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.training = False

        def call(self, *tensors: torch.Tensor) -> object:
            leaves = list(form.constants)
            for position, tensor in zip(form.positions, tensors, strict=True):
                leaves[position] = tensor
            args, kwargs = pytree.tree_unflatten(leaves, form.spec)
            return self.inner(*args, **kwargs)

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(leaves_of(self.call(*tensors)))

    return Flat()


# --- the entrypoint ---


def store_entrypoint(
    module: torch.nn.Module,
    form: Form,
    sources: dict[str, Path],
    checks: Checks,
    folder: Path,
) -> None:
    """Write the folder `model`. NotStored if a fresh interpreter cannot build the module from it.

    `sources` are the files of the script's own modules, by their paths in the folder.
    """
    import torch

    kinds = {type(part) for part in module.modules()}
    if mine := sorted(kind.__name__ for kind in kinds if kind.__module__ == "__main__"):
        raise NotStored(
            f"the script itself defines {mine[0]}, and nothing can import it from there"
        )
    package = folder / PACKAGE
    for name, file in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, package / name)
    package.mkdir(exist_ok=True)
    parts = {
        "module": module,
        "spec": form.spec,
        "constants": form.constants,
        "positions": form.positions,
    }
    try:
        torch.save(parts, package / PICKLE)
    except Exception as error:  # the user's classes may raise anything
        raise NotStored(f"it cannot be pickled: {first_line(error)}") from error
    with (package / PICKLE).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    own = {name.partition("/")[0].removesuffix(".py") for name in sources}
    tops = {kind.__module__.partition(".")[0] for kind in kinds} - own - {"torch"}
    text = ENTRY_TEXT.format(
        name=f"{type(module).__module__}.{type(module).__qualname__}",
        # so that a compile notices other versions of them
        imports="".join(f"import {top}\n" for top in sorted(tops)),
        file=PICKLE,
        sha256=digest,
        inputs=", ".join(form.names),
    )
    (package / f"{ENTRYPOINT.partition(':')[0]}.py").write_text(text, encoding="utf-8")
    _check_entrypoint(checks, folder)


def _check_entrypoint(checks: Checks, folder: Path) -> None:
    """Build the module in an interpreter that knows nothing of the script, and compare answers."""
    changes = {"entrypoint": ENTRYPOINT, "python_path": folder / PACKAGE}
    checks = replace(checks, source=checks.source.model_copy(update=changes))
    (folder / CHECKS).write_bytes(pickle.dumps(checks))
    root = str(Path(__file__).parents[2])
    # without the folders that the script has put on its path
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(folder / CHECKS)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        lines = (process.stdout or process.stderr).strip().splitlines() or ["it crashed"]
        raise NotStored(f"a fresh interpreter cannot build it: {lines[-1]}")


def entrypoint_fault(checks: Checks) -> str:
    """Describe how the module of the plan differs from the recorded one; "" if it does not."""
    try:
        return _fault(load_module(checks.source), checks)
    except CrucibleError as error:
        return error.message


def _fault(module: torch.nn.Module, checks: Checks) -> str:
    for feeds, expected in checks.calls:
        if fault := compare_outputs(expected, run_module(module, checks.source, feeds), TOLERANCE):
            return f"it answers otherwise: {fault}"
    return ""


# --- the program ---


def store_program(module: torch.nn.Module, profile: Profile, checks: Checks, folder: Path) -> None:
    """Write model.pt2 with free dimensions where the profile has symbols. `module` is flat.

    NotStored if torch.export cannot capture the module, or captures another one.
    """
    import torch

    source = checks.source
    sizes = example_sizes(source.inputs, (profile,))
    example = feeds_at(source.inputs, (checks.calls[0][0],), sizes)
    try:
        program = captured(Job(source, module, source.outputs, 0, example, Path(), flat=True))
    except (Refused, CrucibleError) as error:
        raise NotStored(f"torch.export cannot capture it: {first_line(error)}") from error
    if fault := _fault(program.module(), checks):
        raise NotStored(f"the program that torch.export captured is not the module: {fault}")
    torch.export.save(program, folder / PROGRAM)


if __name__ == "__main__":
    found = entrypoint_fault(pickle.loads(Path(sys.argv[1]).read_bytes()))
    print(found)
    sys.exit(1 if found else 0)
