"""What all figures share: the figure that is not drawn yet, colours, and the drawing as SVG."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.recipe import Precision
from pipeline.report.entries import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#dfe4ea"
WIDTH_INCHES = 8.6
COLOURS = {
    "winner": "#0b7a4b",
    "baseline": "#6b7280",
    "candidate": "#2f6fb5",
    "failed accuracy": "#b42318",
}
PRECISION_COLOURS = {
    Precision.FP32: "#1f2933",
    Precision.TF32: "#6b7280",
    Precision.BF16: "#6a51a3",
    Precision.FP16: "#2f6fb5",
    Precision.INT8: "#0b7a4b",
    Precision.FP8: "#b8860b",
    "integer": "#8fbc94",
    "none": "#dfe4ea",
    "unknown": "#b42318",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a report, not drawn yet: drawing is the slowest part of a report."""

    section: str  # its key
    name: str  # unique in a report, fit for a file name
    caption: str
    figure: partial[Figure]  # the drawing function and the values that it shows

    @property
    def key(self) -> str:
        """The digest of the values, and of the code that draws them. Equal figures have equal
        keys.
        """
        code = Path(__file__), Path(self.figure.func.__code__.co_filename)
        values = repr((self.name, self.figure.args)).encode()
        return hashlib.sha256(b"".join(file.read_bytes() for file in code) + values).hexdigest()

    def draw(self) -> str:
        """Draw the `<svg>` element."""
        return svg(self.name, self.figure)


def axis_label(entry: Entry) -> str:
    return f"{short(entry.label)}  {entry.number}"


def short(text: str, limit: int = 44) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _style() -> AbstractContextManager[None]:
    import matplotlib

    settings: dict[str, object] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "crucible",  # equal values give equal ids
        "text.parse_math": False,  # labels are untrusted: `$` is a dollar
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": MUTED,
        "ytick.color": INK,
    }
    context: AbstractContextManager[None] = matplotlib.rc_context(settings)
    return context


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure as wide as the page. Without pyplot it has no display and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, max(height, 1.8)), layout="constrained")
    return figure, figure.subplots()


def svg(name: str, draw: Callable[[], Figure]) -> str:
    """Draw the `<svg>` element. Its ids begin with the figure's name, to be unique in the page."""
    buffer = io.StringIO()
    with _style():
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        draw().savefig(buffer, format="svg", metadata=metadata, transparent=True)
    text = buffer.getvalue()
    return re.sub(
        r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name.lower()}-", text[text.index("<svg") :]
    )
