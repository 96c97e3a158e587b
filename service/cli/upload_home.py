"""`crucible upload-home`: share the files of a home with other servers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pipeline.errors import PlanError
from service.cli.options import HomeOption


def upload_home(
    home: HomeOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be uploaded.")
    ] = False,
) -> None:
    """Upload the files of a home that was used before CRUCIBLE_SERVICE_FILES_URL was set: other
    servers find its jobs, reports and models then.

    Safe beside running servers. After an interruption, run it again: it goes on.
    """
    from rich.progress import Progress

    from pipeline.cli import terminal
    from pipeline.formatting import bytes_text
    from service import logs
    from service.registry.older_files import older_folders, upload_older
    from service.settings import PREFIX, settings_from
    from service.storage.database import database_from
    from service.storage.files import files_from
    from service.storage.layout import Folders

    settings = settings_from(os.environ, home=home)
    if not settings.home.is_dir():
        raise PlanError(
            f"no folder '{settings.home}'", "give the service's home with --home or CRUCIBLE_HOME"
        )
    if settings.files_url is None:
        raise PlanError(
            f"expected {PREFIX}FILES_URL, the place of files that servers share, got none",
            "set it as for the servers",
        )
    logs.configure(settings)
    database, folders = database_from(settings), Folders(settings.home)
    try:
        files, older = files_from(settings, database), older_folders(database, folders)
        sizes = [each.size_bytes for each in older]
        uploaded = 0
        if not dry_run:
            with Progress(console=terminal.console(stderr=True)) as progress:
                bar = progress.add_task("upload", total=sum(sizes))
                for each, size in zip(older, sizes, strict=True):
                    uploaded += upload_older(database, folders, files, each)
                    progress.advance(bar, size)
    finally:
        database.close()
    if dry_run:
        print(f"would be uploaded: {len(older)} folders, {bytes_text(sum(sizes))}")
    else:
        print(f"uploaded: {uploaded} of {len(older)} folders, {bytes_text(sum(sizes))}")
