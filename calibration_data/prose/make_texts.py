"""Cut three books in the public domain into documents for language models.

    python make_texts.py alice29.txt asyoulik.txt plrabn12.txt

The files are those of the Canterbury corpus: Lewis Carroll's "Alice's Adventures in Wonderland"
(1865), William Shakespeare's "As You Like It" (1599) and John Milton's "Paradise Lost" (1667).
Written beside this file: calibration.jsonl, selection.jsonl and validation.jsonl, with one
{"text": ...} a line. No document is in two of them.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import cycle
from pathlib import Path

CHARACTERS = 2000  # of a document: about 500 tokens
SETS = {"calibration": 12, "selection": 12, "validation": 42}
BEGINS = ("Alice was beginning", "As I remember, Adam", "Of Man's first disobedience")


def documents(file: Path, begin: str) -> list[str]:
    """The documents of a book, from the words with which it begins."""
    text = file.read_text(encoding="latin-1")
    text = re.sub(r"[ \t\r]+", " ", text[text.index(begin) :])
    text = re.sub(r" ?\n ?", "\n", text)
    text = re.sub(r"\n{2,}", "\n\n", text)
    return [text[at : at + CHARACTERS] for at in range(0, len(text) - CHARACTERS, CHARACTERS)]


def main() -> None:
    books = [documents(Path(name), words) for name, words in zip(sys.argv[1:], BEGINS, strict=True)]
    apart = [book[:: max(1, len(book) // sum(SETS.values()))] for book in books]
    turns = (book.pop() for book in cycle(apart))
    for name, count in SETS.items():
        lines = [json.dumps({"text": next(turns)}) + "\n" for _ in range(count)]
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
