"""`crucible gc`: what the server does once a day, now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import PlanError


def gc(
    home: Annotated[
        Path | None, typer.Option(help="Of the service; $CRUCIBLE_HOME if left out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
) -> None:
    """Remove old jobs with their files, uploads that became no job, and artifacts that nothing has
    used, as CRUCIBLE_SERVICE_RETENTION_DAYS says.

    Safe beside a running server, and beside `crucible compile`.
    """
    from service import logs
    from service.devices.leases import utc_now
    from service.jobs.retention import collect
    from service.jobs.store import JobStore
    from service.registry.repository import Repository
    from service.settings import settings_from
    from service.storage.database import Database
    from service.storage.layout import Folders

    settings = settings_from(os.environ, home=home)
    if not settings.home.is_dir():
        raise PlanError(
            f"no folder '{settings.home}'", "give the service's home with --home or CRUCIBLE_HOME"
        )
    logs.configure(settings)
    database = Database(settings.database)
    try:
        done = collect(
            settings,
            JobStore(database),
            utc_now,
            dry_run,
            Repository(database, Folders(settings.home)).jobs(),
        )
    finally:
        database.close()
    message = "would be removed" if dry_run else "removed"
    counts = f"{done.jobs} jobs, {done.folders} folders of no job, {done.artifacts} artifacts"
    print(
        f"{message}: {counts}; {done.freed_bytes / 2**20:.1f} MiB, of what is older than"
        f" {settings.retention_days:g} days"
    )
