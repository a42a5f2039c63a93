"""The messages of a scripted broker in memory: queues, read requests, and half messages.

As in a real broker, half messages are hidden until END_TRANSACTION. The store does not remember an
end, so each commit stores the message again. Each check appends a copy of the half message, which
can be committed, too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from rocket_sink.wire.batch import InnerMessage, iter_batch
from rocket_sink.wire.codes import RequestCode, ResponseCode, SysFlag
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.headers import ONEWAY_FLAG, Frame, response_to
from rocket_sink.wire.properties import (
    CLUSTER,
    PGROUP,
    TRAN_MSG,
    UNIQ_KEY,
    decode_properties,
    split_keys,
)
from rocket_sink.wire.stored import StoredMessage, encode_stored

CLUSTER_NAME = "FakeCluster"
"""The property CLUSTER of every stored message."""
TIMERS = frozenset({"TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"})
_INFLATED_MAX_BYTES = 16 * 1024 * 1024


class MemoryStore:
    """Queues by (topic, queue id), and a commit log."""

    def __init__(self, host: tuple[str, int]) -> None:
        self._host = host
        self._queues: dict[tuple[str, int], list[StoredMessage]] = {}
        self._log: dict[int, StoredMessage] = {}
        self._end = 0

    def put(self, request: Frame, queue_id: int) -> list[StoredMessage]:
        """Append the message or batch of a request with the field names of SEND_MESSAGE_V2."""
        ext = request.ext or {}
        body = bytes(request.body or b"")
        sys_flag = int(ext.get("f", "0"))
        if ext.get("m") == "true":
            messages = list(iter_batch(body))
        else:
            if sys_flag & SysFlag.COMPRESSED:
                kind = CompressionType.of_sys_flag(sys_flag)
                body = inflate(body, kind, cap=_INFLATED_MAX_BYTES)
            properties = decode_properties(ext.get("i", ""))
            messages = [InnerMessage(int(ext.get("h", "0")), body, properties, False)]
        store_ms = now_ms()
        return [
            self.append(
                StoredMessage(
                    topic=ext["b"],
                    body=message.body,
                    flag=message.flag,
                    properties={**message.properties, CLUSTER: CLUSTER_NAME},
                    queue_id=queue_id,
                    sys_flag=sys_flag,
                    born_ms=int(ext.get("g", "0")),
                    store_ms=store_ms,
                    store_host=self._host,
                )
            )
            for message in messages
        ]

    def at(self, commit_log_offset: int) -> StoredMessage | None:
        return self._log.get(commit_log_offset)

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return the messages of a topic in the order in which they were stored."""
        return [m for m in self._log.values() if m.topic == topic]

    def forget(self, topic: str) -> None:
        for queue in [queue for queue in self._queues if queue[0] == topic]:
            for message in self._queues.pop(queue):
                self._log.pop(message.commit_log_offset)

    def remove(self, commit_log_offset: int) -> None:
        """Remove a message from the commit log; its queue keeps it."""
        self._log.pop(commit_log_offset)

    def tear(self, commit_log_offset: int, kept: Mapping[str, str]) -> None:
        """Keep only these properties of a message, as in the last message of a killed broker."""
        torn = replace(self._log[commit_log_offset], properties=dict(kept), torn=True)
        self._log[commit_log_offset] = torn
        self._queues[torn.topic, torn.queue_id][torn.queue_offset] = torn

    def recall(self, message_id: str) -> bool:
        """Remove the timed message with this client id; return False if there is none."""
        for message in self._log.values():
            properties = message.properties
            if TIMERS & properties.keys() and properties.get(UNIQ_KEY) == message_id:
                self.remove(message.commit_log_offset)
                return True
        return False

    def append(self, message: StoredMessage) -> StoredMessage:
        """Append the message to its queue and the commit log; return it with its offsets."""
        queue = self._queues.setdefault((message.topic, message.queue_id), [])
        stored = replace(message, queue_offset=len(queue), commit_log_offset=self._end)
        queue.append(stored)
        self._log[self._end] = stored
        self._end += len(encode_message(stored))
        return stored

    # --- read requests ----------------------------------------------------------------------

    def min_offset(self, request: Frame) -> Frame:
        return _offset(request, 0)

    def max_offset(self, request: Frame) -> Frame:
        return _offset(request, len(self._queue(request)))

    def offset_by_time(self, request: Frame) -> Frame:
        time_ms = int((request.ext or {})["timestamp"])
        return _offset(request, sum(m.store_ms < time_ms for m in self._queue(request)))

    def pull(self, request: Frame) -> Frame:
        ext = request.ext or {}
        queue, offset = self._queue(request), int(ext["queueOffset"])
        messages = queue[offset : offset + int(ext["maxMsgNums"])]
        fields = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(min(offset + len(messages), len(queue))),
            "minOffset": "0",
            "maxOffset": str(len(queue)),
        }
        code = ResponseCode.SUCCESS if messages else ResponseCode.PULL_NOT_FOUND
        return response_to(request, code, ext=fields, body=_body(messages))

    def query(self, request: Frame) -> Frame:
        """Find messages by an index key or, with `_UNIQUE_KEY_QUERY`, by the client message id."""
        ext = request.ext or {}
        key, by_id = ext["key"], ext.get("_UNIQUE_KEY_QUERY") == "true"
        matches = [
            m
            for m in self.messages(ext["topic"])
            if key in ([m.properties.get(UNIQ_KEY)] if by_id else split_keys(m.properties))
        ]
        if not matches:
            return response_to(request, ResponseCode.QUERY_NOT_FOUND)
        fields = {"indexLastUpdateTimestamp": str(now_ms()), "indexLastUpdatePhyoffset": "0"}
        body = _body(matches[: int(ext["maxNum"])])
        return response_to(request, ResponseCode.SUCCESS, ext=fields, body=body)

    def view(self, request: Frame) -> Frame:
        message = self.at(int((request.ext or {})["offset"]))
        if message is None:
            return response_to(request, ResponseCode.SYSTEM_ERROR, remark="can not find message")
        return response_to(request, ResponseCode.SUCCESS, body=_body([message]))

    def _queue(self, request: Frame) -> list[StoredMessage]:
        ext = request.ext or {}
        return self._queues.get((ext["topic"], int(ext["queueId"])), [])


def _offset(request: Frame, offset: int) -> Frame:
    return response_to(request, ResponseCode.SUCCESS, ext={"offset": str(offset)})


def encode_message(message: StoredMessage) -> bytes:
    """Return the bytes of the message in an answer, without compression."""
    sys_flag = message.sys_flag & ~(SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK)
    return encode_stored(replace(message, sys_flag=sys_flag))


def _body(messages: list[StoredMessage]) -> bytes | None:
    return b"".join(encode_message(message) for message in messages) or None


def now_ms() -> int:
    return time.time_ns() // 1_000_000


HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
_REAL_TOPIC, _REAL_QID = "REAL_TOPIC", "REAL_QID"


class Halves:
    """The half messages of one store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._open: dict[int, StoredMessage] = {}

    @staticmethod
    def is_half(request: Frame) -> bool:
        """Return whether the send is a half message (SendMessageProcessor)."""
        properties = decode_properties((request.ext or {}).get("i", ""))
        return properties.get(TRAN_MSG, "").lower() == "true"

    def put(self, request: Frame, queue_id: int) -> list[StoredMessage]:
        """Store a message in the half topic (TransactionalMessageBridge)."""
        ext = dict(request.ext or {})
        real = f"{_REAL_TOPIC}\x01{ext['b']}\x02{_REAL_QID}\x01{queue_id}\x02"
        hidden = replace(request, ext={**ext, "b": HALF_TOPIC, "i": ext.get("i", "") + real})
        stored = self._store.put(hidden, 0)
        self._open |= {half.commit_log_offset: half for half in stored}
        return stored

    def end(self, request: Frame) -> Frame | None:
        """Handle END_TRANSACTION; like brokers, do not answer the state "unknown"."""
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
        return list(self._open.values())

    def lose(self) -> None:
        for half in self._store.messages(HALF_TOPIC):
            self._store.remove(half.commit_log_offset)
        self._open.clear()

    def check(self, half: StoredMessage) -> Frame:
        """Copy a half message, as brokers do, and return the transaction check of the copy."""
        del self._open[half.commit_log_offset]
        half = self._store.append(half)
        self._open[half.commit_log_offset] = half
        topic, queue_id = half.properties[_REAL_TOPIC], int(half.properties[_REAL_QID])
        ext = {
            "topic": topic,
            "tranStateTableOffset": str(half.queue_offset),
            "commitLogOffset": str(half.commit_log_offset),
            "msgId": half.properties[UNIQ_KEY],
            "transactionId": half.properties[UNIQ_KEY],
            "offsetMsgId": half.offset_message_id,
        }
        body = encode_message(replace(half, topic=topic, queue_id=queue_id))
        return Frame(RequestCode.CHECK_TRANSACTION_STATE, ext, body, flag=ONEWAY_FLAG)


def _wrong(half: StoredMessage | None, ext: Mapping[str, str]) -> str:
    """Return why the half message does not fit the request (checkPrepareMessage); else empty."""
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
