"""`crucible audit`: read who did what on a service on this machine."""

from __future__ import annotations

import datetime as dt
import os
import re
from typing import Annotated

import typer

from pipeline.cli import terminal
from pipeline.errors import PlanError
from service.cli.options import HomeOption, JsonOption
from service.storage.audit_entry import ACTIONS, Filter, StoredEntry

AGE = re.compile(r"(\d{1,5})([mhd])")
UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def audit(
    since: Annotated[
        str | None,
        typer.Option(
            metavar="AGE|TIME", help="Only entries since then: 30m, 12h, 7d, or 2026-01-31 in UTC."
        ),
    ] = None,
    action: Annotated[
        str,
        typer.Option(
            metavar="ACTION",
            help="Only this action, such as key.created, or `key` for all of keys.",
        ),
    ] = "",
    owner: Annotated[
        str, typer.Option(help="Only what this owner did. user:NAME: at this machine.")
    ] = "",
    object_: Annotated[
        str,
        typer.Option(
            "--object", metavar="OBJECT", help="Only this object: job/ID, model/NAME or key/PREFIX."
        ),
    ] = "",
    limit: Annotated[int, typer.Option(help="Maximum number of entries, the newest.", min=1)] = 100,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who did what with jobs, models and keys, and which requests were refused. The newest
    entry is the last.

    An owner is that of a key, `local` without keys, `user:NAME` for a command on this machine, or
    `service`. The numbers have no gaps, unless entries were deleted.
    """
    import json

    from service.settings import settings_from
    from service.storage.audit import Audit
    from service.storage.database import database_from

    which = Filter(since_from(since, dt.datetime.now(dt.UTC)), _action(action), owner, object_)
    settings = settings_from(os.environ, home=home)
    if settings.database_url is None and not settings.database.is_file():
        raise PlanError(
            f"no database '{settings.database}'",
            "give the service's home with --home or CRUCIBLE_HOME",
        )
    found = Audit(database_from(settings)).entries(which, limit)
    if as_json:
        print(json.dumps([entry.model_dump() for entry in found]))
        return
    columns = ("entry", "time in UTC", "action", "object", "owner, key", "address", "details")
    terminal.console().print(terminal.plain_table(columns, map(_row, found)))
    if len(found) == limit:
        terminal.console(stderr=True).print(
            f"these are the {limit} newest entries; --limit and --since choose others",
            highlight=False,
        )


def since_from(text: str | None, now: dt.datetime) -> dt.datetime | None:
    """Return the moment of `--since`. PlanError if it is neither an age nor a time."""
    if text is None:
        return None
    if age := AGE.fullmatch(text):
        return now - dt.timedelta(**{UNITS[age[2]]: int(age[1])})
    try:
        moment = dt.datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        raise PlanError(
            f"--since is '{text}', expected an age or a time",
            "give 30m, 12h, 7d, 2026-01-31 or 2026-01-31T12:00",
        ) from None


def _action(text: str) -> str:
    groups = {action.partition(".")[0] for action in ACTIONS}
    if text and text not in ACTIONS and text not in groups:
        raise PlanError(f"no action '{text}'", f"give one of {', '.join(ACTIONS)}")
    return text


def _row(entry: StoredEntry) -> tuple[str, ...]:
    details = ", ".join(f"{name}: {value}" for name, value in entry.details.items())
    who = f"{entry.owner} {entry.key}".strip()
    texts = (str(entry.seq), entry.at[:19], entry.action, entry.object, who, entry.address, details)
    return tuple(map(_printable, texts))


def _printable(text: str) -> str:
    """Replace what would control a terminal: clients choose the paths of their requests."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
