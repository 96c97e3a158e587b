"""The servers that a database names: each writes its address with its heartbeats.

A server that stops removes its address. One that falls silent keeps it for SILENT_S: the health
checks of the proxy find out sooner whether it answers, and the database may have been away for all.
"""

from __future__ import annotations

import sqlalchemy as sa

from pipeline.errors import HostError
from service.routing.addresses import Address
from service.storage.database import Database
from service.storage.tables import database_clock_s, nodes

SILENT_S = 300.0


def addresses_from_database(database: Database) -> tuple[Address, ...]:
    """Return the addresses of the servers in a database. HostError if there is none, or if the
    database cannot be used.
    """
    live = nodes.c.heartbeat_at > database_clock_s() - SILENT_S
    query = sa.select(nodes.c.address).where(live, nodes.c.address != "").distinct()
    with database.read() as rows:
        addresses = tuple(sorted(map(Address.parse, rows.scalars(query))))
    if not addresses:
        raise HostError(
            "the database names no server with an address",
            "start servers with this database and a port; `crucible node list` shows them",
        )
    return addresses
