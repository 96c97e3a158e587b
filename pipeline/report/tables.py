"""Tables and sections of a report as values.

Markdown, HTML and the terminal render them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Column(NamedTuple):
    """One column of a table."""

    title: str
    align: Literal["left", "right"] = "left"
    wrap: bool = True  # whether a terminal may break its texts into lines


def left(*titles: str) -> tuple[Column, ...]:
    """Return columns of texts."""
    return tuple(Column(title) for title in titles)


def right(*titles: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(title, "right") for title in titles)


class Bar(NamedTuple):
    """Two lengths from 0 to 1, drawn one after the other."""

    ran: float
    reused: float


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as plain text, not escaped. Each renderer escapes them for its format."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    emphasised: int | None = None  # the index of the winner's row
    bars: tuple[Bar, ...] = ()  # one per row, for HTML
    folded: bool = False  # HTML shows the table closed, under its title
    text_rows: int | None = None  # how many rows Markdown shows; None: all
    key: str = ""  # its id in HTML, by which the script of the graph finds it
    row_key: str = ""  # with the first cell of a row, the id of that row in HTML: `entry-1`

    @property
    def headings(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its content."""

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    code: str = ""
    tables: tuple[Table, ...] = ()

    @property
    def is_empty(self) -> bool:
        has_rows = any(table.rows for table in self.tables)
        return not (self.paragraphs or self.items or self.code or has_rows)


def number_cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
