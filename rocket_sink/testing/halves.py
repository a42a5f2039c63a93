"""Half messages of a scripted broker: hidden until END_TRANSACTION, checked when a test says so.

As a real broker, it remembers no end: it commits as often as it is told to, and each check writes
the half message anew, so that there are two places of it that can be committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rocket_sink.testing.store import MemoryStore, encode_message
from rocket_sink.wire.codes import RequestCode, ResponseCode, SysFlag
from rocket_sink.wire.command import Frame, response_to
from rocket_sink.wire.properties import PGROUP, TRAN_MSG, UNIQ_KEY, decode_properties
from rocket_sink.wire.stored import StoredMessage

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
_REAL_TOPIC, _REAL_QID = "REAL_TOPIC", "REAL_QID"


class Halves:
    """The half messages in one store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._open: dict[int, StoredMessage] = {}

    @staticmethod
    def is_half(request: Frame) -> bool:
        """The send wants its message prepared, not stored (SendMessageProcessor)."""
        properties = decode_properties((request.ext or {}).get("i", ""))
        return properties.get(TRAN_MSG, "").lower() == "true"

    def put(self, request: Frame, queue_id: int, now_ms: int) -> list[StoredMessage]:
        """Store it in the hidden topic, as TransactionalMessageBridge does."""
        ext = dict(request.ext or {})
        real = f"{_REAL_TOPIC}\x01{ext['b']}\x02{_REAL_QID}\x01{queue_id}\x02"
        hidden = replace(request, ext={**ext, "b": HALF_TOPIC, "i": ext.get("i", "") + real})
        stored = self._store.put(hidden, 0, now_ms)
        self._open |= {half.commit_log_offset: half for half in stored}
        return stored

    def end(self, request: Frame) -> Frame | None:
        """END_TRANSACTION; a broker does not answer the state "unknown"."""
        ext = request.ext or {}
        state = int(ext["commitOrRollback"])
        if state == SysFlag.TRANSACTION_NOT:
            return None
        half = self._store.at(int(ext["commitLogOffset"]))
        wrong = _wrong(half, ext)
        if half is None or wrong:
            return response_to(request, ResponseCode.SYSTEM_ERROR, remark=wrong)
        if state == SysFlag.TRANSACTION_COMMIT:
            self._store.append(_real(half))
        self._open.pop(half.commit_log_offset, None)
        return response_to(request, ResponseCode.SUCCESS)

    def messages(self) -> list[StoredMessage]:
        """Those that wait for their end."""
        return list(self._open.values())

    def lose(self) -> None:
        """Forget all of them, as when their part of the log is deleted."""
        for half in self._store.messages(HALF_TOPIC):
            self._store.remove(half.commit_log_offset)
        self._open.clear()

    def check(self, half: StoredMessage) -> Frame:
        """The broker's question about a half message, of which it writes a copy first."""
        del self._open[half.commit_log_offset]
        half = self._store.append(half)
        self._open[half.commit_log_offset] = half
        shown = replace(
            half,
            topic=half.properties[_REAL_TOPIC],
            queue_id=int(half.properties[_REAL_QID]),
        )
        ext = {
            "topic": shown.topic,
            "tranStateTableOffset": str(half.queue_offset),
            "commitLogOffset": str(half.commit_log_offset),
            "msgId": half.properties[UNIQ_KEY],
            "transactionId": half.properties[UNIQ_KEY],
            "offsetMsgId": half.offset_message_id,
        }
        frame = Frame(RequestCode.CHECK_TRANSACTION_STATE, ext, encode_message(shown))
        frame.flag |= 2  # oneway
        return frame


def _wrong(half: StoredMessage | None, ext: Mapping[str, str]) -> str:
    """EndTransactionProcessor.checkPrepareMessage."""
    if half is None or half.topic != HALF_TOPIC:
        return "Find prepared transaction message failed"
    if half.properties.get(PGROUP) != ext["producerGroup"]:
        return "The producer group wrong"
    if half.queue_offset != int(ext["tranStateTableOffset"]):
        return "The transaction state table offset wrong"
    return ""


def _real(half: StoredMessage) -> StoredMessage:
    properties = dict(half.properties)
    topic, queue_id = properties.pop(_REAL_TOPIC), int(properties.pop(_REAL_QID))
    properties.pop(TRAN_MSG)
    return replace(half, topic=topic, queue_id=queue_id, properties=properties)
