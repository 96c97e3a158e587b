"""What the race asks of a rival: a library that is in a folder of its own, or installed here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeline.core.recipe import Precision
from pipeline.execution.child_process import Channel
from pipeline.llm.plan import LanguageBenchmark
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generator, Room
from pipeline.llm.speed.race import Reads, answer_prompts


class Rival(Protocol):
    """A library with the model in its own format."""

    @property
    def label(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def recipe(self) -> Rival: ...
    @property
    def is_on_gpu(self) -> bool: ...
    @property
    def packages(self) -> Path | None:
        """Return the folder with its package; None if it is installed here."""
        ...

    def bytes_read(self) -> int:
        """Return the bytes of weights that one token reads in full."""
        ...

    def open(self, room: Room) -> Generator:
        """Open the model, in a process of its own."""
        ...


def is_installed(package: str, packages: Path | None) -> bool:
    """Return True if a package is in this folder, or installed here."""
    if packages is None:
        return importlib.util.find_spec(package) is not None
    return (packages / package / "__init__.py").is_file()


def contend(
    channel: Channel, rival: Rival, room: Room, prompts: Sequence[Ids], options: LanguageBenchmark
) -> None:
    """Open a rival, and answer prompts at each request of the parent."""
    if rival.packages is not None:
        sys.path.append(str(rival.packages))
    answer_prompts(channel, rival.open(room), prompts, options, Reads((), 1))
