"""OpenTelemetry tracing, enabled by the standard `OTEL_*` variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from sqlalchemy import Engine

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_EXCLUDED_ROUTES = "healthz,readyz,metrics"


def install(
    app: FastAPI, engine: Engine, provider: TracerProvider | None = None
) -> Callable[[], None]:
    """Trace every request and every SQL statement, without the values they contain.

    Args:
        app: the application whose requests are traced.
        engine: the database whose statements are traced.
        provider: exports the spans; by default to `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Returns:
        A function that stops tracing and sends the remaining spans.

    Raises:
        ImportError: the extra `otel` is not installed.
    """
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor

    provider = provider or _create_export_provider()
    FastAPIInstrumentor.instrument_app(
        app,
        tracer_provider=provider,
        excluded_urls=_EXCLUDED_ROUTES,
        exclude_spans=["receive", "send"],
    )
    SQLAlchemyInstrumentor().instrument(
        engine=engine,
        tracer_provider=provider,
        skip_dep_check=True,  # it does not declare SQLAlchemy 2.1 yet; the tests cover it
    )

    def stop() -> None:
        """Stop tracing; engines created later in this process are not traced either."""
        SQLAlchemyInstrumentor().uninstrument()
        FastAPIInstrumentor.uninstrument_app(app)
        provider.shutdown()

    return stop


def _create_export_provider() -> TracerProvider:
    """Return a provider that exports spans in batches, set up by the OTEL_* variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": "privacy-accountant"})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
