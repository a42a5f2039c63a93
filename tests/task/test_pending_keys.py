"""onPendingKey: a key's later epochs wait for the backfill of its dead letters, or pass them."""

import dataclasses

import pytest

from rocket_sink.errors import DeliveryError, OptionError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.pending_keys import PendingKeys
from rocket_sink.options import SinkOptions
from rocket_sink.testing import Answer
from tests.clusters import scripted_cluster
from tests.task.one_task import CTX, run_task
from tests.task.test_worker import spooled

NEXT = dataclasses.replace(CTX, epoch=4, task_attempt_id=8)


def send(cluster, ledger, ctx, keys, **options):
    defaults = {"nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger),
             "ordering": "strict", "requestMaxMessages": 1}  # fmt: skip
    columns = {"body": [f"{ctx.epoch}{key}".encode() for key in keys], "sharding_key": list(keys)}
    return run_task(SinkOptions.parse({**defaults, **options}), ctx, columns)


def refuse(cluster, times):
    cluster.on_send(Answer(13, "the message is illegal"), times=times)


cluster = scripted_cluster(1, t=4)


def stored(cluster):
    return sorted(message.body for message in cluster.messages("t"))


def test_a_key_with_a_pending_letter_waits(cluster, tmp_path):
    refuse(cluster, 1)
    assert send(cluster, tmp_path, CTX, "a").given_up == 1
    summary = send(cluster, tmp_path, NEXT, "aabb")
    assert (summary.acked, summary.held_back) == (2, 2)
    assert stored(cluster) == [b"4b", b"4b"]
    letters = [row for row in spooled(tmp_path) if row["kind"] == "dead_letter"]
    assert [row["reason"] for row in letters if row["epoch"] == 4] == ["held_back"] * 2
    assert "onPendingKey" in letters[-1]["last_error"]


def test_pass_lets_it_overtake(cluster, tmp_path):
    refuse(cluster, 1)
    send(cluster, tmp_path, CTX, "a", onPendingKey="pass")
    assert send(cluster, tmp_path, NEXT, "a", onPendingKey="pass").acked == 1


def test_held_rows_hold_their_key_too(cluster, tmp_path):
    """A key is held until all of its dead letters are resolved."""
    refuse(cluster, 1)
    send(cluster, tmp_path, CTX, "a")
    (first,) = (tmp_path / "_notes" / "pending").iterdir()
    send(cluster, tmp_path, NEXT, "a")
    first.unlink()
    later = dataclasses.replace(CTX, epoch=5)
    assert send(cluster, tmp_path, later, "a").held_back == 1


def test_other_queries_wait_and_the_own_epochs_next_attempt_does_not(cluster, tmp_path):
    """The next attempt sends the epoch again from its start, so it overtakes nothing."""
    other = dataclasses.replace(CTX, query_id="q2")
    refuse(cluster, 1)
    send(cluster, tmp_path / "1", CTX, "a")
    assert send(cluster, tmp_path / "1", other, "a").held_back == 1
    refuse(cluster, 1)
    send(cluster, tmp_path / "2", CTX, "a")
    assert send(cluster, tmp_path / "2", dataclasses.replace(CTX, run_id="r2"), "a").acked == 1
    assert send(cluster, tmp_path / "2", other, "a").acked == 1


def test_a_replay_does_not_hold_back_what_is_stored(cluster, tmp_path):
    once = {"delivery": "effectively_once", "storedCheckDelay": 100}
    assert send(cluster, tmp_path, CTX, "ab", **once).acked == 2
    refuse(cluster, 1)
    send(cluster, tmp_path, dataclasses.replace(CTX, query_id="q2", epoch=2), "a")
    summary = send(cluster, tmp_path, dataclasses.replace(CTX, run_id="r2"), "abac", **once)
    assert (summary.found_stored, summary.held_back, summary.acked) == (2, 1, 3)
    assert summary.duplicates_possible == 0


def test_a_replay_that_finds_no_route_gives_rows_up_under_their_ids(cluster, tmp_path):
    """The replay cannot look rows up. A backfill finds stored rows by these ids."""
    options = SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), delivery="effectively_once"
    )
    columns = {"body": [b"a", b"b"], "topic": ["t", "t"]}
    assert run_task(options, CTX, columns).acked == 2
    cluster.forget_brokers()
    again = dataclasses.replace(CTX, attempt_number=1)
    assert [run_task(options, ctx, columns).unknown for ctx in (NEXT, again)] == [0, 2]
    letters = [row for row in spooled(tmp_path) if row["kind"] == "dead_letter"]
    facts = [(row["reason"], row["outcome"], row["maybe_duplicate"]) for row in letters]
    assert facts == [("unknown", "unknown", True)] * 2 + [("transport", "not_sent", None)] * 2
    ids = {message.body: message.message_id for message in cluster.messages("t")}
    assert {row["body"]: row["message_id"] for row in letters[:2]} == ids


@pytest.mark.parametrize(
    ("ordering", "attempt", "delivery", "maybe_stored"),
    [
        ("strict", 1, "at_least_once", True), ("best_effort", 1, "at_least_once", True),
        ("strict", 0, "at_least_once", None), ("strict", 1, "effectively_once", None),
    ],
)  # fmt: skip
def test_letters_of_a_replay_may_be_stored(
    cluster, tmp_path, ordering, attempt, delivery, maybe_stored
):
    """Rows of the earlier attempt are stored, then the first row of their key fails."""
    send(cluster, tmp_path, CTX, "aa", ordering=ordering)
    again = dataclasses.replace(CTX, task_attempt_id=8, attempt_number=attempt)
    refuse(cluster, 1)
    options = {"ordering": ordering, "delivery": delivery, "replayCheck": "never"}
    assert send(cluster, tmp_path, again, "aa", **options).given_up == 2
    letters = [row for row in spooled(tmp_path) if row["kind"] == "dead_letter"]
    assert [row["reason"] for row in letters] == ["data", "held_back"]
    assert [row["maybe_duplicate"] or None for row in letters] == [None, maybe_stored]


def test_a_complete_attempt_lets_go_of_what_earlier_ones_noted(cluster, tmp_path):
    """The first run's driver died before it read a spool; the second run delivers all rows."""
    refuse(cluster, 2)
    send(cluster, tmp_path, CTX, "ab")
    again = dataclasses.replace(CTX, run_id="r2", task_attempt_id=1)
    assert send(cluster, tmp_path, again, "ab").acked == 2
    assert send(cluster, tmp_path, dataclasses.replace(NEXT, run_id="r2"), "ab").acked == 2
    assert list((tmp_path / "_notes" / "pending").iterdir()) == []


def test_an_attempt_that_gives_up_again_holds_its_own_keys_only(cluster, tmp_path):
    refuse(cluster, 2)
    send(cluster, tmp_path, CTX, "ab")
    refuse(cluster, 1)
    send(cluster, tmp_path, dataclasses.replace(CTX, run_id="r2"), "ab")
    letters = [r for r in spooled(tmp_path) if r["kind"] == "dead_letter" and r["run_id"] == "r2"]
    keys = {row["sharding_key"] for row in letters}  # Either key may come to the broker first.
    assert len(keys) == 1 and PendingKeys(resolve_path(tmp_path)).held_for(NEXT) == {"t": keys}


def test_an_attempt_that_fails_lets_go_of_nothing(cluster, tmp_path):
    refuse(cluster, 1)
    send(cluster, tmp_path, CTX, "a")
    refuse(cluster, 1)
    with pytest.raises(DeliveryError):
        send(cluster, tmp_path, dataclasses.replace(CTX, run_id="r2"), "ba", maxFailures=0)
    assert PendingKeys(resolve_path(tmp_path)).held_for(NEXT) == {"t": {"a"}}


def test_a_worker_that_outlives_its_driver_lets_go_of_nothing_newer(cluster, tmp_path):
    old, new = PendingKeys(resolve_path(tmp_path)), PendingKeys(resolve_path(tmp_path))
    old.held_for(CTX)
    later = dataclasses.replace(CTX, run_id="r2")
    new.held_for(later)
    new.note(later, {"t": {"a"}})
    old.withdraw_earlier()
    assert PendingKeys(resolve_path(tmp_path)).held_for(NEXT) == {"t": {"a"}}


def test_refused_rows_hold_nobody(cluster, tmp_path):
    assert send(cluster, tmp_path, CTX, "a", maxMessageSize=1).invalid == 1
    assert send(cluster, tmp_path, NEXT, "a").acked == 1


def test_a_task_without_letters_writes_nothing(cluster, tmp_path):
    send(cluster, tmp_path, CTX, "abc")
    assert not (tmp_path / "_notes" / "pending").exists()
    assert PendingKeys(resolve_path(tmp_path)).held_for(NEXT) == {}


@pytest.mark.parametrize("missing", [{"ordering": "none"}, {"ledger": ""}])
def test_hold_needs_an_ordering_and_a_ledger(missing):
    settings = {"ordering": "strict", "ledger": "/l", "onPendingKey": "hold", **missing}
    with pytest.raises(OptionError, match="onPendingKey=hold"):
        SinkOptions.parse(settings)
