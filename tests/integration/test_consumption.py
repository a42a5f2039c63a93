"""The messages of a ledger that a group has consumed, beside Java's consumer and mqadmin."""

import datetime as dt
import re
import uuid
from unittest.mock import MagicMock, Mock

import pyarrow as pa
import pytest

from rocket_sink import Ledger, TableProducer
from rocket_sink.commands import check
from rocket_sink.errors import RocketSinkError
from rocket_sink.ledger.query import consumption as module
from rocket_sink.ledger.records import in_order, send_rows
from rocket_sink.ledger.report import Scope, figures
from rocket_sink.ledger.views import reader
from rocket_sink.options import SinkOptions
from rocket_sink.wire.route import BrokerData, TopicRoute
from tests.clusters import make_topic
from tests.java_client import FOLDER, GENERATIONS, run_java
from tests.ledger.night import QUERY, START, at, night, store
from tests.ledger.values import attempt, context
from tests.ledger.views import quick_ledger
from tests.run_command import run_command


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_what_a_java_consumer_has_read(cluster, spark, tmp_path):
    topic, ledger = f"consumed-{uuid.uuid4().hex[:8]}", Ledger(tmp_path / "ledger")
    group = f"push-{topic}"  # that of PushTopic.java
    make_topic(cluster, topic)
    options = {"nameServer": cluster.name_server, "topic": topic}
    witness = re.compile(rf"^{topic}\s+(broker-\w)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", re.MULTILINE)

    def consume(count):
        words = FOLDER / "PushTopic.java", cluster.name_server, topic, str(count)
        run_java(*words, version=GENERATIONS[0])

    def report(name=group, code=0):
        ledger.sync(spark)
        done = run_command(
            "report", "--ledger", ledger.path, "-n", cluster.name_server, "-g", name, "--json"
        )
        assert done.code == code, done.err
        return done.json()["consumption"] if code == 0 else done.err

    with TableProducer(ledger=ledger.path, **options) as producer:
        for rows in (40, 30, 30):
            producer.send(pa.table({"body": [str(n) for n in range(rows)]}))
            if rows == 40:
                consume(rows)
    reported = report()
    by_mqadmin = {
        (broker, int(queue)): (int(position), int(difference))
        for broker, queue, _, position, difference in witness.findall(
            cluster.admin("consumerProgress", "-g", group)
        )
    }
    assert (40, 0) in by_mqadmin.values()
    for queue in reported["queues"]:  # mqadmin has no line of a broker that knows no position
        own = queue["position"] or 0, queue["waiting"]
        assert by_mqadmin.get((queue["broker"], queue["queue_id"]), own) == own
    (query,) = reported["queries"]
    assert (query["messages"], query["waiting"], query["deleted"]) == (100, 60, 0)
    assert (query["first_waiting"], query["epochs_waiting"], query["last_epoch"]) == (2, 2, 3)
    of_group = {"group": group, "options": SinkOptions.parse(options)}
    by_spark = figures(reader(ledger.rows(spark)), ledger.path, Scope(), **of_group)
    assert by_spark.as_dict()["consumption"] == reported
    by_ledger = ledger.report(spark, **of_group)
    assert by_ledger.consumption == by_spark.consumption

    consume(60)
    checked = run_command("check", "-n", cluster.name_server, "--ledger", ledger.path, "-g", group)
    assert checked.code == 0
    assert f"is past all 100 messages of {topic}" in " ".join(checked.out.split())
    assert "no broker knows a position of the group nobody" in report("nobody", code=1)


@pytest.mark.parametrize("end", [100, 80, 70])
def test_messages_that_wait_or_were_deleted(end, tmp_path, monkeypatch):
    """The ledger of a night has messages from offset 42 on in each queue. The group is at 60 in one
    topic, whose queues begin at 70 now, or has no position in a queue, or in the other topic. If
    the topic was made anew, it may end (80, 70) before the ledger's messages do."""
    path, ctx = night(tmp_path / "ledger"), context(query_id=QUERY, epoch=1)
    first = send_rows([attempt(topic="orders", queue_id=9, queue_offset=0)], ctx, requests=[1])
    delayed = send_rows([attempt(topic="orders", queue_offset=-1)], ctx, requests=[1])
    store(path, in_order([at(batch, START) for batch in (first, delayed)], 2 << 32))
    quick = quick_ledger(path)
    sends = quick.query(
        "SELECT topic, broker_name AS broker, queue_id, message_count AS n FROM answered "
        "WHERE outcome = 'acked' AND queue_offset > 0"
    ).to_pylist()
    brokers = sorted({row["broker"] for row in sends if row["topic"] == "orders"})
    route = TopicRoute(brokers=tuple(BrokerData("c", name) for name in brokers))

    def position(queue, _):
        assert end != 100 or queue.topic == "orders", "the other topic is gone"
        if queue.queue_id == 9:
            return None if end > 70 else 7
        return 60 if queue.topic == "orders" and queue.queue_id != 1 else None

    admin = MagicMock()
    admin.__enter__.return_value = admin
    admin.consumer_offset.side_effect = position
    admin.topic_route.side_effect = lambda topic: route
    admin.topics.return_value = ["orders", "invoices"][: 1 if end == 100 else 2]
    admin.min_offset.side_effect = lambda queue: 0 if queue.queue_id == 9 else 70
    admin.max_offset.side_effect = lambda queue: end if queue.topic == "orders" else 100
    monkeypatch.setattr(module, "Admin", Mock(return_value=admin))
    report = figures(quick.query, path, Scope(), group="billing")
    (text,) = report.consumption.uncounted
    assert text.startswith("7 messages of transactions")
    orders = [row["n"] for row in sends if row["topic"] == "orders"]
    read = [18 for row in sends if row["topic"] == "orders" and row["queue_id"] != 1]
    (query,) = report.consumption.queries
    assert query.messages == sum(orders) + 7
    waiting = sum(min(42 + n, end) - 70 for n in orders)
    assert query.waiting == waiting + (7 if end > 70 else 0)
    assert query.deleted == sum(orders) - sum(read) - waiting
    assert report.consumption.without_offset == 7
    assert {queue.topic for queue in report.consumption.queues} == {"orders"}
    names = [finding.name for finding in report.verdict]
    assert ("deleted_unread" in names, "not_consumed" in names) == (True, end > 70)
    checked, further = check._consumed(SinkOptions.parse(ledger=path), "billing")
    assert checked.state == "note" and "of orders by the query" in checked.text
    assert ("of them were deleted before" in checked.text) == (end == 70)
    route = TopicRoute(brokers=route.brokers[1:])  # The first broker is decommissioned.
    consumption = figures(quick.query, path, Scope(), group="billing").consumption
    on_first = sum(r["n"] for r in sends if (r["topic"], r["broker"]) == ("orders", brokers[0]))
    assert consumption.without_broker == {brokers[0]: on_first + 7}
    assert consumption.queries[0].messages == sum(orders) - on_first
    assert {queue.broker for queue in consumption.queues} == set(brokers[1:])
    assert further.text.startswith("besides, 7 messages of transactions")
    later = figures(quick.query, path, Scope(since=START + dt.timedelta(9)), group="billing")
    assert later.consumption == module.Consumption("billing", 0)
    admin.consumer_offset.side_effect = None
    admin.consumer_offset.return_value = None
    with pytest.raises(RocketSinkError, match="no broker knows a position of the group billing"):
        figures(quick.query, path, Scope(), group="billing")
    uncounted = module.Consumption("billing", without_offset=3, without_broker={"a": 1})
    monkeypatch.setattr(module, "consumption", lambda *_: uncounted)
    checked = list(check._consumed(SinkOptions.parse(ledger=path), "billing"))
    assert {finding.state for finding in checked} == {"note"}
    assert [finding.text for finding in checked] == [
        "besides, 1 message on the broker a, which has left the route (position unknown)",
        "besides, 3 messages of transactions, or with a delay or a timer (offset unknown)",
    ]
