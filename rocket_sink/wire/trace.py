"""Message traces in the format of RocketMQ's dashboard (TraceDataEncoder): one line per event.

0x01 separates fields, and 0x02 ends a line. A trace message has many lines; its index keys are the
message ids and keys of all lines. Its topic is RMQ_SYS_TRACE_TOPIC or the option `traceTopic`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, get_type_hints

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


@dataclass(slots=True)
class Trace:
    """The first fields of a trace. Blanks separate `keys`; `store_host` is the broker's address."""

    time_ms: int
    region_id: str
    producer_group: str
    topic: str
    message_id: str
    tags: str
    keys: str
    store_host: str


@dataclass(slots=True)
class PubTrace(Trace):
    """The trace of a send. `cost_ms` is the duration with all attempts."""

    body_length: int
    cost_ms: int
    message_type: MessageType
    offset_message_id: str
    success: bool


@dataclass(slots=True)
class EndTransactionTrace(Trace):
    """The trace of a transaction's end. `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""

    message_type: MessageType
    transaction_id: str
    state: str
    from_transaction_check: bool


_NAMES: Final[dict[type[Trace], str]] = {PubTrace: "Pub", EndTransactionTrace: "EndTransaction"}
_VALUES: Final[dict[type[Trace], Callable[[Any], tuple[Any, ...]]]] = {
    kind: attrgetter(*kind.__dataclass_fields__) for kind in _NAMES
}
_FORMS: Final[dict[type[Trace], str]] = {
    kind: CONTENT_SEPARATOR.join(
        [name, *("%s" if form in (str, bool) else "%d" for form in get_type_hints(kind).values())]
    )
    for kind, name in _NAMES.items()
}


def encode_traces(traces: Iterable[Trace]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (body, index keys) of as few trace messages as the limits allow. Raise
    LocalProtocolError if a field holds a separator."""
    lines: list[str] = []
    keys: set[str] = set()
    body_bytes = key_bytes = 0
    for trace in traces:
        line = _encode_line(trace)
        # Blanks separate keys, so the words of an id with blanks become keys, as in Java.
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
    *values, flag = _VALUES[type(trace)](trace)
    line = _FORMS[type(trace)] % (*values, "true" if flag else "false")
    if line.count(CONTENT_SEPARATOR) != len(values) + 1 or FIELD_SEPARATOR in line:
        raise LocalProtocolError(
            f"a trace of the message {trace.message_id!r} holds 0x01 or 0x02, its separators"
        )
    return line + FIELD_SEPARATOR
