"""Readers of brokers whose answers are much larger in memory than on the wire."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink import cli
from rocket_sink.errors import RemoteProtocolError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin import dlq
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.spark.reading.batch import MessageReader
from rocket_sink.spark.reading.options import ReadOptions
from rocket_sink.task import dlq_export
from rocket_sink.testing import FakeCluster
from rocket_sink.testing import store as reads
from rocket_sink.wire.compress import CompressionType, compress
from rocket_sink.wire.stored import StoredMessage, encode_stored
from tests.memory import memory_below

MIB = 1 << 20
BODY = bytes(4 * MIB)
COUNT = 30
GROUP = "billing"


@pytest.fixture
def topic(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a dead-letter topic whose messages take 4 kB on the wire and 4 MiB in memory."""
    kind = CompressionType.ZSTD
    small = compress(BODY, kind)

    def encode(message: StoredMessage) -> bytes:
        return encode_stored(replace(message, sys_flag=kind.sys_flag), stored_body=small)

    monkeypatch.setattr(reads, "encode_message", encode)
    name = f"%DLQ%{GROUP}"
    cluster.create_topic(name, 1)
    store(cluster, name, [f"ID{number}" for number in range(COUNT)])
    return name


def store(cluster: FakeCluster, topic: str, ids: Iterable[str]) -> None:
    for broker in cluster.brokers:
        for number, message_id in enumerate(ids):
            broker.store.append(
                StoredMessage(
                    topic, BODY, store_ms=number, store_host=broker.store._host,
                    properties={"UNIQ_KEY": message_id, "KEYS": "k", "RETRY_TOPIC": "orders"},
                )
            )  # fmt: skip


def test_a_topic_is_read_in_bounded_memory(cluster: FakeCluster, topic: str) -> None:
    with Admin(nameServer=cluster.name_server) as admin, memory_below(60 * MIB):
        count = 0
        for message in admin.read_topic(topic):
            assert message.body == BODY
            count += 1
        assert count == 2 * COUNT


def test_tail(cluster: FakeCluster, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    # fmt: off
    line = ["tail", "-n", cluster.name_server, "-t", topic, "--from-start", "--no-follow",
            "--json", "--key", "none"]
    # fmt: on
    with memory_below(80 * MIB):
        assert cli.main(line) == 0
    assert capsys.readouterr().out == ""


def test_a_query_beyond_the_limit_is_explained(cluster: FakeCluster, topic: str) -> None:
    store(cluster, topic, ["same"] * COUNT)
    with Admin(nameServer=cluster.name_server) as admin:
        with memory_below(90 * MIB), pytest.raises(RemoteProtocolError, match="ask for fewer"):
            admin.query_by_unique_key(topic, "same")
        assert len(admin.query_by_unique_key(topic, "same", max_messages=5)) == 10
        (found, _) = admin.query_by_unique_key(topic, "ID3")
        assert found.body == BODY
        with memory_below(3 * MIB):
            (found, _) = admin.query_by_unique_key(topic, "ID3", bodies=False)
        assert found.body == b""


def test_look_ups_of_effectively_once(cluster: FakeCluster, topic: str, make_engine: Any) -> None:
    engine = make_engine()
    ids = [f"ID{number}" for number in range(COUNT)]
    with memory_below(3 * MIB):
        assert StoredMessages(engine, since_ms=0).find(topic, ids, timed=False) == set(ids)


def test_dead_letters(cluster: FakeCluster, topic: str, tmp_path: Path) -> None:
    with Admin(nameServer=cluster.name_server) as admin:
        with memory_below(80 * MIB):
            assert sum(1 for _ in dlq.read(admin, dlq.DlqQuery(GROUP))) == 2 * COUNT
        stored: Any = SimpleNamespace(status="SEND_OK")
        resender = dlq.Resender(admin, lambda message: stored, to_topic=topic)
        (letter,) = dlq.read(admin, dlq.DlqQuery(GROUP, limit=1))
        with memory_below(3 * MIB):
            resender.resend(letter)
        assert resender.report.resent == 1
        with memory_below(150 * MIB):
            letters = dlq.read(admin, dlq.DlqQuery(GROUP))
            assert dlq_export.to_file(letters, tmp_path / "letters.parquet") == 2 * COUNT


def test_the_spark_reader(cluster: FakeCluster, topic: str) -> None:
    options = SinkOptions.parse(nameServer=cluster.name_server, topic=topic)
    reader = MessageReader(ReadOptions(), options)
    with memory_below(80 * MIB):
        rows = 0
        for partition in reader.partitions():
            for batch in reader.read(partition):
                assert batch.nbytes < 24 * MIB
                rows += batch.num_rows
        assert rows == 2 * COUNT
