"""The row contract: resolved on the driver, cast in the tasks; its errors name the way out."""

import os
import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from rocket_sink.errors import ColumnError, OptionError
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import _MEANT, CONTRACT, kind_of, resolve_columns
from rocket_sink.rows.normalise import normalise

TEXT, BYTES, LONG = pa.string(), pa.binary(), pa.int64()
UTC_US = pa.timestamp("us", "UTC")
MAP = pa.map_(TEXT, TEXT)


def headers(value):
    return pa.list_(pa.struct([("key", TEXT), ("value", value)]))


def plan(columns, /, *, case_sensitive=False, **options):
    parsed = SinkOptions.parse({"topic": "t", **options})
    return resolve_columns(pa.schema(columns), parsed, case_sensitive=case_sensitive)


def sources(columns, /, **options):
    return dict(plan(columns, **options).sources)


def error(columns, /, **options):
    with pytest.raises(ColumnError) as caught:
        plan(columns, **options)
    return caught.value


def rows(columns, /, **options):
    table = pa.table({n: v if isinstance(v, pa.Array) else pa.array(v) for n, v in columns.items()})
    parsed = SinkOptions.parse({"topic": "t", **options})
    return normalise(table, resolve_columns(table.schema, parsed))


ACCEPTED = [
    *[("body", kind) for kind in (BYTES, TEXT, pa.large_binary(), pa.large_string(),
                                  pa.binary_view(), pa.string_view(), pa.binary(4),
                                  pa.dictionary(pa.int32(), TEXT))],
    ("topic", TEXT), ("tags", TEXT), ("tags", pa.dictionary(pa.int8(), pa.large_string())),
    ("tags", pa.null()), ("keys", TEXT), ("keys", pa.list_(TEXT)), ("keys", pa.large_list(TEXT)),
    *[("sharding_key", kind) for kind in (TEXT, LONG, pa.int8(), pa.decimal128(10, 2))],
    ("properties", MAP), ("properties", headers(TEXT)), ("properties", headers(BYTES)),
    ("delay_level", pa.int32()), ("delay_ms", LONG), ("delivery_timestamp", LONG),
    ("delivery_timestamp", UTC_US), ("flag", pa.int32()), ("wait_store", pa.bool_()),
    ("message_id", TEXT), ("event_time", UTC_US), ("order_by", pa.float64()),
    ("order_by", pa.timestamp("us")),
]  # fmt: skip
REFUSED = [
    ("body", LONG), ("body", pa.null()), ("body", pa.list_(pa.int8())), ("topic", BYTES),
    ("tags", LONG), ("tags", pa.list_(TEXT)), ("keys", BYTES), ("keys", pa.list_(LONG)),
    ("sharding_key", BYTES), ("sharding_key", pa.float64()), ("sharding_key", pa.bool_()),
    ("properties", pa.map_(TEXT, LONG)), ("properties", pa.map_(TEXT, BYTES)),
    ("properties", pa.list_(pa.struct([("name", TEXT), ("value", TEXT)]))), ("properties", TEXT),
    ("delay_level", TEXT), ("delay_level", pa.uint64()), ("delay_ms", pa.float64()),
    ("delivery_timestamp", pa.timestamp("us")), ("flag", TEXT), ("wait_store", TEXT),
    ("message_id", LONG), ("event_time", LONG), ("event_time", pa.timestamp("us")),
    ("order_by", MAP), ("order_by", pa.list_(LONG)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), ACCEPTED, ids=str)
def test_a_type_of_the_contract_is_taken(name, kind):
    options = {"topic": ""} if name == "topic" else {}
    columns = {"body": TEXT, "topic": TEXT, name: kind}
    assert sources(columns, **options)[name] == name


@pytest.mark.parametrize(("name", "kind"), REFUSED, ids=str)
def test_another_type_is_an_error_that_names_column_type_and_way_out(name, kind):
    options = {"topic": ""} if name == "topic" else {}
    caught = error({"body": TEXT, "topic": TEXT, name: kind}, **options)
    assert caught.column == name
    assert f"column {name!r} has the type {kind_of(kind)}" in caught.text
    assert "cast it" in caught.text


@pytest.mark.parametrize(
    ("spark_type", "arrow_type"),
    [
        (spark.StringType(), TEXT), (spark.VarcharType(5), TEXT), (spark.BinaryType(), BYTES),
        (spark.ByteType(), pa.int8()), (spark.LongType(), LONG),
        (spark.DecimalType(10, 2), pa.decimal128(10, 2)), (spark.BooleanType(), pa.bool_()),
        (spark.TimestampType(), UTC_US), (spark.TimestampNTZType(), pa.timestamp("us")),
        (spark.DoubleType(), pa.float64()), (spark.DateType(), pa.date32()),
        (spark.NullType(), pa.null()), (spark.ArrayType(spark.StringType()), pa.list_(TEXT)),
        (spark.MapType(spark.StringType(), spark.StringType()), MAP),
        (spark.ArrayType(spark.StructType([
            spark.StructField("key", spark.StringType(), False),
            spark.StructField("value", spark.BinaryType())])), headers(BYTES)),
    ],
    ids=str,
)  # fmt: skip
def test_spark_and_arrow_types_have_one_vocabulary(spark_type, arrow_type):
    assert kind_of(spark_type) == kind_of(arrow_type)


def test_a_struct_type_is_read_like_an_arrow_schema():
    schema = spark.StructType().add("value", "binary").add("key", "string").add("n", "integer")
    resolved = resolve_columns(schema, SinkOptions.parse(topic="t"))
    assert dict(resolved.sources) == {"body": "value", "keys": "key"}


def test_a_collated_string_is_a_string():
    assert kind_of(spark.StringType("UTF8_LCASE")) == "string"


def test_names_aliases_prefixes_and_mappings():
    assert sources({"value": TEXT, "key": TEXT, "headers": MAP}) == {
        "body": "value", "keys": "key", "properties": "headers"
    }  # fmt: skip
    assert sources({"body": TEXT, "value": LONG})["body"] == "body"
    assert sources({"body": TEXT, "tags": LONG, "__rmq_tags": TEXT})["tags"] == "__rmq_tags"
    columns = {"payload": TEXT, "id": LONG, "body": LONG}
    mapped = sources(columns, columns="body=payload, sharding_key=id")
    assert mapped == {"body": "payload", "sharding_key": "id"}
    assert sources({"body": TEXT, "k": TEXT}, columns="key=k")["keys"] == "k"
    assert sources({"body": TEXT, "at": UTC_US}, orderBy="at")["order_by"] == "at"


def test_case_is_ignored_unless_the_session_minds_it():
    assert sources({"Body": TEXT, "TAGS": TEXT}) == {"body": "Body", "tags": "TAGS"}
    assert sources({"body": TEXT, "TAGS": TEXT}, case_sensitive=True) == {"body": "body"}
    assert "ambiguous" in error({"body": TEXT, "tags": TEXT, "TAGS": TEXT}).text
    both = {"body": TEXT, "tags": TEXT, "TAGS": TEXT}
    assert sources(both, case_sensitive=True)["tags"] == "tags"


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"a": TEXT}, {}, ["no column 'body'", "columns='body=<column>'", "bodyFormat", "'a'"]),
        ({"body": TEXT}, {"topic": ""}, ["no column 'topic'", "option topic"]),
        ({"body": TEXT}, {"columns": "body=nix"}, ["option columns", "'nix'", "'body'"]),
        ({"body": TEXT}, {"columns": "tag=body"}, ["did you mean 'tags'"]),
        ({"body": TEXT}, {"columns": "zzz=body"}, ["has no column 'zzz'", "sharding_key"]),
        ({"body": TEXT}, {"orderBy": "at"}, ["option orderBy", "'at'"]),
        ({"body": TEXT, "queue_id": LONG}, {}, ["'queue_id' needs", "'broker_name'"]),
        ({"body": TEXT, "broker_name": TEXT}, {}, ["'broker_name' needs", "'queue_id'"]),
        ({"body": TEXT}, {"ordering": "strict"}, ["ordering=strict", "columns='sharding_key="]),
        ({"body": TEXT, "x": TEXT}, {"strictColumns": True}, ["strictColumns", "'x'"]),
        ({"body": TEXT, "a": TEXT}, {"bodyFormat": "json"}, ["bodyFormat=json", "'body'"]),
        ({"tags": TEXT}, {"bodyFormat": "json"}, ["nothing to pack"]),
        ({"body": TEXT, "shard_key": TEXT}, {}, ["'shard_key'", "'sharding_key'", "columns='sh"]),
        ({"body": TEXT, "shardingKey": TEXT}, {}, ["did you mean 'sharding_key'"]),
        ({"body": TEXT, "tag": TEXT}, {}, ["did you mean 'tags'", "columns='tags=tag'"]),
        ({"body": TEXT, "header": MAP}, {}, ["did you mean 'headers'", "columns='properties="]),
        ({"boddy": TEXT}, {}, ["did you mean 'body'"]),
        ({"value": BYTES, "key": BYTES}, {}, ["Kafka", "cast(key AS string) AS sharding_key"]),
    ],
)
def test_an_error_names_the_remedy(columns, options, words):
    refused = error(columns, **options)
    words = [*words, refused.facts.get("column", "nothing to pack")]
    assert [word for word in words if word not in refused.text] == []


@pytest.mark.parametrize(
    "name",
    ["order_id", "message", "event", "event_id", "event_type", "order", "queue", "top", "lag",
     "flat", "tag1", "id", "text", "topics", "broker"],
)  # fmt: skip
def test_a_data_column_is_not_taken_for_a_misspelled_one(name):
    assert sources({"body": TEXT, name: TEXT}) == {"body": "body"}
    assert plan({"tag": TEXT}, bodyFormat="json").json_columns == ("tag",)


@pytest.mark.parametrize("column", [column.name for column in CONTRACT])
def test_near_names_of_each_column_are_refused(column):
    """Try names as other languages, other tools and mistyping write them."""
    meant = {name for name, wanted in _MEANT.items() if wanted == column}
    words = column.split("_")
    camel = words[0] + "".join(map(str.title, words[1:]))
    near = {*meant, f"{column}x"} | ({camel, "".join(words)} if words[1:] else set())
    for name in sorted(near - {column}):
        columns = {"body": TEXT, name: TEXT} if column != "body" else {name: TEXT}
        options = {} if column != "topic" else {"topic": ""}
        assert f"the row contract has no column {name!r}" in error(columns, **options).text


def test_a_delay_is_not_ignored():
    assert "did you mean 'delay_ms'" in error({"body": TEXT, "delay": LONG}).text
    assert sources({"body": TEXT, "delay": LONG, "delay_ms": LONG})["delay_ms"] == "delay_ms"


def test_a_forbidden_topic_is_an_option_error():
    with pytest.raises(OptionError, match=r"option topic: .*forbidden"):
        plan({"body": TEXT}, topic="SCHEDULE_TOPIC_XXXX")


def test_strict_columns_know_overridden_and_mapped_columns():
    columns = {"body": TEXT, "topic": TEXT, "id": TEXT, "__rmq_flag": LONG}
    assert plan(columns, strictColumns=True, columns="keys=id").source("keys") == "id"


def test_json_packs_all_data_and_leaves_metadata_out():
    columns = {"tail": TEXT, "n": LONG, "value": LONG, "tags": TEXT, "topic": TEXT}
    resolved = plan(columns, bodyFormat="json", columns="sharding_key=tail", strictColumns=True)
    assert resolved.json_columns == ("tail", "n", "value", "topic")
    assert dict(resolved.sources) == {"body": "body", "tags": "tags", "sharding_key": "tail"}
    assert resolved.needs_to_json
    batch = pa.record_batch({name: pa.nulls(1, kind) for name, kind in columns.items()})
    with pytest.raises(ColumnError, match="to_json"):
        normalise(batch, resolved)


def test_a_plan_pickles():
    resolved = plan({"a": TEXT, "tags": TEXT}, bodyFormat="json")
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_needed_columns_are_named_once():
    resolved = plan({"body": TEXT, "id": TEXT, "x": TEXT}, columns="keys=id,sharding_key=id")
    assert resolved.needed_columns == ("body", "id")


def decimals(kind, *texts):
    return pa.array([text and Decimal(text) for text in texts], kind), texts


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("body", pa.array([b"1234", None], pa.binary(4)), [b"1234", None]),
        ("body", pa.array([b"0123456789abcdef"], pa.uuid()), [b"0123456789abcdef"]),
        ("topic", pa.array(["other"]), ["other"]), ("order_by", pa.array([1.5]), [1.5]),
        # Tags are trimmed like Java's String.trim: other blanks are part of a tag.
        ("tags", pa.array([" a ", "", None, "\u2003", "\tключ\u2003\n"]),
         ["a", None, None, "\u2003", "ключ\u2003"]),
        ("delivery_timestamp", pa.array([1_700_000_000_123]), [1_700_000_000_123]),
        # A property that is there twice has its first place and its last value.
        ("properties", pa.array([[("a", "1"), ("b", "2"), ("a", "3")], None,
                                 [("b", None), ("a", "4")]], MAP),
         [[("a", "3"), ("b", "2")], [], [("a", "4")]]),
        # A null drops an entry, and not the property.
        ("properties", pa.array([[{"key": "a", "value": b"1"}, {"key": "a", "value": None}, None]],
                                headers(BYTES)), [[("a", "1")]]),
        # Numbers shard by their text: Java's `BigDecimal.toPlainString`; Arrow's own has 0E-10.
        ("sharding_key", pa.array([12, None, -5]), ["12", None, "-5"]),
        *(("sharding_key", *decimals(*case)) for case in (
            (pa.decimal128(20, 10), "0.0000000000", "-0.0000000010", "0.0000000001", None),
            (pa.decimal128(38, 38), "-0." + "9" * 38, "0." + "0" * 38),
            (pa.decimal256(76, 2), "1" * 74 + ".25", "-0.05"),
            (pa.decimal128(5, 0), "0", "-12", None), (pa.decimal128(5, -2), "0", "1200", "-100"),
        )),
    ],
)  # fmt: skip
def test_values_of_a_column(name, column, values):
    options = {"topic": ""} if name == "topic" else {}
    field = "delivery_timestamp_ms" if name == "delivery_timestamp" else name
    for first in (0, 1):
        part = column[first:]
        bodies = pa.array(["x"] * len(part), TEXT)
        columns = rows({"body": bodies, name: part}, **options).columns()
        assert columns.get(field, part[:0]).to_pylist() == [*values[first:]]


def test_the_topic_option_wins_over_the_column():
    assert "topic" not in sources({"body": TEXT, "topic": LONG})
    assert rows({"body": ["x"], "topic": ["other"]}).topic == "t"


@pytest.mark.parametrize(
    ("unit", "ticks", "millis"),
    [("s", 3, 3000), ("ms", 3, 3), ("us", 3999, 3), ("us", -1, -1), ("ns", 3_999_999, 3)],
)
def test_times_are_epoch_milliseconds_rounded_down(unit, ticks, millis):
    times = pa.array([ticks, None], pa.int64()).cast(pa.timestamp(unit, "UTC"))
    normalised = rows({"body": ["x", "y"], "delivery_timestamp": times, "event_time": times})
    assert normalised.delivery_timestamp_ms.to_pylist() == [millis, None]
    assert normalised.event_time_ms.to_pylist() == [millis, None]


@pytest.mark.parametrize("ticks", [1 << 62, -(1 << 62)])
def test_seconds_beyond_all_milliseconds_are_not_taken_for_others(ticks):
    times = pa.array([ticks, None, 3], pa.int64()).cast(pa.timestamp("s", "UTC"))
    far, none, near = rows({"body": ["x"] * 3, "event_time": times}).event_time_ms.to_pylist()
    assert abs(far) > 1 << 62 and (far > 0) == (ticks > 0) and (none, near) == (None, 3000)


def test_columns_without_values_are_absent():
    normalised = rows(
        {
            "body": ["x"], "tags": pa.nulls(1), "keys": pa.array([[None]], pa.list_(TEXT)),
            "properties": pa.array([[("a", None)]], MAP), "flag": pa.nulls(1, pa.int32()),
        }
    )  # fmt: skip
    assert set(normalised.columns()) == {"body"}


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.large_string()])
def test_a_slice_behind_two_gigabytes_is_taken(kind, tmp_path):
    file, width = tmp_path / "sparse", 1 << 20
    file.touch()
    os.truncate(file, 2100 * width)
    offsets = np.arange(0, 2101 * width, width, np.int64)
    with pa.memory_map(str(file)) as data:
        buffers = [None, pa.py_buffer(offsets), data.read_buffer(2100 * width)]
        bodies = pa.Array.from_buffers(kind, 2100, buffers)
        normalised = normalise(pa.record_batch({"body": bodies[2080:2082]}), plan({"body": kind}))
    assert normalised.body == pa.array([b"\0" * width] * 2)


def test_a_missing_column_is_named():
    with pytest.raises(ColumnError, match="no column 'tags'"):
        normalise(pa.record_batch({"body": ["x"]}), plan({"body": TEXT, "tags": TEXT}))


def test_rows_can_be_taken_and_sliced():
    normalised = rows({"body": ["a", "b", "c"], "tags": ["1", "2", "3"], "queue_id": [0, 1, 2],
                 "broker_name": ["x", "y", "z"]})  # fmt: skip
    selection = normalised.take(pa.array([2, 0]).to_numpy())
    assert (selection.body.to_pylist(), selection.queue_id.to_pylist()) == ([b"c", b"a"], [2, 0])
    assert normalised.slice(1, 2).tags.to_pylist() == ["2"]
    assert selection.topic == "t"


def test_rows_with_an_id_of_their_own_keep_it():
    normalised = rows({"body": ["a", "b"], "message_id": ["own", None]})
    ids = normalised.property_columns(pa.array(["m1", "m2"]))["message_ids"]
    assert ids.to_pylist() == ["own", "m2"]
