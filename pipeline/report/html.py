"""A report as one HTML file that needs nothing else: no script, no network, figures inline.

Names in a model and texts in a report are untrusted: the template escapes everything but the
figures, which matplotlib escapes, and the page's own policy forbids scripts and loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.formatting import date
from pipeline.report.figures import Plot, plots
from pipeline.report.tables import headline, sections
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


def page(report: Report, figures: Sequence[Plot] | None = None) -> str:
    """Render the whole report. `figures` are those of the report if they are drawn already."""
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            headline=headline(report),
            sections=sections(report),
            figures=plots(report) if figures is None else figures,
        )
    )
