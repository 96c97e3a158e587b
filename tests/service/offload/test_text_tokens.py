"""Tokenizers in a helper: what they give, and that a hostile one harms nobody."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DamagedError
from service.errors import Unprocessable
from service.offload.text_tokens import Text, TextTokens
from service.offload.tokenizer_worker import KEPT
from service.sandbox.layers import Sandbox
from tests.service.http.openai.encoders import write_tokenizer

pytest.importorskip("tokenizers", reason="encoders: no tokenizers")
CAT = [2, 5, 6, 8, 3]  # [CLS] the cat sleeps [SEP]


class Tokenizers:
    """Asks for tokens by files of a folder."""

    def __init__(self, folder: Path, tokens: TextTokens) -> None:
        self.folder, self.helper = folder, tokens

    def write(self, name: str = "t.json", indent: int = 0, **changes: Any) -> Path:
        """`indent` changes the digest alone."""
        file = write_tokenizer(self.folder / name)
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps(content, indent=indent))
        return file

    async def ask(self, file: Path, *texts: Text, most: int = 64) -> list[list[int]]:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lists = await self.helper.tokens(file, digest, texts, most)
        return [each.tolist() for each in lists]


def with_tokenizers(folder: Path, story: Callable[[Tokenizers], Awaitable[None]]) -> None:
    async def run() -> None:
        tokens = TextTokens(Sandbox(folder / "home"))
        try:
            await story(Tokenizers(folder, tokens))
        finally:
            await tokens.close()

    asyncio.run(run())


def test_texts_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    async def story(tokenizers: Tokenizers) -> None:
        file = tokenizers.write()
        long = await tokenizers.ask(file, "The cat sleeps", "a " * 20, (4, 4), "")
        assert long == [CAT, [2, *[4] * 20, 3], [4, 4], [2, 3]]

    with_tokenizers(tmp_path, story)


def test_the_number_of_a_wrong_text_is_named(tmp_path: Path) -> None:
    async def story(tokenizers: Tokenizers) -> None:
        file = tokenizers.write()
        for text, message in (
            ("a " * 9, "input 1 has 11 tokens, this model takes at most 8"),
            ((14,), "input 1 has the token 14, this model has 14 tokens"),
            ((), "input 1 has no tokens"),
        ):
            with pytest.raises(Unprocessable) as error:
                await tokenizers.ask(file, "a", text, most=8)
            assert error.value.message == message

    with_tokenizers(tmp_path, story)


def test_a_tokenizer_that_the_helper_has_forgotten_is_sent_again(tmp_path: Path) -> None:
    async def story(tokenizers: Tokenizers) -> None:
        files = [tokenizers.write(f"{n}.json", indent=n) for n in range(KEPT + 2)]
        for file in (*files, *files):
            assert await tokenizers.ask(file, "the cat sleeps") == [CAT]

    with_tokenizers(tmp_path, story)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    async def story(tokenizers: Tokenizers) -> None:
        file = tokenizers.write()
        for digest, path, message in (
            ("0" * 64, file, "has changed"),
            ("1" * 64, tmp_path / "none", "cannot be read"),
        ):
            with pytest.raises(DamagedError, match=message) as error:
                await tokenizers.helper.tokens(path, digest, ["a"], 8)
            assert "promote" in error.value.next_step

    with_tokenizers(tmp_path, story)


def split_at(pattern: str) -> dict[str, Any]:
    how = {"behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, **how}}


HOSTILE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": {"type": "none"}}, "cannot be read"),
    (split_at("("), "cannot be read"),
    (split_at("(a+)+$"), "crashed its process"),  # over the limit of its library
    (split_at("(a|b)*a(a|b)*c"), "took more than 10 s"),
)


def test_a_hostile_tokenizer_is_refused_and_the_next_one_works(tmp_path: Path) -> None:
    async def story(tokenizers: Tokenizers) -> None:
        for changes, message in HOSTILE:
            with pytest.raises(Unprocessable) as error:
                await tokenizers.ask(tokenizers.write("hostile.json", **changes), "a" * 3000 + "!")
            assert message in error.value.message
            assert await tokenizers.ask(tokenizers.write(), "the cat sleeps") == [CAT]

    with_tokenizers(tmp_path, story)
