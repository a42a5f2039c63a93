"""The handle by which a timed message can be taken back (RecallMessageHandle, version 1)."""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple

from rocket_sink.errors import MessageError

_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """`deliver_ms` is the delivery time as text, `message_id` the client's (UNIQ_KEY)."""

    topic: str
    broker_name: str
    deliver_ms: str
    message_id: str


def decode_recall_handle(text: str) -> RecallHandle:
    """As `SendResult.recall_handle` has it.

    Raises:
        MessageError: INVALID_RECALL_HANDLE.
    """
    try:
        # Java's decoder takes base64 without its padding, too.
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        items = raw.decode().split(" ")
    except (binascii.Error, ValueError):
        items = []
    if len(items) < 5 or items[0] != _VERSION:
        raise MessageError(
            f"{text[:60]!r} is no recall handle; it is in the SendResult of a timed message that a "
            "5.3 broker stored",
            code="INVALID_RECALL_HANDLE",
        )
    return RecallHandle(*items[1:5])
