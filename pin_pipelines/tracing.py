"""Traces: one span a run and one a batch, by OpenTelemetry's API (specs, «Наблюдаемость», «Traces»).

The engines make their spans through this module alone. As long as nobody sets OpenTelemetry's SDK up, the API's spans
are empty and cost microseconds. ``export_spans`` sets it up, where the standard environment variables name a collector.

Every span carries ``correlationId``, the id of the run. Attributes that are None are left out. An exception that leaves
a span is recorded in it, and makes it one that failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from opentelemetry import context, trace

P = ParamSpec("P")
R = TypeVar("R")

CORRELATION_ID = "correlationId"
SERVICE_NAME = "pin-pipelines"

_HTTP_PROTOCOL = "http/protobuf"

_tracer = trace.get_tracer(__package__)
_logger = logging.getLogger(__name__)


@contextmanager
def span(name: str, run_id: str | None, **attributes: Any) -> Iterator[None]:
    """A span of a run; what is done in it, in this thread or a ``carried`` job, belongs to it.

    Args:
        name: of the span.
        run_id: Dagster's id of the run; becomes ``correlationId``. None for a run that has none.
        attributes: as they are known when the span begins.
    """
    with _tracer.start_as_current_span(name, attributes=_plain({CORRELATION_ID: run_id, **attributes})):
        yield


@contextmanager
def batch_span(name: str, run_id: str | None) -> Iterator[Callable[..., None]]:
    """A span that begins now, for a batch that is known later; where there turns out to be none, there is no span.

    Yields:
        What makes the span, of the attributes that it is called with. Called again, it adds to them.
    """
    began = time.time_ns()
    with ExitStack() as opened:
        spans: list[trace.Span] = []

        def describe(**attributes: Any) -> None:
            if spans:
                annotate(**attributes)
                return
            spans.append(
                opened.enter_context(
                    _tracer.start_as_current_span(
                        name, attributes=_plain({CORRELATION_ID: run_id, **attributes}), start_time=began
                    )
                )
            )

        yield describe


def annotate(**attributes: Any) -> None:
    """Add to the attributes of the span that is current in this thread."""
    current = trace.get_current_span()
    if current.is_recording():
        current.set_attributes(_plain(attributes))


def note(event: str, **attributes: Any) -> None:
    """Note something that happened, at this moment, in the span that is current in this thread."""
    current = trace.get_current_span()
    if current.is_recording():
        current.add_event(event, _plain(attributes))


def carried(job: Callable[P, R]) -> Callable[P, R]:
    """The job, to be called in another thread as a part of the span that is current in this one."""
    here = context.get_current()

    @wraps(job)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = context.attach(here)
        try:
            return job(*args, **kwargs)
        finally:
            context.detach(token)

    return call


@cache
def export_spans() -> None:
    """Send the spans of this process to a collector, if OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) names one.

    The SDK reads the other standard variables itself. It sends by and by, and what is left when the process ends.
    Called again, nothing happens, and neither does where somebody set the SDK up before, as its wrapper for commands
    does. Traces are an aid: what is wrong with their settings is logged, and stops nobody.
    """
    endpoint = _variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint is None or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or _HTTP_PROTOCOL
    if protocol != _HTTP_PROTOCOL:
        _logger.warning(
            "no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL is %r and must be %s", protocol, _HTTP_PROTOCOL
        )
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _logger.warning("no traces are sent: %s is missing; install with the extra `otel`", error.name)
        return
    # The service has a name of its own, unless the environment gives it another.
    named = Resource({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create(named.attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def _variable(*names: str) -> str | None:
    """The first of the variables that is set to something."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def _plain(attributes: dict[str, Any]) -> dict[str, str | bool | int | float]:
    return {
        name: value if isinstance(value, bool | int | float) else str(value)
        for name, value in attributes.items()
        if value is not None
    }
