"""Statements of a commit, counted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools.statements import changes, main

BEFORE = '''
def double(x):
    """Twice."""
    if x:
        return x * 2
    return 0
'''


@pytest.mark.parametrize(
    ("after", "added", "deleted"),
    [
        (BEFORE, 0, 0),
        (BEFORE.replace("x * 2", "(\n            x\n            * 2\n        )"), 0, 0),
        (BEFORE.replace("x * 2", "2 * x"), 1, 1),
        (BEFORE.replace("if x:", "if x > 0:"), 1, 1),
        (BEFORE + "\ny = double(1)\n", 1, 0),
        ("", 0, 5),
        (
            BEFORE.replace("    return 0", "    try:\n        return 0\n    except E:\n        x"),
            3,
            0,
        ),
    ],
)
def test_only_statements_that_differ_count(after: str, added: int, deleted: int) -> None:
    assert changes(BEFORE, after) == (added, deleted)


def test_a_commit_counts_by_its_product_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    git("init")
    for folder in ("pipeline", "service", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pipeline" / "old.py").write_text(BEFORE)
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "pipeline" / "old.py").unlink()
    (tmp_path / "service" / "new.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "tests" / "test.py").write_text("z = 3\n")
    git("add", ".")
    git("commit", "-m", "second")
    main("HEAD")
    assert capsys.readouterr().out == "statements: 2 added, 5 deleted\n"
