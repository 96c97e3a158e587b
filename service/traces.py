"""Traces: a span per request with its parts, sent by OTLP over HTTP when `otel_endpoint` is set. FastAPI makes the spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.telemetry import TelemetryConfig

from pipeline.errors import BackendUnavailable
from pipeline.runner import installed
from service.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

SEND_S = 2.0  # an answer of the collector, also at the end: it must not keep the server from ending
PATH = "/v1/traces"  # of OTLP over HTTP


def provider_from(settings: Settings) -> TracerProvider | None:
    """What makes and sends spans; None without an endpoint. BackendUnavailable names the extra that is missing."""
    if settings.otel_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        said = f"otel_endpoint is set, and traces need a library that is not installed: {error}"
        raise BackendUnavailable(said, "pip install 'crucible[otel]', or unset CRUCIBLE_SERVICE_OTEL_ENDPOINT") from error
    address = settings.otel_endpoint.rstrip("/")
    exporter = OTLPSpanExporter(endpoint=address if address.endswith(PATH) else address + PATH, timeout=SEND_S)
    return tracing_to(BatchSpanProcessor(exporter))


def tracing_to(processor: SpanProcessor) -> TracerProvider:
    """A provider of our own, so that none but this application's spans go there."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": "crucible", "service.version": installed("crucible")}))
    provider.add_span_processor(processor)
    return provider


def telemetry_of(provider: TracerProvider | None) -> TelemetryConfig:
    """FastAPI's settings: traces alone. Figures are Prometheus', and the log is ours, which keeps keys out."""
    return {"tracer_provider": provider, "tracing": provider is not None, "metrics": False, "logs": False, "auto_configure": False}
