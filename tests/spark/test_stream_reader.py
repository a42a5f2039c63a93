"""The streaming reader: offsets, limits, queues that come and go; first by hand, then by Spark."""

import json
import pickle
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rocket_sink import errors
from rocket_sink.errors import ConfigurationError, SendError
from rocket_sink.message import MessageQueue
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.spark.reading import stream as module
from rocket_sink.spark.reading.batch import queue_name
from rocket_sink.spark.reading.options import ReadOptions
from rocket_sink.spark.reading.stream import TopicStream
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire import requests
from rocket_sink.wire.codes import RequestCode, ResponseCode
from tests.clusters import scripted_cluster
from tests.spark.two_brokers import TOPIC, fill

limits = pytest.importorskip("pyspark.sql.streaming.datasource")
cluster = scripted_cluster(t=2)

QUEUES = ("broker-a:0", "broker-a:1", "broker-b:0", "broker-b:1")


def reader(cluster, **options):
    asked = {"nameserver": cluster.name_server, "topic": TOPIC, **options}
    return TopicStream(*ReadOptions.parse(asked, is_stream=True))


def offsets(*numbers):
    return {TOPIC: dict(zip(QUEUES, numbers, strict=True))}


ALL = limits.ReadAllAvailable()
ZERO = offsets(0, 0, 0, 0)


def bodies(stream, start, end):
    # Spark passes offsets as JSON, and partitions by pickle, to other processes.
    start, end = json.loads(json.dumps([start, end]))
    parts = pickle.loads(pickle.dumps(list(stream.partitions(start, end))))
    batches = [batch for part in parts for batch in stream.read(part)]
    return sorted(body.decode() for batch in batches for body in batch["body"].to_pylist())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (3, 0, 0, 1)), ({"startingOffsets": "earliest"}, (0, 0, 0, 0)),
        ({"startingOffsets": '{"broker-a:0": 2}'}, (2, 0, 0, 0)),
        ({"startTimestamp": "1010"}, (1, 0, 0, 1)),
    ],
)  # fmt: skip
def test_a_new_query_begins_where_the_options_say(cluster, options, expected):
    fill(cluster, 3)
    fill(cluster, 1, broker=1, queue=1)
    assert reader(cluster, **options).initialOffset() == offsets(*expected)
    with pytest.raises(errors.OptionError, match="has no queue 'broker-z:0'"):
        reader(cluster, startingOffsets='{"broker-z:0": 1}').initialOffset()


def test_an_epoch_has_what_came_since_the_one_before(cluster):
    stream = reader(cluster)
    fill(cluster, 2)
    fill(cluster, 1, broker=1, queue=1)
    end = stream.latestOffset(ZERO, ALL)
    fill(cluster, 5)
    assert end[TOPIC] == offsets(2, 0, 0, 1)[TOPIC] == stream.reportLatestOffset()[TOPIC]
    assert stream.getDefaultReadLimit() == ALL
    assert bodies(stream, ZERO, end) == ["000", "001", "110"]
    assert bodies(stream, end, end) == []


def test_offsets_of_another_cluster_are_not_read(cluster):
    """The other cluster has more messages, so each queue ends after the checkpoint's offset."""
    fill(cluster, 2)
    end = reader(cluster).latestOffset(ZERO, ALL)
    # The offset names the cluster by all addresses, so that a moved cluster is known again.
    addresses = {cluster.name_server, *(broker.address for broker in cluster.brokers)}
    assert addresses <= {*end[module._CLUSTER]}
    with FakeCluster(brokers=2) as other:
        other.create_topic(TOPIC, 2)
        fill(other, 3)
        moved = reader(other)
        later = moved.latestOffset(end, ALL)
        for start, stop in ((end, later), (ZERO, end)):
            with pytest.raises(ConfigurationError, match="offsets are of a cluster with"):
                moved.partitions(start, stop)
        assert bodies(reader(other, failOnDataLoss="false"), end, later) == ["002"]
    again = reader(cluster, nameserver=f"127.0.0.1:1;{cluster.name_server}")
    assert again.partitions(end, again.latestOffset(end, ALL)) == []


def test_the_first_epoch_has_the_same_messages_when_it_runs_again(cluster):
    """Spark's log has the ends of epochs, so Spark asks for the start of the first one again."""
    stream = reader(cluster)
    fill(cluster, 1)
    start = stream.initialOffset()
    fill(cluster, 2)
    end = stream.latestOffset(start, ALL)
    assert stream.latestOffset(end, ALL) == end  # No message waits.
    fill(cluster, 5)
    assert module._BEGINS in end and module._BEGINS not in stream.latestOffset(end, ALL)
    # The end has no start before Spark 4.2, and after an epoch without messages.
    for logged, expected in ((end, ["000", "001"]), (offsets(1, 0, 0, 0), [])):
        again = reader(cluster)
        assert bodies(again, again.initialOffset(), logged) == expected
        assert again.latestOffset(logged, ALL)[TOPIC] == offsets(8, 0, 0, 0)[TOPIC]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (100, (6, 0, 3, 0)), (9, (6, 0, 3, 0)), (6, (4, 0, 2, 0)), (2, (1, 0, 1, 0)),
        (1, (1, 0, 1, 0)),
    ],
)  # fmt: skip
def test_a_limit_is_shared_out_by_what_waits(cluster, most, expected):
    stream = reader(cluster, maxOffsetsPerTrigger=str(most))
    fill(cluster, 6)
    fill(cluster, 3, broker=1)
    assert stream.getDefaultReadLimit() == limits.ReadMaxRows(most)
    ends = stream.latestOffset(ZERO, limits.ReadMaxRows(most))
    assert ends[TOPIC] == offsets(*expected)[TOPIC]
    assert stream.latestOffset(ZERO, ALL)[TOPIC] == offsets(6, 0, 3, 0)[TOPIC]


def test_an_epoch_waits_for_enough_messages_or_for_its_time(cluster, monkeypatch):
    clock = [5.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stream = reader(cluster, minOffsetsPerTrigger="3", maxTriggerDelay="1h")
    limit = stream.getDefaultReadLimit()
    assert limit == limits.ReadMinRows(3)
    fill(cluster, 1)
    # The first epoch of a start waits for nothing.
    first = stream.latestOffset(ZERO, limit)
    assert first[TOPIC] == offsets(1, 0, 0, 0)[TOPIC]
    fill(cluster, 2)
    assert stream.latestOffset(first, limit) == first
    assert stream.latestOffset(first, ALL)[TOPIC] == offsets(3, 0, 0, 0)[TOPIC]
    fill(cluster, 1, broker=1)
    last = stream.latestOffset(first, limit)
    assert last[TOPIC] == offsets(3, 0, 1, 0)[TOPIC]
    fill(cluster, 1)
    for now_s, end in ((5 + 3599, 3), (5 + 3600, 4)):
        clock[0] = now_s
        assert stream.latestOffset(last, limit)[TOPIC] == offsets(end, 0, 1, 0)[TOPIC]


def test_available_now_ends_where_the_topic_ended_at_the_start(cluster):
    stream = reader(cluster, minOffsetsPerTrigger="100")
    fill(cluster, 2)
    stream.prepareForTriggerAvailableNow()
    fill(cluster, 2)
    cluster.create_topic(TOPIC, 3)
    fill(cluster, 2, queue=2)
    # A query that begins with `latest` may begin later, and a topic may be made anew.
    for begin, last in ((0, 2), (2, 2), (3, 3), (9, 4)):
        start = offsets(begin, 0, 0, 0)
        assert (
            stream.latestOffset(start, limits.ReadMinRows(100))[TOPIC]
            == offsets(last, 0, 0, 0)[TOPIC]
        )


def test_a_new_queue_is_read_from_its_first_message(cluster):
    stream = reader(cluster)
    start = stream.initialOffset()
    cluster.create_topic(TOPIC, 3)
    fill(cluster, 2, queue=2)
    end = stream.latestOffset(start, ALL)
    assert end[TOPIC] == {**start[TOPIC], "broker-a:2": 2, "broker-b:2": 0}
    few = stream.latestOffset(start, limits.ReadMaxRows(1))
    assert few[TOPIC]["broker-a:2"] == 1
    assert bodies(stream, start, end) == ["020", "021"]


def test_a_broker_that_is_away_keeps_its_offsets(cluster, caplog):
    stream = reader(cluster)
    fill(cluster, 1)
    fill(cluster, 1, broker=1)
    cluster.brokers[1].kill()
    end = stream.latestOffset(ZERO, ALL)
    assert end[TOPIC] == offsets(1, 0, 0, 0)[TOPIC]
    [record] = caplog.records
    assert "the broker broker-b is away" in record.message and record.peer == "broker-b"
    assert bodies(stream, ZERO, end) == ["000"]
    new_queues = stream.latestOffset({TOPIC: {"broker-a:0": 0}}, ALL)
    assert new_queues[TOPIC] == {"broker-a:0": 1, "broker-a:1": 0}
    # A query that runs outlives all brokers and name servers; a start needs one of each.
    cluster.brokers[0].kill()
    assert stream.latestOffset(end, ALL) == end
    with pytest.raises(SendError):
        reader(cluster).latestOffset(end, ALL)
    cluster.forget_brokers()
    assert stream.latestOffset(end, ALL) == end
    assert "the queues of the last epoch are read: " in caplog.text
    cluster.stop_name_server()
    assert stream.latestOffset(end, ALL) == end
    with pytest.raises(SendError):
        reader(cluster).latestOffset(end, ALL)
    cluster.start_name_server()
    cluster.register()
    for broker in cluster.brokers:
        broker.restart()
    assert stream.latestOffset(end, ALL)[TOPIC] == offsets(1, 0, 1, 0)[TOPIC]


def test_a_refusal_is_no_broker_that_is_away(cluster):
    stream = reader(cluster)
    start = stream.initialOffset()
    refusal = Answer(ResponseCode.NO_PERMISSION)
    cluster.brokers[1].on(RequestCode.GET_MAX_OFFSET, refusal, times=None)
    with pytest.raises(errors.PermissionDeniedError):
        stream.latestOffset(start, ALL)


def test_a_task_waits_for_its_broker(cluster):
    stream = reader(cluster)
    start = stream.initialOffset()
    fill(cluster, 2)
    end = stream.latestOffset(start, ALL)
    cluster.brokers[0].kill()
    cluster.stop_name_server()

    def come_back():
        cluster.start_name_server()
        cluster.brokers[0].restart()

    timer = threading.Timer(1.0, come_back)
    timer.start()
    assert bodies(stream, start, end) == ["000", "001"]
    timer.join()


def test_a_deleted_topic_is_an_error_if_messages_were_read(cluster):
    stream = reader(cluster)
    fill(cluster, 2)
    start = stream.latestOffset(ZERO, ALL)
    cluster.delete_topic(TOPIC)
    end = stream.latestOffset(start, ALL)
    with pytest.raises(ConfigurationError, match="made anew, or its broker has lost"):
        stream.partitions(start, end)


def test_a_time_to_start_from_is_for_the_first_epoch_only(cluster):
    """A script may give the present time at each start; the checkpoint decides."""
    fill(cluster, 3)
    late = reader(cluster, startTimestamp="1020")
    assert late.initialOffset() == offsets(2, 0, 0, 0)
    assert bodies(late, ZERO, offsets(3, 0, 0, 0)) == ["000", "001", "002"]


def test_a_time_after_the_newest_message_of_an_old_broker(cluster, monkeypatch):
    """Brokers before 5.2 return the newest message's offset."""
    fill(cluster, 3)
    monkeypatch.setattr(
        Admin, "offset_by_time", lambda self, queue, ms: max(self.max_offset(queue) - 1, 0)
    )
    for ms, offset in ((5000, 3), (1020, 2)):
        first = reader(cluster, startTimestamp=str(ms)).initialOffset()
        assert first[TOPIC] == offsets(offset, 0, 0, 0)[TOPIC]


def test_a_namespace_is_part_of_topic_checkpoint_and_group(cluster, monkeypatch):
    cluster.create_topic("space%t", 1)
    note = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(requests, "update_consumer_offset", note)
    stream = reader(cluster, namespace="space", consumerGroup="g")
    start = stream.initialOffset()
    assert start == {"space%t": {"broker-a:0": 0, "broker-b:0": 0}}
    with pytest.raises(ZeroDivisionError):
        stream.commit(start)
    note.assert_called_once_with(MessageQueue("space%t", "broker-a", 0), "space%g", 0)
    by_header = reader(cluster, namespaceV2="space", consumerGroup="g")
    begin = by_header.initialOffset()
    with pytest.raises(ZeroDivisionError):
        by_header.commit(begin)
    assert list(begin) == list(start)
    assert note.call_args.args == (MessageQueue("t", "broker-a", 0), "g", 0)
    with pytest.raises(ConfigurationError, match="is of the topic t, and this query reads space%t"):
        stream.latestOffset(ZERO, ALL)


def test_the_group_follows_finished_epochs_and_skips_a_broker_that_is_away(
    cluster, monkeypatch, caplog
):
    noted: list[tuple[str, int]] = []

    def note(self, queue, group, offset):
        if queue.broker_name == "broker-b":
            raise errors.ConnectError("away")
        noted.append((queue_name(queue), offset))

    monkeypatch.setattr(Admin, "set_consumer_offset", note)
    stream = reader(cluster, consumerGroup="g")
    start = stream.initialOffset()
    fill(cluster, 2)
    end = stream.latestOffset(start, ALL)
    assert noted == [("broker-a:0", 0), ("broker-a:1", 0)]
    assert caplog.text.count("did not note") == 1
    # Spark passes the end of the epoch at the next look, but commits it after the next epoch.
    stream.latestOffset(end, ALL)
    stream.commit(end)
    assert noted[2:] == [("broker-a:0", 2)]


def test_a_broker_is_asked_for_a_group_that_it_does_not_have(cluster):
    """Brokers refuse the offsets of an unknown group, and consoles ask for its retry topic."""
    stream = reader(cluster, consumerGroup="g")
    broker = cluster.brokers[0]
    for answer, times in ((ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, 1), (0, None)):
        broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, Answer(answer), times=times)
    stream.commit({TOPIC: {"broker-a:0": 7}})
    wanted = (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.HEART_BEAT)
    asked = [frame for frame in broker.requests if frame.code in wanted]
    assert [frame.code for frame in asked] == [wanted[0], wanted[1], wanted[0]]
    groups = json.loads(bytes(asked[1].body or b""))["consumerDataSet"]
    assert [group["groupName"] for group in groups] == ["g"]
    assert asked[2].ext and asked[2].ext["commitOffset"] == "7"


def test_spark_before_4_2_passes_no_start(cluster, monkeypatch, caplog):
    monkeypatch.setattr(module, "ReadAllAvailable", None)
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"):
        with pytest.raises(errors.OptionError, match=r"need Spark 4\.2"):
            reader(cluster, **{name: "5"})
    stream, started = reader(cluster), reader(cluster)
    assert started.initialOffset() == ZERO
    fill(cluster, 1)
    # Spark asks for the first offset after the first end.
    end = stream.latestOffset()
    fill(cluster, 1)
    assert stream.initialOffset() == end == offsets(1, 0, 0, 0)
    cluster.brokers[1].kill()
    assert stream.latestOffset()[TOPIC] == offsets(2, 0, 0, 0)[TOPIC]
    # A process that has just started does not know the offsets of a broker that is away.
    with pytest.raises(SendError):
        started.latestOffset()
    cluster.forget_brokers()
    cluster.register("broker-a")
    assert stream.latestOffset()[TOPIC] == offsets(2, 0, 0, 0)[TOPIC]
    assert "no name server has a route to t there" in caplog.text
    restarted = reader(cluster)
    with pytest.raises(ConfigurationError, match="broker of broker-b:0, broker-b:1 was away when"):
        restarted.partitions(offsets(1, 0, 0, 0), restarted.latestOffset())


@pytest.mark.parametrize(
    ("start", "end", "text", "remaining"),
    [
        (offsets(9, 0, 0, 0), offsets(3, 0, 0, 0), "made anew, or its broker has lost", 3),
        (ZERO, offsets(3, 0, 0, 0), "begins at offset 1 now; 0 was asked for", 2),
    ],
)
def test_messages_that_are_gone_are_an_error_unless_allowed(
    cluster, monkeypatch, start, end, text, remaining
):
    fill(cluster, 3)
    monkeypatch.setattr(Admin, "min_offset", lambda self, queue: 3 - remaining)
    with pytest.raises(ConfigurationError, match=text):
        reader(cluster).partitions(start, end)
    assert len(bodies(reader(cluster, failOnDataLoss="false"), start, end)) == remaining


def test_a_queue_that_brokers_do_not_give_any_more(cluster):
    start = {TOPIC: {**ZERO[TOPIC], "broker-a:7": 4}}
    with pytest.raises(ConfigurationError, match="has no queue broker-a:7 now"):
        reader(cluster).latestOffset(start, ALL)
    kept = reader(cluster, failOnDataLoss="false").latestOffset(start, ALL)
    assert kept == start
