"""Count the statements of the product that a commit adds and deletes.

    python -m tests.tools.statements REV

A statement that moves within a file, or is only laid out anew, counts as neither.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter

FOLDERS = ("pipeline", "service")
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(source: str) -> Counter[str]:
    """Return each statement of a module; of a compound statement without those in its bodies."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            counts[_own_text(node)] += 1
    return counts


def _own_text(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> str:
    own = {
        name: value
        for name, value in ast.iter_fields(node)
        if name not in BODIES or not isinstance(value, list)
    }
    if len(own) == len(node._fields):
        return ast.unparse(node)
    return type(node).__name__ + repr([(name, _text(value)) for name, value in own.items()])


def _text(value: object) -> str:
    if isinstance(value, list):
        return str([_text(each) for each in value])
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def changes(before: str, after: str) -> tuple[int, int]:
    """Return how many statements were added and how many deleted between two sources."""
    old, new = statements(before), statements(after)
    return (new - old).total(), (old - new).total()


def changes_of_commit(revision: str) -> tuple[int, int]:
    """Return the sum of `changes` over the product's Python files that the commit touches."""
    names = _git("diff", "--name-only", "--no-renames", f"{revision}^", revision, "--", *FOLDERS)
    added = deleted = 0
    for name in names.splitlines():
        if name.endswith(".py"):
            more, less = changes(_file(f"{revision}^", name), _file(revision, name))
            added, deleted = added + more, deleted + less
    return added, deleted


def _file(revision: str, name: str) -> str:
    """Return a file's text at a revision; empty where it does not exist."""
    listed = _git("ls-tree", "--name-only", revision, "--", name)
    return _git("show", f"{revision}:{name}") if listed else ""


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return result.stdout


def main(revision: str) -> None:
    """Print both numbers of one commit."""
    added, deleted = changes_of_commit(revision)
    print(f"statements: {added} added, {deleted} deleted")


if __name__ == "__main__":
    main(sys.argv[1])
