"""A server without language models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from service.auth import Caller
from service.errors import NotFound
from service.language.generation import Answer, GenerateRequest, ServedLanguage


class NoLanguages:
    """`Generating` of a server that deploys no language model."""

    def languages(self, caller: Caller) -> tuple[ServedLanguage, ...]:
        return ()

    def find_language(
        self, caller: Caller, model: str | None, version: int | None = None
    ) -> ServedLanguage:
        raise NotFound(
            f"no language model '{model}' is deployed", "GET /v1/models lists those that are"
        )

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[Answer]:
        self.find_language(request.caller, request.model, request.version)
        raise AssertionError("no language model can be found")
