"""The commands that pages show. A block that no test runs says why, in a comment above it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (
    "docs/index.md",
    "docs/install.md",
    "docs/faq.md",
    "docs/troubleshooting.md",
    "docs/limits.md",
    "docs/howto/write-a-plan.md",
    "docs/howto/read-the-report.md",
    "docs/explain/design.md",
    "docs/reference/support-matrix.md",
    "CONTRIBUTING.md",
)
PAGES = tuple((ROOT / name).read_text(encoding="utf-8") for name in NAMES)
"""Pages whose commands run in tests/docs; the tests of the service run those of its pages."""

BLOCK = re.compile(
    r"(?:<!-- not run here: (?P<why>[^>]*) -->\n)?```console\n(?P<text>.*?)```", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    commands: tuple[str, ...]
    not_run: str  # the reason; empty: a test runs the commands


def blocks_of(page: str) -> list[Block]:
    """Every block of commands of a page."""
    return [
        Block(
            tuple(re.findall(r"^\$ (.*)", block["text"], re.MULTILINE)),
            (block["why"] or "").strip(),
        )
        for block in BLOCK.finditer(page)
    ]
