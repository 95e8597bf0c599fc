"""OpenTelemetry, where it is installed and the standard `OTEL_*` variables ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from sqlalchemy import Engine

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_NOT_TRACED = "healthz,readyz,metrics"


def install(
    app: FastAPI, engine: Engine, provider: TracerProvider | None = None
) -> Callable[[], None]:
    """Trace every request and every statement, without the values in them.

    Args:
        app: whose requests.
        engine: whose statements.
        provider: where the spans go; by default where `OTEL_EXPORTER_OTLP_ENDPOINT` says.

    Returns:
        What sends the spans that still wait, and then no more.

    Raises:
        ImportError: the extra `otel` is not installed.
    """
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor

    provider = provider or _exporting()
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=_NOT_TRACED, exclude_spans=["receive", "send"]
    )
    SQLAlchemyInstrumentor().instrument(
        engine=engine,
        tracer_provider=provider,
        skip_dep_check=True,  # it has not yet said that it knows SQLAlchemy 2.1; the tests do
    )
    return provider.shutdown


def _exporting() -> TracerProvider:
    """A provider that sends batches of spans as the standard variables say."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": "privacy-accountant"})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
