"""Keys: shown once, stored as a digest, verified in the same words whatever is wrong."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.errors import PlanError, UserError
from service.errors import NotFound, Unauthorized
from service.storage import tables
from service.storage.database import Database
from service.storage.key import FORM, SCOPES
from service.storage.keys import KNOWN_FOR_S, MAX_KNOWN, REFUSED, Keys, _CachedKey


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database)


def test_a_key_is_verified_by_its_text_which_is_stored_nowhere(
    keys: Keys, database: Database, tmp_path: Path
) -> None:
    key, text = keys.create("ci", ["compile", "infer"])
    assert FORM.fullmatch(text)
    assert keys.verify(text) == key
    assert key.scopes == ("compile", "infer")
    assert key.owner == f"key:{key.prefix}"
    secret = text.split("_", 2)[2]  # it may hold a _ itself
    with database.read() as rows:
        assert secret not in repr(rows.execute(sa.select(tables.keys)).all())
    assert not any(secret.encode() in file.read_bytes() for file in tmp_path.iterdir())


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_verified_key_is_known_for_a_moment_without_the_database(database: Database) -> None:
    clock = Clock()
    keys = Keys(database, clock)
    key, text = keys.create("ci", ["infer"])
    assert keys.known(text) is None
    keys.verify(text)
    assert keys.known(text) == key
    assert keys.known(text[:-1]) is None
    clock.now_s += KNOWN_FOR_S + 1
    assert keys.known(text) is None
    keys.verify(text)
    assert keys.known(text) == key
    with pytest.raises(Unauthorized):
        keys.verify(f"{text[:-1]}!")
    assert len(keys._known) == 1


def test_a_revoked_key_is_known_to_no_process(tmp_path: Path) -> None:
    """`crucible keys revoke` is another process than the server: two on one database here."""
    server, command = (Keys(Database(tmp_path / "crucible.db")) for _ in range(2))
    keys = [server.create(str(number), ["infer"]) for number in range(3)]
    for revoking, (revoked, text) in zip((command, server), keys[:2], strict=True):
        for key in keys[keys.index((revoked, text)) :]:
            server.verify(key[1])
        revoking.revoke(revoked.prefix)
        assert server.known(text) is None
        with pytest.raises(Unauthorized):
            server.verify(text)
    assert server.verify(keys[2][1]) == server.known(keys[2][1])


def test_a_key_revoked_by_another_host_is_refused_within_five_seconds(postgresql: str) -> None:
    """No file beside the database tells it. On the host that revokes it, it is refused at once."""
    clock, here, there = Clock(), Database(postgresql), Database(postgresql)
    revoking, serving = Keys(here), Keys(there, clock)
    key, text = revoking.create("ci", ["infer"])
    for each in (revoking, serving):
        each.verify(text)
    revoking.revoke(key.prefix)
    assert revoking.known(text) is None
    assert KNOWN_FOR_S <= 5
    clock.now_s += KNOWN_FOR_S + 0.001
    assert serving.known(text) is None
    with pytest.raises(Unauthorized):
        serving.verify(text)
    here.close()
    there.close()


def test_a_slow_database_does_not_lengthen_the_time_that_a_revoked_key_works(
    postgresql: str,
) -> None:
    clock = Clock()

    class Slow(Keys):
        def _row(self, prefix: str) -> sa.RowMapping | None:
            row = super()._row(prefix)
            clock.now_s += 3
            return row

    database = Database(postgresql)
    serving = Slow(database, clock)
    _, text = serving.create("ci", ["infer"])
    serving.verify(text)
    assert serving.known(text) is not None
    clock.now_s = KNOWN_FOR_S + 0.001
    assert serving.known(text) is None
    database.close()


def test_what_was_verified_while_it_was_revoked_is_not_known(tmp_path: Path) -> None:
    class Late(Keys):
        """The row is read, then the key is revoked, then the answer comes."""

        def _row(self, prefix: str) -> sa.RowMapping | None:
            row = super()._row(prefix)
            if row is not None and not row["revoked"]:
                Keys(database).revoke(prefix)
            return row

    database = Database(tmp_path / "crucible.db")
    _, text = Keys(database).create("ci", ["infer"])
    late = Late(database)
    late.verify(text)  # it worked when the row was read
    assert late.known(text) is None


def test_so_many_keys_are_known_and_no_more(keys: Keys) -> None:
    texts = [keys.create("k", ["infer"])[1] for _ in range(3)]
    key = keys.verify(texts[0])
    keys._known.update({str(number): _CachedKey(key, 0.0, 0) for number in range(MAX_KNOWN)})
    for text in texts:
        keys.verify(text)
    assert len(keys._known) == 3


def test_256_bits_make_keys_that_differ(keys: Keys) -> None:
    texts = {keys.create("k", ["infer"])[1] for _ in range(20)}
    assert len(texts) == len({text[:14] for text in texts}) == 20


@pytest.mark.parametrize("wrong", ["", "cru_", "Bearer", "cru_0000000000_" + "A" * 43, "ü" * 60])
def test_what_is_no_key_is_refused(keys: Keys, wrong: str) -> None:
    with pytest.raises(Unauthorized, match=REFUSED):
        keys.verify(wrong)


def test_a_wrong_secret_and_a_revoked_key_are_refused_in_the_same_words(keys: Keys) -> None:
    key, text = keys.create("k", ["infer"])
    other = text[:-1] + ("A" if text[-1] != "A" else "B")
    with pytest.raises(Unauthorized) as wrong:
        keys.verify(other)
    assert "CRUCIBLE_KEY" in wrong.value.next_step
    assert keys.is_valid(key.prefix)
    assert keys.revoke(key.prefix).revoked
    assert not keys.is_valid(key.prefix)
    assert not keys.is_valid("unknown")
    with pytest.raises(Unauthorized) as revoked:
        keys.verify(text)
    assert wrong.value.message == revoked.value.message
    assert [each.prefix for each in keys.list()] == [key.prefix]
    with pytest.raises(NotFound, match="no valid key"):
        keys.revoke(key.prefix)


def test_an_unknown_scope_is_named(keys: Keys) -> None:
    with pytest.raises(PlanError, match="no scope 'root'"):
        keys.create("k", ["infer", "root"])


def test_the_first_admin_key_comes_from_a_file_once(keys: Keys, tmp_path: Path) -> None:
    text = keys.create("made elsewhere", ["infer"])[1]
    file = tmp_path / "key"
    fresh = f"cru_{'0' * 10}_{'a' * 43}"
    file.write_text(fresh + "\n")
    key = keys.add_from_file(file)
    assert key is not None
    assert key.scopes == SCOPES
    assert keys.verify(fresh) == key
    assert keys.add_from_file(file) is None
    assert keys.verify(text)


@pytest.mark.parametrize("content", ["", "hunter2", "é"])
def test_a_file_without_a_key_is_named(keys: Keys, tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(UserError, match=r"not a Crucible key|cannot read the admin key"):
        keys.add_from_file(file)
    with pytest.raises(UserError, match="cannot read the admin key"):
        keys.add_from_file(tmp_path / "absent")
