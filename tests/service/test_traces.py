"""Traces go where the setting says; without the library the server says what to install."""

import asyncio
import importlib.util
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from pipeline.errors import BackendUnavailable
from service.app import create_app
from service.settings import Settings
from service.traces import provider_from, telemetry_of, tracing_to

SDK = importlib.util.find_spec("opentelemetry.sdk") is not None


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert provider_from(Settings()) is None
    told = telemetry_of(None)
    assert [told[name] for name in ("tracing", "metrics", "logs", "auto_configure")] == [False] * 4


@pytest.mark.skipif(SDK, reason="the extra otel is installed")
def test_a_missing_extra_is_named_before_anything_begins(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="otel_endpoint is set") as caught:
        create_app(Settings(home=tmp_path / "home", otel_endpoint="http://127.0.0.1:4318"))
    assert "crucible[otel]" in caught.value.next_step
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(not SDK, reason="the extra otel is not installed")
@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_go_to_the_endpoints_path_for_traces(path: str) -> None:
    provider = provider_from(Settings(otel_endpoint=f"http://127.0.0.1:4318{path}"))
    (processor,) = provider._active_span_processor._span_processors  # type: ignore[union-attr]
    exporter = getattr(processor, "_batch_processor", processor)._exporter
    assert exporter._endpoint == "http://127.0.0.1:4318/v1/traces"


async def _asked(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        await client.get("/jobs/17")


@pytest.mark.skipif(not SDK, reason="the extra otel is not installed")
def test_a_request_is_a_span_by_its_route() -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    app = FastAPI(telemetry=telemetry_of(tracing_to(SimpleSpanProcessor(kept))))

    @app.get("/jobs/{job_id}")
    async def get(job_id: str) -> str:
        return job_id

    asyncio.run(_asked(app))
    spans = kept.get_finished_spans()
    assert "GET /jobs/{job_id}" in [span.name for span in spans]
    assert {span.resource.attributes["service.name"] for span in spans} == {"crucible"}
