"""The pages about operation hold: their commands run in a test, or say why they cannot."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.errors import StoreError
from service.storage import tables
from service.storage.database import Database
from tests.service.builders.schemas import newer_schema
from tests.service.integration.test_docs import HOW_TOS, MARKED, WITH_KEYS, commands

ROOT = Path(__file__).parents[2]
PAGE = "\n".join(HOW_TOS[name] for name in (*WITH_KEYS, "containers", "kubernetes"))
SPAN = re.compile(r"`([^`]+)`(<!-- not run here: [^>`]+ -->)?")
COMMAND = re.compile(
    r"(crucible|curl|docker|grpc_health_probe|kubectl|make|pip|python3?|tar|uv|--\S+) .+|\S+\.py"
)


def test_commands_that_are_not_run_need_what_is_not_here() -> None:
    blocks = MARKED.findall(PAGE)
    assert len(blocks) + sum(bool(mark) for _, mark in inline()) == PAGE.count("<!-- not run here")
    for reason, block in blocks:
        reasons = {"no cluster": "kubectl", "several GPUs": "--device"}
        missing = next((word for text, word in reasons.items() if text in reason), "docker")
        assert missing in block, reason
    assert not re.search(r"^\$ (docker|kubectl)", MARKED.sub("", PAGE), re.MULTILINE)


def inline() -> list[tuple[str, str]]:
    """Commands between the page's words, and what marks them."""
    spans = SPAN.findall(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    return [(text, mark) for text, mark in spans if COMMAND.fullmatch(text)]


def test_commands_between_words_are_run_or_marked() -> None:
    """They may name a command of crucible, or a part of one in a block; CI runs those of make."""
    known = [*commands(PAGE), (ROOT / ".ci" / "run").read_text()]
    for text, mark in inline():
        named = re.fullmatch(r"crucible \w+", text) or any(text in line for line in known)
        assert bool(named) != bool(mark), text


def test_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"\bdocker/[\w./]+\w", PAGE):
        assert (ROOT / name).exists(), name


def test_a_home_is_copied_before_an_upgrade_and_put_back_for_the_old_version(
    tmp_path: Path,
) -> None:
    """What the page's containers run, here on a home; the newer version has a newer database, and
    leaves files of its own.
    """
    home, backup = tmp_path / "home", tmp_path / "backup"
    backup.mkdir()

    def run(line: str) -> None:
        inside = re.sub(r"^docker run .* --entrypoint (\w+) .* crucible:cpu (.+)$", r"\1 \2", line)
        assert inside != line
        here = inside.replace("/var/lib/crucible", str(home)).replace("/backup", str(backup))
        subprocess.run(["bash", "-euo", "pipefail", "-c", here], check=True)

    def names() -> list[str]:
        database = Database(home / "crucible.db")
        with database.read() as rows:
            models = list(rows.scalars(sa.select(tables.models.c.name)))
        database.close()
        return models

    save, restore = (
        line for line in commands(PAGE) if line.startswith("docker run") and "--entrypoint" in line
    )
    old = Database(home / "crucible.db")
    with old.write() as rows:
        rows.execute(sa.insert(tables.models).values(name="kept", owner="me", current=1, latest=1))
    old.close()
    (home / "models" / "kept" / "1").mkdir(parents=True)
    run(save)

    new = Database(home / "crucible.db", newer_schema(tmp_path, "op.execute('DELETE FROM models')"))
    (home / ".newer").mkdir()
    shutil.rmtree(home / "models")
    new.close()
    with pytest.raises(StoreError, match="this Crucible knows up to"):
        names()
    run(restore)
    assert names() == ["kept"]
    assert sorted(path.name for path in home.rglob("*")) == ["1", "crucible.db", "kept", "models"]
