"""The tokenizer that Hugging Face describes in one file."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import DamagedError
from pipeline.llm.engine import LanguageEngine

TOKENIZER_FILE = "tokenizer.json"


class FastTokenizer:
    """Text to tokens and back. Threads may share it. DamagedError if the file is none."""

    def __init__(self, engine: LanguageEngine) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(engine.root / TOKENIZER_FILE))
        except Exception as error:  # the library raises no class of its own
            raise DamagedError(
                f"'{TOKENIZER_FILE}' of the language model cannot be read: {error}",
                "compile the model again",
            ) from error

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        ids = list(tokens)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
