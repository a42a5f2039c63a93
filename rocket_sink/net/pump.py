"""A selector loop over many links. One thread drives it at a time; it starts none but for names.

`poll` is `prepare`, `wait`, `process`; a driver that shares the pump between threads holds its
lock around the first and the last and lets it go while it waits. Links may be used (under that
lock) while another thread waits: a new wish to write wakes the waiting one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rocket_sink.errors import ConnectError, SendError, TlsError
from rocket_sink.net.link import Link
from rocket_sink.net.readiness import READ, WRITE, Readiness
from rocket_sink.net.resolve import Resolver
from rocket_sink.net.rpc_hooks import RpcHooks
from rocket_sink.net.tls import Security, TlsSettings
from rocket_sink.net.transport import StreamEnded, StreamState, no_resources
from rocket_sink.options import SinkOptions
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.connection import Connection
from rocket_sink.wire.frame import Frame, Serialize

TICK_S: Final = 0.02
"""Longest wait while requests are in flight: deadlines and suspicion are looked at this often."""
FLUSH_BYTES: Final = 131_072
"""Queued bytes at which a sender writes at once instead of leaving it to the next poll."""
_LOOK_FIRST_S: Final = 0.05
Signer = Callable[[Mapping[str, str], Any], Mapping[str, str]]


class Pump:
    """The links of one client, by address."""

    def __init__(
        self, options: SinkOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Raises:
            OptionError: the TLS files cannot be read.
            LocalResourcesError: there are no descriptors left.
        """
        settings = TlsSettings.of(options)
        self._security = Security(settings) if settings else None
        self._connect_timeout_s = options.connect_timeout_ms / 1000
        self._max_idle_s = options.channel_max_idle_s
        self.serializer: Serialize = "rocketmq" if options.serializer == "rocketmq" else "json"
        self.sign: Signer | None = None
        """Gives the header fields that sign a request (ACL)."""
        self.clock = clock
        self.on_request: Callable[[Link, Frame], bool] = lambda link, frame: False
        """Serves a peer's request; False: it is answered with code 3."""
        self.rpc_hooks = RpcHooks()
        try:
            self._readiness = Readiness()
        except OSError as error:
            raise no_resources("make a client", error) from error
        self._resolver = Resolver(self._readiness.wake, clock=clock)
        self._links: dict[str, Link] = {}
        self._retired: set[Link] = set()
        self._next_scan_s = 0.0
        self.late_answers = 0
        self.opened = 0
        """Connections opened so far."""
        self.waiting = False
        """Another thread is in `wait` now: what is queued must wake it."""
        self.hurried = False
        """What is queued then is written at once instead: its sender has nothing else to do."""

    def link(self, address: str, now_s: float) -> Link:
        """The link in use for an address, opened when there is none.

        Raises:
            ConnectError: refused at once.
        """
        link = self._links.get(address)
        if link is not None and not link.connection.in_flight:
            idle_s = now_s - link.used_s
            if idle_s > self._max_idle_s:
                self.retire(link, now_s)
            elif idle_s > _LOOK_FIRST_S and link.is_open:
                # The peer may have closed it meanwhile; written first and read later, that would
                # leave the outcome unknown.
                self._receive(link, now_s, to_the_end=True)
            link = self._links.get(address)
        return link or self._open(address, now_s)

    def peek(self, address: str) -> Link | None:
        """The link in use for an address, if any."""
        return self._links.get(address)

    def _open(self, address: str, now_s: float) -> Link:
        link = Link(
            address,
            self._security,
            Connection(serialize=self.serializer, sign=self.sign),
            self._serve,
            now_s=now_s,
            connect_deadline_s=now_s + self._connect_timeout_s,
            resolver=self._resolver,
        )
        self._links[address] = link
        self._readiness.watch(link, READ | WRITE)
        return link

    def send(self, link: Link, owner: Any, buffers: Sequence[Any], size: int, now_s: float) -> None:
        """Queue a frame that `link.connection` knows; it is written soon, together with others."""
        link.outbox.put(owner, buffers, size)
        if link.transport.state is not StreamState.OPEN:
            return
        if link.outbox.size >= FLUSH_BYTES or (self.waiting and self.hurried):
            self.flush(link, now_s)
        elif self.waiting and not link.interest & WRITE:
            self._readiness.watch(link, READ | WRITE)

    def call(
        self, address: str, frame: Frame, owner: Any, *, deadline_s: float, now_s: float
    ) -> None:
        """Send a request frame; a failure to begin reaches the owner as `on_failed`, too."""
        try:
            link = self.link(address, now_s)
        except ConnectError as error:
            owner.on_failed(error, now_s)
            return
        self.call_on(link, frame, owner, deadline_s=deadline_s, now_s=now_s)

    def call_on(
        self, link: Link, frame: Frame, owner: Any, *, deadline_s: float, now_s: float
    ) -> None:
        """As `call`, on this very connection."""
        if self.rpc_hooks:
            frame = self.rpc_hooks.before(link.address, frame)
            owner = self.rpc_hooks.watched(owner, link.address, frame)
        head = link.connection.send_request(frame, deadline_s=deadline_s, token=owner)
        buffers = [head, frame.body] if frame.body else [head]
        self.send(link, owner, buffers, sum(map(len, buffers)), now_s)

    def oneway(self, address: str, frame: Frame, now_s: float) -> None:
        """Send without an answer.

        Raises:
            ConnectError
        """
        link = self.link(address, now_s)
        if self.rpc_hooks:
            frame = self.rpc_hooks.before(address, frame)
        head = link.connection.send_oneway(frame)
        buffers = [head, frame.body] if frame.body else [head]
        self.send(link, None, buffers, sum(map(len, buffers)), now_s)

    def respond(self, link: Link, request: Frame, code: int, remark: str | None = None) -> None:
        """Answer a peer's request."""
        data = link.connection.respond(request, code, remark=remark)
        if data:
            self.send(link, None, [data], len(data), self.clock())

    def flush(self, link: Link, now_s: float) -> None:
        """Write what the kernel takes of one link."""
        if not link.is_open:
            return
        try:
            link.flush(now_s)
        except (StreamEnded, TlsError) as ended:
            self.fail(link, ended, now_s)
            return
        wanted = READ | WRITE if link.outbox or link.transport.unsent else READ
        if wanted != link.interest:
            self._readiness.watch(link, wanted)

    def poll(self, timeout_s: float) -> None:
        """One round: write, wait at most `timeout_s` for the peers, read, expire."""
        wait_s = self.prepare(timeout_s)
        self.process(self.wait(wait_s))

    def prepare(self, timeout_s: float) -> float:
        """Write what is queued; how long the wait may be (s)."""
        self.write()
        busy = False
        for link in self.links:
            if link.transport.readable_now:
                return 0.0
            busy = busy or link.connection.in_flight > 0
        return min(timeout_s, TICK_S) if busy else timeout_s

    def write(self) -> None:
        """Write what is queued, as far as the kernel takes it."""
        for link in self.links:
            if link.outbox:
                self.flush(link, self.clock())

    def wait(self, timeout_s: float) -> list[tuple[Link, int]]:
        """Wait for readiness; the only part that blocks."""
        return self._readiness.wait(timeout_s)

    def wake(self) -> None:
        """End another thread's `wait`."""
        self._readiness.wake()

    def process(self, ready: Iterable[tuple[Link, int]]) -> None:
        """Read, write and connect what is ready; then fail what is overdue.

        What has arrived is read before anything is judged late: a pause of this process must
        not look like a pause of the brokers.
        """
        now_s = self.clock()
        for link, mask in ready:
            if not link.closed:
                self._serve_ready(link, mask, now_s)
        for link in self.links:
            if link.transport.readable_now:
                self._receive(link, now_s)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + TICK_S / 2
            self._scan(now_s)

    def _serve_ready(self, link: Link, mask: int, now_s: float) -> None:
        if not link.is_open:
            self._advance(link, now_s)
            return
        if mask & READ:
            self._receive(link, now_s)
        if mask & WRITE and not link.closed:
            self.flush(link, now_s)

    def _receive(self, link: Link, now_s: float, *, to_the_end: bool = False) -> None:
        try:
            link.receive(now_s, to_the_end=to_the_end)
        except (StreamEnded, TlsError) as ended:
            self.fail(link, ended, now_s)

    def _advance(self, link: Link, now_s: float) -> None:
        # A connect that goes on with the name's next address has another socket, maybe under the
        # same number, so the selector must forget the old one first.
        self._readiness.forget(link)
        try:
            opened = link.transport.advance()
        except ConnectError as error:
            self.fail(link, error, now_s)
            return
        self._readiness.watch(link, READ | (WRITE if link.wants_write else 0))
        if opened:
            self.opened += 1
            link.ready_s = link.used_s = now_s
            self.flush(link, now_s)

    def _scan(self, now_s: float) -> None:
        for link in self.links:
            if not link.is_open and not link.closed and now_s >= link.connect_deadline_s:
                self.fail(link, link.transport.timed_out(), now_s)
                continue
            due_s = link.connection.next_deadline_s
            if due_s is not None and now_s >= due_s:
                self._expire(link, now_s)
            if link.retired and not link.connection.in_flight and not link.unwritten:
                self.fail(link, StreamEnded("retired"), now_s)

    def _expire(self, link: Link, now_s: float) -> None:
        oldest_s = link.connection.oldest_sent_s
        if oldest_s is None or oldest_s >= link.heard_s:
            # Nothing was heard since the overdue request went out, or it never went: what comes
            # next gets a new connection, what is in flight here keeps its chance.
            self.retire(link, now_s)
        link.expire(now_s)

    def retire(self, link: Link, now_s: float) -> None:
        """No new requests on this link; it closes when nothing is in flight on it."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if link.closed:
            return
        link.retired = True
        self._retired.add(link)
        if not link.connection.in_flight and not link.unwritten:
            self.fail(link, StreamEnded("retired"), now_s)

    def fail(self, link: Link, cause: Exception, now_s: float) -> None:
        """Close a link and fail its requests."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self._retired.discard(link)
        if not link.closed:
            self._readiness.forget(link)
        self.late_answers += link.connection.late_answers
        link.fail(cause, now_s)

    def _serve(self, link: Link, frame: Frame) -> None:
        if not self.on_request(link, frame):
            text = f"request code {frame.code} is not served by this client"
            self.respond(link, frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, text)

    @property
    def links(self) -> list[Link]:
        """All links that exist, retired ones too."""
        return [*self._links.values(), *self._retired]

    @property
    def in_flight(self) -> int:
        return sum(link.connection.in_flight for link in self.links)

    def close(self, reason: SendError | None = None) -> None:
        """Close all links; what is in flight fails."""
        now_s = self.clock()
        for link in self.links:
            self.fail(link, reason or StreamEnded("closed here"), now_s)
        self._readiness.close()

    def abandon(self) -> None:
        """In a forked child: close this process's copies without a word to the peers."""
        for link in self.links:
            link.transport.close()
        self._readiness.close()
