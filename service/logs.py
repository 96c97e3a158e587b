"""Structured logs: one line per event on stderr, as JSON or text, with the id of its request or
job.

    logs.get("service.runner").info("job.started", job=job.id, pid=pid)

No key is ever logged: no logger receives `Authorization`, and text that looks like a key is
replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import structlog

from service.settings import Settings
from service.storage.key import FORM

get = structlog.get_logger
HIDDEN = "cru_***"


def configure(settings: Settings) -> None:
    """Configure logging once per process. Messages of uvicorn and other libraries get the same
    form.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer = (
        structlog.processors.JSONRenderer(_json_from)
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    # bypasses `logging`, which takes half the time of a line; every request writes a line
    structlog.configure(
        processors=[*shared, renderer, without_keys],
        logger_factory=_Lines,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
                without_keys,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # it warns of every malformed body, which the answer reports anyway
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers[:] = []
        # service.http.access_log writes the line per request
        logging.getLogger(name).propagate = name != "uvicorn.access"


# made once: json.dumps with `default` makes an encoder for each line
_ENCODER = json.JSONEncoder(default=repr)


def _json_from(event: Mapping[str, Any], **_: Any) -> str:
    """Return a line of JSON. Values that JSON does not have become their `repr`."""
    return _ENCODER.encode(event)


class _Lines:
    """Writes the lines of one logger to the current stderr, one write per line. Failed writes are
    ignored: no request fails for them.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def info(self, line: str) -> None:
        # OSError: full disk or broken pipe; ValueError: closed; AttributeError: no stderr
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{line}\n")

    debug = warning = error = critical = info


def without_keys(logger: Any, method: str, line: Any) -> str:
    """Structlog processor that replaces keys anywhere in a rendered line, also in a traceback."""
    assert isinstance(line, str)
    return FORM.sub(HIDDEN, line) if "cru_" in line else line
