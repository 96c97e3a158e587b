"""`crucible proxy`: HAProxy before several servers, and its servers while it runs."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.errors import HostError, PlanError
from service.cli.options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.routing.addresses import Address
    from service.routing.follow import Pool
    from service.routing.runtime import Runtime

    Servers = Callable[[], tuple[Address, ...]]

app = typer.Typer(
    help="Spread requests over several servers, by HAProxy; take servers out and put them back."
)

ProxyHomeOption = Annotated[
    Path | None, typer.Option("--home", help="Home of the proxy. Default: $CRUCIBLE_HOME.")
]
AddressArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of a server of the proxy.")
]


@app.command()
def start(
    servers: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="HTTP address of a server. Its gRPC port is the next one. Repeatable.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File with one address on each line. It is followed while it changes."),
    ] = None,
    from_database: Annotated[
        bool,
        typer.Option(
            "--from-database",
            help="Follow the servers of the database CRUCIBLE_SERVICE_DATABASE_URL.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65534, help="Port of HTTP. The port of gRPC is the next one.")
    ] = 8000,
    home: ProxyHomeOption = None,
) -> None:
    """Run HAProxy before servers until Ctrl-C. Each request goes to the server with the fewest
    requests, of those whose /readyz answers.
    """
    from service.routing.configuration import ProxyOptions
    from service.routing.follow import Pool
    from service.routing.haproxy import running, socket_of

    wanted = _source(servers, file, from_database)
    first = wanted()
    options = ProxyOptions(host, port, socket_of(_home(home)))
    with running(options) as (process, runtime):
        pool = Pool(runtime)
        pool.update(first)
        print(f"the proxy listens on http://{host}:{port}; gRPC: port {port + 1}", flush=True)
        _follow(process.poll, pool, wanted)


def _source(servers: list[str] | None, file: Path | None, from_database: bool) -> Servers:
    """Return what reads the servers, from one place. PlanError for several, or none."""
    from service.routing.addresses import addresses_from, addresses_from_file

    if [bool(servers), file is not None, from_database].count(True) != 1:
        raise PlanError(
            "expected servers from one of --server, --file and --from-database, got several or"
            " none",
            "give --server HOST:PORT for each server, or one of the others",
        )
    if file is not None:
        return partial(addresses_from_file, file)
    if from_database:
        return _database_source()
    addresses = addresses_from(servers or ())
    return lambda: addresses


def _database_source() -> Servers:
    """Return what reads the servers of the database. PlanError if none is set."""
    from service.routing.database import addresses_from_database
    from service.settings import settings_from
    from service.storage.database import Database

    url = settings_from(os.environ).database_url
    if url is None:
        raise PlanError(
            "--from-database needs the PostgreSQL database of the servers, and none is set",
            "set CRUCIBLE_SERVICE_DATABASE_URL as for the servers",
        )
    return partial(addresses_from_database, Database(url))


def _follow(ended: Callable[[], int | None], pool: Pool, wanted: Servers) -> None:
    """Update the servers every second. HostError if HAProxy ends, which it does not by itself."""
    import time

    complaint = ""
    while (status := ended()) is None:
        time.sleep(1)
        try:
            pool.update(wanted())
            complaint = ""
        except (PlanError, HostError) as error:
            if complaint != str(error):
                print(f"the other servers stay as they are: {error}", file=sys.stderr, flush=True)
            complaint = str(error)
    raise HostError(f"HAProxy ended with exit code {status}", "start the proxy again")


@app.command(name="list")
def list_servers(home: ProxyHomeOption = None, as_json: JsonOption = False) -> None:
    """List the servers of the running proxy, for HTTP and for gRPC."""
    import dataclasses
    import json

    from pipeline.cli import terminal

    servers = _runtime(home).servers()
    if as_json:
        print(json.dumps([dataclasses.asdict(server) for server in servers]))
        return
    head = ("server", "protocol", "state", "active", "total", "last check")
    rows = [
        (each.name, each.backend, each.state, f"{each.active}", f"{each.total}", each.check)
        for each in servers
    ]
    terminal.console().print(terminal.plain_table(head, rows))


@app.command()
def drain(
    server: AddressArgument,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the requests in flight.")
    ] = 60,
    home: ProxyHomeOption = None,
) -> None:
    """Give a server no new request, and wait until it has answered those that it has. Then it can
    be stopped, replaced and started again.
    """
    from service.routing.addresses import Address
    from service.routing.follow import wait_until_idle

    address, runtime = Address.parse(server), _runtime(home)
    runtime.drain(address)
    wait_until_idle(runtime, address, timeout)
    print(f"the server {address} answers no request; `crucible proxy enable {address}` ends this")


@app.command()
def enable(server: AddressArgument, home: ProxyHomeOption = None) -> None:
    """Give a server requests again, once its /readyz answers."""
    from service.routing.addresses import Address

    address = Address.parse(server)
    _runtime(home).enable(address)
    print(f"the server {address} gets requests as soon as its /readyz answers")


def _home(home: Path | None) -> Path:
    from pipeline.plan import files

    return home or files.home()


def _runtime(home: Path | None) -> Runtime:
    from service.routing.haproxy import socket_of
    from service.routing.runtime import Runtime

    return Runtime(socket_of(_home(home)))
