"""`delivery=transactional` on real brokers that check every second.

A second is below their transactionOpBatchInterval (3 s), so brokers also ask about half messages
that were committed long ago. If the answer were COMMIT, those would be stored twice.
"""

import threading
from collections import Counter

import pytest

from rocket_sink import Ledger, RocketSink
from rocket_sink.cluster import LocalCluster
from rocket_sink.commands.common.output import Bar
from rocket_sink.commands.transactions import settle_in_order
from rocket_sink.errors import DeliveryError
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.spark import foreach_batch, transactions
from rocket_sink.spark.transactions import TransactionCommitter
from tests.killed import Killed
from tests.producer.waiting import until
from tests.spark.test_transactional_epochs import run_without_append

pytestmark = [pytest.mark.cluster, pytest.mark.spark]
ROWS = 300
TOPIC = "decided"


@pytest.fixture(scope="module")
def checking():
    often = {
        "transactionCheckInterval": "1000", "transactionTimeOut": "1000",
        # By these defaults of RocketMQ brokers note ends in batches.
        "transactionOpBatchInterval": "3000", "transactionOpMsgMaxSize": "4096",
    }  # fmt: skip
    running = LocalCluster(brokers=1, broker_config=often).start(timeout_s=600)
    try:
        yield running
    finally:
        for answerer in transactions._answerers.values():
            answerer.close()
        transactions._answerers.clear()
        running.stop()


@pytest.fixture
def answers(monkeypatch):
    """Return (epoch, message id, answer) of all requests of the brokers."""
    told: list[tuple[int, str, str]] = []

    class Telling(transactions.CheckBacks):
        def __init__(self, *given, **more):
            more["on_decision"] = lambda mark, one, state: told.append(
                (mark.epoch, one, state.name)
            )
            super().__init__(*given, **more)

    monkeypatch.setattr(transactions, "CheckBacks", Telling)
    return told


def test_epochs_are_seen_once_decided_and_once(spark, checking, tmp_path, monkeypatch, answers):
    sink = RocketSink(
        nameServer=checking.name_server, topic=TOPIC, ledger=str(tmp_path / "ledger"), appId="q",
        delivery="transactional", ordering="strict", columns="sharding_key=key",
    )  # fmt: skip
    with Admin(sink.options) as admin:
        admin.create_topic(TOPIC, queues=4)

        def seen():
            admin.await_dispatched(TOPIC)
            bodies = [m.body.decode().split("/") for m in admin.read_topic(TOPIC)]
            return Counter((int(epoch), int(row)) for epoch, row in bodies)

        # The driver of this attempt dies before the append.
        _killed(sink, spark, 0, monkeypatch, foreach_batch, "_append", run_without_append)
        assert not seen()
        sink.write_batch(_rows(spark, 0), 0)
        assert seen() == _all(0)
        # The next driver dies after the append: only the ledger has the epoch.
        _killed(sink, spark, 1, monkeypatch, TransactionCommitter, "_end", _die)
        endings = TransactionCommitter(spark, sink.options)
        rows = endings.open_epochs()
        with Bar("settle", 2 * ROWS) as bar:
            done = settle_in_order(endings, rows, bar)
        assert all(epoch.is_good for epoch in done) and seen() == _all(0) + _all(1)
        # Brokers go on asking until all uncommitted half messages and their copies are rolled back.
        until(lambda: _rolled_back(answers) >= ROWS, timeout_s=120)
        assert {answer for _, _, answer in answers} <= {"ROLLBACK", "UNKNOWN"}
        assert seen() == _all(0) + _all(1)
        _check_order(admin)
    row = Ledger(sink.options.ledger).transactions(spark).where("epoch = 1").first()
    assert (row.halves, row.committed, row.refused, row.open) == (ROWS, ROWS, 0, False)


def _rolled_back(answers):
    return len({one for epoch, one, answer in answers if epoch == 0 and answer == "ROLLBACK"})


def _check_order(admin):
    for queue in admin.queues(TOPIC):
        rows: dict[str, list[tuple[int, int]]] = {}
        for message in admin.read_queue(queue):
            epoch, row = message.body.decode().split("/")
            key = message.properties["__SHARDINGKEY"]
            rows.setdefault(key, []).append((int(epoch), int(row)))
        assert all(keyed_rows == sorted(keyed_rows) for keyed_rows in rows.values())


def _rows(spark, epoch):
    columns = (f"concat('{epoch}/', id) AS body", "concat('k', id % 10) AS key")
    return spark.range(0, ROWS, 1, 1).selectExpr(*columns)


def _all(epoch):
    return Counter((epoch, row) for row in range(ROWS))


def _killed(sink, spark, epoch, monkeypatch, owner, name, kill):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            sink.write_batch(_rows(spark, epoch), epoch)


def _die(*given, **more):
    if threading.current_thread() is threading.main_thread():
        raise Killed
    # The answerer gets this error if a broker has asked it.
    raise DeliveryError("the driver is dead")
