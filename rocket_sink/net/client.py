"""A selector loop over the channels of a client. Only name look-ups run in threads.

`poll` calls `prepare`, `wait` and `process`. The thread of a producer calls them itself, and other
threads end its wait by `wake`."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rocket_sink.errors import ConnectError, SendError, TlsError, UnwrittenError
from rocket_sink.net import log
from rocket_sink.net.channel import Channel
from rocket_sink.net.hooks import RpcHooks, Watched
from rocket_sink.net.resolve import Resolver
from rocket_sink.net.tls import Security
from rocket_sink.net.transport import StreamEnded, StreamState, Transport, no_resources
from rocket_sink.options import SinkOptions
from rocket_sink.wire.answers import AnswerShapes
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.columns.single_frames import fill_frames
from rocket_sink.wire.connection import OPAQUES, Connection
from rocket_sink.wire.headers import Frame

_TICK_S: Final = 0.02
"""Longest wait while requests are in flight, because their deadlines have to be checked."""
FLUSH_BYTES: Final = 131_072
"""Number of queued bytes at which `send` writes at once, without waiting for the next poll."""
_CHECK_IDLE_S: Final = 0.05
"""Idle time after which a channel is read before its next use, in case the peer has closed it."""
_MAX_IDLE_S: Final = 120.0
"""Idle time after which a channel is not used again, because a firewall may have forgotten it."""
UNREAD_ANSWERS_BYTES: Final = 1 << 20
"""Bytes of answers to a peer's requests, queued and not taken by the kernel, above which further
requests of the peer get no answer."""
_LOG: Final = log.logger(__name__)
READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE
Signer = Callable[[Mapping[str, str], Any], Mapping[str, str]]


class Readiness:
    """A selector over the channels' sockets; `wake` and `close` may be called from any thread."""

    def __init__(self) -> None:
        """Make the selector; raises OSError if there are no free descriptors."""
        self._selector = selectors.DefaultSelector()
        self._unresolved: dict[Channel, None] = {}
        """Channels that have no socket yet; the end of their name look-up wakes the selector."""
        self._closed = False
        try:
            self._wake_read, self._wake_write = socket.socketpair()
        except OSError:
            self._selector.close()
            raise
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, READ, None)

    def watch(self, channel: Channel, interest: int) -> None:
        """Register a channel, or change its interest."""
        channel.interest = interest
        number = channel.transport.fileno()
        if number < 0:
            self._unresolved[channel] = None
        elif number in self._selector.get_map():
            self._selector.modify(number, interest, channel)
        else:
            self._selector.register(number, interest, channel)

    def forget(self, channel: Channel) -> None:
        self._unresolved.pop(channel, None)
        number = channel.transport.fileno()
        if number >= 0 and number in self._selector.get_map():
            self._selector.unregister(number)

    def wait(self, timeout_s: float) -> list[tuple[Channel, int]]:
        """Return the ready channels with their events; none if another thread calls `close`."""
        ready = []
        try:
            for key, mask in self._selector.select(timeout_s):
                if key.data is None:
                    self._wake_read.recv(4096)
                else:
                    ready.append((key.data, mask))
        except (OSError, ValueError):
            if self._closed:
                return []
            raise
        if self._unresolved:
            ready += [
                (channel, WRITE)
                for channel in self._unresolved
                if channel.transport.targets.look_up.done
            ]
        return ready

    def wake(self) -> None:
        try:  # noqa: SIM105 (each send calls this, and `suppress` takes as long as the call)
            self._wake_write.send(b"w")
        except OSError:
            pass

    def close(self) -> None:
        """Close the selector. A wait of another thread ends at its time-out, or by `wake`."""
        self._closed = True
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


@dataclass(slots=True, eq=False)
class Call:
    """The owner of a request; it calls a function with the answer (of any code) or the error."""

    done: Callable[[Frame | None, SendError | None, float], None]

    def on_end(self, result: Any, sent_s: float | None, now_s: float) -> None:
        if isinstance(result, Frame):
            self.done(result, None, now_s)
        else:
            self.done(None, result, now_s)


class NetworkClient:
    """The channels of one client, by address."""

    def __init__(
        self,
        options: SinkOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        sign: Signer | None = None,
        hide: Callable[[str], str] | None = None,
        on_request: Callable[[Channel, Frame], bool] | None = None,
        hooks: RpcHooks | None = None,
    ) -> None:
        """
        Args:
            sign: returns the header fields to add to a request (ACL, namespace).
            hide: removes credentials from a remark.
            on_request: serves a peer's request; returns False if its code is not supported.

        Raises:
            OptionError: the TLS files cannot be read.
            LocalResourcesError: no free descriptors.
        """
        self._security = None if options.tls_mode == "off" else Security(options)
        self._connect_timeout_s = options.connect_timeout_ms / 1000
        self._sign = sign
        self._hide = hide
        self.clock = clock
        self._on_request = on_request
        self.rpc_hooks = RpcHooks() if hooks is None else hooks
        try:
            self._readiness = Readiness()
        except OSError as error:
            raise no_resources("make a client", error) from error
        self._resolver = Resolver(self._readiness.wake, clock)
        self._channels: dict[str, Channel] = {}
        self._draining: set[Channel] = set()
        self._next_scan_s = 0.0
        self.opened = 0
        """Number of connections opened so far."""

    def channel(self, address: str, now_s: float) -> Channel:
        """Return the current channel of an address, or a new one. Raises ConnectError if connecting
        fails at once."""
        channel = self._channels.get(address)
        if channel is not None and channel.connection.error is not None:
            # The peer has broken the protocol, so the channel is about to fail, and takes no more
            # requests. An owner calls this for an answer that came before the violation.
            self.drain(channel, now_s)
            return self._open(address, now_s)
        if channel is not None and not channel.connection.in_flight:
            idle_s = now_s - channel.used_s
            if idle_s > _MAX_IDLE_S:
                self.drain(channel, now_s)
            elif idle_s > _CHECK_IDLE_S and channel.is_open:
                # Read first: if the peer has closed the connection, a write's outcome is unknown.
                self._receive(channel, now_s, to_the_end=True)
            channel = self._channels.get(address)
        return channel or self._open(address, now_s)

    def peek(self, address: str) -> Channel | None:
        return self._channels.get(address)

    def _open(self, address: str, now_s: float) -> Channel:
        try:
            channel = Channel(
                Transport(address, self._security, self._resolver),
                Connection(
                    # Begin with a random id, because a proxy gives its error answers ids from 0 on.
                    first_opaque=secrets.randbelow(OPAQUES // 2),
                    sign=self._sign,
                    hide=self._hide,
                    shapes=AnswerShapes(),
                ),
                self._serve,
                now_s=now_s,
                connect_deadline_s=now_s + self._connect_timeout_s,
            )
        except ConnectError:
            raise
        except Exception as error:
            # Catch all errors, because a name server may send a malformed address.
            text = f"cannot connect to {address!r}: {error!r}"
            raise ConnectError(text, address=address) from error
        self._channels[address] = channel
        self._readiness.watch(channel, READ | WRITE)
        return channel

    def send(
        self, channel: Channel, owner: Any, buffers: Sequence[Any], size: int, now_s: float
    ) -> None:
        """Queue a frame, and write at once if the queue is large. The caller has added the frame's
        request to the connection."""
        channel.write_queue.put(owner, buffers, size)
        if channel.transport.state is not StreamState.OPEN:
            return
        if channel.write_queue.size >= FLUSH_BYTES:
            self.flush(channel, now_s)

    def call(
        self, address: str, frame: Frame, owner: Any, *, deadline_s: float, now_s: float
    ) -> None:
        """Send a request; the owner gets the answer or the error."""
        try:
            channel = self.channel(address, now_s)
        except ConnectError as error:
            owner.on_end(error, None, now_s)
            return
        self.call_on(channel, frame, owner, deadline_s=deadline_s, now_s=now_s)

    def call_on(
        self, channel: Channel, frame: Frame, owner: Any, *, deadline_s: float, now_s: float
    ) -> None:
        """Send a request on this channel; the owner gets the answer or the error."""
        try:
            if self.rpc_hooks:
                frame = self.rpc_hooks.before(channel.address, frame)
                owner = Watched(self.rpc_hooks, owner, channel.address, frame)
            head = channel.connection.send_request(frame, deadline_s=deadline_s, token=owner)
        except Exception as error:  # A hook may have added an illegal field.
            owner.on_end(UnwrittenError(f"its frame cannot be made: {error!r}"), None, now_s)
            return
        buffers = [head, frame.body] if frame.body else [head]
        self.send(channel, owner, buffers, sum(map(len, buffers)), now_s)

    @property
    def takes_groups(self) -> bool:
        """Whether `call_group` may be used: headers have no signatures, and no hook sees them."""
        return self._sign is None and not self.rpc_hooks

    def call_group(
        self,
        address: str,
        frame: Frame,
        columns: Mapping[str, Any],
        owner: Any,
        *,
        deadline_s: float,
        now_s: float,
    ) -> int:
        """Send requests that differ in some header fields; return the first opaque id. The owner
        gets each answer, and one error for all requests without an answer. `columns` is {header
        field: its text in each frame} (`fill_frames`)."""
        try:
            channel = self.channel(address, now_s)
        except ConnectError as error:
            owner.on_end(error, None, now_s)
            return 0
        count = len(next(iter(columns.values())))
        first = channel.connection.open_group(count, deadline_s=deadline_s, token=owner)
        try:
            data = memoryview(fill_frames(frame, columns, first)).cast("B")
        except Exception as error:
            channel.connection.cancel(owner)
            owner.on_end(UnwrittenError(f"its frames cannot be made: {error!r}"), None, now_s)
            return 0
        self.send(channel, owner, (data,), len(data), now_s)
        return first

    def oneway(self, address: str, frame: Frame, now_s: float) -> None:
        """Send a oneway request. If the kernel does not take all of it, the rest is written later.
        Raises ConnectError or UnwrittenError."""
        channel = self.channel(address, now_s)
        try:
            if self.rpc_hooks:
                frame = self.rpc_hooks.before(address, frame)
            head = channel.connection.send_oneway(frame)
        except Exception as error:  # A hook may have added an illegal field.
            raise UnwrittenError(f"its frame cannot be made: {error!r}") from error
        buffers = [head, frame.body] if frame.body else [head]
        self.send(channel, None, buffers, sum(map(len, buffers)), now_s)
        self.flush(channel, now_s)

    def respond(
        self, channel: Channel, request: Frame, code: int, remark: str | None = None
    ) -> None:
        """Answer a peer's request; do nothing if the channel is closed, or about to close. Drop the
        answer if the peer does not read earlier ones: they would grow without end, and the peer has
        to expect that an answer is lost."""
        if channel.connection.error is not None:
            return
        if channel.write_queue.unowned_bytes > UNREAD_ANSWERS_BYTES:
            log.about(channel.address, _LOG).warning(
                "%s sends requests and does not read the answers: its request with code %d gets "
                "none. Look at the process there, which may be stopped or out of memory",
                channel.address, request.code,
            )  # fmt: skip
            return
        data = channel.connection.respond(request, code, remark=remark)
        if data:
            self.send(channel, None, [data], len(data), self.clock())

    def flush(self, channel: Channel, now_s: float) -> None:
        """Write as much of the channel's queue as the kernel takes."""
        if not channel.is_open:
            return
        try:
            channel.flush(now_s)
        except (StreamEnded, TlsError) as ended:
            self.fail(channel, ended, now_s)
            return
        wanted = READ | WRITE if channel.has_unwritten else READ
        if wanted != channel.interest:
            self._readiness.watch(channel, wanted)

    def poll(self, timeout_s: float) -> None:
        """Write, wait at most `timeout_s` for the peers, read, and expire requests."""
        wait_s = self.prepare(timeout_s)
        self.process(self.wait(wait_s))

    def prepare(self, timeout_s: float) -> float:
        """Write all queues; return how long `wait` may take, at most `timeout_s`."""
        self.write()
        busy = False
        for channel in self.channels:
            if channel.transport.readable_now:
                return 0.0
            busy = busy or channel.connection.in_flight > 0
        return min(timeout_s, _TICK_S) if busy else timeout_s

    def write(self) -> None:
        """Write as much of all queues as the kernel takes."""
        for channel in self.channels:
            if channel.write_queue:
                self.flush(channel, self.clock())

    def wait(self, timeout_s: float) -> list[tuple[Channel, int]]:
        """Wait for ready channels; no other method blocks."""
        return self._readiness.wait(timeout_s)

    def wake(self) -> None:
        """End another thread's `wait`."""
        self._readiness.wake()

    def process(self, ready: Iterable[tuple[Channel, int]]) -> None:
        """Read, write and connect ready channels; then expire requests. Read answers before
        requests expire, because they may have come while this process paused."""
        now_s = self.clock()
        for channel, mask in ready:
            if not channel.is_open and not channel.closed:
                self._advance(channel, now_s)
                continue
            if mask & READ and not channel.closed:
                self._receive(channel, now_s)
            if mask & WRITE and not channel.closed:
                self.flush(channel, now_s)
        for channel in self.channels:
            if channel.transport.readable_now:
                self._receive(channel, now_s)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + _TICK_S / 2
            self._scan(now_s)

    def _receive(self, channel: Channel, now_s: float, *, to_the_end: bool = False) -> None:
        try:
            channel.receive(now_s, to_the_end=to_the_end)
        except (StreamEnded, TlsError) as ended:
            self.fail(channel, ended, now_s)

    def _advance(self, channel: Channel, now_s: float, *, skip: bool = False) -> None:
        # Unregister the old socket first: the next address's socket may have the same descriptor.
        self._readiness.forget(channel)
        try:
            opened = channel.transport.advance(skip=skip)
        except ConnectError as error:
            self.fail(channel, error, now_s)
            return
        wants_write = not opened and channel.transport.wants_write
        self._readiness.watch(channel, READ | (WRITE if wants_write else 0))
        if opened:
            self.opened += 1
            channel.ready_s = channel.used_s = now_s
            self.flush(channel, now_s)

    def _scan(self, now_s: float) -> None:
        for channel in self.channels:
            if not channel.is_open and not channel.closed:
                if now_s >= channel.connect_deadline_s:
                    self.fail(channel, channel.transport.timeout_error(), now_s)
                elif channel.transport.targets.is_silent(now_s):
                    self._advance(channel, now_s, skip=True)
            due_s = channel.connection.next_deadline_s
            if due_s is not None and now_s >= due_s:
                self._expire(channel, now_s)
            if channel.draining and not channel.connection.in_flight and not channel.has_unwritten:
                self.fail(channel, StreamEnded("drained"), now_s)

    def _expire(self, channel: Channel, now_s: float) -> None:
        oldest = channel.connection.oldest
        if oldest is None or oldest.sent_s is None or oldest.sent_s >= channel.heard_s:
            # The peer did not take the oldest request, or has sent nothing since. So new requests
            # get a new connection; this connection may still bring answers.
            self.drain(channel, now_s)
        channel.expire(now_s)

    def drain(self, channel: Channel, now_s: float) -> None:
        """Send no new requests on this channel, and close it once no request is in flight."""
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]
        if channel.closed:
            return
        # The next connection needs to know now: a request in flight may keep this one for seconds.
        channel.transport.note_silence()
        channel.draining = True
        self._draining.add(channel)
        if not channel.connection.in_flight and not channel.has_unwritten:
            self.fail(channel, StreamEnded("drained"), now_s)

    def fail(self, channel: Channel, cause: Exception, now_s: float) -> None:
        """Close a channel and fail its requests."""
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]
        self._draining.discard(channel)
        if not channel.closed:
            self._readiness.forget(channel)
        channel.fail(cause, now_s)

    def _serve(self, channel: Channel, frame: Frame) -> None:
        if self._on_request is None or not self._on_request(channel, frame):
            text = f"request code {frame.code} is not served by this client"
            self.respond(channel, frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, text)

    @property
    def channels(self) -> list[Channel]:
        """Return all channels, including draining ones."""
        return [*self._channels.values(), *self._draining]

    @property
    def in_flight(self) -> int:
        return sum(channel.connection.in_flight for channel in self.channels)

    def close(self) -> None:
        """Close all channels and fail the requests in flight."""
        now_s = self.clock()
        for channel in self.channels:
            self.fail(channel, StreamEnded("closed here"), now_s)
        self.wake()
        self._readiness.close()

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets, without a TLS or TCP shutdown."""
        for channel in self.channels:
            channel.transport.close()
        self._readiness.close()


def invoke(client: NetworkClient, address: str, frame: Frame, timeout_s: float) -> Frame:
    """Send a request, and return the answer, whatever its code. Raises NotSentError or
    UnknownOutcomeError if the connection failed, before or after the send."""
    results: list[tuple[Frame | None, SendError | None]] = []
    now_s = client.clock()
    call = Call(lambda answer, error, _: results.append((answer, error)))
    client.call(address, frame, call, deadline_s=now_s + timeout_s, now_s=now_s)
    while not results:
        client.poll(timeout_s)
    answer, error = results[0]
    if answer is None:
        assert error is not None
        raise error
    return answer
