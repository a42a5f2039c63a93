"""The state of a broker in a fault table, from the table's view."""

from __future__ import annotations

from rocket_sink.routing.fault import LatencyFaultTolerance


def is_available(
    faults: LatencyFaultTolerance, name: str, now_s: float, topic: str | None = None
) -> bool:
    """Return whether neither the broker nor the topic on it is isolated."""
    isolated, _, pairs = faults.view(now_s)
    return name not in isolated and (topic, name) not in pairs


def is_reachable(faults: LatencyFaultTolerance, name: str) -> bool:
    """Return whether the broker answered its last request, or a later probe."""
    return name not in faults.view(0.0)[1]
