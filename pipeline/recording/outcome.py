"""What the recording process hands to `crucible record` when the script has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import CrucibleError

PROGRAM = "model.pt2"
PACKAGE = "model"  # folder of an entrypoint
ENTRYPOINT = "recorded_module:build"
PICKLE = "module.pt"


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """A module that the script called."""

    name: str  # dotted path of its class
    calls: int
    left_out: dict[str, int]  # calls that cannot be recorded, by reason
    shapes: dict[str, int]  # recorded calls, by the dtypes and shapes of the inputs in words


@dataclass(frozen=True, slots=True)
class Recording:
    """The stored module, and the files of its calls.

    A call's file holds the arrays in_0, in_1, ... in the order of `inputs`.
    """

    name: str  # dotted path of the module's class
    model: Path  # PROGRAM or PACKAGE
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    profile: Profile
    has_rows: bool  # axis 0 of every input counts samples that do not depend on each other
    files: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The modules seen, and the recording of one of them or the reason why there is none."""

    modules: tuple[ModuleCalls, ...]
    uncounted: int  # calls of further modules
    result: Recording | CrucibleError
