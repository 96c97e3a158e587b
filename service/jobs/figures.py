"""The figures of a job's candidates, joined from its events: what its page shows while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.core.progress import CandidateFigures
from service import logs

MAX_CANDIDATES = 200  # of one job; a child may invent more, and a plot of more shows nothing

FIGURES: TypeAdapter[CandidateFigures] = TypeAdapter(CandidateFigures)

log = logs.get("service.figures")


def joined_figures(events: Iterable[Mapping[str, Any]]) -> tuple[CandidateFigures, ...]:
    """Return the newest figures of each candidate, in the order in which the candidates appeared.

    One event has the accuracy of a candidate and another its latency. Damaged data is left out.
    """
    found: dict[str, CandidateFigures] = {}
    for data in events:
        try:
            figures = FIGURES.validate_python(data)
        except ValidationError as error:
            log.error("figures.damaged", error=str(error))
            continue
        known = found.get(figures.label)
        if known is not None:
            found[figures.label] = _join(known, figures)
        elif len(found) < MAX_CANDIDATES:
            found[figures.label] = figures
    return tuple(found.values())


def _join(known: CandidateFigures, new: CandidateFigures) -> CandidateFigures:
    return replace(
        new,
        is_baseline=known.is_baseline or new.is_baseline,
        accuracy=new.accuracy or known.accuracy,
        latency=new.latency or known.latency,
    )
