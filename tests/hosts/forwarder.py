"""A host's bad cable: a process that passes frames between its veth and a TAP device.

`bed.Host.impair` starts the process. It reads a JSON line for each change of the `Impairment` on
standard input, answers "done" to each, and ends when standard input ends.

Directions are the host's: `in` is towards it, `out` is from it. Frames never overtake each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass

IN, OUT = "in", "out"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_SOL_PACKET, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 263, 23, 3
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16
_LONGEST = 65_600
_QUEUE_S = 2.0
"""The queue of a slow line: a frame that would wait longer is dropped."""


@dataclass(frozen=True)
class Impairment:
    """The faults of a cable.

    Attributes:
        delay_ms, jitter_ms: each way; a round trip takes twice as long.
        loss_in, loss_out: share of frames that are dropped; 1 drops all.
        rate_bps: bits per second each way; 0 sets no limit.
        longest_frame: bytes with the Ethernet header; longer frames vanish, as in a path that
            hides its MTU. 0 sets no limit.
        reject: port of the host whose TCP segments are answered with a reset, as a rejecting
            firewall does; 0 rejects none.
        reset_every_s: period after which every open connection is reset, at its next segment with
            data; 0 resets none.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_in: float = 0.0
    loss_out: float = 0.0
    rate_bps: float = 0.0
    longest_frame: int = 0
    reject: int = 0
    reset_every_s: float = 0.0

    def line(self):
        return json.dumps(asdict(self)) + "\n"


class Line:
    """A line that delays, drops and resets frames. It is pure except for its random generator.

    `due` returns frames as (direction, frame), in the order of their arrival.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._waiting = []
        self._number = 0
        self._latest = {IN: 0.0, OUT: 0.0}
        self._free_at = {IN: 0.0, OUT: 0.0}
        self._spared = {}
        self._since = 0.0
        self._what = Impairment()

    def impair(self, what, now):
        self._what, self._since = what, now
        self._spared.clear()

    def take(self, direction, frame, now):
        """Take a frame from the host (OUT) or for it (IN)."""
        impairment = self._what
        if impairment.longest_frame and len(frame) > impairment.longest_frame:
            return
        loss = impairment.loss_in if direction == IN else impairment.loss_out
        if loss and self._random.random() < loss:
            return
        segment = Segment.of(frame)
        if segment is not None and direction == IN and segment.ports[1] == impairment.reject:
            if not segment.flags & _RST:
                self._put(OUT, segment.refusal(), now)
            return
        if segment is not None and impairment.reset_every_s and self._resets(segment, now):
            self._put(OUT if direction == IN else IN, segment.refusal(), now)
            self._put(direction, segment.as_reset(), now)
            return
        self._put(direction, frame, now)

    def _resets(self, segment, now):
        period = int((now - self._since) / self._what.reset_every_s)
        if segment.flags & _SYN:
            self._spared[segment.flow] = period
        if not segment.payload or segment.flags & _RST:
            return False
        # A connection that is older than the first period is reset in that period.
        if self._spared.get(segment.flow, -1) >= period:
            return False
        self._spared[segment.flow] = period
        return True

    def _put(self, direction, frame, now):
        impairment, at = self._what, now
        if impairment.rate_bps:
            begins = max(now, self._free_at[direction])
            if begins - now > _QUEUE_S:
                return
            at = self._free_at[direction] = begins + len(frame) * 8 / impairment.rate_bps
        at += (impairment.delay_ms + impairment.jitter_ms * self._random.random()) / 1000
        at = self._latest[direction] = max(at, self._latest[direction])
        self._number += 1
        heapq.heappush(self._waiting, (at, self._number, direction, frame))

    def due(self, now):
        """Return the frames whose time has come."""
        frames = []
        while self._waiting and self._waiting[0][0] <= now:
            _, _, direction, frame = heapq.heappop(self._waiting)
            frames.append((direction, frame))
        return frames

    def wait_s(self, now):
        """Return the seconds until the next frame is due, or None if no frame waits."""
        return max(0.0, self._waiting[0][0] - now) if self._waiting else None


@dataclass(frozen=True)
class Segment:
    """A TCP segment in an IPv4 packet in an Ethernet frame."""

    frame: bytes
    addresses: bytes
    """Source and destination, 8 bytes."""
    ports: tuple[int, int]
    sequence: int
    acknowledged: int
    flags: int
    payload: int

    @classmethod
    def of(cls, frame):
        """Parse a frame; return None if it holds no TCP segment."""
        if frame[12:14] != b"\x08\x00" or len(frame) < 54 or frame[23] != socket.IPPROTO_TCP:
            return None
        start = 14 + (frame[14] & 15) * 4
        source, target, sequence, acknowledged, word = struct.unpack_from(">HHIIH", frame, start)
        total = int.from_bytes(frame[16:18], "big")
        payload = total - (start - 14) - (word >> 12) * 4
        return cls(
            frame, frame[26:34], (source, target), sequence, acknowledged, word & 0x3F, payload
        )

    @property
    def flow(self):
        """A key of the connection, equal for both directions."""
        ends = [self.addresses[:4] + struct.pack(">H", self.ports[0]),
                self.addresses[4:] + struct.pack(">H", self.ports[1])]  # fmt: skip
        return b"".join(sorted(ends))

    def refusal(self):
        """Return the frame by which the receiver would have reset the connection."""
        frame, there = self.frame, self.addresses
        length = self.payload + bool(self.flags & _SYN) + bool(self.flags & _FIN)
        fields = (
            (self.acknowledged, 0, _RST)
            if self.flags & _ACK
            else (0, self.sequence + length & 0xFFFFFFFF, _RST | _ACK)
        )
        return _tcp(frame[6:12], frame[:6], there[4:] + there[:4], self.ports[::-1], *fields)

    def as_reset(self):
        """Return the reset that the sender could have sent in place of this segment."""
        frame = self.frame
        fields = (self.sequence, self.acknowledged, _RST | _ACK)
        return _tcp(frame[:6], frame[6:12], self.addresses, self.ports, *fields)


def _tcp(target, source, addresses, ports, sequence, acknowledged, flags):
    def packed(check):
        fields = (*ports, sequence, acknowledged, 5 << 12 | flags, 0, check, 0)
        return struct.pack(">HHIIHHHH", *fields)

    pseudo = addresses + struct.pack(">HH", socket.IPPROTO_TCP, 20)
    segment = packed(_checksum(pseudo + packed(0)))
    head = struct.pack(">BBHHHBBH", 0x45, 0, 40, 0, 0x4000, 64, socket.IPPROTO_TCP, 0)
    check = struct.pack(">H", _checksum(head + addresses))
    return target + source + b"\x08\x00" + head[:10] + check + addresses + segment


def _checksum(data):
    """Return the checksum of RFC 1071 over an even number of bytes."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def open_tap(name):
    """Open a new TAP device that lives as long as the descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    )
    return descriptor


def open_cable(name):
    """Open a socket for all frames that come out of an interface."""
    cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    cable.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    cable.bind((name, 0))
    cable.setblocking(False)
    return cable


def _frames_of(read):
    frames = []
    with contextlib.suppress(BlockingIOError):
        while len(frames) < 256:
            frames.append(read())
    return frames


def main(veth, tap, seed):
    """Forward between the two until standard input ends."""
    line, cable, device = Line(seed), open_cable(veth), open_tap(tap)
    print("ready", flush=True)
    waits = selectors.DefaultSelector()
    waits.register(0, selectors.EVENT_READ)
    waits.register(cable, selectors.EVENT_READ)
    waits.register(device, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in waits.select(line.wait_s(time.monotonic()))}
        now = time.monotonic()
        if 0 in ready:
            text = sys.stdin.readline()
            if not text:
                return
            line.impair(Impairment(**json.loads(text)), now)
            print("done", flush=True)
        if cable.fileno() in ready:
            for frame in _frames_of(lambda: cable.recv(_LONGEST)):
                line.take(OUT, frame, now)
        if device in ready:
            for frame in _frames_of(lambda: os.read(device, _LONGEST)):
                line.take(IN, frame, now)
        for direction, frame in line.due(time.monotonic()):
            # The frame is lost if the device's queue is full or the device is going away.
            with contextlib.suppress(OSError):
                if direction == OUT:
                    os.write(device, frame)
                else:
                    cable.send(frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
