"""The messages of one scripted broker, in memory, found by offset, key and client message id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rocket_sink.wire.batch import decode_batch
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.command import Frame
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.properties import CLUSTER, UNIQ_KEY, decode_properties
from rocket_sink.wire.stored import StoredMessage, encode_stored

CLUSTER_NAME = "FakeCluster"
"""The name that every stored message gets as its property CLUSTER."""
TIMERS = frozenset({"TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"})
_INFLATED_MAX_BYTES = 16 * 1024 * 1024


class MemoryStore:
    """Queues by (topic, queue id); a commit-log offset per message, as a real store has."""

    def __init__(self, host: tuple[str, int]) -> None:
        self._host = host
        self._queues: dict[tuple[str, int], list[StoredMessage]] = {}
        self._log: dict[int, StoredMessage] = {}
        self._end = 0

    def put(self, request: Frame, queue_id: int, now_ms: int) -> list[StoredMessage]:
        """Append the message or the batch of a send request (SEND_MESSAGE_V2 names)."""
        ext = request.ext or {}
        body = bytes(request.body or b"")
        sys_flag = int(ext.get("f", "0"))
        base = StoredMessage(
            topic=ext["b"],
            body=b"",
            queue_id=queue_id,
            sys_flag=sys_flag,
            born_ms=int(ext.get("g", "0")),
            store_ms=now_ms,
            store_host=self._host,
        )
        if ext.get("m") == "true":
            return [
                self.append(
                    replace(
                        base,
                        body=inner.body,
                        flag=inner.flag,
                        properties={**inner.properties, CLUSTER: CLUSTER_NAME},
                    )
                )
                for inner in decode_batch(body)
            ]
        if sys_flag & SysFlag.COMPRESSED:
            kind = CompressionType.of_sys_flag(sys_flag)
            body = inflate(body, kind, cap=_INFLATED_MAX_BYTES)
        properties = {**decode_properties(ext.get("i", "")), CLUSTER: CLUSTER_NAME}
        flag = int(ext.get("h", "0"))
        return [self.append(replace(base, body=body, flag=flag, properties=properties))]

    def max_offset(self, topic: str, queue_id: int) -> int:
        return len(self._queues.get((topic, queue_id), ()))

    def read(self, topic: str, queue_id: int, offset: int, count: int) -> list[StoredMessage]:
        return self._queues.get((topic, queue_id), [])[offset : offset + count]

    def find(self, topic: str, key: str, *, unique: bool) -> list[StoredMessage]:
        """By client message id, or by one of the index keys."""
        return [m for m in self.messages(topic) if _has_key(m.properties, key, unique=unique)]

    def at(self, commit_log_offset: int) -> StoredMessage | None:
        return self._log.get(commit_log_offset)

    def messages(self, topic: str) -> list[StoredMessage]:
        """All messages of a topic in the order in which they were stored."""
        return [m for m in self._log.values() if m.topic == topic]

    def forget(self, topic: str) -> None:
        """Delete a topic's messages."""
        for queue in [queue for queue in self._queues if queue[0] == topic]:
            for message in self._queues.pop(queue):
                self._log.pop(message.commit_log_offset)

    def remove(self, commit_log_offset: int) -> None:
        """Take a message out of the log; the queue keeps its place."""
        self._log.pop(commit_log_offset)

    def tear(self, commit_log_offset: int, kept: Mapping[str, str]) -> None:
        """Leave these of its properties, as of the last message that a killed broker wrote."""
        torn = replace(self._log[commit_log_offset], properties=dict(kept), torn=True)
        self._log[commit_log_offset] = torn
        self._queues[torn.topic, torn.queue_id][torn.queue_offset] = torn

    def recall(self, message_id: str) -> bool:
        """Take the timed message with this client id out of the log; False when it is not there."""
        for message in list(self._log.values()):
            if (
                TIMERS & message.properties.keys()
                and message.properties.get(UNIQ_KEY) == message_id
            ):
                self.remove(message.commit_log_offset)
                return True
        return False

    def append(self, message: StoredMessage) -> StoredMessage:
        """Store it at the end of its queue and of the log."""
        queue = self._queues.setdefault((message.topic, message.queue_id), [])
        stored = replace(message, queue_offset=len(queue), commit_log_offset=self._end)
        queue.append(stored)
        self._log[self._end] = stored
        self._end += len(encode_message(stored))
        return stored


def encode_message(message: StoredMessage) -> bytes:
    """The message's bytes in an answer; bodies are sent inflated."""
    return encode_stored(
        replace(
            message, sys_flag=message.sys_flag & ~(SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK)
        )
    )


def _has_key(properties: Mapping[str, str], key: str, *, unique: bool) -> bool:
    if unique:
        return properties.get(UNIQ_KEY) == key
    return key in properties.get("KEYS", "").split(" ")
