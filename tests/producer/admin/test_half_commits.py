"""Half messages are committed in groups; a message that a broker refuses is reported by itself."""

import itertools
import threading
from dataclasses import asdict
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from rocket_sink.errors import AuthenticationError, DeliveryError, LedgerError
from rocket_sink.message import Message
from rocket_sink.net import client
from rocket_sink.producer.admin import half_commits
from rocket_sink.producer.admin.half_commits import HALVES, Half, HalfMessageCommitter
from rocket_sink.producer.transactions import UNKNOWN
from rocket_sink.testing import Answer, CloseConnection
from rocket_sink.wire.answers import PlainAnswers
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.ids import decode_offset_message_id
from tests.producer.conftest import drive_until

COUNT = 120


@pytest.fixture
def halves(make_producer):
    producer, sent_halves = make_producer(producerGroup="halves"), []
    for number in range(COUNT):
        message = Message("orders", b"%d" % number)
        half = producer.send_in_transaction(message, lambda message, arg: UNKNOWN).send_result
        log_offset, queue = decode_offset_message_id(half.offset_message_id), half.queue
        place = queue.broker_name, queue.queue_id, half.queue_offset, log_offset
        sent_halves.append(Half("orders", *place, half.message_id))
    return pa.Table.from_pylist([asdict(half) for half in sent_halves], HALVES)


@pytest.fixture
def at_once(monkeypatch):
    """Return a list that gets the number of answers in each reading."""
    counts = []
    plain = half_commits._Commits.on_end

    def counted(self, result, *more):
        if isinstance(result, PlainAnswers):
            counts.append(len(result))
        plain(self, result, *more)

    monkeypatch.setattr(half_commits._Commits, "on_end", counted)
    return counts


def committer(engine):
    return HalfMessageCommitter(engine, group="halves", ordered=False, since_ms=0)


def assert_all_committed(cluster, report):
    assert (report.committed, report.refused) == (COUNT, [])
    stored = sorted(int(message.body) for message in cluster.messages("orders"))
    assert stored == list(range(COUNT))


@pytest.fixture
def together(cluster):
    """Let the brokers answer after a while, so that the answers come together on a slow machine."""
    cluster.freeze()
    timer = threading.Timer(1.5, lambda: [broker.thaw() for broker in cluster.brokers])
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize(("by_queue", "count"), [(False, 4), (True, 12)])
def test_each_queue_is_a_lane_if_order_counts(by_queue, count):
    names = ("topic", "broker_name", "queue_id")
    queues = itertools.product(("t", "u"), ("a", "b"), range(3))
    halves = pa.Table.from_pylist([dict(zip(names, queue, strict=True)) for queue in queues])
    assert len(set(half_commits._lanes(halves, by_queue=by_queue))) == count


def test_a_commit_waits_longer_after_each_failure(cluster, make_engine, halves, monkeypatch):
    engine, waits, counts, checks = make_engine(sendMsgTimeout=3000), [], [], []
    monkeypatch.setattr(engine, "drive_for", waits.append)
    cluster.on(RequestCode.END_TRANSACTION, Answer(ResponseCode.SYSTEM_BUSY, "not now"), times=8)
    more = {"progress": counts.append, "check": checks.append}
    commits = HalfMessageCommitter(engine, group="halves", ordered=True, since_ms=0, **more)
    report = commits.commit(halves.slice(0, 1), doubtful=False)
    # An end that the producer has sent may take one of the answers.
    assert waits[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1, 1, 1])
    assert (report.committed, counts, {*checks}) == (1, [1], {0.0, 3.0})


@pytest.mark.parametrize("are_new", [True, False])
def test_new_credentials_are_read_before_a_refusal_is_final(
    are_new, cluster, make_engine, halves, monkeypatch
):
    engine = make_engine()
    cluster.on(RequestCode.END_TRANSACTION, Answer(1, "check signature failed"))
    monkeypatch.setattr(engine, "reread_credentials", lambda signed_s: are_new and signed_s > 0)
    if are_new:
        assert_all_committed(cluster, committer(engine).commit(halves, doubtful=False))
        return
    with pytest.raises(AuthenticationError):
        committer(engine).commit(halves, doubtful=False)


def test_a_lock_that_may_be_lost_ends_a_commit_unwritten(cluster, make_engine, halves, monkeypatch):
    def check(ahead_s):
        if ahead_s:
            raise LedgerError("the lock may be lost")

    engine, abandon = make_engine(), MagicMock()
    monkeypatch.setattr(engine, "abandon", abandon)
    commits = committer(engine)
    commits.check = check
    with pytest.raises(LedgerError, match="may be lost"):
        commits.commit(halves, doubtful=False)
    assert abandon.called and not cluster.messages("orders")


def test_answers_are_read_by_columns(cluster, make_engine, halves, at_once, together):
    report = committer(make_engine(sendMsgTimeout=20_000)).commit(halves, doubtful=False)
    assert_all_committed(cluster, report)
    assert max(at_once) >= 16


@pytest.mark.parametrize(
    ("behaviour", "times"),
    [
        (CloseConnection(), 1),
        (Answer(ResponseCode.SYSTEM_BUSY, "not now"), 7),
        (Answer(ResponseCode.SYSTEM_ERROR, "not now"), 7),
    ],
)
def test_what_has_no_answer_is_committed_again(cluster, make_engine, halves, behaviour, times):
    cluster.on(RequestCode.END_TRANSACTION, behaviour, times=times)
    report = committer(make_engine(sendMsgTimeout=3000)).commit(halves, doubtful=False)
    assert_all_committed(cluster, report)


@pytest.mark.parametrize(("doubtful", "first"), [(False, "the connection to"), (True, "odd")])
def test_a_look_up_without_an_answer_is_told_of_with_the_first_error(
    cluster, make_engine, halves, doubtful, first
):
    cluster.on(RequestCode.END_TRANSACTION, CloseConnection(), times=None)
    cluster.on(RequestCode.QUERY_MESSAGE, Answer(1, "odd"), times=None)
    engine = make_engine(storedCheckTimeout=300)
    with pytest.raises(DeliveryError, match=rf"could not be committed \(.*{first}"):
        committer(engine).commit(halves, doubtful=doubtful)


def test_two_halves_of_one_id_are_not_committed_beside_their_message(cluster, make_engine, halves):
    """The answer to a half message was lost, so it was sent again under its id."""
    engine, [half] = make_engine(), halves.slice(0, 1).to_pylist()
    committer(engine).commit(halves.slice(0, 1), doubtful=False)
    again = pa.Table.from_pylist([half, {**half, "half_offset": half["half_offset"] + 1}], HALVES)
    report = committer(engine).commit(again, doubtful=True)
    assert (report.committed, report.found_stored) == (2, 2)
    assert [message.body for message in cluster.messages("orders")] == [b"0"]
    frames = [frame.ext for broker in cluster.brokers for frame in broker.requests]
    keys = [ext["key"] for ext in frames if ext and "key" in ext]
    assert keys == ["-", half["message_id"]], "what is on its way is waited for, and looked up"


def test_frames_that_cannot_be_made_leave_nothing_behind(cluster, make_engine, halves, monkeypatch):
    engine, calls = make_engine(sendMsgTimeout=600_000), []
    fill_frames = client.fill_frames

    def fill(*given):
        calls.append(given)
        if len(calls) == 1:
            raise MemoryError("no room for the frames")
        return fill_frames(*given)

    monkeypatch.setattr(client, "fill_frames", fill)
    monkeypatch.setattr(half_commits, "_LONGEST_REQUEST_S", 600.0)
    report = committer(engine).commit(halves, doubtful=False)
    assert_all_committed(cluster, report)
    assert len(calls) > 1
    drive_until(engine, lambda: not engine.client.in_flight, 60.0)  # Heartbeats may be.
