"""What an attack is, and how it can end."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.attack.targets import Targets

Verdict = Literal["held", "FELL", "not run"]


class Fell(Exception):
    """The server did not keep its promise; the message says what happened instead."""


class NotRun(Exception):
    """The attack cannot be made on this host; the message says why."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack from outside. `run` returns what happened; it raises Fell or NotRun."""

    name: str
    promise: str  # what must hold
    run: Callable[[Targets], str]
    slow: bool = False  # takes over 5 s on a quiet host: left out by `--quick`


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attack ended."""

    name: str
    promise: str
    happened: str
    verdict: Verdict


def make(attack: Attack, targets: Targets) -> Outcome:
    """Run one attack, and look at the servers afterwards: they must live, and have no errors."""
    verdict: Verdict = "held"
    try:
        happened = attack.run(targets)
    except NotRun as reason:
        verdict, happened = "not run", str(reason)
    except Fell as fall:
        verdict, happened = "FELL", str(fall)
    except Exception as error:  # noqa: BLE001  the edge of an attack: the others go on
        traceback.print_exc()
        verdict, happened = "FELL", f"{type(error).__name__}: {error}"
    if damage := targets.damage():
        verdict, happened = "FELL", f"{happened}; {damage}"
    return Outcome(attack.name, attack.promise, " ".join(happened.split()), verdict)


def table_of(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| attack | what must hold | what happened | result |", "|---|---|---|---|"]
    for outcome in outcomes:
        cells = (outcome.name, outcome.promise, outcome.happened, outcome.verdict)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def in_page(page: str, table: str) -> str:
    """Return a page with its table of attacks replaced."""
    before, _, rest = page.partition("| attack | what must hold |")
    _, gap, after = rest.partition("\n\n")
    return f"{before}{table}{gap or chr(10)}{after}"
