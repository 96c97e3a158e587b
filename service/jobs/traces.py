"""Traces, sent by OTLP over HTTP when `otel_endpoint` is set: FastAPI makes the spans of a request;
those of a job and its stages join them.
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
from service.jobs.state import Job, JobEvent, StageSeen
from service.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

SEND_S = 2.0  # an answer of the collector, also at the end: it must not keep the server from ending
PATH = "/v1/traces"  # of OTLP over HTTP
TRACEPARENT = "traceparent"


def provider_from(settings: Settings) -> TracerProvider | None:
    """What makes and sends spans; None without an endpoint. BackendUnavailable names the extra that
    is missing.
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
    """A provider of our own, so that none but this application's spans go there."""
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
    """FastAPI's settings: traces alone. Figures are Prometheus', and the log is ours, which keeps
    keys out.
    """
    return {
        "tracer_provider": provider,
        "tracing": provider is not None,
        "metrics": False,
        "logs": False,
        "auto_configure": False,
    }


def current_trace() -> str | None:
    """The span of the request that is being answered, in a form that a job can keep; None where
    nothing is traced.
    """
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(TRACEPARENT)


class JobSpans:
    """A job and each of its stages as spans below that of the request which made it, also after a
    restart of the server.
    """

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = (provider or NoOpTracerProvider()).get_tracer("crucible")

    def observe(self, job: Job, event: JobEvent) -> None:
        """Tell of a stage that has finished, and of a job that has ended."""
        now_s = dt.datetime.now(dt.UTC).timestamp()
        if isinstance(event, StageSeen):
            if event.state == "finished":
                self._tell(
                    job,
                    f"stage {event.progress.stage}",
                    now_s - event.seconds,
                    now_s,
                    subject=event.progress.subject,
                )
        elif job.is_final:
            self._tell(
                job,
                "job",
                now_s - job.took_s,
                now_s,
                plan=job.name,
                state=job.state,
                device=job.device,
                verdict=job.verdict or "",
            )

    def _tell(
        self, job: Job, span_name: str, start_s: float, end_s: float, **attributes: str
    ) -> None:
        parent = TraceContextTextMapPropagator().extract(
            {TRACEPARENT: job.trace} if job.trace else {}
        )
        named = {
            "crucible.job": job.id,
            **{f"crucible.{key}": value for key, value in attributes.items() if value},
        }
        span = self._tracer.start_span(
            span_name, parent, attributes=named, start_time=int(start_s * 1e9)
        )
        span.end(int(end_s * 1e9))
