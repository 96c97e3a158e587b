"""A server with no model deployed."""

from __future__ import annotations

from service.errors import NotFound
from service.guard import Caller
from service.serving.requests import InferAnswer, InferRequest, Served, Statistics


class NothingServed:
    """Serving, of no models at all."""

    def served(self, caller: Caller) -> tuple[Served, ...]:
        return ()

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        raise NotFound("no model is deployed" if model is None else f"no model '{model}' is deployed", "deploy one first")

    async def infer(self, request: InferRequest) -> InferAnswer:
        raise NotImplementedError(self.find(request.caller, request.model, request.version))

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]:
        return ()

    async def load(self, caller: Caller, model: str) -> Served:
        return self.find(caller, model)

    async def unload(self, caller: Caller, model: str) -> None:
        self.find(caller, model)
