"""Removes this host's paths from texts for clients: a job's own files appear by name, others as
below $CRUCIBLE_HOME.
"""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

from pipeline.core.progress import CandidateFigures
from pipeline.execution.stage_event import StageEvent
from service.jobs.state import Died, Failure, JobEvent
from service.storage.layout import Folders

HOME = "$CRUCIBLE_HOME"


def scrubbed(text: str, folders: Folders) -> str:
    """Remove the home's path: `<home>/uploads/<job>/model.onnx` becomes `model.onnx`."""
    homes = {str(folders.home), str(folders.home.resolve())}  # a job may have followed links
    for home in sorted(homes | set(map(html.escape, homes))):
        text = re.sub(rf"{re.escape(home)}/(?:uploads|jobs|reports)/[0-9a-f]+/", "", text)
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", lambda _: HOME, text)
    return text


def scrubbed_event(event: JobEvent, folders: Folders) -> JobEvent:
    """Scrub the texts of an event before it is stored, because they reach clients."""
    match event:
        case Died(failure):
            texts = {
                "message": scrubbed(failure.message, folders),
                "next_step": scrubbed(failure.next_step, folders),
            }
            return Died(Failure(code=failure.code, **texts))
        case StageEvent(text=text, subject=subject):
            figures = event.figures and _scrubbed_figures(event.figures, folders)
            return replace(
                event,
                text=scrubbed(text, folders),
                subject=scrubbed(subject, folders),
                figures=figures,
            )
    return event


def _scrubbed_figures(figures: CandidateFigures, folders: Folders) -> CandidateFigures:
    accuracy, latency = figures.accuracy, figures.latency
    return replace(
        figures,
        label=scrubbed(figures.label, folders),
        accuracy=accuracy and replace(accuracy, measure=scrubbed(accuracy.measure, folders)),
        latency=latency and replace(latency, shape=scrubbed(latency.shape, folders)),
    )


def scrub_file(file: Path, folders: Folders) -> None:
    """Rewrite a text file without the home's path."""
    text = file.read_text(encoding="utf-8")
    if (clean := scrubbed(text, folders)) != text:
        file.write_text(clean, encoding="utf-8")
