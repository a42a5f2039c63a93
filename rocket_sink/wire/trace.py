"""Message traces in the format of RocketMQ's dashboard (TraceDataEncoder): one line per event.

0x01 separates fields, and 0x02 ends a line. A trace message has many lines; its index keys are all
message ids and keys in them. Its topic is RMQ_SYS_TRACE_TOPIC, or the option `traceTopic`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias, get_type_hints

from rocket_sink.errors import LocalProtocolError

CONTENT_SEPARATOR: Final = "\x01"
FIELD_SEPARATOR: Final = "\x02"
_BODY_MAX: Final = 128_000
_KEYS_MAX: Final = 30_000
"""Limit of the bytes of all keys; the properties of a message may have 32,767 bytes."""


class MessageType(enum.IntEnum):
    """The type of a message in a trace (ordinal in MessageType.java)."""

    NORMAL = 0
    TRANSACTION_HALF = 1
    TRANSACTION_COMMIT = 2
    DELAY = 3
    ORDER = 4


class PubTrace(NamedTuple):
    """The trace of a send. `keys` are joined by blanks; `store_host` is the broker's address;
    `cost_ms` is the duration with all attempts."""

    time_ms: int
    region_id: str
    producer_group: str
    topic: str
    message_id: str
    tags: str
    keys: str
    store_host: str
    body_length: int
    cost_ms: int
    message_type: MessageType
    offset_message_id: str
    success: bool


class EndTransactionTrace(NamedTuple):
    """The trace of a transaction's end. `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""

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


Trace: TypeAlias = PubTrace | EndTransactionTrace

_NAMES: Final[dict[type[Trace], str]] = {
    PubTrace: "Pub",
    EndTransactionTrace: "EndTransaction",
}
_FORMS: Final[dict[type[Trace], str]] = {
    kind: CONTENT_SEPARATOR.join(
        [name, *("%s" if form in (str, bool) else "%d" for form in get_type_hints(kind).values())]
    )
    for kind, name in _NAMES.items()
}


def encode_traces(traces: Iterable[Trace]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the body text and the keys of each trace message, as few messages as the limits allow.

    Raises:
        LocalProtocolError: a field holds a separator.
    """
    lines: list[str] = []
    keys: set[str] = set()
    body_bytes = key_bytes = 0
    for trace in traces:
        line = _encode_line(trace)
        # If an id contains blanks, its parts become keys, as in the property that Java writes.
        own = f"{trace.message_id} {trace.keys}"
        own_bytes = len(own.encode()) + 1
        is_full = body_bytes + len(line) > _BODY_MAX or key_bytes + own_bytes > _KEYS_MAX
        if lines and is_full:
            yield "".join(lines), frozenset(keys - {""})
            lines, keys, body_bytes, key_bytes = [], set(), 0, 0
        lines.append(line)
        keys.update(own.split(" "))
        body_bytes, key_bytes = body_bytes + len(line), key_bytes + own_bytes
    if lines:
        yield "".join(lines), frozenset(keys - {""})


def _encode_line(trace: Trace) -> str:
    line = _FORMS[type(trace)] % (*trace[:-1], "true" if trace[-1] else "false")
    if line.count(CONTENT_SEPARATOR) != len(trace) or FIELD_SEPARATOR in line:
        raise LocalProtocolError(
            f"a trace of the message {trace.message_id!r} holds 0x01 or 0x02, its separators"
        )
    return line + FIELD_SEPARATOR
