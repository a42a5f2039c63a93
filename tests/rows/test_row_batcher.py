"""Python rows to Arrow: the batcher infers names and types, and the row contract judges them."""

import calendar
import datetime as dt
import decimal
import time

import pyarrow as pa
import pytest
from pyspark.sql import Row

from rocket_sink.errors import ColumnError
from rocket_sink.options import SinkOptions
from rocket_sink.rows import row_batcher as gathering
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.rows.row_batcher import RowBatcher, RowBuffer
from rocket_sink.rows.sort import RowSorter
from rocket_sink.spark.foreach_task import _time_of as time_of

OPTIONS = SinkOptions.parse({"nameServer": "n:1", "topic": "t"})


def gather(*rows, **options):
    return RowBatcher(OPTIONS.with_(**options)).batch(rows)


def test_only_needed_columns_are_converted():
    batch = gather(Row(body="a", other=object(), tags="x"), Row(body="b", other=1, tags=None))
    assert batch.to_pydict() == {"body": ["a", "b"], "tags": ["x", None]}


def test_the_types_that_spark_hands_out():
    at = dt.datetime(2024, 5, 1, 12, 0, 0, 5)
    batch = gather(
        Row(
            value=bytearray(b"x"), key=["a", "b"], sharding_key=decimal.Decimal("12.50"),
            headers=[Row(key="h", value=bytearray(b"v"))], delay_level=3, wait_store=False,
            event_time=at,
        )
    )  # fmt: skip
    rows = normalise(batch, resolve_columns(batch.schema, OPTIONS))
    assert rows.body.to_pylist() == [b"x"]
    assert rows.keys.to_pylist() == [["a", "b"]]
    assert rows.sharding_key.to_pylist() == ["12.50"]
    assert rows.properties.to_pylist() == [[("h", "v")]]
    assert rows.event_time_ms.to_pylist() == [int(at.timestamp() * 1000)]


@pytest.mark.parametrize("value", [dt.timedelta(hours=1), dt.time(1, 2)])
def test_rows_are_sorted_by_what_the_driver_lets_through(value):
    batch = gather(Row(body="a", took=value), columns=(("order_by", "took"),))
    rows = normalise(batch, resolve_columns(batch.schema, OPTIONS.with_(order_by="took")))
    assert rows.order_by.to_pylist() == [value]


def test_headers_may_be_empty_or_without_value_in_the_first_row():
    rows = [
        Row(body="a", headers=[]),
        Row(body="b", headers=[Row(key="k", value=None)]),
        Row(body="c", headers=[Row(key="k", value=bytearray(b"\xff"))]),
    ]
    batch = gather(*rows)
    kind = pa.struct([("key", pa.string()), ("value", pa.binary())])
    assert batch.schema.field("headers").type == pa.list_(kind)
    assert gather(rows[0]).schema.field("headers").type == pa.null()


def test_a_column_without_values_yet_is_no_error():
    gatherer = RowBatcher(OPTIONS)
    first = gatherer.batch([Row(body=None, tags=None, properties=None)])
    assert first.schema.field("body").type == pa.binary()
    later = gatherer.batch([Row(body="b", tags="x", properties={"a": "b", "n": None})])
    assert later["properties"].to_pylist() == [[("a", "b"), ("n", None)]]


def test_a_wrong_type_is_found_when_its_first_value_comes():
    gatherer = RowBatcher(OPTIONS)
    gatherer.batch([Row(body="a", tags=None)])
    with pytest.raises(ColumnError, match="tags"):
        gatherer.batch([Row(body="a", tags=5)])


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        (Row(other=1), {}, "body"), (Row(body=5), {}, "body"), ((1, 2), {}, "not a Row"),
        (Row(body="a", properties={"a": 1}), {}, "properties"),
        (Row(body="a", keys=[1]), {}, "keys"), (Row(a=1), {"bodyFormat": "json"}, r"sink\.stream"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit(row, options, text):
    with pytest.raises(ColumnError, match=text):
        gather(row, **options)


def test_text_with_a_lone_surrogate_is_one_rows_trouble():
    batch = gather(Row(body="\ud800"), Row(body="fine"))
    assert batch.num_rows == 2 and batch["body"][1].as_py() == "fine"


def test_mapped_columns_are_checked_too():
    gatherer = RowBatcher(OPTIONS.with_(columns="body=payload, keys=id", orderBy="n"))
    batch = gatherer.batch([Row(payload="a", id="k", n=3)])
    assert batch.schema.names == ["payload", "id", "n"]
    with pytest.raises(ColumnError, match="keys"):
        gatherer.batch([Row(payload="a", id=5, n=3)])


class TestPile:
    """A batch ends by its rows, or by its bytes if rows are large: a task's memory is bounded."""

    @pytest.fixture(autouse=True)
    def few_bytes(self, monkeypatch):
        monkeypatch.setattr(gathering, "GATHER_BYTES", 100_000)

    @staticmethod
    def batches(sizes, limit=1000, **options):
        """Return the number of rows of each batch."""
        pile, counts = RowBuffer(RowBatcher(OPTIONS.with_(**options)), limit), []
        for size in sizes:
            pile.rows.append(Row(tags="t", body=b"x" * size))
            if len(pile.rows) >= pile.look_at and pile.is_full():
                counts.append(pile.take().num_rows)
        last = pile.take()
        assert pile.take() is None
        return [*counts, *([last.num_rows] if last is not None else [])]

    def test_small_rows_are_counted(self):
        assert self.batches([10] * 2500) == [1000, 1000, 500]
        assert self.batches([10] * 7, limit=3) == [3, 3, 1]
        assert self.batches([10] * 2, limit=1) == [1, 1]
        assert self.batches([]) == []

    def test_large_ones_are_weighed(self):
        counts = self.batches([5000] * 500)
        assert sum(counts) == 500
        assert max(counts) * 5000 <= 1.1 * 100_000
        assert set(self.batches([200_000] * 30)[1:]) <= {1}

    def test_one_that_grows_is_noticed(self):
        counts = self.batches([1] * 1000 + [5000] * 400, limit=8000)
        assert max(counts[1:]) * 5000 <= 1.1 * 100_000

    def test_what_comes_while_a_batch_is_made_stays(self):
        """Another thread takes a batch while the owner appends (foreach)."""
        pile: RowBuffer

        class Slow(RowBatcher):
            def batch(self, rows):
                batch = super().batch(rows)
                pile.rows.append(Row(body=b"later"))
                return batch

        pile = RowBuffer(Slow(OPTIONS), 1000)
        pile.rows.append(Row(body=b"first"))
        batches = [pile.take(), pile.take()]
        assert [batch and batch.to_pydict() for batch in batches] == [
            {"body": [b"first"]}, {"body": [b"later"]},
        ]  # fmt: skip
        assert len(pile.rows) == pile.look_at == 1

    @pytest.mark.parametrize("row", [Row(body=7), Row(body=None, tags="t"), Row(text="no body")])
    def test_what_is_no_body_is_the_row_contracts_business(self, row):
        pile = RowBuffer(RowBatcher(OPTIONS), 1000)
        pile.rows += [row] * 20
        assert not pile.is_full()

    def test_the_body_is_found_under_its_own_name(self):
        pile = RowBuffer(RowBatcher(OPTIONS.with_(columns="body=Payload")), 1000)
        pile.rows += [Row(tags="t", payload=b"x" * 60_000)] * 2
        assert pile.is_full()


@pytest.fixture
def zone(request, monkeypatch):
    """Set the zone that a parameter names, else New York's."""
    monkeypatch.setenv("TZ", getattr(request, "param", "America/New_York"))
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "hours"), [("UTC", 0), ("America/New_York", -5), ("Asia/Tokyo", 9)], indirect=["zone"]
)
def test_the_end_of_the_year_9999_is_a_time(zone, hours):
    """West of UTC this moment is in the year 10000, in local time."""
    at = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)
    batch = gather(Row(body="a", event_time=at))
    micros = batch.column("event_time").cast(pa.int64())[0].as_py()
    seconds = calendar.timegm((9999, 12, 31, 23, 59, 59)) - 3600 * hours
    assert micros == seconds * 1_000_000 + 999_999


ZONE_TIMES = {
    # New York's clock goes from 02:00 to 03:00 in March, and from 02:00 back to 01:00 in November.
    "skipped": [(3, 10, hour, minute) for hour in (1, 2, 3, 4) for minute in (0, 15, 30, 59)],
    "twice": [(11, 3, hour, minute) for hour in (0, 1, 2) for minute in (0, 30, 59)],
}


def in_order(times):
    """Return the times in the order in which a foreach lane sends their rows."""
    rows = [Row(body=str(number), at=value) for number, value in enumerate(times)]
    options = OPTIONS.with_(order_by="at")
    batcher = RowBatcher(options)
    sorter = RowSorter(memory_bytes=1 << 20)
    sorter.add(normalise(batcher.batch(rows), batcher.plan))
    return [times[int(body)] for part in sorter.sorted_rows() for body in part.body.to_pylist()]


@pytest.mark.parametrize("hours", ZONE_TIMES)
def test_times_without_a_zone_are_sorted_as_they_are_written(hours, zone):
    """Spark sorts a TIMESTAMP_NTZ by its written value, in any zone of its workers."""
    written = [dt.datetime(2024, *parts, 0, 7) for parts in ZONE_TIMES[hours]]
    written += [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59)]
    assert in_order([None, *reversed(written)]) == [*sorted(written), None]


def test_moments_of_an_hour_that_comes_twice_keep_their_order(zone):
    """Spark returns such moments with `fold` set."""
    year_1_s = calendar.timegm((1, 1, 1, 0, 0, 0))  # A datetime in New York cannot hold this time.
    begin_s = calendar.timegm((2024, 11, 3, 4, 30, 0))
    seconds = [year_1_s, year_1_s + 60, *range(begin_s, begin_s + 10_800, 1200)]
    moments = [time_of(second * 1_000_000) for second in seconds]
    assert [id(at) for at in in_order(moments[::-1])] == [id(at) for at in moments]
