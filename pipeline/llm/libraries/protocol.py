"""What each library of language models can do. A module fulfils `Library`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import Target
from pipeline.core.progress import Progress, silent
from pipeline.llm.engine import ExportedModel, LanguageEngine
from pipeline.llm.plan import Device, LanguageCandidate, LanguagePlan
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Generator, Room
from pipeline.llm.source import Description, Source
from pipeline.llm.speed.roofline import StepParts
from pipeline.llm.texts import Documents
from pipeline.llm.ways import WayScore

Logs = NDArray[np.float64]


class ScoredGenerator(Generator, Protocol):
    """An engine opened as it serves."""

    def log_probs(self, ids: Ids) -> Logs:
        """Return the log-probability of each token after the first, read at once: [n - 1]."""
        ...

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        """Continue one prompt greedily by exactly this number of tokens."""
        ...


class ScoredGraph(Protocol):
    """An engine opened for whole distributions."""

    @property
    def facts(self) -> dict[str, str]:
        """Return what changes answers, as the library reports it."""
        ...

    def log_probs(self, ids: Ids, one_by_one: int) -> Logs:
        """Return the log-probabilities of all successors, [n, vocabulary]. The last `one_by_one`
        tokens are read one by one, through the cache.
        """
        ...


class Library(Protocol):
    """One library. Errors: BackendUnavailable if it is missing, UnsupportedError for a model or a
    candidate that it cannot run.
    """

    PACKAGES: tuple[str, ...]  # modules that it imports
    INSTALL: str  # the command that installs them

    def target(self, device: Device) -> Target:
        """Return the device and the library's version. HostError without such a device."""
        ...

    def default_candidates(
        self, about: Description, source: Source, plan: LanguagePlan
    ) -> tuple[LanguageCandidate, ...]: ...

    def export(
        self,
        source: Source,
        about: Description,
        device: Device,
        out: Path,
        progress: Progress = silent,
    ) -> ExportedModel:
        """Write what its candidates share into `out`."""
        ...

    def build(
        self,
        exported: ExportedModel,
        recipe: LanguageCandidate,
        source: Source,
        calibration: Documents | None,
        out: Path,
        progress: Progress = silent,
    ) -> LanguageEngine: ...

    def open_served(self, engine: LanguageEngine, room: Room) -> ScoredGenerator: ...

    def open_graph(
        self, engine: LanguageEngine, room: Room, served: ScoredGenerator
    ) -> ScoredGraph:
        """`served`: the same engine, from `open_served`; they may share weights."""
        ...

    def compare_ways(
        self,
        engine: LanguageEngine,
        room: Room,
        served: ScoredGenerator,
        prompts: Sequence[Ids],
        alone: Sequence[Generation],
    ) -> tuple[WayScore, ...]:
        """Serve prompts in each way that the library has, beside the answers `alone`."""
        ...

    def weight_bytes_read(self, engine: LanguageEngine) -> int:
        """Return the bytes that making one token reads."""
        ...

    def measure_parts(
        self,
        engine: LanguageEngine,
        room: Room,
        prompt: Ids,
        tokens: int,
        progress: Progress = silent,
    ) -> StepParts:
        """Measure where the time between tokens goes. UnsupportedError if the library cannot
        tell.
        """
        ...
