"""The application without a network: a client on a home of its own, with the double for the job
worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from onnx import helper

from service.app import create_app
from service.context import Service
from service.jobs.messages import HostIdentity
from service.settings import Settings
from tests.service.builders.jobs import WITHIN_S, WORKER, write_out

URL = "http://localhost:8000"
CANDIDATES = {"onnxruntime fp32": "", "onnxruntime int8": "", "tensorrt fp16": "no GPU is here"}
HOST = HostIdentity(devices={"cpu": "a CPU"}, digest="h", candidates=CANDIDATES)


async def known_host() -> HostIdentity:
    """Identity of a host whose hardware is not looked up."""
    return HOST


def model_bytes(graph: str) -> bytes:
    """The smallest ONNX file with a graph of this name."""
    proto: bytes = helper.make_model(helper.make_graph([], graph, [], [])).SerializeToString()
    return proto


MODEL = model_bytes("g")


def parts(name: str, model: bytes = MODEL, **more: bytes) -> dict[str, tuple[str, bytes]]:
    """An upload for the double, which does what the job's name says."""
    return {
        "model": ("model.onnx", model),
        "plan": ("plan.yaml", f"name: {name}".encode()),
        **{role: (f"{role}.npz", data) for role, data in more.items()},
    }


class Desk:
    """A client, and what stands behind the application."""

    def __init__(self, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.app, self.client = app, client
        self.service: Service = app.state.service

    async def compile(
        self, name: str, headers: dict[str, str] | None = None, model: bytes = MODEL
    ) -> httpx.Response:
        return await self.client.post("/compile", files=parts(name, model), headers=headers)

    async def until(self, job_id: str, *states: str) -> dict[str, Any]:
        end = time.monotonic() + WITHIN_S
        while (job := (await self.client.get(f"/jobs/{job_id}")).json())["state"] not in states:
            assert time.monotonic() < end, job
            await asyncio.sleep(0.02)
        state: dict[str, Any] = job
        return state

    async def end_of(self, name: str) -> dict[str, Any]:
        answer = await self.compile(name)
        assert answer.status_code == 202, answer.text
        return await self.until(answer.json()["id"], "succeeded", "failed", "cancelled")

    def key(self, *scopes: str) -> dict[str, str]:
        """A new key's header."""
        return {"Authorization": f"Bearer {self.service.keys.create('test', scopes)[1]}"}


@asynccontextmanager
async def opened_desk(
    home: Path,
    traces: Any = None,
    worker: Sequence[str] = WORKER,
    generating: Any = None,
    **settings: Any,
) -> AsyncIterator[Desk]:
    """Run the application in this process, with a client."""
    if not (home / "template").exists():
        write_out(home / "template", home / "template-store")
    # the double of a worker copies its report from the home, which the sandbox hides
    settings.setdefault("sandbox", "off" if worker is WORKER else "auto")
    app = create_app(
        Settings(home=home, **settings), worker, known_host, traces=traces, generating=generating
    )
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=URL, timeout=WITHIN_S) as client,
    ):
        desk = Desk(app, client)
        await desk.service.started
        yield desk


def at_desk(home: Path, story: Callable[[Desk], Awaitable[None]], **settings: Any) -> None:
    """Run `story` against an application in this process."""

    async def run() -> None:
        async with opened_desk(home, **settings) as desk:
            await story(desk)

    asyncio.run(run())
