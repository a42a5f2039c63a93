"""The parts of connections, each alone: with sockets, transports and clocks of the test."""

import contextlib
import errno
import ssl
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.net import client as clients
from rocket_sink.net import identity, log, tls
from rocket_sink.net.channel import HEARD_RECENTLY_S, Channel, WriteQueue
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.net.identity import Identity
from rocket_sink.net.resolve import Resolver
from rocket_sink.net.transport import (
    PATIENCE_S,
    READ_BYTES,
    StreamEnded,
    StreamState,
    Targets,
    Transport,
)  # fmt: skip
from rocket_sink.options import SinkOptions
from rocket_sink.wire.connection import Connection
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to

NOW_S = 1000.0


# --- addresses ---------------------------------------------------------------------------------


def targets(*names):
    resolver = Resolver(lambda: None, lambda: NOW_S)
    look_up = SimpleNamespace(done=True, targets=[(2, 1, 6, "", name) for name in names])
    resolver.look_up = lambda host, port: look_up
    target = Targets("h", 1, resolver)
    target.begin()
    return target, resolver


def test_silent_addresses_come_again_with_twice_the_patience():
    target, resolver = targets("a", "b")
    assert target.next()[4] == "a" and not target.is_silent(NOW_S)
    assert not target.is_silent(NOW_S + PATIENCE_S - 0.01) and target.is_silent(NOW_S + PATIENCE_S)
    target.skip()
    assert target.next()[4] == "b" and not target.is_silent(NOW_S + 9), "its time begins now"
    target.note(works=False)
    assert target.next()[4] == "a" and not target.is_silent(NOW_S), "no other is left"
    target.skip()
    assert not target.is_silent(NOW_S + 20) and not target.is_silent(NOW_S + 20 + PATIENCE_S)
    assert target.is_silent(NOW_S + 20 + 2 * PATIENCE_S)
    again, _ = targets("a", "b", "c")
    again._resolver = resolver
    again.begin()
    assert [again.next()[4] for _ in range(3)] == ["a", "c", "b"], "a failed address is last"
    assert again.next() is None is again.current
    for works in (False, True):
        again.current = (2, 1, 6, "", "c")
        again.note(works=works)
    assert list(resolver._failed["h", 1]) == ["b"]
    only, resolver = targets("a")
    only.next()
    only.note(works=False)
    assert not resolver._failed, "nothing to choose from"


def test_failed_addresses_are_in_the_order_of_their_failure_and_few(monkeypatch):
    monkeypatch.setattr("rocket_sink.net.resolve._FAILED_MAX", 2)
    resolver = Resolver(lambda: None, lambda: NOW_S)
    for name in "abab":
        resolver.note("h", 1, name, works=False)
    order = [(0, 0, 0, "", name) for name in "bacd"]
    assert [t[4] for t in resolver.in_order("h", 1, order)] == ["c", "d", "a", "b"]
    resolver.note("h", 1, "c", works=False)
    assert [t[4] for t in resolver.in_order("h", 1, order)] == ["a", "d", "b", "c"]
    assert [t[4] for t in resolver.in_order("h", 2, order)] == list("bacd")
    resolver._known = {("h", 1): (SimpleNamespace(done=False), 0.0)}
    resolver.forget("h", 1)
    assert resolver._known, "it is still being looked up"
    resolver.forget("other", 1)


def transport(state, *, heard=False, answered=None):
    """Return a transport in this state; with `answered`, over TLS."""
    tcp = object.__new__(Transport)
    tcp.address, tcp.state, tcp._heard, tcp._failure = "h:1", state, heard, None
    tcp._tls = None if answered is None else SimpleNamespace(answered=answered, unsent=True)
    notes = []
    tcp.targets = SimpleNamespace(
        host="h", forget=lambda: notes.append("forget"), note=lambda works: notes.append(works),
    )  # fmt: skip
    tcp.notes = notes
    return tcp


@pytest.mark.parametrize(
    ("state", "answered", "kind", "text", "notes"),
    [
        (StreamState.RESOLVING, None, errors.UnknownHostError, "look-up took too long", []),
        (StreamState.CONNECTING, None, errors.ConnectError, "^connecting to h:1 took", ["forget"]),
        (StreamState.HANDSHAKING, False, errors.ConnectError, "TLS handshake .*tlsMode=off",
         ["forget"]),
        (StreamState.HANDSHAKING, True, errors.ConnectError, r"TLS handshake [^;]*\)$", ["forget"]),
    ],
)  # fmt: skip
def test_a_connect_that_takes_too_long_says_at_which_step(state, answered, kind, text, notes):
    tcp = transport(state, answered=answered)
    with pytest.raises(kind, match=text) as caught:
        raise tcp.timeout_error()
    assert type(caught.value) is kind and caught.value.address == "h:1" and tcp.notes == notes


def test_a_silent_address_is_tried_again_after_the_others():
    tcp = transport(StreamState.HANDSHAKING, answered=False)
    tcp.targets, tcp._socket, tcp._next_target = MagicMock(), MagicMock(), MagicMock()
    tcp.wants_write, tcp.unsent = False, True
    assert not tcp.advance(skip=True) and tcp._next_target.called and tcp._socket.close.called
    assert tcp.targets.method_calls == [call.skip(), call.note(works=False)]
    assert (tcp.state, tcp._tls) == (StreamState.CONNECTING, None)
    assert tcp.wants_write and not tcp.unsent


def test_addresses_that_fail_at_once_are_passed(monkeypatch):
    tcp = transport(StreamState.RESOLVING)
    sockets = [MagicMock(), MagicMock()]
    sockets[0].connect_ex.return_value = errno.ECONNREFUSED
    sockets[1].connect_ex.return_value = errno.EINPROGRESS
    outcomes = [OSError(errno.EAFNOSUPPORT, "no"), *sockets, OSError(errno.EAFNOSUPPORT, "no such")]
    monkeypatch.setattr("rocket_sink.net.transport._new_socket", MagicMock(side_effect=outcomes))
    tcp.targets.next = MagicMock(side_effect=[(2, 1, 6, "", name) for name in "abcd"] + [None])
    tcp._next_target()
    assert tcp._socket is sockets[1] and tcp.notes == [False] and sockets[0].close.called
    assert sockets[1].connect_ex.call_args == call("c")
    with pytest.raises(errors.ConnectError, match="cannot connect to h:1: no such"):
        tcp._next_target()
    assert tcp.state is StreamState.CLOSED and tcp.notes == [False, "forget"]
    unknown = transport(StreamState.RESOLVING)
    unknown.targets.next = MagicMock(return_value=None)
    with pytest.raises(errors.ConnectError, match="cannot connect to h:1: no address"):
        unknown._next_target()


@pytest.mark.parametrize(
    ("state", "heard", "notes"),
    [(StreamState.OPEN, False, [False]), (StreamState.OPEN, True, []),
     (StreamState.CLOSED, False, [])],
)  # fmt: skip
def test_an_address_that_has_sent_nothing_is_noted(state, heard, notes):
    tcp = transport(state, heard=heard)
    tcp.note_silence()
    assert tcp.notes == notes


def socket_of(*results):
    """Return a socket whose calls raise, or return, these results."""
    end = MagicMock(side_effect=results)
    return SimpleNamespace(recv=end, sendmsg=end)


ALERT = ssl.SSLError(1, "alert")
ALERT.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"


@pytest.mark.parametrize(
    ("results", "heard", "text"),
    [
        ([BlockingIOError(), InterruptedError(), b"x"], False, None),
        ([b""], False, "the peer closed the connection; it has sent nothing: if it speaks TLS"),
        ([b""], True, "the peer closed the connection$"),
        ([OSError(errno.EIO, "broken")], True, r"reading failed: .*broken$"),
        ([OSError(errno.EIO, "broken")], False, "broken; it has sent nothing"),
    ],
)
def test_the_end_of_a_stream_has_its_reason(results, heard, text):
    tcp = transport(StreamState.OPEN, heard=heard)
    tcp._stream = socket_of(*results)
    if text is None:
        assert [tcp.read(), tcp.read(), tcp.read()] == [None, None, b"x"]
        assert tcp.notes == [True] and tcp._heard
        return
    with pytest.raises(StreamEnded, match=text):
        tcp.read()


@pytest.mark.parametrize(
    ("write", "read", "heard", "kind"),
    [
        (BlockingIOError(), None, False, None), (InterruptedError(), None, False, None),
        (OSError(errno.EPIPE, "broken"), b"x", False, StreamEnded),
        (OSError(errno.EPIPE, "broken"), ALERT, True, StreamEnded),
        (OSError(errno.EPIPE, "broken"), ALERT, False, errors.TlsRefusedError),
        (TypeError("defect"), None, False, TypeError),
    ],
)  # fmt: skip
def test_a_write_that_fails_asks_for_the_servers_alert(write, read, heard, kind):
    tcp = transport(StreamState.OPEN, heard=heard, answered=True)
    tcp._stream = socket_of(write)
    tcp._tls.recv = socket_of(read).recv
    tcp._security = SimpleNamespace(server_name="name", reload=lambda context: False)
    tcp._context = None
    if kind is None:
        assert tcp.write([b"x"]) == 0
        return
    words = {StreamEnded: "writing failed", TypeError: "defect"}
    with pytest.raises(kind, match=words.get(kind, "wants a client")):
        tcp.write([b"x"])


@pytest.mark.parametrize("unsent", [True, False])
@pytest.mark.parametrize("is_done", [True, False])
def test_bytes_that_tls_has_not_written_are_waited_for(unsent, is_done):
    tcp = transport(StreamState.HANDSHAKING, answered=True)
    tcp._tls = SimpleNamespace(unsent=unsent, handshake=lambda: is_done)
    tcp.wants_write = tcp.unsent = not unsent
    tcp._handshake()
    assert (tcp.wants_write, tcp.unsent) == (unsent, unsent)
    assert (tcp.state is StreamState.OPEN) is is_done
    tcp._stream, tcp.unsent = socket_of(3), not unsent
    assert tcp.write([b"abc"]) == 3 and tcp.unsent is unsent


@pytest.mark.parametrize("newer", [True, False])
def test_a_refusal_is_final_unless_the_files_are_newer(newer):
    tcp = transport(StreamState.OPEN, answered=True)
    tcp._security = SimpleNamespace(server_name="", reload=lambda context: newer)
    tcp._context = None
    error = tcp._refusal_error(ALERT)
    assert type(error) is (errors.TlsError if newer else errors.TlsRefusedError)
    assert error.address == "h:1" and "with h:1 failed" in error.text
    eof = tcp._refusal_error(ConnectionResetError("reset"))
    assert type(eof) is errors.TlsError


def certificate(code):
    error = ssl.SSLCertVerificationError(1, "refused")
    error.verify_code, error.verify_message = code, "because"
    return error


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        ((62, 64), "does not name me.*tlsServerName"), ((9,), "is not valid yet"),
        ((10,), "has expired"), ((2, 18, 19, 20, 21), r"not trusted \(because\); set tlsCa"),
        ((1, 63, 22), "^the certificate is refused: because"),
    ],
)  # fmt: skip
def test_a_certificate_that_is_refused(codes, text):
    for code in codes:
        with pytest.raises(ValueError, match=text):
            raise ValueError(tls.explain(certificate(code), "me", answered=True))
        assert tls.is_final(certificate(code))


@pytest.mark.parametrize("reason", [*tls._ABOUT_US, *tls._ABOUT_ALL])
def test_each_alert_has_its_text(reason):
    error = ssl.SSLError(1, "alert")
    error.reason = f"TLSV1_ALERT_{reason}"
    assert tls.explain(error, "me", answered=False) == tls._REASONS[reason]
    assert tls.refuses_us(error) is (reason in tls._ABOUT_US) and tls.is_final(error)


@pytest.mark.parametrize("reason", [None, "ODD"])
def test_an_error_without_a_text_of_its_own_keeps_openssls(reason):
    error = ssl.SSLError(1, "odd words")
    error.reason = reason
    assert tls.explain(error, "me", answered=True) == (reason or str(error))
    assert not tls.is_final(error)


@pytest.mark.parametrize(("security", "full_read"), [(None, READ_BYTES), ("TLS", 0)])
def test_a_short_read_has_emptied_a_socket_without_tls(security, full_read):
    resolver = SimpleNamespace(look_up=lambda *_: SimpleNamespace(done=False))
    assert Transport("h:1", security, resolver).full_read == full_read


@pytest.mark.parametrize("files", [(), ("a",), ("a", "b")])
def test_files_that_have_changed_are_read_again(tmp_path, monkeypatch, files):
    security, contexts = object.__new__(tls.Security), []
    monkeypatch.setattr(
        tls, "_new_context", lambda options: contexts.append(options) or len(contexts)
    )
    paths = [tmp_path / name for name in files]
    for path in paths:
        path.write_text("one")
    options = SimpleNamespace(
        tls_ca=str(paths[0]) if paths else "", tls_cert=str(paths[-1]) if paths else "", tls_key="",
        tls_server_name="name",
    )  # fmt: skip
    security.__init__(options)
    first = security.context
    assert security.server_name == "name" and security.context is first and len(contexts) == 1
    assert security.reload(None) is True, "another handshake has read them since"
    assert security.reload(first) is False and security.context != first
    for path in paths:
        path.write_text("two!")
    assert security.reload(security.context) is bool(paths)


# --- frames and channels -----------------------------------------------------------------------


class Owner:
    def __init__(self):
        self.ends = []

    def on_end(self, *end):
        self.ends.append(end)


class Wire:
    """A transport that takes `takes` bytes or raises it, and gives the received `data`, part by
    part."""

    full_read = 8
    readable_now = False
    unsent = False

    def __init__(self, takes=0, data=(), state=StreamState.OPEN):
        self.takes, self.data, self.state = takes, list(data), state
        self.address, self.reads, self.is_noted = "h:1", [], False
        self.targets = SimpleNamespace(is_silent=lambda now_s: False)

    def write(self, buffers):
        if isinstance(self.takes, Exception):
            raise self.takes
        count = min(self.takes, sum(map(len, buffers)))
        self.takes -= count
        return count

    def read(self, size):
        self.reads.append(size)
        return self.data.pop(0) if self.data else None

    def close(self):
        self.state = StreamState.CLOSED

    def fileno(self):
        return -1

    def note_silence(self):
        self.is_noted = True

    def timeout_error(self):
        return errors.ConnectError("took too long")


def opened(wire, on_request=None):
    return Channel(wire, Connection(), on_request, now_s=NOW_S, connect_deadline_s=NOW_S + 3.0)


def requested(channel, deadline_s=NOW_S + 1.0):
    owner = Owner()
    head = channel.connection.send_request(Frame(1), deadline_s=deadline_s, token=owner)
    channel.write_queue.put(owner, [head, bytes(300 - len(head))], 300)
    return owner


@pytest.mark.parametrize(
    ("takes", "state", "kind", "text", "left"),
    [
        (300, StreamState.OPEN, errors.RequestTimeoutError, "no answer from h:1 before", 0),
        (50, StreamState.OPEN, errors.RequestTimeoutError, "took a part of the request", 250),
        (0, StreamState.OPEN, errors.UnwrittenError, "h:1 took no more bytes", 0),
        (0, StreamState.CONNECTING, errors.ConnectError, "took too long", 0),
    ],
)
def test_a_request_whose_time_is_over(takes, state, kind, text, left):
    channel = opened(Wire(takes, state=state))
    owner = requested(channel)
    channel.flush(NOW_S + 0.25)
    channel.heard_s = NOW_S + 0.2
    channel.expire(NOW_S + 0.99)
    assert not owner.ends
    channel.expire(NOW_S + 1.0)
    [(error, sent_s, at_s)] = owner.ends
    assert type(error) is kind and text in error.text and (sent_s, at_s) == (None, NOW_S + 1.0)
    assert (channel.write_queue.size, bool(channel.write_queue.unowned_bytes)) == (left, left > 0)


def test_requests_that_expire_together_are_withdrawn_together(monkeypatch):
    """A withdrawal goes through the whole queue: one for each of 8,000 requests took 2.4 s."""
    channel, withdrawals = opened(Wire()), MagicMock(side_effect=WriteQueue.withdraw)
    monkeypatch.setattr(WriteQueue, "withdraw", lambda *args: withdrawals(*args))
    owners = [requested(channel) for _ in range(3)]
    channel.expire(NOW_S + 1.0)
    assert [len(owner.ends) for owner in owners] == [1, 1, 1] and withdrawals.call_count == 1


@pytest.mark.parametrize(("heard_s", "is_extended"), [(0.5, True), (0.49, False)])
def test_a_live_peer_gets_more_time(heard_s, is_extended):
    channel, owner = opened(Wire(300)), Owner()
    channel.connection.open_request(deadline_s=NOW_S + 1.0, token=owner, latest_s=NOW_S + 9)
    channel.write_queue.put(owner, [bytes(100)], 100)
    channel.flush(NOW_S)
    channel.heard_s = channel.connection.last_heard_s = NOW_S + heard_s
    channel.expire(NOW_S + 1.0)
    assert bool(owner.ends) is not is_extended
    if is_extended:
        assert channel.connection.next_deadline_s == pytest.approx(NOW_S + 1.1)


@pytest.mark.parametrize(
    ("cause", "takes", "outcome", "kind"),
    [
        (StreamEnded("cut"), 300, Outcome.UNKNOWN, errors.ConnectionLostError),
        (StreamEnded("cut"), 50, Outcome.NOT_SENT, errors.UnwrittenError),
        (StreamEnded("cut"), StreamEnded("cut"), Outcome.NOT_SENT, errors.UnwrittenError),
        (errors.TlsError("refused"), 300, Outcome.NOT_SENT, errors.TlsError),
        (errors.ProducerClosedError("closed"), 300, Outcome.UNKNOWN, errors.UnknownOutcomeError),
        (errors.ProducerClosedError("closed"), 0, Outcome.NOT_SENT, errors.ProducerClosedError),
    ],
)
def test_a_connection_that_ends(cause, takes, outcome, kind):
    channel = opened(Wire(takes))
    owner = requested(channel)
    with contextlib.suppress(StreamEnded):
        channel.flush(NOW_S)
    channel.fail(cause, NOW_S + 2.0)
    [(error, sent_s, at_s)] = owner.ends
    assert (type(error), error.outcome, sent_s, at_s) == (kind, outcome, None, NOW_S + 2.0)
    assert error.__cause__ is cause and error is not cause and channel.closed
    assert not channel.write_queue and "closed" in repr(channel)


def test_a_peers_silence_begins_with_the_last_byte_in_either_way():
    channel = opened(Wire(300))
    channel.heard_s = NOW_S - 9.0
    assert channel.silent_s(NOW_S) == 0.0
    requested(channel)
    assert channel.silent_s(NOW_S) == 0.0, "nothing is written yet"
    channel.flush(NOW_S + 1.0)
    assert (channel.used_s, channel.silent_s(NOW_S + 3.0)) == (NOW_S + 1.0, 2.0)
    channel.heard_s = NOW_S + 2.5
    assert channel.silent_s(NOW_S + 3.0) == 0.5


def test_a_turn_reads_a_bounded_number_of_times():
    wire = Wire()
    channel = opened(wire)
    channel._dispatch = lambda events, now_s: 0
    channel.connection.receive_data = lambda data, now_s: []
    assert channel.receive(NOW_S + 1) is False and channel.heard_s == NOW_S
    wire.data = [b"x" * 8, b"x" * 7, b"x"]
    assert channel.receive(NOW_S + 1) is False and channel.heard_s == NOW_S + 1
    assert wire.data == [b"x"]
    assert channel.receive(NOW_S + 1, to_the_end=True) is False and not wire.data
    wire.data = [b"x" * 8] * 20
    assert channel.receive(NOW_S + 1) is True and len(wire.data) == 4


@pytest.mark.parametrize(
    "frame", [Frame(9, flag=2), response_to(Frame(9), 0)], ids=["requests", "answers"]
)
def test_a_flood_from_one_peer_leaves_the_others_their_turn(frame):
    """A turn reads 65,536 bytes, some milliseconds of work, not all that the kernel holds."""
    wire, unasked, served = Wire(), encode_frame(frame), []
    channel = opened(wire, lambda channel, request: served.append(request.code))
    for data, reads, is_more in (
        ([unasked * 64], [65_536, 65_536], False),
        ([unasked * 33, unasked * 32, unasked], [65_536, 65_536], True),
        ([unasked, unasked], [4096], True),  # The peer still floods.
        ([unasked[:9]], [4096, 65_536], False),
    ):
        wire.data, wire.reads = data, []
        assert channel.receive(NOW_S) is is_more and wire.reads == reads
    assert served == ([] if frame.is_response else [9] * 130)


# --- the client --------------------------------------------------------------------------------


@pytest.fixture
def client(closing, monkeypatch):
    network = NetworkClient(SinkOptions.parse(nameServer="n:1"), clock=lambda: NOW_S)
    monkeypatch.setattr(clients, "Transport", lambda *_: Wire(1000, state=StreamState.CONNECTING))
    return closing(network)


@pytest.mark.parametrize(
    ("idle_s", "in_flight", "is_read", "is_same"),
    [(0.05, False, False, True), (0.06, False, True, True), (120.0, False, True, True),
     (120.1, False, False, False), (120.1, True, False, True)],
)  # fmt: skip
def test_an_idle_connection_is_read_or_left(client, idle_s, in_flight, is_read, is_same):
    channel = client.channel("h:1", NOW_S)
    assert client.peek("h:1") is channel and channel.connect_deadline_s == NOW_S + 3.0
    channel.transport.state = StreamState.OPEN
    if in_flight:
        requested(channel)
    assert (client.channel("h:1", NOW_S + idle_s) is channel) is is_same
    assert bool(channel.transport.reads) is is_read and channel.closed is not is_same


def test_a_forked_child_closes_its_copies_of_sockets(client):
    channel = client.channel("h:1", NOW_S)
    client.abandon()
    assert channel.closed


def test_a_frame_is_written_at_once_if_the_queue_is_large(client, monkeypatch):
    monkeypatch.setattr(clients, "FLUSH_BYTES", 100)
    channel = client.channel("h:1", NOW_S)
    for state, size, left in (
        (StreamState.CONNECTING, 100, 100), (StreamState.OPEN, 99, 0), (StreamState.OPEN, 99, 99),
        (StreamState.OPEN, 1, 0),
    ):  # fmt: skip
        channel.transport.state = state
        client.send(channel, None, (bytes(size),), size, NOW_S)
        assert channel.write_queue.size == left
    owner, channel.transport.takes = requested(channel), StreamEnded("cut")
    client.flush(channel, NOW_S + 1)
    assert channel.closed and owner.ends[0][2] == NOW_S + 1


def test_a_connection_is_made_in_time_or_the_next_address_is_tried(client):
    channel, owner = client.channel("h:1", NOW_S), Owner()
    wire = channel.transport
    client.call("h:1", Frame(1), owner, deadline_s=NOW_S + 60, now_s=NOW_S)
    skips = []
    wire.advance = lambda skip: skips.append(skip)
    wire.wants_write = True
    for at_s, is_silent in ((2.9, False), (2.9, True)):
        wire.targets.is_silent = lambda now_s, is_silent=is_silent: is_silent
        client._scan(NOW_S + at_s)
    assert skips == [True] and not owner.ends and channel.interest == clients.READ | clients.WRITE
    client._scan(NOW_S + 3.0)
    assert type(owner.ends[0][0]) is errors.ConnectError and not client.channels
    channel = client.channel("h:2", NOW_S)
    channel.transport.advance = lambda skip: True
    client._advance(channel, NOW_S + 0.4)
    assert channel.ready_s == channel.used_s == NOW_S + 0.4 and client.opened == 1


@pytest.mark.parametrize(
    ("heard_s", "is_written", "drains"),
    [(0.5, True, True), (0.51, True, False), (0.9, False, True)],
)
def test_an_answer_that_is_missing_on_a_silent_connection_ends_its_use(
    client, heard_s, is_written, drains
):
    channel = client.channel("h:1", NOW_S)
    wire = channel.transport
    wire.state, wire.takes = StreamState.OPEN, 1000 if is_written else 0
    owner = requested(channel)
    client.flush(channel, NOW_S + 0.5)
    channel.heard_s = NOW_S + heard_s
    client._scan(NOW_S + 0.99)
    assert not owner.ends
    client._scan(NOW_S + 1.0)
    assert len(owner.ends) == 1 and (client.peek("h:1") is None) is drains
    assert wire.is_noted is drains
    client._scan(NOW_S + 1.1)
    assert channel.closed is drains and (channel in client.channels) is not drains


@pytest.mark.parametrize("way", ["call", "oneway", "group"])
def test_a_frame_that_cannot_be_made(client, way, monkeypatch):
    owner, broken = Owner(), MagicMock(side_effect=ValueError("defect"))
    client.rpc_hooks = SimpleNamespace(before=broken)
    monkeypatch.setattr(clients, "fill_frames", broken)
    ends = {"deadline_s": NOW_S + 1, "now_s": NOW_S}
    with pytest.raises(errors.UnwrittenError, match=r"ValueError\('defect'\)"):
        if way == "call":
            client.call("h:1", Frame(1), owner, **ends)
        elif way == "group":
            assert client.call_group("h:1", Frame(1), {"a": [b"1", b"2"]}, owner, **ends) == 0
        else:
            client.oneway("h:1", Frame(1), NOW_S)
        raise owner.ends.pop()[0]
    assert client.in_flight == 0 and not owner.ends


@pytest.mark.parametrize("error", [ValueError("defect"), errors.ConnectError("defect")])
def test_a_connection_that_cannot_be_begun(client, error, monkeypatch):
    monkeypatch.setattr(clients, "Transport", MagicMock(side_effect=error))
    owner, ends = Owner(), {"deadline_s": NOW_S + 1, "now_s": NOW_S}
    client.call("h:1", Frame(1), owner, **ends)
    assert client.call_group("h:1", Frame(1), {"a": [b"1"]}, owner, **ends) == 0
    assert [type(end[0]) for end in owner.ends] == [errors.ConnectError] * 2
    assert all("defect" in end[0].text and end[2] == NOW_S for end in owner.ends)


def test_a_oneway_request_is_written_at_once(client):
    channel, sizes = client.channel("h:1", NOW_S), []
    channel.transport.state = StreamState.OPEN
    for body in (None, b"ab"):
        before = channel.transport.takes
        client.oneway("h:1", Frame(1, None, body), NOW_S)
        sizes.append(before - channel.transport.takes)
    assert sizes[1] == sizes[0] + 2 > 50 and not channel.has_unwritten and not client.in_flight


def test_a_client_takes_groups_unless_headers_are_signed_or_seen(client):
    assert client.takes_groups
    client.rpc_hooks = ["hook"]
    assert not client.takes_groups
    client.rpc_hooks, client._sign = [], len
    assert not client.takes_groups
    first = client.call_group(
        "h:1", Frame(1), {"a": np.array([b"1", b"2"])}, Owner(), deadline_s=NOW_S + 1, now_s=NOW_S
    )
    assert first >= 0 and client.in_flight == 2


def test_a_wait_is_short_while_something_is_in_flight(client):
    channel = client.channel("h:1", NOW_S)
    assert client.prepare(5.0) == 5.0
    requested(channel)
    assert (client.prepare(5.0), client.prepare(0.01)) == (0.02, 0.01)
    channel.transport.readable_now = True
    assert client.prepare(5.0) == 0.0
    client.drain(channel, NOW_S)
    assert channel.draining and client.channels == [channel] and client.peek("h:1") is None
    call = Call(lambda *end: None)
    client.call_on(channel, Frame(1), call, deadline_s=NOW_S + 9, now_s=NOW_S)
    assert client.in_flight == 2


def test_an_error_of_an_open_selector_is_raised(monkeypatch):
    readiness = clients.Readiness()
    select = MagicMock(side_effect=[OSError, ValueError, ValueError])
    monkeypatch.setattr(readiness._selector, "select", select)
    for error in (OSError, ValueError):
        with pytest.raises(error):
            readiness.wait(0.0)
    readiness.close()
    assert readiness.wait(0.0) == []


# --- names and logs ----------------------------------------------------------------------------


def test_a_client_id_is_used_once_in_a_process_and_a_child_has_its_own(monkeypatch):
    options = SinkOptions.parse(
        clientIp="10.0.0.9", instanceName="only-here", producerGroup="g", namespace="ns"
    )
    first, second = Identity(options), Identity(options)
    assert first.group == "ns%g" and first.client_id == second.client_id == "10.0.0.9@only-here"
    first.claim()
    first.claim()
    with pytest.raises(errors.ConfigurationError, match=r"'ns%g' .*only-here'"):
        second.claim()
    second.release()
    with pytest.raises(errors.ConfigurationError):
        second.claim()
    first.release()
    first.release()
    second.claim()
    second.release()
    Identity(options.with_(producerGroup="other")).claim()
    monkeypatch.setattr(identity.os, "getpid", lambda: 77)
    assert Identity(options).client_id == "10.0.0.9@only-here#77"
    free = Identity(SinkOptions.parse(clientIp="10.0.0.9"))
    assert free.client_id.startswith("10.0.0.9@77#") and free.of_pid == 77


@pytest.mark.parametrize(
    ("ip", "packed"),
    [("10.0.0.1", bytes((10, 0, 0, 1))), ("::1", bytes(15) + b"\1"), ("no", bytes((127, 0, 0, 1)))],
)
def test_message_ids_have_the_address(monkeypatch, ip, packed):
    monkeypatch.setattr(identity, "MessageIds", dict)
    fields = identity.new_message_ids(ip)
    assert fields["ip"] == packed and 0 <= fields["class_hash"] < 1 << 32
    other = identity.new_message_ids(ip)  # Containers have processes of the same number.
    assert fields["class_hash"] != other["class_hash"]


def test_counters_of_records_are_few_and_end(monkeypatch):
    monkeypatch.setattr(log, "_KINDS", 2)
    now_s = [0.0]
    guard = log.Guard(lambda: now_s[0])
    kinds = [log.Kind("l", 30, "t", f"p{n}") for n in range(4)]
    for kind in kinds:
        for _ in range(log.BURST + 1):
            guard.admit(kind)
    assert {kind.peer for kind in guard._counts} == {"p0", "p1", "other peers"}
    now_s[0] = log.EVERY_S - 0.1
    assert guard.admit(kinds[0]) == (None, [])
    now_s[0] = log.EVERY_S
    count, due = guard.admit(kinds[0])
    assert count is not None and (count.passed, count.since_s) == (1, now_s[0])
    assert {(kind.peer, cut) for kind, cut in due} == {("p0", 2), ("p1", 1), ("other peers", 12)}
    count.shown = "the last"
    for _ in range(log.BURST):
        guard.admit(kinds[0])
    assert guard.rest() == [(kinds[0]._replace(text="the last"), 1)]
    assert HEARD_RECENTLY_S == 0.5
