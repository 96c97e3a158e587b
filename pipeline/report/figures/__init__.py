"""The report's figures, as SVG by matplotlib, without a display.

Text stays text: it can be read aloud, searched and copied. Each figure is first computed as a
value, then drawn.
"""

from __future__ import annotations

from pipeline.report.entries import entries, shapes
from pipeline.report.figures.drawing import Plot
from pipeline.report.figures.layers import layer_errors, operators, precisions
from pipeline.report.figures.roofline import rooflines
from pipeline.report.figures.speed import latency, pareto, throughput
from pipeline.report.layer_errors import kept_patterns, ranked_rescues
from pipeline.results.report import Report


def plots(report: Report) -> tuple[Plot, ...]:
    """Return every figure that this report has values for."""
    lines = entries(report)
    candidates = [
        pareto(report, lines),
        throughput(lines, report.best_point),
        *(latency(lines, sizes) for sizes in shapes(report)),
        precisions(lines),
        operators(report),
    ]
    errors = [
        layer_errors(number, rescue, ranking, kept_patterns(report, rescue))
        for number, (rescue, ranking) in enumerate(ranked_rescues(report), start=1)
    ]
    found = (plot for plot in candidates if plot is not None)
    return (*found, *rooflines(report), *errors)
