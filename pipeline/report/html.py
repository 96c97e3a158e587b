"""A report as one self-contained HTML file: no script, no network, figures inline.

The content of its tables is in the `*_sections.py`.

Names in a model and texts in a report are untrusted. The template escapes everything except the
figures, which matplotlib escapes. The content security policy of the page forbids scripts and
loading.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.formatting import date
from pipeline.report.figures import Plot, plots
from pipeline.report.sections import headline, sections
from pipeline.results.report import Report


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["date"] = date
    return environment


def page(report: Report, svg_of: Callable[[Plot], str] = Plot.draw) -> str:
    """Render the whole report. `svg_of` returns the `<svg>` element of a figure."""
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            headline=headline(report),
            sections=sections(report),
            figures=plots(report),
            svg_of=svg_of,
        )
    )
