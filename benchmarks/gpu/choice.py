"""Which row to measure, with which of its ways or variants: as results name it, pages print it, and
the command line takes it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.rows import row_named

COMMAND = ("python", "-m", "benchmarks", "gpu_models")


@dataclass(frozen=True, slots=True)
class Choice:
    """A row or part, and some of its ways or variants; all of them where `words` is empty."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """`encoder_b1: fp16, int8`: names the row in the results and on pages."""
        return f"{self.name}: {', '.join(self.words)}" if self.words else self.name

    @property
    def names_ways(self) -> bool:
        """Whether `words` are ways of ours; else they select variants of a part."""
        return row_named(self.name) is not None or "throughput" in self.name


def choice_from_heading(text: str) -> Choice:
    """`encoder_b1: fp16, int8` -> the row encoder_b1 with two of its ways."""
    name, _, words = text.partition(":")
    return Choice(name.strip(), words_of(words))


def words_of(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
