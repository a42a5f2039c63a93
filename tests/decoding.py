"""Readers and writers for tests: the opposite directions of the product's encoders and decoders."""

import base64
from datetime import datetime, timedelta
from typing import NamedTuple

from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.headers import parse_int64
from rocket_sink.wire.ids import id_prefix, month_start_ms
from rocket_sink.wire.trace import (
    CONTENT_SEPARATOR,
    FIELD_SEPARATOR,
    EndTransactionTrace,
    MessageType,
    PubTrace,
)

_TRACES = {"Pub": PubTrace, "EndTransaction": EndTransactionTrace}


class ClientId(NamedTuple):
    """The parts of a client message id. `elapsed_ms` counts from the start of some month."""

    ip: bytes
    pid: int
    class_hash: int
    elapsed_ms: int
    counter: int

    def nearest_time_ms(self, now_ms, tz=None):
        """Return the latest time before `now_ms` that the id can mean (getNearlyTimeFromID)."""
        start_ms = month_start_ms(now_ms, tz)
        if start_ms + self.elapsed_ms > now_ms:
            last_month = datetime.fromtimestamp(start_ms / 1000, tz) - timedelta(days=1)
            start_ms = month_start_ms(int(last_month.timestamp() * 1000), tz)
        return start_ms + self.elapsed_ms


def decode_message_id(text):
    data = bytes.fromhex(text)
    parts = (data[-12:-10], data[-10:-6], data[-6:-2], data[-2:])
    return ClientId(data[:-12], *(int.from_bytes(part, "big") for part in parts))


def message_id(*, ip, pid, class_hash, start_ms, now_ms, counter):
    """Return a client message id. `start_ms` is a value of `month_start_ms`."""
    elapsed = (now_ms - start_ms) & 0xFFFFFFFF
    return f"{id_prefix(ip, pid, class_hash)}{elapsed:08X}{counter & 0xFFFF:04X}"


def encode_message(message, properties):
    """Encode a message of a batch, with its wire properties."""
    return encode_inner(message.body, properties, message.flag)


def encode_recall_handle(handle):
    return base64.urlsafe_b64encode(" ".join(("v1", *handle)).encode()).decode()


def decode_trace(text):
    """Return the lines of a trace message's body."""
    traces = []
    for line in text.split(FIELD_SEPARATOR)[:-1]:
        kind, *values = line.split(CONTENT_SEPARATOR)
        parts = zip(_TRACES[kind].__dataclass_fields__, values, strict=True)
        traces.append(_TRACES[kind](**{name: _trace_value(name, value) for name, value in parts}))
    return traces


def _trace_value(name, text):
    if name in ("time_ms", "body_length", "cost_ms"):
        return parse_int64(text, name)
    if name == "message_type":
        return MessageType(parse_int64(text, name))
    is_flag = name in ("success", "from_transaction_check")
    return {"true": True, "false": False}[text] if is_flag else text


def sign(ext, body, access_key, secret, token=None):
    """Return the header fields to add to a request."""
    return Credentials(access_key, secret, token).signer()(ext, body)


def batch_body(batch, first, last):
    """Return the request body of the messages `first` to `last` (exclusive)."""
    return bytes(memoryview(batch.data)[int(batch.offsets[first]) : int(batch.offsets[last])])
