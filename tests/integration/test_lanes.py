"""A suite of cases that every lane runs, against a scripted cluster and a real Delta ledger."""

import calendar
import shutil
import uuid
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocket_sink import Ledger, RocketSink
from rocket_sink.errors import ColumnError, ConfigurationError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.wire.columns.properties import EVENT_TIME_PROPERTY
from tests.clusters import are_in_order, scripted_cluster

from .lanes import BY_SPARK, LANES

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600)]

cluster = scripted_cluster(scope="module")


@pytest.fixture(
    params=[
        *(*LANES, BY_SPARK[1]),
        *(pytest.param(BY_SPARK[n], marks=pytest.mark.long) for n in (0, 2, 3, 4, 5)),
    ],
    ids=lambda lane: lane.name,
)
def lane(request):
    return request.param


class World:
    """A run with a topic, a ledger and a source folder of its own."""

    def __init__(self, spark, cluster, folder, lane):
        self.spark, self.cluster, self.folder, self.lane = spark, cluster, folder, lane
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        cluster.create_topic(self.topic)
        self.ledger = Ledger(str(folder / "ledger"))

    @property
    def options(self):
        """The lane's options; by the times a busy machine does not make a broker look slow."""
        return {
            "nameServer": self.cluster.name_server, "topic": self.topic,
            "ledger": str(self.folder / "ledger"), "sendMsgTimeout": 60_000,
            "connectTimeoutMs": 20_000,
        }  # fmt: skip

    def put(self, table, parts=1):
        source = self.folder / "source"
        source.mkdir(exist_ok=True)
        step = -(-table.num_rows // parts)
        for part in range(parts):
            pq.write_table(table.slice(part * step, step), source / f"{uuid.uuid4().hex}.parquet")

    def run(self, **options):
        source, checkpoint = self.folder / "source", self.folder / "checkpoint"
        self.lane.run(self.spark, source, checkpoint, {**self.options, **options})
        self.ledger.sync(self.spark)

    def stored(self):
        return self.cluster.messages(self.topic)

    def view(self, select):
        """Return the rows of a query over the ledger's views. DuckDB cannot read each table."""
        query = reader_of(self.spark, resolve_path(self.ledger.path))
        return [SimpleNamespace(**row) for row in query(select).to_pylist()]

    def epochs(self):
        return self.view("SELECT * FROM epochs")

    def letters(self):
        rows = self.view("SELECT * FROM pending_letters")
        return {row.keys[0]: row.last_error_code for row in rows}


@pytest.fixture
def world(spark, cluster, tmp_path, lane):
    return World(spark, cluster, tmp_path, lane)


def lanes_of(*chosen):
    """Run a test with these lanes; the other lanes belong to the long forms."""
    params = [
        pytest.param(each, id=each.name, marks=[] if lane.name in chosen else [pytest.mark.slow])
        for lane, by_spark in zip(LANES, BY_SPARK, strict=True)
        for each in (lane, by_spark)
    ]
    return pytest.mark.parametrize("lane", params)


def flights(count, keys=40):
    return pa.table(
        {
            "body": [f"{i:06d}" for i in range(count)],
            "keys": [f"m{i}" for i in range(count)],
            "sharding_key": [f"N{i % keys}" for i in range(count)],
            "tags": ["UA"] * count,
            "properties": pa.array([{"n": str(i)} for i in range(count)],
                                   pa.map_(pa.string(), pa.string())),
            "event_time": pa.array([1_700_000_000_000_000 + i for i in range(count)],
                                   pa.timestamp("us", tz="UTC")),
            "traceparent": [f"00-{i + 1:032x}-{i + 1:016x}-01" for i in range(count)],
            "ignored": list(range(count)),
        }
    )  # fmt: skip


def test_rows_arrive_whole_in_order_and_the_ledger_adds_up(world):
    world.put(flights(3000))
    world.run(ordering="strict")
    stored = world.stored()
    assert sorted(m.body for m in stored) == [f"{i:06d}".encode() for i in range(3000)]
    sample = next(m for m in stored if m.body == b"000041")
    own = {"KEYS": "m41", "TAGS": "UA", "__SHARDINGKEY": "N1", "n": "41"}
    own["__event_time_ms"] = "1700000000000"
    assert {name: sample.properties[name] for name in own} == own
    assert {m.body: m.properties["traceparent"] for m in stored} == {
        b"%06d" % i: f"00-{i + 1:032x}-{i + 1:016x}-01" for i in range(3000)
    }
    assert are_in_order(stored)
    epochs = world.epochs()
    assert sum(e.rows_in for e in epochs) == sum(e.acked for e in epochs) == 3000
    assert all(e.adds_up for e in epochs)
    notes = [*(world.folder / "ledger/_notes/queues").rglob("*.json")]
    assert len(notes) == world.lane.streams, "a batch write without dead letters leaves no note"
    plain = world.spark.read.format("delta").load(str(world.folder / "ledger"))
    assert plain.where("kind = 'send'").count() > 0
    sent = "SELECT sum(message_count) AS count FROM sends WHERE outcome = 'acked'"
    assert world.view(sent)[0].count == 3000


# The three lanes use Python's rows, Arrow's batches, and the accounts of a commit.
@lanes_of("foreach", "source_batch", "foreach_batch")
def test_bad_rows_become_dead_letters_and_the_epoch_goes_on(world):
    good = flights(20)
    bad = good.slice(0, 7).drop_columns(["body", "keys", "properties"])
    bad = bad.append_column("body", pa.array(
        [None, "", "x" * 2000, "reserved", "inject", "big", "blank key"]))  # fmt: skip
    bad = bad.append_column("keys", pa.array(
        ["null", "empty", "large", "reserved", "inject", "big", "two words"]))  # fmt: skip
    bad = bad.append_column("properties", pa.array(
        [None, None, None, {"KEYS": "x"}, {"a": "1\x02TAGS\x012"}, {"a": "y" * 33_000}, None],
        pa.map_(pa.string(), pa.string())))  # fmt: skip
    table = pa.concat_tables([good, bad.select(good.column_names)])
    # Three more rows are bad by their topics.
    topics = [None, "not a topic", "x" * 128, *[world.topic] * (table.num_rows - 3)]
    world.put(table.append_column("topic", pa.array(topics)))
    world.run(maxMessageSize=1024, topic="")
    assert len(world.stored()) == 17
    assert world.letters() == {
        "m0": "INVALID_TOPIC", "m1": "INVALID_TOPIC", "m2": "INVALID_TOPIC",
        "null": "NULL_BODY", "empty": "EMPTY_BODY", "large": "BODY_TOO_LARGE",
        "reserved": "RESERVED_PROPERTY", "inject": "INVALID_PROPERTY",
        "big": "PROPERTIES_TOO_LARGE", "two words": "INVALID_KEYS",
    }  # fmt: skip
    (epoch,) = world.epochs()
    assert (epoch.rows_in, epoch.acked, epoch.dead, epoch.invalid) == (27, 17, 10, 10)
    assert epoch.adds_up


@lanes_of("foreach")
def test_moments_of_all_years_are_sent_as_they_are(world, monkeypatch):
    """In a worker west of UTC the begin of year 1 is no datetime; Spark itself takes more years."""
    monkeypatch.setitem(world.spark.sparkContext.environment, "TZ", "America/New_York")
    year_1 = calendar.timegm((1, 1, 1, 0, 0, 0)) * 1_000_000
    year_10000 = (calendar.timegm((9999, 12, 31, 23, 59, 59)) + 1) * 1_000_000
    moments = [year_1 + 1000, 1_700_000_000_000_000, year_10000 + 36 * 3_600_000_000]
    table = flights(len(moments))
    times = pa.array(moments, pa.timestamp("us", tz="UTC"))
    place = table.column_names.index("event_time")
    world.put(table.set_column(place, "event_time", times))
    world.run(ordering="strict", orderBy="event_time")
    sent = [message.properties[EVENT_TIME_PROPERTY] for message in world.stored()]
    assert sorted(map(int, sent)) == [moment // 1000 for moment in moments]
    assert world.letters() == {}


# The two lanes fail in a stream and in a batch.
@lanes_of("foreach", "write")
def test_a_source_is_not_turned_into_dead_letters_while_all_brokers_are_down(world):
    world.put(flights(30))  # one task: Spark lets others run on when the first has failed
    try:
        world.cluster.kill()
        with pytest.raises(Exception, match="no broker took any of"):
            world.run(deliveryTimeoutMs=500, ordering="best_effort", orderWaitMs=500)
        notes = [*(world.folder / "ledger/_notes/queues").rglob("*.json")]
        assert world.lane.name != "write" or not notes, "nothing needs the queues of a failed write"
    finally:
        for broker in world.cluster.brokers:
            broker.restart()
    assert not world.stored()
    world.run()
    assert sorted(m.body for m in world.stored()) == [f"{i:06d}".encode() for i in range(30)]
    assert world.letters() == {}


@pytest.mark.parametrize("lane", [LANES[0], LANES[3]], ids=lambda lane: lane.name)
def test_an_app_id_goes_with_its_checkpoint(world):
    """Refuse an appId without its checkpoint. The crash harness shows it for foreachBatch."""
    world.put(flights(20))
    world.run(appId="a")
    shutil.rmtree(world.folder / "checkpoint")
    with pytest.raises(Exception, match=r"CheckpointError.*appId 'a' names the streaming query"):
        world.run(appId="a")
    assert len(world.stored()) == 20


def test_what_is_checked_on_the_driver(spark, cluster):
    sink = RocketSink(nameServer=cluster.name_server, topic="t")
    with pytest.raises(ColumnError, match="body"):
        sink.check(spark.range(1))
    with pytest.raises(ColumnError, match="body"):
        sink.stream(spark.readStream.format("rate").load())
    with pytest.raises(ConfigurationError, match=r"this frame is a stream; use .*stream\(df\)"):
        sink.write(spark.readStream.format("rate").load())
    with pytest.raises(ConfigurationError, match=r"this frame is a batch; use sink.write\(df\)"):
        sink.stream(spark.sql("SELECT 'x' AS body"))
