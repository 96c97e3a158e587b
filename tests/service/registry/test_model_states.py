"""How far servers have followed the changes of models."""

import sqlalchemy as sa

from service.jobs.nodes import Nodes
from service.registry.model_states import ModelStates
from service.registry.models import ServerState
from service.storage.database import Database
from service.storage.tables import model_states, models, nodes

SILENT_S = 1000.0


def ready(server: str, version: int = 1, reason: str = "") -> ServerState:
    return ServerState(server=server, host="h", state="ready", version=version, reason=reason)


def two_servers(database: Database) -> tuple[ModelStates, ModelStates]:
    with database.write() as rows:
        row = {"owner": "me", "current": 1, "latest": 1}
        rows.execute(sa.insert(models), [{"name": name, **row} for name in "ab"])
    for name in ("one", "two"):
        Nodes(database, name, "server").send_heartbeat({})
    Nodes(database, "agent", "node").send_heartbeat({})  # it loads no models
    with database.write() as rows:
        rows.execute(sa.update(nodes).values(name="h"))
    one, two = (ModelStates(database, name, SILENT_S) for name in ("one", "two"))
    return one, two


def test_the_states_of_all_live_servers_are_listed(database: Database) -> None:
    one, two = two_servers(database)
    one.store({"a": (1, ready("one")), "b": (1, ready("one"))})
    two.store({"a": (1, ready("two", 2, "it does not fit"))})
    expected = (ready("one"), ready("two", 2, "it does not fit"))
    assert one.of("a") == {"a": expected}
    assert one.of() == {"a": expected, "b": (ready("one"),)}
    two.forget()
    assert one.of("a") == {"a": (ready("one"),)}


def test_a_server_is_late_until_it_has_followed_or_is_gone(database: Database) -> None:
    one, two = two_servers(database)
    assert one.late("a", 3) == ("two",)
    two.store({"a": (2, ready("two"))})
    assert one.late("a", 3) == ("two",)
    two.store({"a": (3, ready("two", reason="out of memory"))})
    assert one.late("a", 3) == ()
    with database.write() as rows:
        rows.execute(sa.update(nodes).where(nodes.c.id == "two").values(heartbeat_at=0.0))
    assert one.late("a", 4) == ()
    assert one.of("a") == {}


def test_states_of_servers_that_are_long_gone_are_forgotten(database: Database) -> None:
    one, two = two_servers(database)
    two.store({"a": (1, ready("two"))})
    with database.write() as rows:
        rows.execute(sa.delete(nodes).where(nodes.c.id == "two"))
    one.store({"b": (1, ready("one"))})
    with database.read() as rows:
        assert rows.scalars(sa.select(model_states.c.server)).all() == ["one"]
