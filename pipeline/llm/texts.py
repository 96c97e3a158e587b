"""The user's texts: read from files, checked, and the same for all candidates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.errors import DataError, PlanError
from pipeline.llm.hf import load_tokenizer, token_ids
from pipeline.llm.plan import LanguagePlan, Texts
from pipeline.llm.source import Source

MIN_DOCUMENTS = 4
"""Fewer do not show how much texts differ."""

MAX_BYTES = 1 << 28


class Documents(Frozen):
    """One set of texts."""

    name: str
    texts: tuple[str, ...] = Field(exclude=True)
    digest: str

    def __len__(self) -> int:
        return len(self.texts)


def read_documents(path: Path, name: str) -> Documents:
    """Read a .jsonl file with `{"text": ...}` a line, or a folder of .txt files, each a document.

    DataError names the file and the line.
    """
    if path.is_dir():
        texts = [_read(file) for file in sorted(path.glob("*.txt"))]
    elif path.suffix == ".jsonl":
        texts = list(_lines(path))
    else:
        raise DataError(
            f"texts.{name}: expected a .jsonl file or a folder of .txt files, got '{path}'",
            'write one {"text": "..."} a line',
        )
    if any(not text.strip() for text in texts):
        raise DataError(f"texts.{name}: a text in '{path}' is empty", "remove it")
    if len(set(texts)) < len(texts):
        raise DataError(
            f"texts.{name}: a text is in '{path}' twice", "remove one: intervals count on texts"
        )
    if len(texts) < MIN_DOCUMENTS:
        raise DataError(
            f"texts.{name}: {len(texts)} texts in '{path}', expected at least {MIN_DOCUMENTS}",
            "add more: an interval needs texts that differ",
        )
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return Documents(name=name, texts=tuple(texts), digest=digest)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise DataError(
                f"'{file}' has {file.stat().st_size} bytes, expected at most {MAX_BYTES}",
                "give a part of it: some hundred texts are enough",
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"no file at '{file}'", "correct the path in the plan") from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{file}' is not UTF-8: {error}", "convert it to UTF-8") from error


def _lines(file: Path) -> Iterator[str]:
    for number, line in enumerate(_read(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f'\'{file}\', line {number}: expected {{"text": "..."}}, got {line[:60]!r}',
                "correct this line",
            )
        yield text


def read_texts(texts: Texts) -> tuple[Documents | None, Documents, Documents]:
    """Return the calibration, selection and validation sets. DataError if a text is in two."""
    calibration = None
    if texts.calibration is not None:
        calibration = read_documents(texts.calibration, "calibration")
    selection = read_documents(texts.selection, "selection")
    validation = read_documents(texts.validation, "validation")
    seen: dict[str, str] = {}
    for part in filter(None, (calibration, selection, validation)):
        for text in part.texts:
            if seen.setdefault(text, part.name) != part.name:
                raise DataError(
                    f"a text of texts.{part.name} is in texts.{seen[text]}, too: {text[:60]!r}",
                    "remove it from one: a text that chose the winner cannot prove it",
                )
    return calibration, selection, validation


# -- in the model's tokens, before the model runs ------------------------------


class TokenCounts(Frozen):
    """The tokens of each text, in the order of the sets and of their texts."""

    counts: tuple[tuple[int, ...], ...]


def count_tokens(
    source: Source, sets: Sequence[Documents], max_tokens: int, progress: Progress = silent
) -> TokenCounts:
    """Count the tokens of sets of texts, `max_tokens` at most of each text."""
    progress(None, "counting tokens")
    tokenizer = load_tokenizer(source)
    return TokenCounts(
        counts=tuple(
            tuple(len(token_ids(tokenizer, text, max_tokens)) for text in documents.texts)
            for documents in sets
        )
    )


def check_texts(name: str, counts: Sequence[int], plan: LanguagePlan) -> None:
    """DataError if a text of this set is shorter than its two parts need."""
    least = plan.texts.cached_tokens + 2
    for number, count in enumerate(counts, 1):
        if count < least:
            raise DataError(
                f"text {number} of texts.{name} has {count} tokens, expected at least {least}",
                "remove it, or lower `texts.cached_tokens`",
            )


def check_prompts(counts: Sequence[int], plan: LanguagePlan) -> None:
    """PlanError if no text of the selection set is as long as a prompt."""
    tokens, longest = plan.benchmark.prompt_tokens, max(counts)
    if longest < tokens:
        raise PlanError(
            f"benchmark.prompt_tokens: {tokens}, but the longest text of the selection set has"
            f" {longest} tokens",
            "lower it, raise `texts.max_tokens`, or add a longer text",
        )
