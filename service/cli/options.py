"""Options that several of the service's commands share, and the connection to a server.

The server's address comes from --url or CRUCIBLE_URL, the key only from CRUCIBLE_KEY: all users of
a machine can see a command's arguments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from service.client import Client
    from service.storage.audit_entry import Actor

HomeOption = Annotated[
    Path | None, typer.Option(help="The service's home. Default: $CRUCIBLE_HOME.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        envvar="CRUCIBLE_URL",
        help=(
            "Address of the service. Default: http://127.0.0.1:8000. The API key is read only from"
            " CRUCIBLE_KEY."
        ),
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id or address of the job.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Follow the job to its end, like `crucible wait`.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print only the JSON document on stdout, without progress.")
]


def operator() -> Actor:
    """Whom the audit names for a command on this machine: the user who runs it."""
    import getpass

    from service.storage.audit_entry import Actor

    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        name = str(os.getuid())
    return Actor(f"user:{name}")


def connect(url: str | None) -> Client:
    """Create a client of the service at this address."""
    from service.client import Client
    from service.client.address import DEFAULT_URL

    return Client(url or DEFAULT_URL, os.environ.get("CRUCIBLE_KEY") or None)
