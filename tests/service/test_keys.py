"""Keys: shown once, stored as a digest, verified in the same words whatever is wrong."""

from pathlib import Path

import pytest

from pipeline.errors import PlanError, UserError
from service.database import Database
from service.errors import NotFound, Unauthorized
from service.keys import FORM, REFUSED, Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(Database(tmp_path / "crucible.db"))


def test_a_key_is_verified_by_its_text_which_is_stored_nowhere(keys: Keys, tmp_path: Path) -> None:
    key, text = keys.create("ci", ["compile", "infer"])
    assert FORM.fullmatch(text)
    assert keys.verify(text) == key
    assert key.scopes == ("compile", "infer")
    assert key.owner == f"key:{key.prefix}"
    secret = text.rpartition("_")[2].encode()
    assert not any(secret in file.read_bytes() for file in tmp_path.iterdir())


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
    assert keys.revoke(key.prefix).revoked
    with pytest.raises(Unauthorized) as revoked:
        keys.verify(text)
    assert wrong.value.message == revoked.value.message
    assert [each.prefix for each in keys.list()] == [key.prefix]
    with pytest.raises(NotFound, match="that works"):
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
    assert key.scopes == ("compile", "infer", "admin")
    assert keys.verify(fresh) == key
    assert keys.add_from_file(file) is None
    assert keys.verify(text)


@pytest.mark.parametrize("content", ["", "hunter2", "é"])
def test_a_file_without_a_key_is_named(keys: Keys, tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(UserError, match=r"no Crucible key|cannot read the admin key"):
        keys.add_from_file(file)
    with pytest.raises(UserError, match="cannot read the admin key"):
        keys.add_from_file(tmp_path / "absent")
