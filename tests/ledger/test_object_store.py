"""The spool and the locks on an S3 API; the judge is what the store lists, asked by boto3."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from rocket_sink.ledger import lock as lease_module
from rocket_sink.ledger import spool as spool_files
from rocket_sink.ledger.lock import LedgerLock
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.spool import SpoolWriter, read_batches
from rocket_sink.owner import Owner

from .values import context, sends

EPOCHS = 30


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A client of an S3 server on loopback; pyarrow finds it by the environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        yield client
    server.stop()


@pytest.fixture
def place(
    store: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> LedgerPath:
    monkeypatch.setattr(lease_module, "_SETTLE_S", 0.3)
    monkeypatch.setattr(lease_module, "_POLL_S", 0.1)
    return resolve_path(f"s3://bucket/{request.node.name}")


def keys(store: Any, place: LedgerPath) -> list[str]:
    prefix = place.root.partition("/")[2]
    found = store.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return [item["Key"].removeprefix(f"{prefix}/") for item in found]


def test_after_many_epochs_nothing_stays(store: Any, place: LedgerPath) -> None:
    filesystem = place.filesystem()
    for epoch in range(EPOCHS):
        writer = SpoolWriter(place, context(epoch=epoch))
        writer.append(sends(context(epoch=epoch), 2))
        writer.seal()
    # Of an older version.
    for epoch in range(5):
        filesystem.create_dir(f"{place.spool}/q-query/{epoch}", recursive=True)
    files = spool_files.sealed_files(place, filesystem)
    assert len(files) == spool_files.waiting_epochs(place, filesystem) == EPOCHS
    assert sum(b.num_rows for info in files for b in read_batches(info.path, filesystem)) == (
        2 * EPOCHS
    )
    for info in files:
        filesystem.delete_file(info.path)
    spool_files.drop_empty_folders(place, filesystem)
    assert set(keys(store, place)) <= {
        "", "_spool/", "_spool/q-query/", "_spool/q-query/3/", "_spool/q-query/4/",
    }  # fmt: skip


def test_a_damaged_object_is_put_aside(store: Any, place: LedgerPath) -> None:
    writer = SpoolWriter(place, context())
    writer.append(sends(context(), 2))
    sealed = writer.seal()
    moved = spool_files.put_aside(place, place.filesystem(), sealed)
    assert spool_files.quarantined(place, place.filesystem()) == [moved]
    assert spool_files.sealed_files(place, place.filesystem()) == []


HOLDER = """
    import sys
    from rocket_sink.ledger import lock as lease
    from rocket_sink.ledger.lock import LedgerLock
    from rocket_sink.ledger.path import resolve_path
    lease._SETTLE_S = 0.3
    lock = LedgerLock(resolve_path(sys.argv[1]), lease_s=3)
    assert lock.acquire(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_driver_of_another_host_blocks_for_its_lease_alone(
    store: Any, place: LedgerPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Owner, "is_alive", lambda self: None)  # as seen from another host
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), place.uri],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    lock = LedgerLock(place)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not lock.acquire(2 * 3)  # two leases long it lives, and keeps it
    finally:
        holder.kill()
        holder.communicate()
    assert lock.acquire(60)
    lock.check()
    lock.release()
    assert "_spool/_folds/lock" not in keys(store, place)
