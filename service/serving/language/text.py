"""From tokens to text while they come: whole characters only, and an end at a stop text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 3  # bytes of a character in UTF-8 that may lack the last one
WINDOW, KEPT = 32, 8  # tokens that are decoded again with each new one; those kept of them

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, without special ones. Bytes that are no character are replaced."""


class TextStream:
    """Decodes tokens one after another. All returned texts together are the text of all tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens = list[int]()  # those that the next ones are decoded with
        self._sent = 0  # characters of their text

    def add(self, tokens: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        held = len(text) - len(text.rstrip(REPLACEMENT))
        whole = text[: len(text) - min(held, MAX_HELD)]
        new, self._sent = whole[self._sent :], max(self._sent, len(whole))
        if not held and len(self._tokens) > WINDOW:
            self._shorten(text)
        return new

    def end(self) -> str:
        """Return what was held back: bytes that are no character."""
        return self._decode(self._tokens)[self._sent :] if self._tokens else ""

    def _shorten(self, text: str) -> None:
        """Forget all but the last tokens, if these alone have the same text at the end."""
        last = self._tokens[-KEPT:]
        tail = self._decode(last)
        if tail and text.endswith(tail):
            self._tokens, self._sent = last, len(tail)


class StopTexts:
    """Ends a text before the first stop text, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Return what certainly comes before any stop text."""
        whole = self._held + text
        places = [at for at in (whole.find(stop) for stop in self._stops) if at >= 0]
        if places:
            self.found, self._held = True, ""
            return whole[: min(places)]
        keep = max((_overlap(whole, stop) for stop in self._stops), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def end(self) -> str:
        """Return what was held back, since nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of `text` begin `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
