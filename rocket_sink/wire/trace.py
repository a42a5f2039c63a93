"""Message traces in the format of RocketMQ's dashboard (TraceDataEncoder): one line per event.

Fields are separated by 0x01, lines by 0x02. A trace message holds many lines; its index keys are
all message ids and keys in them. It is sent to RMQ_SYS_TRACE_TOPIC or the option `traceTopic`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rocket_sink.errors import LocalProtocolError

CONTENT_SEPARATOR: Final = "\x01"
FIELD_SEPARATOR: Final = "\x02"


class MessageType(enum.IntEnum):
    """The ordinals of MessageType.java."""

    NORMAL = 0
    TRANSACTION_HALF = 1
    TRANSACTION_COMMIT = 2
    DELAY = 3
    ORDER = 4


@dataclass(frozen=True)
class PubTrace:
    """A send. `keys` are joined by blanks; `cost_ms` is the duration with all attempts."""

    time_ms: int
    region_id: str
    producer_group: str
    topic: str
    message_id: str
    tags: str
    keys: str
    store_host: str
    """The broker's address."""
    body_length: int
    cost_ms: int
    message_type: MessageType
    offset_message_id: str
    success: bool


@dataclass(frozen=True)
class EndTransactionTrace:
    """A transaction's end. `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""

    time_ms: int
    region_id: str
    producer_group: str
    topic: str
    message_id: str
    tags: str
    keys: str
    store_host: str
    message_type: MessageType
    transaction_id: str
    state: str
    from_transaction_check: bool


Trace = PubTrace | EndTransactionTrace

_NAMES: Final[dict[type[Trace], str]] = {
    PubTrace: "Pub",
    EndTransactionTrace: "EndTransaction",
}


def encode_trace(traces: Iterable[Trace]) -> tuple[str, frozenset[str]]:
    """The body text of one trace message, and its keys.

    Raises:
        LocalProtocolError: a field holds a separator.
    """
    lines = []
    keys: set[str] = set()
    for trace in traces:
        lines.append(_encode_line(trace))
        # An id may hold blanks, which separate keys: so does the property that Java writes.
        keys.update(f"{trace.message_id} {trace.keys}".split(" "))
    return "".join(lines), frozenset(keys - {""})


def _encode_line(trace: Trace) -> str:
    values = [_NAMES[type(trace)]]
    for name in trace.__dataclass_fields__:
        value = getattr(trace, name)
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, int):
            value = str(int(value))
        if CONTENT_SEPARATOR in value or FIELD_SEPARATOR in value:
            raise LocalProtocolError(f"the trace's {name} holds 0x01 or 0x02, its separators")
        values.append(value)
    return CONTENT_SEPARATOR.join(values) + FIELD_SEPARATOR
