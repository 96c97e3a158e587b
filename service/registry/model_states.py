"""How far the servers of a database have followed the changes of its models.

    states.store({"m": (3, state)})     this server has done what revision 3 of model m says
    states.of("m")                      the states of all live servers
    states.late("m", 3)                 live servers that have not followed revision 3 yet

A server that cannot load a version has followed, too: its state says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from service.registry.models import ServerState
from service.storage.database import Database
from service.storage.tables import database_clock_s, model_states, nodes

Followed = tuple[int, ServerState]
"""The revision of a model that a server has followed, and the model's state there then."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The states of one server's models, and a view of all. Safe for threads."""

    database: Database
    server: str
    silent_s: float  # how long a server may send no heartbeat before it counts as gone

    def store(self, followed: Mapping[str, Followed]) -> None:
        """Store the states of models at this server. Forgets servers that are gone long ago."""
        here = model_states.c.server == self.server
        gone = model_states.c.server.not_in(sa.select(nodes.c.id)) & ~here
        with self.database.write() as rows:
            rows.execute(sa.delete(model_states).where(gone))
            for model, (revision, state) in sorted(followed.items()):
                rows.execute(sa.delete(model_states).where(here, model_states.c.model == model))
                values = {
                    "model": model,
                    "server": self.server,
                    "revision": revision,
                    "state": state.state,
                    "version": state.version,
                    "reason": state.reason,
                }
                rows.execute(sa.insert(model_states).values(values))

    def of(self, model: str | None = None) -> dict[str, tuple[ServerState, ...]]:
        """Return the states at live servers, by model. None: of all models."""
        query = sa.select(model_states, nodes.c.name).join(
            nodes, (nodes.c.id == model_states.c.server) & self._is_live()
        )
        if model is not None:
            query = query.where(model_states.c.model == model)
        found = dict[str, tuple[ServerState, ...]]()
        with self.database.read() as rows:
            for row in rows.execute(query.order_by(nodes.c.name, nodes.c.id)):
                state = ServerState(
                    server=row.server,
                    host=row.name,
                    state=row.state,
                    version=row.version,
                    reason=row.reason,
                )
                found[row.model] = (*found.get(row.model, ()), state)
        return found

    def late(self, model: str, revision: int) -> tuple[str, ...]:
        """Return the other live servers that have not followed this revision of a model."""
        followed = sa.select(model_states.c.server).where(
            model_states.c.model == model, model_states.c.revision >= revision
        )
        query = sa.select(nodes.c.id).where(
            nodes.c.kind == "server",
            nodes.c.id != self.server,
            self._is_live(),
            nodes.c.id.not_in(followed),
        )
        with self.database.read() as rows:
            return tuple(rows.scalars(query))

    def forget(self) -> None:
        """Remove the states of this server, which ends."""
        with self.database.write() as rows:
            rows.execute(sa.delete(model_states).where(model_states.c.server == self.server))

    def _is_live(self) -> sa.ColumnElement[bool]:
        return nodes.c.heartbeat_at > database_clock_s() - self.silent_s
