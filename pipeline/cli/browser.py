"""Open a page in the user's browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from pipeline.cli.terminal import console, print_text


def open_page(file: Path) -> None:
    """Open an HTML file in the browser, or print its path and why that cannot be."""
    reason = "" if _has_display() else "this host has no display"
    if not reason and not webbrowser.open(file.absolute().as_uri()):
        reason = "this host has no browser"
    if reason:
        print_text(console(stderr=True), f"not opened, {reason}: {file.absolute()}", markup=False)


def _has_display() -> bool:
    """Return False on Linux without X11 and Wayland, where only text browsers would open."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
