"""Consumers' dead letters on their way into the spool of a ledger."""

import pytest

from rocket_sink import Message, Producer
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.producer.admin import dlq
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.task import dlq_export
from tests.clusters import scripted_cluster

cluster = scripted_cluster(1, **{"%DLQ%g": 1})


def test_what_was_read_before_an_error_is_left_to_the_fold(cluster, tmp_path, monkeypatch):
    """The fold takes them while this process lives on; a second export gives the same letters."""
    monkeypatch.setattr(dlq_export, "_ROWS", 1)
    with Producer(nameServer=cluster.name_server, producerGroup="p") as producer:
        producer.send(Message("%DLQ%g", b"x"))
    with Admin(nameServer=cluster.name_server) as admin:
        (letter,) = dlq.read(admin, dlq.DlqQuery("g"))

    def cut():
        yield from (letter, letter, letter)
        raise ConnectionError("the broker is gone")

    with pytest.raises(ConnectionError):
        dlq_export.to_ledger(cut(), str(tmp_path))
    place = resolve_path(tmp_path)
    files = sealed_files(place, place.filesystem())
    rows = [
        row for info in files for batch in read_batches(info.path, place.filesystem())
        for row in batch.select(["lane", "ordinal"]).to_pylist()
    ]  # fmt: skip
    assert rows == [{"lane": "export", "ordinal": number} for number in range(3)]
