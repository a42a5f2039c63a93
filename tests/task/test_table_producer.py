"""TableProducer: every row is stored or returned, with the options of the Spark lanes."""

import random
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pytest

from rocket_sink import Ledger, TableProducer
from rocket_sink.errors import ColumnError, ConfigurationError, DeliveryError, ProducerClosedError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.testing import Answer, Drop
from rocket_sink.testing.script import is_send
from rocket_sink.wire.codes import RequestCode, ResponseCode
from tests.clusters import scripted_cluster
from tests.ledger.values import session, spool_rows
from tests.ledger.views import view_rows

cluster = scripted_cluster(orders=4)


@pytest.fixture
def make(cluster, closing):
    options = {"nameServer": cluster.name_server, "topic": "orders"}
    return lambda **more: closing(TableProducer(**options, **more))


def table(rows=3000):
    return pa.table(
        {
            "body": [b"%d" % n for n in range(rows)],
            "keys": [f"k{n}" for n in range(rows)],
            "sharding_key": [f"s{n % 7}" for n in range(rows)],
        }
    )


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t, lambda t: t.to_batches(100), lambda t: t.to_reader(100),
        lambda t: t.combine_chunks().to_batches()[0], lambda t: Exported(t),
        lambda t: (batch for batch in t.to_batches(7)),
    ],
)  # fmt: skip
def test_tables_in_any_form(cluster, make, form):
    producer = make()
    assert producer.send(form(table(500))).summary.acked == 500
    assert producer.send(form(table(500))).summary.acked == 500
    assert len({m.message_id for m in cluster.messages("orders")}) == 1000


class Exported:
    """A frame in the form in which polars, pandas and DuckDB export theirs."""

    def __init__(self, data):
        self._data = data

    def __arrow_c_stream__(self, requested_schema=None):
        return self._data.__arrow_c_stream__(requested_schema)


def test_rows_that_cannot_be_sent_come_back(cluster, make):
    data = pa.table({"body": [b"a", None, b"c", b""], "tags": ["x", "y", "a||b", "z"]})
    producer = make()
    result = producer.send(data)
    assert (result.summary.acked, result.summary.dead, result.summary.adds_up) == (1, 3, True)
    letters = result.dead_letters
    assert set(letters["last_error_code"].to_pylist()) == {
        "NULL_BODY", "INVALID_TAGS", "EMPTY_BODY"
    }  # fmt: skip
    assert [m.body for m in cluster.messages("orders")] == [b"a"]


def test_what_came_back_can_be_sent_again(cluster, make):
    cluster.on_send(Answer(ResponseCode.NO_PERMISSION), times=1000)
    producer = make(deliveryTimeoutMs=500)
    first = producer.send(table(50))
    assert first.summary.dead == 50 and not first.summary.all_delivered
    cluster.behave()
    second = producer.send(first.dead_letters)
    assert second.summary.acked == 50
    stored = {m.message_id for m in cluster.messages("orders")}
    assert stored == set(first.dead_letters["message_id"].to_pylist())
    cluster.kill()
    assert producer.send(table(5)).summary.dead == 5, "no source would be consumed"


def test_the_options_may_want_an_error(make):
    with pytest.raises(DeliveryError, match="null"):
        make(onInvalid="fail").send(pa.table({"body": pa.array([b"a", None])}))


@pytest.mark.parametrize("data", ["text", {"body": [b"x"]}, 7, [1, 2]])
def test_no_table(make, data):
    with pytest.raises(ColumnError, match="give"):
        make().send(data)


def test_wrong_columns(cluster, make):
    with pytest.raises(ColumnError, match="did you mean 'body'"):
        make().send(pa.table({"payload": [b"x"]}))
    sends = [f for f in cluster.requests() if f.code != RequestCode.HEART_BEAT]
    assert not sends


def test_refused_options(cluster):
    with pytest.raises(ConfigurationError, match="to_json"):
        TableProducer(nameServer=cluster.name_server, bodyFormat="json")
    producer = TableProducer(
        nameServer=cluster.name_server, topic="orders", delivery="transactional", ledger="/l"
    )
    with pytest.raises(ConfigurationError, match="transactional"):
        producer.send(table(1))


def test_a_producer_is_a_query_and_shows_its_state(make):
    producer = make(appId="app")
    query, again = (producer.send(table(1)).summary.query_id for _ in range(2))
    app_id, _, run_id = query.partition("/")
    assert (app_id, again) == ("app", query) and str(uuid.UUID(run_id)) == run_id
    assert repr(producer) == "<TableProducer orders, 2 tables sent>"
    producer.close()
    assert repr(producer) == "<TableProducer orders, closed>"


def test_after_close(make):
    producer = make()
    producer.close()
    producer.close()
    with pytest.raises(ProducerClosedError):
        producer.send(table(1))


def test_each_send_of_each_producer_is_an_epoch_of_the_ledger(cluster, make, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    rows = pa.table({"body": [None if n % 4 == 0 else str(n) for n in range(100)]})
    for sends in (3, 2):
        producer = make(ledger=ledger.path)
        results = [producer.send(rows) for _ in range(sends)]
        assert {result.dead_letters.num_rows for result in results} == {25}
    assert "75" in str(results[0]) and "<table>" in results[0]._repr_html_()
    assert "dead_letters" not in repr(results[0])
    ledger.sync(session())
    epochs = view_rows(ledger.path, "SELECT * FROM epochs")
    counts = [(e.rows_in, e.acked, e.dead, e.num_input_rows) for e in epochs]
    assert counts == [(100, 75, 25, 100)] * 5
    assert all(e.adds_up and e.confirmed and e.lane == "table" for e in epochs)
    assert sorted(e.epoch for e in epochs) == [1, 1, 2, 2, 3]
    assert len({e.query_id for e in epochs}) == 2
    assert len(cluster.messages("orders")) == 375


def test_the_account_of_a_send_that_fails_has_what_was_under_way(cluster, make, tmp_path):
    cluster.on_send(Drop(), times=None)

    def source():
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s and not cluster.messages("orders"):
            yield pa.record_batch({"body": [b"x"] * 10})
            time.sleep(0.01)
        raise OSError("the source broke")

    ledger = str(tmp_path / "ledger")
    with pytest.raises(OSError, match="broke"):
        make(ledger=ledger).send(source())
    (file,) = Path(resolve_path(ledger).spool).rglob("*.arrow")
    rows = spool_rows(file)
    (account,) = (row for row in rows if row["kind"] == "epoch")
    unknown = [row["message_count"] for row in rows if row["outcome"] == "unknown"]
    assert not account["complete"] and account["unknown"] == sum(unknown) > 0


def test_a_trace_context_goes_into_each_message_and_an_ill_formed_one_into_the_letters(
    cluster, make
):
    """The columns of Spark's lanes: batched and single rows, with properties and without."""
    parents = [f"00-{n + 1:032x}-{n + 1:016x}-01" for n in range(8)]
    rows = pa.table(
        {
            "body": [b"%d" % n for n in range(8)],
            "properties": pa.array(
                [{"own": "1", "traceparent": "old"}, None] * 4, pa.map_(pa.string(), pa.string())
            ),
            "delay_level": pa.array([0, 0, 0, 0, 0, 0, 1, 1], pa.int32()),
            "traceparent": [*parents[:4], "00-0-0-00", None, *parents[6:]],
            "tracestate": ["a=1,b@c=2", None, "", *[None] * 5],
        }
    )
    result = make().send(rows)
    stored = {int(m.body): dict(m.properties) for m in cluster.messages("orders")}
    assert {n: stored[n].get("traceparent") for n in stored} == {
        **{n: parents[n] for n in (0, 1, 2, 3, 6, 7)}, 5: None,
    }  # fmt: skip
    assert {n: stored[n]["tracestate"] for n in stored if "tracestate" in stored[n]} == {
        0: "a=1,b@c=2"
    }
    assert {n for n in stored if stored[n].get("own")} == {0, 2, 6}
    (letter,) = result.dead_letters.to_pylist()
    assert (letter["body"], letter["reason"], letter["last_error_code"]) == (
        b"4", "data", "INVALID_PROPERTY",
    )  # fmt: skip
    assert dict(letter["properties"]) == {"own": "1", "traceparent": "00-0-0-00"}
    assert "'00-0-0-00'" in letter["last_error"] and "trace-context" in letter["last_error"]
    assert make(propertyPolicy="drop").send(rows).summary.acked == 8
    (dropped,) = (dict(m.properties) for m in cluster.messages("orders") if m.body == b"4")
    assert dropped["own"] == "1" and "traceparent" not in dropped


def limit_bodies(broker, most, remark):
    """Refuse larger requests, as a broker does whose maxMessageSize is `most`."""

    def is_larger(frame):
        return is_send(frame) and len(frame.body or b"") > most

    broker.script.add(
        Answer(1, f"java.lang.RuntimeException: {remark}"), matches=is_larger, times=None
    )


ENCODERS = ("message body size exceeded", "message size exceeded")
"""The texts of a broker's own encoder and of DLedger's."""


@pytest.mark.parametrize("remark", ENCODERS)
@pytest.mark.parametrize("ordering", ["none", "strict"])
def test_batches_shrink_to_the_size_that_a_broker_takes(cluster, make, caplog, ordering, remark):
    small = cluster.brokers[1]
    limit_bodies(small, 20_000, remark)
    producer = make(ordering=ordering, requestMaxBytes=200_000, sendMsgTimeout=60_000)
    rows = 8000
    for repetition in range(2):
        before = sum(map(is_send, small.requests))
        assert producer.send(table(rows)).summary.all_delivered
        requests = sum(map(is_send, small.requests)) - before
        stored = cluster.messages("orders")
        assert len(stored) == (repetition + 1) * rows
        # 4,000 rows of some 100 bytes are 20 requests of 20,000 bytes.
        assert requests <= 300, "a refused batch is halved and not sent row by row"
        assert ("requestMaxBytes" in caplog.text) == (repetition == 0), "it is remembered"
        caplog.clear()
    if ordering == "strict":
        for key in range(7):
            own = [m for m in stored if m.properties["__SHARDINGKEY"] == f"s{key}"]
            numbers = [int(m.body) for m in own]
            assert numbers == [*range(key, rows, 7)] * 2


def test_a_row_that_is_too_large_does_not_shrink_later_batches(cluster, make):
    """A broker before 5.0 refuses a batch with the same text for the size of one message."""
    poison = random.Random(1).randbytes(30_000)  # does not shrink when it is compressed

    def has_poison(frame):
        return is_send(frame) and poison in bytes(frame.body or b"")

    for broker in cluster.brokers:
        answer = Answer(1, "java.lang.RuntimeException: message size exceeded")
        broker.script.add(answer, matches=has_poison, times=None)
    producer = make()
    assert producer.send(table()).summary.all_delivered
    bodies = [poison if n == 700 else b"%d" % n for n in range(3000)]
    result = producer.send(pa.table({"body": bodies}))
    assert (result.summary.acked, result.summary.dead) == (2999, 1)
    before = sum(is_send(r) for r in cluster.requests())
    assert before <= 60, "the row is found by halving"
    assert producer.send(table()).summary.all_delivered
    assert sum(is_send(r) for r in cluster.requests()) <= before + 8
