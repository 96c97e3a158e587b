"""Figures of docs/benchmarks: SVG with its text as text, drawn again only for other values (another
matplotlib draws the same ones otherwise).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.common import ROOT
from pipeline.report.figures.drawing import GRID, INK, MUTED

FOLDER = ROOT / "docs" / "benchmarks"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "crucible",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
}
NOTHING_OF_THE_HOST = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure: where it lies, what it shows, who draws it."""

    name: str
    values: Any  # what JSON takes
    draw: Callable[[Figure, Any], None]
    size: tuple[float, float] = (8.6, 3.6)  # inches

    def is_current(self, folder: Path = FOLDER) -> bool:
        """Whether the file is of these values."""
        file = folder / self.name
        return file.is_file() and file.read_text(encoding="utf-8").startswith(self._mark())

    def write(self, folder: Path = FOLDER) -> Path:
        with matplotlib.rc_context(
            {**STYLE, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True}
        ):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure, self.values)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata=NOTHING_OF_THE_HOST, facecolor="white")
        file, text = folder / self.name, buffer.getvalue()
        file.write_text(self._mark() + text[text.index("<svg") :], encoding="utf-8")
        return file

    def _mark(self) -> str:
        return f"<!-- of {hashlib.sha256(json.dumps(self.values).encode()).hexdigest()} -->\n"
