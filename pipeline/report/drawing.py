"""How figures are drawn: SVG by matplotlib, without a display. Text stays text: it can be read
aloud, searched and copied.

A figure is first a value, then a drawing: equal values need not be drawn again, and matplotlib
takes a second to load.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#dfe4ea"
WIDTH_INCHES = 8.6


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: where it belongs, what it shows in words, and how it is drawn."""

    section: str  # the key of the section it belongs to
    name: str  # unique in a report, fit for a file name
    caption: str
    key: str  # equal keys give equal drawings
    draw: Callable[[], str]  # the <svg> element


def key_of(code: Path, data: NamedTuple) -> str:
    """What a drawing depends on: the values, and the code that draws them, here and in the file
    `code`.
    """
    return hashlib.sha256(
        Path(__file__).read_bytes() + code.read_bytes() + repr(data).encode()
    ).hexdigest()


def short(text: str, limit: int = 44) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _style() -> AbstractContextManager[None]:
    import matplotlib

    settings: dict[str, object] = {
        "svg.fonttype": "none",
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
    """A figure of the page's width, without pyplot: no display, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, max(height, 1.8)), layout="constrained")
    return figure, figure.subplots()


def svg(name: str, draw: Callable[[], Figure]) -> str:
    """The `<svg>` element; its ids carry the figure's name, for all figures share the ids of one
    page.
    """
    buffer = io.StringIO()
    with _style():
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        draw().savefig(buffer, format="svg", metadata=metadata, transparent=True)
    text = buffer.getvalue()
    return re.sub(
        r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name.lower()}-", text[text.index("<svg") :]
    )
