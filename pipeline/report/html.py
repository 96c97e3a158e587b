"""A report as one self-contained HTML file: no network, figures and the script of the graph inline.

The content of its tables is in the `*_sections.py`. Without the script they are all there.

Names in a model and texts in a report are untrusted. The template escapes everything except the
figures, which matplotlib escapes, and the data of the graph, which are escaped for a script. The
content security policy of the page forbids loading, and every script but this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.formatting import date
from pipeline.report.figures import plots
from pipeline.report.figures.drawing import Plot
from pipeline.report.graph.view import graph_json, graph_script, graph_style, script_source
from pipeline.report.performance_summary import TARGET_HEADINGS, target_cells
from pipeline.report.sections import headline, sections
from pipeline.report.tables import Section
from pipeline.results.report import Report
from pipeline.results.targets import TargetsSummary


class Headed(Protocol):
    """What the head of a page says."""

    @property
    def name(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def headline(self) -> str: ...


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
            graph=graph_json(report),
            graph_style=graph_style(),
            script=graph_script(),
            script_source=script_source(),
        )
    )


def targets_page(summary: TargetsSummary) -> str:
    """Render the targets of a plan side by side, with links to their reports."""
    rows = [(target, target_cells(target)) for target in summary.targets]
    template = _environment().get_template("targets.html")
    return template.render(summary=summary, headings=TARGET_HEADINGS, rows=rows)


def language_page(report: Headed, parts: Sequence[Section], figures: Sequence[Plot]) -> str:
    """Render the report of a language model, from its sections and figures."""
    template = _environment().get_template("language.html")
    return template.render(report=report, sections=parts, figures=figures)
