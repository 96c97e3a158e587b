"""`crucible audit` as a user runs it."""

import datetime as dt
import getpass
import json
from pathlib import Path

import pytest

from pipeline.errors import PlanError
from service.cli.audit import since_from
from service.storage.audit import Audit
from service.storage.audit_entry import Actor, Entry
from service.storage.database import Database
from tests.builders.cli import crucible

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def test_what_was_done_to_keys_is_shown(tmp_path: Path) -> None:
    home = ("--home", tmp_path)
    made = crucible("keys", "create", "--name", "ci", "--scope", "infer", "--owner", "team", *home)
    prefix = made.out.split("_")[1]
    assert made.out.startswith("cru_")  # the audit's line of the log is not among the output
    revoked = crucible("keys", "revoke", prefix, *home)
    assert (revoked.out, revoked.err) == (f"key {prefix} ('ci') is revoked\n", "")
    hostile = Entry(Actor("", "", "10.0.0.1", "r1"), "access.refused", "GET /\x1b[2J[red]")
    Audit(Database(tmp_path / "crucible.db")).record(hostile)

    entries = json.loads(crucible("audit", "--json", *home).out)
    assert [(entry["action"], entry["object"], entry["owner"]) for entry in entries[:2]] == [
        (action, f"key/{prefix}", f"user:{getpass.getuser()}")
        for action in ("key.created", "key.revoked")
    ]
    assert entries[0]["details"] == {"name": "ci", "owner": "team", "scopes": "infer"}
    chosen = crucible("audit", "--json", "--action", "key.revoked", "--since", "1h", *home)
    assert json.loads(chosen.out) == entries[1:2]
    table = crucible("audit", *home)
    assert table.code == 0
    assert "key.revoked" in table.out
    assert "\x1b" not in table.out
    newest = crucible("audit", "--limit", "1", *home)
    assert "key.revoked" not in newest.out
    assert "the 1 newest entries" in newest.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--action", "job.made"), "no action 'job.made'"),
        (("--since", "yesterday"), "--since is 'yesterday', expected an age or a time"),
        ((), "no database '"),
    ],
)
def test_a_wrong_argument_is_named(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refusal = crucible("audit", *arguments, "--home", tmp_path)
    assert (refusal.code, message in refusal.err) == (1, True), refusal.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        (None, None),
        ("90m", dt.datetime(2026, 3, 1, 10, 30, tzinfo=dt.UTC)),
        ("12h", dt.datetime(2026, 3, 1, tzinfo=dt.UTC)),
        ("7d", dt.datetime(2026, 2, 22, 12, tzinfo=dt.UTC)),
        ("2026-01-31", dt.datetime(2026, 1, 31, tzinfo=dt.UTC)),
        ("2026-01-31T01:00+01:00", dt.datetime(2026, 1, 31, tzinfo=dt.UTC)),
    ],
)
def test_since_is_an_age_or_a_time(text: str | None, moment: dt.datetime | None) -> None:
    assert since_from(text, NOW) == moment


@pytest.mark.parametrize(
    "text", ["", "7", "d", "-1d", "7w", "999999d", "2026-13-01", "0001-01-01T00:00+05:00"]
)
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected an age or a time"):
        since_from(text, NOW)
