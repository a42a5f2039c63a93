"""Client message ids (UNIQ_KEY), broker message ids (offset message ids), and recall handles.

A client id (MessageClientIDSetter) is upper-case hex of address (4 or 16 bytes), process id (2), a
32-bit number (4; Java: a class loader's hash), milliseconds since the start of the month (4), and a
counter (2). A broker id (MessageDecoder.createMessageId) has address (4 or 16), port (4), and
commit-log offset (8).

The caller passes the address, process id, time, and 32 random bits (`class_hash`). Containers often
have equal process ids, but differ in the bits. A forked child must make a new `MessageIds`. A
recall handle (RecallMessageHandle, version 1) names a timed message to recall."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterable
from datetime import datetime, tzinfo
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple

from rocket_sink.errors import LocalProtocolError, MessageError, RemoteProtocolError

_OFFSET: Final = struct.Struct(">iq")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LONGER_THAN_A_MONTH_MS: Final = 32 * 24 * 3600 * 1000
_OFFSET_IDS: Final = re.compile(rb"(?:[0-9a-fA-F]{32}(?:[0-9a-fA-F]{24})?(?:,(?=.)|$))*", re.DOTALL)


class MessageIds:
    """Client message ids of one process; not thread-safe. After 65,536 ids in one millisecond, the
    time in the ids grows by 1 ms. Java repeats ids then. `tz`: the time zone of months
    (`month_start_ms`)."""

    def __init__(self, *, ip: bytes, pid: int, class_hash: int, tz: tzinfo | None = None) -> None:
        id_prefix(ip, pid, class_hash)
        self._ip, self._pid, self._class_hash, self._tz = ip, pid, class_hash, tz
        self._prefix = ""
        self._start_ms = self._end_ms = 0
        """Start and end of the month of `_now_ms`."""
        self._now_ms = 0
        self._now_prefix = ""
        """The common prefix of the ids of this millisecond."""
        self._counter = 0
        self._remaining = 0

    def next(self, now_ms: int) -> str:
        """Return a new id; `now_ms` is milliseconds since 1970."""
        if now_ms > self._now_ms or self._remaining == 0:
            self._move_on(now_ms)
        self._remaining -= 1
        counter = self._counter
        self._counter = (counter + 1) & 0xFFFF
        return f"{self._now_prefix}{counter:04X}"

    def several(self, count: int, now_ms: int) -> list[str]:
        """Return `count` new ids, in a third of the time that calls of `next` take."""
        ids: list[str] = []
        while len(ids) < count:
            if now_ms > self._now_ms or self._remaining == 0:
                self._move_on(now_ms)
            counter, now_prefix = self._counter, self._now_prefix
            end = counter + min(count - len(ids), self._remaining, 0x10000 - counter)
            ids += [f"{now_prefix}{number:04X}" for number in range(counter, end)]
            self._remaining -= end - counter
            self._counter = end & 0xFFFF
        return ids

    def _move_on(self, now_ms: int) -> None:
        self._now_ms = max(now_ms, self._now_ms + 1)
        self._remaining = 0x10000
        if self._now_ms >= self._end_ms:
            self._start_ms = month_start_ms(self._now_ms, self._tz)
            self._end_ms = month_start_ms(self._start_ms + _LONGER_THAN_A_MONTH_MS, self._tz)
            # The times in ids repeat each month. A new prefix keeps the ids different.
            self._prefix = id_prefix(self._ip, self._pid, self._class_hash)
            self._class_hash += 1
        self._now_prefix = f"{self._prefix}{(self._now_ms - self._start_ms) & 0xFFFFFFFF:08X}"


def id_prefix(ip: bytes, pid: int, class_hash: int) -> str:
    """Return the fixed hex digits of a process's client message ids: 20 with IPv4, 44 with IPv6."""
    if len(ip) not in (4, 16):
        raise LocalProtocolError(f"an address of {len(ip)} bytes; 4 or 16 are possible")
    return (ip + struct.pack(">HI", pid & 0xFFFF, class_hash & 0xFFFFFFFF)).hex().upper()


def month_start_ms(now_ms: int, tz: tzinfo | None = None) -> int:
    """Return the start of the month of `now_ms`; `tz` None is local time, as in Java."""
    now = datetime.fromtimestamp(now_ms // 1000, tz)
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(start.timestamp() * 1000)


def offset_message_id(host: str, port: int, offset: int) -> str:
    """Return the broker's id of the message at a commit-log offset. Raise LocalProtocolError if
    `host` is no numeric address."""
    return (_packed(host) + _OFFSET.pack(port, offset)).hex().upper()


@lru_cache
def _packed(host: str) -> bytes:
    try:
        return ip_address(host).packed
    except ValueError:
        raise LocalProtocolError(f"{host[:60]!r} is not an IP address") from None


def decode_offset_message_id(text: str) -> int:
    """Return the commit-log offset in a broker's id; raise RemoteProtocolError for other texts."""
    if len(text) not in (32, 56) or not _HEX.issuperset(text):
        raise RemoteProtocolError(f"{text[:60]!r} is not an offset message id: 32 or 56 hex digits")
    return int.from_bytes(bytes.fromhex(text[-16:]), "big", signed=True)


_LAST_PORT: Final = 65_535


def address_in_id(text: str) -> str:
    """Return the address `host:port` of the broker that made an id (`decode_offset_message_id`).
    Raise RemoteProtocolError for a client's id, which has no port at that place."""
    packed = bytes.fromhex(text)
    host, port = ip_address(packed[:-12]), int.from_bytes(packed[-12:-8], "big")
    if port > _LAST_PORT:
        raise RemoteProtocolError(f"{text} is a client's id (UNIQ_KEY), not the id of a broker")
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"


def check_offset_message_ids(ids: Iterable[bytes]) -> None:
    """Raise RemoteProtocolError if one of `ids` is not a broker's message id."""
    joined = b",".join(ids)
    if not _OFFSET_IDS.fullmatch(joined):
        for text in joined.split(b","):
            decode_offset_message_id(text.decode(errors="replace"))


_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """The parts of a recall handle. `deliver_ms` is text; `message_id` is the client's id."""

    topic: str
    broker_name: str
    deliver_ms: str
    message_id: str


def decode_recall_handle(text: str) -> RecallHandle:
    """Return the parts of a `SendResult.recall_handle`. Raise MessageError for other texts."""
    try:
        # Add padding: Java's decoder does without it, Python's does not.
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        items = raw.decode().split(" ")
    except (binascii.Error, ValueError):
        items = []
    if len(items) < 5 or items[0] != _VERSION:
        raise MessageError(
            f"{text[:60]!r} is no recall handle; one is in the SendResult of a timed message that "
            "a 5.3 broker has stored",
            code="INVALID_RECALL_HANDLE",
        )
    return RecallHandle(*items[1:5])
