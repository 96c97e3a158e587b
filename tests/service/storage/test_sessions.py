"""Sessions: begun with a key, ended by time, by their owner, or with their key."""

import datetime as dt
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.storage import tables
from service.storage.audit_entry import Actor
from service.storage.database import Database
from service.storage.key import Key
from service.storage.keys import Keys
from service.storage.sessions import SESSION_S, Sessions

ACTOR = Actor("ann", "0123456789", "127.0.0.1", "r")


class Clock:
    now = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)

    def __call__(self) -> dt.datetime:
        return self.now


@pytest.fixture
def key(database: Database) -> Key:
    return Keys(database).create("page", ("infer",), "ann")[0]


def test_a_session_stands_for_its_key_until_its_end(database: Database, key: Key) -> None:
    clock = Clock()
    sessions = Sessions(database, clock)
    token, other = sessions.begin(key, ACTOR), sessions.begin(key, ACTOR)
    assert sessions.key_of(token) == key
    assert sessions.key_of(token[:-1]) is None
    sessions.end(token, ACTOR)
    assert sessions.key_of(token) is None
    assert sessions.key_of(other) == key
    clock.now += dt.timedelta(seconds=SESSION_S - 1)
    assert sessions.key_of(other) == key
    clock.now += dt.timedelta(seconds=1)
    assert sessions.key_of(other) is None
    sessions.begin(key, ACTOR)
    with database.read() as rows:
        assert rows.exec_driver_sql("SELECT count(*) FROM sessions").scalar_one() == 1, "forgotten"


def test_a_revoked_key_ends_its_sessions(database: Database, key: Key) -> None:
    sessions = Sessions(database)
    token = sessions.begin(key, ACTOR)
    Keys(database).revoke(key.prefix)
    assert sessions.key_of(token) is None


def test_the_database_does_not_hold_the_token(database: Database, key: Key, tmp_path: Path) -> None:
    token = Sessions(database).begin(key, ACTOR)
    with database.read() as rows:
        assert token not in repr(rows.execute(sa.select(tables.sessions)).all())
    database.close()
    for file in tmp_path.iterdir():
        assert token.encode() not in file.read_bytes()
