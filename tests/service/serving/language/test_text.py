"""Tokens to text, with a decoder of bytes: one token is one byte."""

from __future__ import annotations

import random

import pytest

from service.serving.language.text import StopTexts, TextStream


def of_bytes(tokens: object) -> str:
    return bytes(tokens).decode(errors="replace")  # type: ignore[call-overload,no-any-return]


def stripped(tokens: object) -> str:
    """As SentencePiece decodes: without the space that begins a text."""
    return of_bytes(tokens).removeprefix(" ")


def streamed(data: bytes, sizes: random.Random, decode: object = of_bytes) -> list[str]:
    stream, parts, at = TextStream(decode), [], 0  # type: ignore[arg-type]
    while at < len(data):
        size = sizes.randint(1, 5)
        parts.append(stream.add(list(data[at : at + size])))
        at += size
    return [*parts, stream.end()]


def test_characters_come_whole_and_none_is_lost() -> None:
    text = "naïve 日本語 🙂🙃 and much plain text, so that old tokens are forgotten. " * 3
    for seed in range(50):
        parts = streamed(text.encode(), random.Random(seed))
        assert "".join(parts) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_bytes_that_are_no_characters_are_replaced() -> None:
    for seed in range(200):
        sizes = random.Random(seed)
        data = bytes(sizes.choices(range(256), k=120))
        assert "".join(streamed(data, sizes)) == data.decode(errors="replace")


def test_a_space_that_a_decoder_leaves_out_at_the_start_stays_elsewhere() -> None:
    text = " one two  three" * 20
    for seed in range(20):
        assert "".join(streamed(text.encode(), random.Random(seed), stripped)) == text[1:]


def cut(pieces: list[str], *stops: str) -> tuple[list[str], bool]:
    ending, given = StopTexts(stops), []
    for piece in pieces:
        given.append(ending.add(piece))
        if ending.found:
            return given, True
    return [*given, ending.end()], False


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["one ", "two ST", "OP three"], ["STOP"], "one two ", True),
        (["STO", "ST", "OP"], ["STOP"], "STO", True),
        (["one ST"], ["STOP"], "one ST", False),
        (["a\n", "\nb"], ["\n\n"], "a", True),
        (["a\n", "b\n"], ["\n\n"], "a\nb\n", False),
        (["xab", "cd"], ["bcd", "abc"], "x", True),
        (["anything"], [], "anything", False),
        (["anything"], [""], "anything", False),
    ],
)
def test_a_stop_text_ends_the_text_before_it(
    pieces: list[str], stops: list[str], text: str, found: bool
) -> None:
    given, ended = cut(pieces, *stops)
    assert ("".join(given), ended) == (text, found)


def test_what_may_begin_a_stop_text_is_held_back() -> None:
    ending = StopTexts(["\n\nQ:"])
    assert [ending.add(piece) for piece in ("an answer\n", "\n", "Q", "uestion")] == [
        "an answer",
        "",
        "",
        "\n\nQuestion",
    ]
