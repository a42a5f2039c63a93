"""The brokers' ceiling: batch requests encoded beforehand, written to plain sockets.

No routing, no checks, no retries: each connection keeps some requests in flight and reads the codes
of answers. This is the limit for any sender with these brokers on this machine.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from benchmarks.rows import record_batch
from benchmarks.sender.modes import Job, Send
from rocket_sink.errors import BrokerBusyError, RejectedError
from rocket_sink.message import MessageQueue
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.codes import PermName
from rocket_sink.wire.columns.encode import encode_columns
from rocket_sink.wire.columns.properties import property_pieces
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.requests import send_message_v2

IN_FLIGHT: Final = 4
"""Requests on one connection."""
_REQUEST_MESSAGES: Final = 4000
_REQUEST_BYTES: Final = 1 << 20
_RECEIVE: Final = 1 << 16
_WAIT_S: Final = 30.0


@dataclass(eq=False)
class _Line:
    """A connection to a broker; it sends `frames`, one per queue, in turn."""

    sock: socket.socket
    frames: list[bytes]
    reader: FrameReader = field(default_factory=FrameReader)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    turn: int = 0
    in_flight: int = 0


@contextmanager
def replay(job: Job) -> Iterator[Send]:
    """Whole requests only, so that somewhat more messages may be sent."""
    count = max(1, min(_REQUEST_MESSAGES, _REQUEST_BYTES // (job.size + 100)))
    lines = _lines(job, _encoded(job, count))

    def send(numbers: range, until_s: float | None) -> None:
        began_s = time.monotonic()
        requests = _pump(lines, -(-len(numbers) // count), until_s)
        job.tally.succeeded(began_s, time.monotonic(), range(requests * count))

    try:
        yield send
    finally:
        for line in lines:
            line.sock.close()


def _encoded(job: Job, count: int) -> memoryview:
    batch = record_batch(count, job.size)
    ids = pa.array([f"7F0000010000000000000000{n:08X}" for n in range(count)])
    pieces = property_pieces(
        count, message_ids=ids, tags=batch.column("tags"), keys=batch.column("keys")
    )
    return memoryview(encode_columns(batch.column("body"), pieces).data)


def _lines(job: Job, body: memoryview) -> list[_Line]:
    with Admin(nameServer=job.options["nameServer"], timeout_s=_WAIT_S) as admin:
        route = admin.topic_route(job.topic)
    masters = {broker.name: broker.master for broker in route.brokers}
    lines = []
    for data in route.queues:
        address = masters.get(data.broker_name)
        if address is None or not data.perm & PermName.WRITE:
            continue
        frames = [
            _frame(job, MessageQueue(job.topic, data.broker_name, queue_id), body)
            for queue_id in range(data.write)
        ]
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), _WAIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        lines.append(_Line(sock, frames))
    return lines


def _frame(job: Job, queue: MessageQueue, body: memoryview) -> bytes:
    frame = send_message_v2(
        batch=True, producer_group="benchmark", topic=job.topic, queue_id=queue.queue_id,
        born_ms=int(time.time() * 1000), properties="", broker_name=queue.broker_name,
        body=body,
    )  # fmt: skip
    return encode_frame(frame)


def _pump(lines: list[_Line], requests: int, until_s: float | None) -> int:
    """Send requests over all connections; returns how many were stored."""
    stored, remaining = 0, requests
    selector = selectors.DefaultSelector()
    for line in lines:
        selector.register(line.sock, selectors.EVENT_READ, line)
    with selector:
        while True:
            if until_s is not None and time.monotonic() >= until_s:
                remaining = 0
            for line in lines:
                remaining = _write(line, remaining)
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.rest else 0)
                if selector.get_key(line.sock).events != wanted:
                    selector.modify(line.sock, wanted, line)
            if not remaining and not any(line.in_flight for line in lines):
                return stored
            ready = selector.select(_WAIT_S)
            if not ready:
                raise TimeoutError(f"no broker has answered for {_WAIT_S:.0f} s")
            for key, events in ready:
                if events & selectors.EVENT_READ:
                    done, refused = _read(key.data)
                    stored, remaining = stored + done, remaining + refused


def _write(line: _Line, left: int) -> int:
    """Write while the kernel and the window have room; returns the number of requests left."""
    while line.rest or (left and line.in_flight < IN_FLIGHT):
        if not line.rest:
            line.rest = memoryview(line.frames[line.turn % len(line.frames)])
            line.turn += 1
            line.in_flight += 1
            left -= 1
        try:
            line.rest = line.rest[line.sock.send(line.rest) :]
        except BlockingIOError:
            break
    return left


def _read(line: _Line) -> tuple[int, int]:
    """The numbers of stored requests, and of those to repeat after a busy answer."""
    data = line.sock.recv(_RECEIVE)
    if not data:
        raise ConnectionError("a broker has closed the connection")
    line.reader.receive_data(data)
    stored = refused = 0
    while (frame := line.reader.next_frame()) is not None:
        assert isinstance(frame, Frame)
        line.in_flight -= 1
        if frame.code in BrokerBusyError.response_codes:
            refused += 1
        elif frame.code != 0:
            raise RejectedError(f"a broker answered {frame.code}: {frame.remark}")
        else:
            stored += 1
    return stored, refused
