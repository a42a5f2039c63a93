"""What a scripted broker answers to those who read: offsets, pulls, look-ups."""

from __future__ import annotations

import time

from rocket_sink.testing.store import MemoryStore, encode_message
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.command import Frame, response_to
from rocket_sink.wire.stored import StoredMessage


class Reads:
    """The reading requests on one store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def min_offset(self, request: Frame) -> Frame:
        return response_to(request, ResponseCode.SUCCESS, ext={"offset": "0"})

    def max_offset(self, request: Frame) -> Frame:
        ext = request.ext or {}
        offset = self._store.max_offset(ext["topic"], int(ext["queueId"]))
        return response_to(request, ResponseCode.SUCCESS, ext={"offset": str(offset)})

    def offset_by_time(self, request: Frame) -> Frame:
        ext = request.ext or {}
        messages = self._store.read(ext["topic"], int(ext["queueId"]), 0, 1 << 31)
        earlier = sum(message.store_ms < int(ext["timestamp"]) for message in messages)
        return response_to(request, ResponseCode.SUCCESS, ext={"offset": str(earlier)})

    def pull(self, request: Frame) -> Frame:
        ext = request.ext or {}
        topic, queue_id, offset = ext["topic"], int(ext["queueId"]), int(ext["queueOffset"])
        found = self._store.read(topic, queue_id, offset, int(ext["maxMsgNums"]))
        top = self._store.max_offset(topic, queue_id)
        fields = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(min(offset + len(found), top)),
            "minOffset": "0",
            "maxOffset": str(top),
        }
        code = ResponseCode.SUCCESS if found else ResponseCode.PULL_NOT_FOUND
        return response_to(request, code, ext=fields, body=_body(found))

    def query(self, request: Frame) -> Frame:
        ext = request.ext or {}
        unique = ext.get("_UNIQUE_KEY_QUERY") == "true"
        found = self._store.find(ext["topic"], ext["key"], unique=unique)[: int(ext["maxNum"])]
        if not found:
            return response_to(request, ResponseCode.QUERY_NOT_FOUND)
        fields = {"indexLastUpdateTimestamp": str(now_ms()), "indexLastUpdatePhyoffset": "0"}
        return response_to(request, ResponseCode.SUCCESS, ext=fields, body=_body(found))

    def view(self, request: Frame) -> Frame:
        message = self._store.at(int((request.ext or {})["offset"]))
        if message is None:
            return response_to(request, ResponseCode.SYSTEM_ERROR, remark="can not find message")
        return response_to(request, ResponseCode.SUCCESS, body=_body([message]))


def _body(messages: list[StoredMessage]) -> bytes | None:
    return b"".join(encode_message(message) for message in messages) or None


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
