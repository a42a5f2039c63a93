"""The notes of a query's queues: who shares one, and when it goes."""

import pytest

from rocket_sink.errors import DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.task.queue_snapshot import QueueSnapshots, forget_queues
from tests.task.stub_engine import publish_info

RUNS = ("0f3c2a10-5d0e-4c62-9d3b-3a8f0c1b7e55", "7b7f5f0e-1f0a-4f5e-8a51-b9d4b3c7f001")


def snapshots(folder, query, **options):
    settings = {"nameServer": "n:1", "ordering": "strict", "ledger": str(folder), **options}
    return QueueSnapshots(SinkOptions.parse(settings), query)


def notes(folder):
    return sorted(path.parent.name for path in (folder / "_notes/queues").rglob("*.json"))


def test_the_batch_writes_of_an_app_share_their_queues(tmp_path):
    """Otherwise the second write would move the keys of the first one, and nobody would notice."""
    first, second = (f"jobs/a/{run}" for run in RUNS)
    snapshots(tmp_path, first).queues(publish_info("t", [("a", 4)]))
    with pytest.raises(DeliveryError, match="b has 4 queues"):
        snapshots(tmp_path, second).queues(publish_info("t", [("a", 4), ("b", 4)]))
    assert len(notes(tmp_path)) == 1
    pinned = snapshots(tmp_path, second).load("t")
    assert pinned is not None and pinned.queues.spans == (("a", 4),)


@pytest.mark.parametrize("query", ["jobs/b", RUNS[0], f"jobs/{RUNS[0]}/x"])
def test_no_other_query_shares_them(tmp_path, query):
    snapshots(tmp_path, f"jobs/{RUNS[0]}").queues(publish_info("t", [("a", 4)]))
    assert snapshots(tmp_path, query).load("t") is None


@pytest.mark.parametrize(
    ("app", "counts", "remaining"),
    [("", {}, 0), ("", {"dead": 1}, 1), ("", {"unknown": 1}, 1), ("jobs", {}, 1)],
)
def test_a_write_without_letters_or_app_leaves_no_note(tmp_path, app, counts, remaining):
    query = f"{app}/{RUNS[0]}".strip("/")
    options = SinkOptions.parse(
        nameServer="n:1", ordering="strict", ledger=str(tmp_path), appId=app
    )
    QueueSnapshots(options, query).queues(publish_info("t", [("a", 4)]))
    forget_queues(options, query, {"dead": 0, "unknown": 0, **counts})
    assert len(notes(tmp_path)) == remaining
