"""`crucible gc`: run the server's daily garbage collection now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import PlanError
from service.cli.options import operator


def gc(
    home: Annotated[
        Path | None, typer.Option(help="The service's home. Default: $CRUCIBLE_HOME.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
) -> None:
    """Remove old jobs with their files, uploads without a job, and unused artifacts.
    CRUCIBLE_SERVICE_RETENTION_DAYS sets their age, and CRUCIBLE_SERVICE_AUDIT_DAYS that of entries
    of the audit, which are removed too.

    Safe beside a running server and beside `crucible compile`.
    """
    from service import logs
    from service.devices.leases import utc_now
    from service.jobs.builds import builds_from
    from service.jobs.retention import collect
    from service.jobs.store import JobStore
    from service.registry.repository import Repository
    from service.settings import settings_from
    from service.storage.database import database_from
    from service.storage.files import files_from
    from service.storage.layout import Folders

    settings = settings_from(os.environ, home=home)
    if not settings.home.is_dir():
        raise PlanError(
            f"no folder '{settings.home}'", "give the service's home with --home or CRUCIBLE_HOME"
        )
    logs.configure(settings)
    database = database_from(settings)
    builds = builds_from(settings, database)
    try:
        removed = collect(
            settings,
            JobStore(database),
            utc_now,
            dry_run,
            Repository(database, Folders(settings.home)).jobs(),
            operator(),
            files_from(settings, database),
            builds,
        )
    finally:
        database.close()
    message = "would be removed" if dry_run else "removed"
    counts = f"{removed.jobs} jobs, {removed.folders} folders without a job"
    mib = removed.freed_bytes / 2**20
    if settings.files_url:
        counts += f", {removed.objects} objects that the database does not name"
        counts += f", {removed.builds} shared artifacts"
    print(
        f"{message}: {counts}, {removed.artifacts} artifacts; {mib:.1f} MiB, older than"
        f" {settings.retention_days:g} days; {removed.audit_entries} entries of the audit, older"
        f" than {settings.audit_days:g} days"
    )
