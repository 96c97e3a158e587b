"""Traces, sent by OTLP over HTTP if `otel_endpoint` is set. FastAPI creates the spans of requests;
the spans of jobs and their stages join them.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from fastapi.telemetry import TelemetryConfig
from opentelemetry.trace import NoOpTracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline import distribution
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable
from pipeline.execution.stage_event import StageEvent
from service.jobs.state import Job, JobEvent
from service.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

SEND_S = 2.0  # timeout of the collector; short, because it also delays the server's shutdown
PATH = "/v1/traces"  # of OTLP over HTTP
TRACEPARENT = "traceparent"


def provider_from(settings: Settings) -> TracerProvider | None:
    """Build the tracer provider; None without an endpoint. BackendUnavailable names the missing
    extra.
    """
    if settings.otel_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"otel_endpoint is set, and traces need a library that is not installed: {error}"
        raise BackendUnavailable(
            message, f"{install_command('otel')}, or unset CRUCIBLE_SERVICE_OTEL_ENDPOINT"
        ) from error
    address = settings.otel_endpoint.rstrip("/")
    exporter = OTLPSpanExporter(
        endpoint=address if address.endswith(PATH) else address + PATH, timeout=SEND_S
    )
    return tracing_to(BatchSpanProcessor(exporter))


def tracing_to(processor: SpanProcessor) -> TracerProvider:
    """Build a provider of our own, so that it receives only this application's spans."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": "crucible", "service.version": distribution.version()}
        )
    )
    provider.add_span_processor(processor)
    return provider


def telemetry_of(provider: TracerProvider | None) -> TelemetryConfig:
    """Return FastAPI's telemetry settings: traces only. Metrics go to Prometheus, and our own log
    hides keys.
    """
    return {
        "tracer_provider": provider,
        "tracing": provider is not None,
        "metrics": False,
        "logs": False,
        "auto_configure": False,
    }


def current_trace() -> str | None:
    """Return the span of the current request in a form that a job can store; None without
    traces.
    """
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(TRACEPARENT)


class JobSpans:
    """Emits spans of a job and its stages below the span of its request, even after a restart of
    the server.
    """

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = (provider or NoOpTracerProvider()).get_tracer("crucible")

    def observe(self, job: Job, event: JobEvent) -> None:
        """Emit a span for a finished stage and for a job that has ended."""
        now_s = dt.datetime.now(dt.UTC).timestamp()
        if isinstance(event, StageEvent):
            if event.state == "finished":
                self._emit_span(
                    job,
                    f"stage {event.stage}",
                    now_s - event.seconds,
                    now_s,
                    subject=event.subject,
                )
        elif job.is_final:
            self._emit_span(
                job,
                "job",
                now_s - job.took_s,
                now_s,
                plan=job.name,
                state=job.state,
                device=job.device,
                verdict=job.verdict or "",
            )

    def _emit_span(
        self, job: Job, span_name: str, start_s: float, end_s: float, **attributes: str
    ) -> None:
        carrier = {TRACEPARENT: job.trace} if job.trace else {}
        parent = TraceContextTextMapPropagator().extract(carrier)
        labels = {f"crucible.{key}": value for key, value in attributes.items() if value}
        labels["crucible.job"] = job.id
        span = self._tracer.start_span(
            span_name, parent, attributes=labels, start_time=int(start_s * 1e9)
        )
        span.end(int(end_s * 1e9))
