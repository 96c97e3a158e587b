"""Print the size of every file and its longest function, and fail where a function is over 60 lines."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

MOST_FUNCTION = 60
TREES = ("pipeline", "service", "calibration_data", "benchmarks", "tests")


def functions(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and name of every function, nested ones counted with their parents."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def main() -> int:
    root = Path(__file__).parents[2]
    rows, lengths = [], []
    for file in sorted(path for tree in TREES for path in (root / tree).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        found = functions(ast.parse(text))
        lengths += [length for length, _ in found]
        rows.append((len(text.splitlines()), file.relative_to(root), max(found, default=(0, ""))))
    for lines, name, (length, function) in sorted(rows, key=lambda row: -row[0]):
        print(f"{lines:5} {name!s:50} longest function {length:3} {function}")
    faults = [
        f"{name}: {function} has {length} lines, at most {MOST_FUNCTION}"
        for _, name, (length, function) in rows
        if length > MOST_FUNCTION
    ]
    total = sum(lines for lines, _, _ in rows)
    print(
        f"{len(rows)} files, {total} lines, {len(lengths)} functions, median {statistics.median(lengths):.0f} lines"
    )
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
