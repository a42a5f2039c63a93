"""The reply of a request-reply pair on its way from a scripted broker to the client that asked."""

from __future__ import annotations

from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.command import ONEWAY_FLAG, Frame

_HEADER = {"producerGroup": "a", "topic": "b", "sysFlag": "f", "bornTimestamp": "g", "flag": "h",
           "properties": "i", "queueId": "e"}  # fmt: skip


def pushed_reply(send: Frame, now_ms: int) -> Frame:
    """PUSH_REPLY_MESSAGE_TO_CLIENT for a SEND_REPLY_MESSAGE_V2 (ReplyMessageProcessor)."""
    ext = send.ext or {}
    fields = {long: ext.get(short, "0") for long, short in _HEADER.items()}
    fields["storeTimestamp"] = str(now_ms)
    frame = Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, fields, send.body)
    frame.flag |= ONEWAY_FLAG
    return frame
