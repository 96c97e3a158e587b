"""Addresses, the comparison of lists, and HAProxy's statistics, without HAProxy."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.errors import HostError, InternalError, PlanError
from service.jobs.claims import LEASE_S
from service.jobs.nodes import Nodes
from service.routing.addresses import Address, addresses_from, addresses_from_file
from service.routing.configuration import ProxyOptions, configuration
from service.routing.database import addresses_from_database
from service.routing.follow import Changes, Pool, changes
from service.routing.runtime import Runtime, ServerState, ServerStatus, parse_statuses
from service.server import LINGER_S
from service.storage.database import Database
from service.storage.tables import nodes
from tests.builders.cli import crucible

A, B, C = (Address(name, 8000) for name in "abc")
HEAD = "# pxname,svname,scur,stot,status,type,check_status,last_chk,addr,\n"


@pytest.mark.parametrize(
    ("text", "address", "name"),
    [
        ("Host-1.example:80", Address("host-1.example", 80), "host-1.example:80"),
        ("10.0.0.1:8000", Address("10.0.0.1", 8000), "10.0.0.1:8000"),
        ("[::1]:8000", Address("::1", 8000), "::1:8000"),
    ],
)
def test_an_address_is_a_host_and_the_port_of_http(text: str, address: Address, name: str) -> None:
    assert Address.parse(text) == address
    assert str(address) == text.lower()
    assert address.name == name


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":8000", "host:0", "host:65535", "a b:1", "a;b:1", "http://a:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected the address of a server as HOST:PORT"):
        Address.parse(text)


def test_a_file_has_one_address_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# ours\na:8000\n\n b:8000 # the new one\n")
    assert addresses_from_file(file) == (A, B)
    file.write_text("# none\n")
    with pytest.raises(PlanError, match="names no server"):
        addresses_from_file(file)
    with pytest.raises(PlanError, match="cannot be read"):
        addresses_from_file(tmp_path / "missing")
    with pytest.raises(PlanError, match="a:8000 is given twice"):
        addresses_from(["a:8000", "A:8000"])


def test_a_name_without_an_address_is_named() -> None:
    with pytest.raises(HostError, match=r"the server nowhere\.invalid:8000 has no address"):
        Address("nowhere.invalid", 8000).resolve()
    assert Address("127.0.0.1", 1).resolve() == "127.0.0.1"


def test_lists_are_compared() -> None:
    assert changes({A, B}, {B}, (B, C)) == Changes(add=(C,), keep=(B,), leave=(A,))
    assert changes({A, B}, {B}, (A,)) == Changes(add=(), keep=(), leave=())


def test_statistics_become_records() -> None:
    rows = "http,FRONTEND,1,1,OPEN,0,,,,\nhttp,a:1,2,9,UP 1/2,2,* L7OK,OK,10.0.0.1:1,\n"
    assert parse_statuses(HEAD + rows) == (
        ServerStatus("http", "a:1", "10.0.0.1:1", ServerState.UP, 2, 9, "L7OK", "OK"),
    )
    for damaged in (
        HEAD.replace("stot,status", "stot,state") + rows,
        HEAD + rows.replace("UP", "ODD"),
    ):
        with pytest.raises(InternalError, match="statistics cannot be read"):
            parse_statuses(damaged)


def test_nobody_on_the_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no proxy answers on"):
        Runtime(tmp_path / "socket").servers()


def test_a_server_that_stops_is_found_while_it_still_answers() -> None:
    """One interval and one fast interval pass until it is taken out."""
    text = configuration(ProxyOptions("[::1]", 8000, Path("/s")))
    assert "bind ::1:8000\n" in text
    assert "bind ::1:8001 proto h2\n" in text
    assert LINGER_S > 1.25


@pytest.mark.parametrize(
    "words", [(), ("--server", "a:1", "--file", "servers"), ("--server", "a:1", "--from-database")]
)
def test_servers_come_from_one_place(words: tuple[str, ...]) -> None:
    result = crucible("proxy", "start", *words)
    assert (result.code, "got several or none" in result.err) == (1, True)


def test_servers_of_a_database_need_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRUCIBLE_SERVICE_DATABASE_URL", raising=False)
    result = crucible("proxy", "start", "--from-database")
    assert (result.code, "CRUCIBLE_SERVICE_DATABASE_URL" in result.err) == (1, True)


def test_a_database_names_the_servers_that_have_an_address(database: Database) -> None:
    with pytest.raises(HostError, match="names no server"):
        addresses_from_database(database)
    one = Nodes(database, "one", "server", "b:8000")
    for node in (one, Nodes(database, "two", "server", "a:8000"), Nodes(database, "n", "node")):
        node.send_heartbeat({})
    Nodes(database, "old", "server", "a:8000").send_heartbeat({})  # before it was started again
    assert addresses_from_database(database) == (A, B)
    with database.write() as rows:  # it may answer, although it sends no heartbeats
        late = nodes.c.heartbeat_at - 2 * LEASE_S
        rows.execute(sa.update(nodes).where(nodes.c.id == "two").values(heartbeat_at=late))
    assert addresses_from_database(database) == (A, B)
    one.leave()
    assert addresses_from_database(database) == (A,)


class Refusing(Runtime):
    """A proxy that does not take the servers of host `a`."""

    def __init__(self) -> None:
        self.added = list[Address]()

    def add(self, address: Address) -> None:
        if address == A:
            raise HostError("the name of the server a:8000 has no address")
        self.added.append(address)


def test_a_server_that_cannot_be_added_holds_back_no_other() -> None:
    runtime = Refusing()
    with pytest.raises(HostError, match="has no address"):
        Pool(runtime).update([A, B, C])
    assert runtime.added == [B, C]
