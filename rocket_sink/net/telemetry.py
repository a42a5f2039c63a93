"""OpenTelemetry metrics of a messaging client, and the trace context of the current span.

Names and attributes follow the semantic conventions for messaging. This module does not import the
metrics API: a program that uses OpenTelemetry has imported it before it makes a producer. Without
OpenTelemetry an engine has no metrics, and a send only tests for None."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import Outcome, RocketSinkError
from rocket_sink.message_rules import host_and_port
from rocket_sink.net import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocket_sink.message import SendResult

_LOG: Final = log.logger(__name__)
DURATION: Final = "messaging.client.operation.duration"
SENT: Final = "messaging.client.sent.messages"
_SCOPE: Final = "rocket_sink"
_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The bucket boundaries that the conventions recommend."""


class ClientMetrics:
    """Records sends in a histogram of durations and a counter of messages."""

    @classmethod
    def of_process(cls) -> ClientMetrics | None:
        """Return the metrics of this process; None if it has not imported OpenTelemetry. A provider
        that is set later gets the values from then on."""
        api = sys.modules.get("opentelemetry.metrics")
        return None if api is None else cls(api)

    def __init__(self, api: Any) -> None:
        meter = api.get_meter(_SCOPE)
        self._duration = meter.create_histogram(
            DURATION,
            unit="s",
            description="Duration of messaging operation initiated by a producer or consumer "
            "client.",
            explicit_bucket_boundaries_advisory=_BOUNDS_S,
        )
        self._sent = meter.create_counter(
            SENT,
            unit="{message}",
            description="Number of messages producer attempted to send to the broker.",
        )

    def record(
        self,
        topic: str,
        messages: int,
        duration_s: float,
        *,
        address: str | None,
        result: SendResult | None,
        error: RocketSinkError | None,
    ) -> None:
        """Record the end of a send, and raise nothing: an error in an SDK or its views is logged.
        `address` is the last attempt's broker as its route names it, so it may be malformed."""
        attributes: dict[str, str | int] = {
            "messaging.system": "rocketmq",
            "messaging.operation.name": "send",
            "messaging.destination.name": topic,
        }
        server = host_and_port(result.broker_address if result else address or "")
        if server is not None:
            attributes["server.address"], attributes["server.port"] = server
        if error is not None:
            attributes["error.type"] = error.code
        try:
            # Pass two dictionaries, because SDK 1.30 keeps a dictionary without copying it.
            self._duration.record(duration_s, {**attributes, "messaging.operation.type": "send"})
            if getattr(error, "outcome", Outcome.ACKED) is not Outcome.NOT_SENT:
                self._sent.add(messages, attributes)
        except Exception:
            _LOG.exception("OpenTelemetry did not take the measurement of a send, which goes on")


def trace_context() -> Mapping[str, str]:
    """Return the context of the current span as properties: `traceparent`, `tracestate`, and those
    of other propagators. Without a span there are none."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
