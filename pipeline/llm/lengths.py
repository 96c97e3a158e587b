"""How long the user's texts are in the model's tokens, checked before the model runs: what does not
fit would else be told after minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.errors import DataError, PlanError
from pipeline.llm.hf import load_tokenizer, token_ids
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.source import Source
from pipeline.llm.texts import Documents


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
