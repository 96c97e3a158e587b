"""Traces go where the setting says; without the library the server says what to install."""

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.jobs.traces import provider_from, telemetry_of, tracing_to
from service.settings import Settings
from tests.service.builders.app import opened_desk


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert provider_from(Settings()) is None
    settings = telemetry_of(None)
    assert [settings[name] for name in ("tracing", "metrics", "logs", "auto_configure")] == [
        False
    ] * 4


def test_a_missing_extra_is_named_before_anything_begins(tmp_path: Path) -> None:
    program = f"""
    import sys
    sys.modules["opentelemetry.sdk"] = None  # as where it is not installed
    from pathlib import Path
    from service.app import create_app
    from service.settings import Settings
    home = Path({str(tmp_path / "home")!r})
    create_app(Settings(home=home, otel_endpoint="http://127.0.0.1:4318"))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "BackendUnavailable: otel_endpoint is set" in result.stderr
    assert ".[otel]" in result.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_go_to_the_endpoints_path_for_traces(path: str) -> None:
    provider = provider_from(Settings(otel_endpoint=f"http://127.0.0.1:4318{path}"))
    (processor,) = provider._active_span_processor._span_processors  # type: ignore[union-attr]
    exporter = getattr(processor, "_batch_processor", processor)._exporter
    assert exporter._endpoint == "http://127.0.0.1:4318/v1/traces"


def test_a_request_its_job_and_the_stages_are_one_trace_across_a_restart(tmp_path: Path) -> None:
    first, second = (
        InMemorySpanExporter(),
        InMemorySpanExporter(),
    )  # a server's end is its exporter's

    async def sent() -> str:
        async with opened_desk(tmp_path, traces=tracing_to(SimpleSpanProcessor(first))) as desk:
            job = (await desk.compile("succeed-2")).json()
            await desk.until(job["id"], "running")
            assert "trace" not in job
        return str(job["id"])

    async def ended(job_id: str) -> dict[str, Any]:
        async with opened_desk(tmp_path, traces=tracing_to(SimpleSpanProcessor(second))) as desk:
            return await desk.until(job_id, "succeeded")

    job = asyncio.run(ended(asyncio.run(sent())))
    spans = {
        span.name: span for exporter in (first, second) for span in exporter.get_finished_spans()
    }
    request, job_span, stage = spans["POST /compile"], spans["job"], spans["stage build"]
    assert {span.context.trace_id for span in (job_span, stage)} == {request.context.trace_id}
    of_request = {
        span.context.span_id
        for span in first.get_finished_spans()
        if span.context.trace_id == request.context.trace_id
    }
    assert {span.parent.span_id for span in (job_span, stage)} <= of_request
    assert (stage.end_time - stage.start_time) / 1e9 == pytest.approx(
        0.1, abs=1e-3
    )  # as the double says
    assert (job_span.end_time - job_span.start_time) / 1e9 == pytest.approx(
        job["elapsed_s"], abs=1e-3
    )
    assert {span.attributes["crucible.job"] for span in (job_span, stage)} == {job["id"]}
    assert (job_span.attributes["crucible.state"], job_span.attributes["crucible.verdict"]) == (
        "succeeded",
        "accepted",
    )
    assert {span.resource.attributes["service.name"] for span in spans.values()} == {"crucible"}
