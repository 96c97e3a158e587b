"""What several of the service's commands take, and how they reach a server.

The server's address comes from --url or CRUCIBLE_URL, the key from CRUCIBLE_KEY only: arguments are
seen by everybody on a machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from service.client import Client

HomeOption = Annotated[
    Path | None, typer.Option(help="The service's home; $CRUCIBLE_HOME if left out.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        envvar="CRUCIBLE_URL",
        help=(
            "Address of the service; http://127.0.0.1:8000 if left out. A key is read from"
            " CRUCIBLE_KEY only."
        ),
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its address.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print only the JSON document on stdout, and no progress.")
]


def connect(url: str | None) -> Client:
    """A client of the service at this address."""
    from service.client import DEFAULT_URL, Client

    return Client(url or DEFAULT_URL, os.environ.get("CRUCIBLE_KEY") or None)
