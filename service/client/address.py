"""Addresses of servers, jobs and reports, as users write them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.errors import PlanError

if TYPE_CHECKING:
    pass


DEFAULT_URL = "http://127.0.0.1:8000"
ADDRESS = re.compile(r"(https?://.+?)/(?:jobs|reports)/([^/?#]+)(?:[/?#].*)?")
JOB_ID = re.compile(r"[0-9a-f]{25}")


def place_of(text: str, url: str | None) -> tuple[str | None, str]:
    """Return the server and the job that a text names: a job's id on the server `url`, or any
    address of a job or its report.
    """
    if match := ADDRESS.fullmatch(text):
        return match[1], match[2]
    if not re.fullmatch(r"\w+", text):
        raise PlanError(
            f"'{text}' is neither a job's id nor an address of a job or a report",
            f"for example {DEFAULT_URL}/reports/ID",
        )
    return url, text


def is_remote(text: str) -> bool:
    """Return True if a text names a job or an address, and not a folder."""
    return bool(JOB_ID.fullmatch(text) or text.startswith(("http://", "https://")))
