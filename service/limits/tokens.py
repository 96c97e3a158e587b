"""Tokens of language models that each key may use, prompts and answers together. Pure: all
functions take the time.

A window begins with the first tokens after the window before. A request takes the most that it may
use before it runs, and gives back what it did not use. So a key never uses more than its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.errors import TooMany
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Window:
    """One limit of each key."""

    setting: str
    name: str
    seconds: int
    limit: int


@dataclass(slots=True)
class TokenCount:
    """The tokens of a key in a window."""

    begin_s: float = float("-inf")
    tokens: int = 0


def windows_of(settings: Settings, servers: int = 1) -> tuple[Window, ...]:
    """Return the limits that are set; of several servers that cannot count together, the share of
    each.
    """
    limits = (
        ("max_tokens_per_minute", "minute", 60, settings.max_tokens_per_minute),
        ("max_tokens_per_day", "day", 86400, settings.max_tokens_per_day),
    )
    return tuple(
        Window(setting, name, seconds, max(1, limit // servers))
        for setting, name, seconds, limit in limits
        if limit is not None
    )


def used(window: Window, count: TokenCount, now_s: float) -> int:
    """Return the tokens that count now."""
    return count.tokens if now_s < count.begin_s + window.seconds else 0


def take(
    windows: Sequence[Window], counts: Sequence[TokenCount], now_s: float, tokens: int
) -> tuple[float, ...]:
    """Count tokens in all windows, and return when each of them began. TooMany, and none are
    counted, if a window has not so many left; also for 0 tokens, if it has none left.
    """
    for window, count in zip(windows, counts, strict=True):
        before = used(window, count, now_s)
        if before + max(tokens, 1) > window.limit:
            left_s = int(count.begin_s + window.seconds - now_s) + 1 if before else None
            raise _too_many(window, before, tokens, left_s)
    if tokens:
        for window, count in zip(windows, counts, strict=True):
            if now_s >= count.begin_s + window.seconds:
                count.begin_s, count.tokens = now_s, 0
            count.tokens += tokens
    return tuple(count.begin_s for count in counts)


def give_back(counts: Sequence[TokenCount], begins_s: Sequence[float], tokens: int) -> None:
    """Take back tokens, in those windows that began then."""
    for count, begin_s in zip(counts, begins_s, strict=True):
        if count.begin_s == begin_s:
            count.tokens -= tokens


def _too_many(window: Window, before: int, tokens: int, left_s: int | None) -> TooMany:
    """`left_s` None: time alone does not help."""
    more = f", and this request may use {tokens} more" if tokens else ""
    wait = "lower `max_tokens`" if left_s is None else f"send it again in {left_s} s"
    if left_s is not None and tokens:
        wait = f"{wait}, or lower `max_tokens`"
    return TooMany(
        f"this key has used {before} tokens of language models in this {window.name}{more};"
        f" expected at most {window.limit} (`{window.setting}`)",
        f"{wait}; GET /limits shows your limits; the operator of this service can raise"
        f" `{window.setting}`",
        left_s,
    )
