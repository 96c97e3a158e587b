"""Structured logs: one line per event on stderr, JSON or text, each with the request id or the job
id it belongs to.

    logs.get("service.runner").info("job.started", job=job.id, pid=pid)

No key is ever logged: `Authorization` is never passed to a logger, and what looks like a key is
blotted out wherever it turns up.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from service.settings import Settings
from service.storage.keys import FORM

bind, unbind, get = (
    structlog.contextvars.bind_contextvars,
    structlog.contextvars.unbind_contextvars,
    structlog.get_logger,
)
HIDDEN = "cru_***"


def configure(settings: Settings) -> None:
    """Once per process; uvicorn's and other libraries' own messages take the same form."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        without_keys,
    ]
    last = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    structlog.configure(
        processors=[
            *shared,
            last,
            # not by way of `logging`, which takes half the time of a line, and a line is written
            # per request
        ],
        logger_factory=_Lines,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("python_multipart").setLevel(
        logging.ERROR
    )  # warns of every malformed body, which its sender is told anyway
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers[:] = []
        logging.getLogger(name).propagate = (
            name != "uvicorn.access"
        )  # we write our own line per request


class _Lines:
    """Writes the lines of one logger, each in one piece, to what is stderr then. What cannot be
    written is lost: nobody's work fails for it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def info(self, line: str) -> None:
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # a full disk, a reader that has gone; it is closed; there is none
            sys.stderr.write(f"{line}\n")

    debug = warning = error = critical = info


def without_keys(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: blots out keys, also inside of texts and tracebacks."""
    for name, value in event.items():
        if isinstance(value, str) and "cru_" in value:
            event[name] = FORM.sub(HIDDEN, value)
    return event
