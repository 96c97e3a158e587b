"""PostgreSQL: its address, what a user reads when it fails, and what it cannot store."""

import sys
import threading
from contextlib import closing

import pytest
import sqlalchemy as sa

from pipeline.errors import PlanError, StoreError, UserError
from service.settings import Settings, settings_from
from service.storage.audit import Audit
from service.storage.audit_entry import Actor, Entry, Filter
from service.storage.database import Database, database_from
from service.storage.keys import Keys
from tests.service.builders.postgresql import Server

NOWHERE = "postgresql+psycopg://me:secret@/crucible?host=/nowhere"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("crucible.db", "not the address of a database"),
        ("mysql://host/name", "no database 'mysql'"),
        ("postgresql://host/name", "no database 'postgresql'"),
        ("sqlite:///crucible.db", "no database 'sqlite'"),
        ("postgresql+psycopg://me:secret@host:port/name", "not the address of a database"),
    ],
)
def test_another_address_is_refused_with_the_right_form(url: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as refused:
        Database(url)
    assert "postgresql+psycopg://USER@HOST/NAME" in refused.value.next_step


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match="psycopg") as refused:
        Database(NOWHERE)
    assert "`postgres`" in refused.value.next_step


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match="cannot use the database") as refused:
        Database(NOWHERE)
    assert "/nowhere" in refused.value.message
    assert "secret" not in f"{refused.value} {refused.value.message}"


def test_an_at_in_the_password_is_refused_without_showing_it() -> None:
    with pytest.raises(PlanError, match="more than one '@'") as refused:
        Database("postgresql+psycopg://me:top@secret@host/crucible")
    assert "%40" in refused.value.next_step
    assert "secret" not in refused.value.message


def test_no_message_shows_a_password_from_the_parameters() -> None:
    pytest.importorskip("psycopg")
    address = "postgresql+psycopg://me@/crucible?host=/nowhere&password=secret&sslpassword=secret"
    with pytest.raises(StoreError, match="nowhere") as refused:
        Database(address)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("option", ["no_such=1", "connect_timeout=soon"])
def test_a_bad_option_of_the_address_is_refused(option: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match=option.partition("=")[0]) as refused:
        Database(f"{NOWHERE}&{option}")
    assert "database_url" in refused.value.next_step


def test_a_user_who_may_create_no_tables_is_told_so(postgresql_server: Server) -> None:
    """The default of PostgreSQL 15 for all but the owner of a database."""
    with postgresql_server.database() as url:
        admin = sa.create_engine(url)
        with admin.begin() as rows:
            rows.exec_driver_sql("CREATE ROLE guest LOGIN")
        try:
            address = sa.make_url(url).set(username="guest")
            with pytest.raises(StoreError, match="permission denied"):
                Database(address.render_as_string())
        finally:
            with admin.begin() as rows:
                rows.exec_driver_sql("DROP ROLE guest")
            admin.dispose()


def test_the_setting_chooses_the_database_and_hides_its_password(postgresql: str) -> None:
    settings = settings_from({"CRUCIBLE_SERVICE_DATABASE_URL": postgresql})
    with closing(database_from(settings)) as database:
        assert database.path is None
    assert "secret" not in repr(Settings(database_url=NOWHERE))


def test_text_with_nul_is_stored_visibly(postgresql: str) -> None:
    """Clients choose the paths of their requests, which the audit records."""
    with closing(Database(postgresql)) as database:
        audit = Audit(database)
        audit.record(Entry(Actor("me"), "access.refused", "GET /jobs/\0"))
        (entry,) = audit.entries(Filter(object="GET /jobs/\0"), 10)
        assert entry.object == "GET /jobs/␀"


def test_it_is_used_again_after_it_was_restarted(postgresql: str) -> None:
    with closing(Database(postgresql)) as database:
        keys = Keys(database)
        keys.create("k", ["infer"])
        ended = sa.text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
            " datname = current_database() AND pid != pg_backend_pid()"
        )
        other = sa.create_engine(postgresql)
        with other.connect() as rows:
            assert rows.execute(ended).all()
        other.dispose()
        assert [key.name for key in keys.list()] == ["k"]


def test_a_subject_is_locked_to_the_end_of_the_transaction(postgresql: str) -> None:
    order = list[str]()
    with closing(Database(postgresql)) as here, closing(Database(postgresql)) as there:

        def second() -> None:
            with there.write() as rows:
                there.lock(rows, "owner/me")
                order.append("second")

        with here.write() as rows:
            here.lock(rows, "owner/me")
            thread = threading.Thread(target=second)
            thread.start()
            with there.write() as others:
                there.lock(others, "owner/you")  # another subject does not wait
            while not _waiting(rows):
                thread.join(0.01)
            order.append("first")
        thread.join()
    assert order == ["first", "second"]


def _waiting(rows: sa.Connection) -> bool:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    return bool(rows.exec_driver_sql(query).scalar_one())
