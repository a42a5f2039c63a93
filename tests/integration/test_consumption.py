"""The messages of a ledger that a group has consumed, beside Java's consumer and mqadmin."""

from __future__ import annotations

import re
import uuid
from typing import Any
from unittest.mock import MagicMock, Mock

import pyarrow as pa
import pytest

from rocket_sink import Ledger, TableProducer
from rocket_sink.commands import check
from rocket_sink.ledger.query import consumption as module
from rocket_sink.ledger.report import Scope, figures
from rocket_sink.ledger.views import reader
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.wire.route import BrokerData, TopicRoute
from tests.clusters import make_topic
from tests.java_client import FOLDER, GENERATIONS, run_java
from tests.ledger.night import night
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

    def consume(count: int) -> None:
        words = FOLDER / "PushTopic.java", cluster.name_server, topic, str(count)
        run_java(*words, version=GENERATIONS[0])

    def report(name: str = group, code: int = 0) -> Any:
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
    path = night(tmp_path / "ledger")
    quick = quick_ledger(path)
    sends = quick.query(
        "SELECT topic, broker_name AS broker, queue_id, message_count AS n FROM answered "
        "WHERE outcome = 'acked'"
    ).to_pylist()
    brokers = sorted({row["broker"] for row in sends if row["topic"] == "orders"})
    route = TopicRoute(brokers=tuple(BrokerData("c", name) for name in brokers))

    def position(queue: MessageQueue, _: str) -> int | None:
        return 60 if queue.topic == "orders" and queue.queue_id != 1 else None

    admin = MagicMock()
    admin.__enter__.return_value = admin
    admin.consumer_offset.side_effect = position
    admin.topics.return_value = ["orders", "invoices"]
    admin.topic_route.side_effect = lambda topic: route
    admin.min_offset.return_value = 70
    admin.max_offset.side_effect = lambda queue: end if queue.topic == "orders" else 100
    monkeypatch.setattr(module, "Admin", Mock(return_value=admin))
    report = figures(quick.query, path, Scope(), group="billing")
    assert report.consumption is not None
    assert report.consumption.uncounted == []
    orders = [row["n"] for row in sends if row["topic"] == "orders"]
    read = [18 for row in sends if row["topic"] == "orders" and row["queue_id"] != 1]
    (query,) = report.consumption.queries
    assert query.messages == sum(orders)
    assert query.waiting == sum(min(42 + n, end) - 70 for n in orders)
    assert query.deleted == sum(orders) - sum(read) - query.waiting
    assert {queue.topic for queue in report.consumption.queues} == {"orders"}
    names = [finding.name for finding in report.verdict]
    assert ("deleted_unread" in names, "not_consumed" in names) == (True, end > 70)
    (checked,) = check._consumed(SinkOptions.parse(ledger=path), "billing")
    assert checked.state == "note" and "of orders by the query" in checked.text
    assert ("of them were deleted before" in checked.text) == (end == 70)
    route = TopicRoute(brokers=route.brokers[1:])  # The first broker is decommissioned.
    consumption = figures(quick.query, path, Scope(), group="billing").consumption
    on_first = sum(r["n"] for r in sends if (r["topic"], r["broker"]) == ("orders", brokers[0]))
    assert consumption.without_broker == {brokers[0]: on_first}
    assert consumption.queries[0].messages == sum(orders) - on_first
    assert {queue.broker for queue in consumption.queues} == set(brokers[1:])
    uncounted = module.Consumption("billing", without_offset=3, without_broker={"a": 1})
    monkeypatch.setattr(module, "consumption", lambda *_: uncounted)
    checked = list(check._consumed(SinkOptions.parse(ledger=path), "billing"))
    assert {finding.state for finding in checked} == {"note"}
    assert [finding.text for finding in checked] == [
        "besides, 1 message on the broker a, which has left the route (position unknown)",
        "besides, 3 messages of transactions, or with a delay or a timer (offset unknown)",
    ]
