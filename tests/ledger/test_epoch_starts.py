"""Notes of begun work: by drivers, by task attempts of runs that follow each other, and by the
queries that an `appId` names."""

import functools
import itertools
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.ledger.epoch_starts import (
    ROWS_FACT,
    EpochStarts,
    IdFacts,
    begin_batch,
    begin_commit,
    begin_epoch,
    begin_named_write,
    begin_write,
    check_whole,
    claim_app_id,
    end_commit,
    end_named_write,
    end_write,
    last_begun,
    note_refused_frame,
    unrecorded_epoch,
)
from rocket_sink.ledger.notes import NoteStore, now_ms
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.options import SinkOptions
from tests.ledger.values import claimant

from .values import refusal

ONCE = "effectively_once"


def test_an_epoch_that_was_begun_before_is_known(place):
    had_begun = [begin_epoch(place, "q", epoch, ONCE) for epoch in (0, 1, 1, 0, 2)]
    assert had_begun == [False, False, True, True, False]
    assert not begin_epoch(place, "another", 0, ONCE)
    assert [last_begun(place, query) for query in ("q", "another", "a third")] == [2, 0, -1]


def test_a_note_that_cannot_be_read_is_not_taken_for_none(tmp_path, place):
    """Otherwise rows that were sent before would be sent again, and count as no duplicates."""
    begin_epoch(place, "q", 5, ONCE)
    note = tmp_path / "_notes" / "epochs" / "q-q.json"
    note.write_text("{")
    assert not begin_epoch(place, "q", 5, ONCE)
    is_whole = functools.partial(check_whole, is_held=True)
    begins = (begin_epoch, 5, "epochs"), (is_whole, 5, "epochs"), (begin_write, "w", "writes")
    for begin, again, kind in begins:
        note = tmp_path / "_notes" / kind / "q-unread.json"
        note.mkdir(parents=True, exist_ok=True)
        with refusal(note, f"cannot tell from {note} whether .*: "):
            begin(place, "unread", again, ONCE)


def test_a_write_that_did_not_end_is_known(place, caplog):
    previous = [begin_write(place, app, write, ONCE) for app, write in ("a1", "a2", "b3")]
    assert previous == [("1", False), ("1", True), ("3", False)]
    assert not end_write(place, "a", "1")  # The second write has begun.
    assert begin_write(place, "a", "5", ONCE) == ("1", True)
    with patch.object(NoteStore, "remove", side_effect=OSError("read-only")):
        assert end_write(place, "a", "5")
    assert f"appId a is complete, but its note _notes/writes/q-a.json in {place}" in caplog.text
    assert end_write(place, "a", "5") and end_write(place, "a", "5")
    assert begin_write(place, "a", "4", ONCE) == ("4", False)


@pytest.mark.parametrize("text", ["{", '{"at_ms": 1}', "[]"])
def test_a_note_that_names_nothing_is_of_something_that_did_not_end(tmp_path, place, text):
    for kind, file in (("writes", "q-a"), ("queries", "q-a"), ("queries", "q-a=7Eways")):
        NoteStore(place, kind).write(file, {})
        (tmp_path / "_notes" / kind / f"{file}.json").write_text(text)
    assert unrecorded_epoch(place, "a", "run", "way", "4") == "4"
    with refusal(NoteStore(place, "queries").where("q-a"), r"queries/q-a\.json which query the"):
        claim_app_id(place, "a", "q2")
    assert end_write(place, "a", "1")
    assert begin_write(place, "a", "2", ONCE) == ("2", True)


def begun(ledger, run, epoch=7):
    """Begin a task attempt in a run of the query `q`; its looks are minutes apart."""
    ctx = RunContext("q", run, epoch, 0, worker="w:1")
    starts = EpochStarts(resolve_path(ledger), ctx, clock=itertools.count(1.0, 60.0).__next__)
    starts.begin({"t": frozenset("a")})
    return starts


def test_a_run_that_another_one_followed_goes_no_further(tmp_path):
    """The run that began last goes on, independent of the order of names."""
    for first, second in (("r1", "r2"), ("s2", "s1")):
        zombie = begun(tmp_path / first, first)
        zombie.check()
        follower = begun(tmp_path / first, second)
        notes = [path.name.partition("-")[0] for path in tmp_path.glob(f"{first}/_notes/*/q-q/7/*")]
        assert sorted(notes) == sorted([f"{first}~0~None~1", f"{second}~0~None~2"])
        with pytest.raises(CheckpointError, match=rf"\(run {second}\) has taken") as taken:
            zombie.check()
        assert (taken.value.query_id, taken.value.run_id) == ("q", second)
        with pytest.raises(CheckpointError):
            begun(tmp_path / first, first)
        # Sends of a `TableProducer` are epochs of one run, and may overlap.
        begun(tmp_path / first, second, epoch=10).check()
        follower.check()
        # The run that began last has ended, and its write has removed all notes.
        shutil.rmtree(tmp_path / first / "_notes" / "starts")
        with pytest.raises(CheckpointError, match=r"ended.* has taken the query q over"):
            zombie.check()


def test_it_looks_once_a_second(tmp_path):
    times = iter([1.0, 1.5, 2.1, 2.2])
    ctx = RunContext("q", "r1", 7, 0, worker="w:1")
    starts = EpochStarts(resolve_path(tmp_path), ctx, clock=times.__next__)
    starts.begin({"t": frozenset("a")})
    begun(tmp_path, "r2")
    starts.check()
    for _ in range(2):  # A thread that goes on after the error is refused, too.
        with pytest.raises(CheckpointError):
            starts.check()


def test_earlier_attempts_are_those_of_the_partition_and_of_other_stages(place):
    def begin(partition, stage_id, task, epoch=0, run="r"):
        ctx = RunContext("q", run, epoch, partition, stage_id, task_attempt_id=task, worker="w:1")
        facts = IdFacts(first_ids=[str(task)], cluster=["n:1"])
        starts = EpochStarts(place, ctx)
        return starts, starts.begin({"t": frozenset(str(task))}, facts)

    store, folder = NoteStore(place, "starts"), Path(place.root, "_notes", "starts", "q-q")
    begun_ms = now_ms()
    assert [begin(partition, 1, partition)[1] for partition in (0, 1)] == [None, None]
    # Spark runs the stage again, and counts the partition's attempts from 0 again.
    again, prior = begin(1, 1, 2)
    assert prior.brokers == {"t": frozenset("1")} and begun_ms <= prior.since_ms <= now_ms()
    assert (prior.facts, prior.clusters) == ([IdFacts({}, {}, ["1"], "", "", ["n:1"])], [["n:1"]])
    again.note_brokers({"t": frozenset("2xa"), "u": frozenset()})
    # Another job of the epoch may have other partitions, whose first ids say nothing.
    fourth, prior = begin(2, 5, 3)
    assert prior.brokers == {"t": frozenset("012xa"), "u": frozenset()}
    assert [facts.first_ids for facts in prior.facts] == [()] * 3
    # A task that has sent nothing withdraws its note, perhaps while others look.
    fourth.withdraw()
    assert len(store.names("q-q/0")) == 3
    names = store.names
    with patch.object(NoteStore, "names", lambda *_: [*names("q-q"), "q-q/0/r~1~1~1-gone"]):
        assert len(begin(1, 1, 4)[1].clusters) == 2
    # A restart may have cut the epoch into other partitions.
    assert len(begin(9, 1, 5, run="s")[1].clusters) == 4
    # A later epoch's rows may have the same ids; its facts are of other rows. Three epochs stay.
    begin(0, 6, 6, epoch=2, run="s")
    assert len(begin(1, 7, 7, run="s")[1].clusters) == 6
    begin(0, 8, 8, epoch=3, run="s")
    (note,) = folder.glob("2/*")
    for text in ("{", "{}", "[]", '{"at_ms": 1, "topics": []}'):
        note.write_text(text)
        with refusal(note, "cannot be read .*: delete it if its epoch has sent nothing"):
            begin(0, 1, 9, epoch=2, run="s")
    with (
        patch.object(NoteStore, "read", side_effect=OSError("the disk")),
        pytest.raises(LedgerError, match=r"cannot note the begin of epoch 2 .*the disk"),
    ):
        begin(0, 1, 9, epoch=2, run="s")
    assert {path.name for path in folder.iterdir()} == {"2", "3"}
    shutil.rmtree(folder)
    folder.write_text("a file in the folder's place")
    with pytest.raises(LedgerError, match=r"cannot note the begin of epoch 0 at .*needs a ledger"):
        begin(0, 1, 10)


def test_a_refused_frame_keeps_its_epoch_from_being_skipped(place):
    begin_epoch(place, "q", 5, ONCE)
    check_whole(place, "q", 5, ONCE, is_held=True)
    note = Path(place.root) / "_notes" / "epochs" / "q-q.json"
    note.write_text("{")
    note_refused_frame(place, "q", 5)
    assert begin_epoch(place, "q", 5, ONCE)
    check_whole(place, "q", 4, ONCE, is_held=True)
    check_whole(place, "another", 5, ONCE, is_held=True)
    with pytest.raises(CheckpointError, match="has one frame of the epoch 5 of the q") as refused:
        check_whole(place, "q", 5, ONCE, is_held=True)
    facts = refused.value
    assert (facts.query_id, facts.ledger_epoch, facts.checkpoint_epoch) == ("q", 5, 5)
    check_whole(place, "q", 5, ONCE, is_held=False)  # All of the epoch is sent again.
    check_whole(place, "q", 5, ONCE, is_held=True)


def test_a_batch_id_names_one_frame(place):
    names = {"appId": "a", "batchId": "b", "delivery": "effectively_once"}
    options = SinkOptions.parse(nameServer="127.0.0.1:1", topic="t", ledger=place.root, **names)
    batches = [begin_batch(options, run, {"the frame": "x"}) for run in ("one", "two")]
    assert [(batch.query_id, batch.is_new) for batch in batches] == [
        ("a/b/one", True), ("a/b/one", False),
    ]  # fmt: skip
    assert batches[0].summary == {}
    batches[0].end({"rows_in": 7})
    done = begin_batch(options, "three", {"the frame": ""})  # The frame is unknown.
    assert done.summary == {"rows_in": 7}
    done.check({ROWS_FACT: 7})
    with pytest.raises(CheckpointError, match="number of rows was 7, and is 8"):
        done.check({ROWS_FACT: 8})
    for changed, frame, text in (
        (options, "y", "the frame was x, and is y"), (options.with_(topic="u"), "x", "was t, and"),
        (options.with_(nameServer="127.0.0.1:2"), "x", "127.0.0.1:1, and this write is for 127.0"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=text) as other:
            begin_batch(changed, "four", {"the frame": frame})
        assert other.value.query_id == "a/b/one"


@pytest.mark.parametrize(
    ("first", "is_done", "is_refused"),
    [(ONCE, False, True), (ONCE, True, False), ("transactional", True, True)],
)
def test_what_is_begun_goes_on_with_its_delivery(place, first, is_done, is_refused):
    """Rows that are done are visible, but half messages may still be uncommitted."""
    options = SinkOptions.parse(nameServer="n:1", ledger=place.root, batchId="b", delivery=first)
    batch = begin_batch(options, "one", {})
    batch.check({"a fact that was not known": "x"})
    if is_done:
        batch.end({"rows_in": 7})
    begin_epoch(place, "q", 5, first)
    for go_on in (
        lambda: begin_batch(options.with_(delivery="at_least_once"), "two", {}),
        lambda: check_whole(place, "q", 5, "at_least_once", is_held=is_done),
    ):
        with pytest.raises(CheckpointError, match="delivery") if is_refused else nullcontext():
            go_on()


def test_a_commit_that_was_begun_before_is_known(place):
    are_first = [begin_commit(place, "q", epoch) for epoch in (1, 1, 2)]
    assert are_first == [True, False, True]
    end_commit(place, "q", 1)
    assert begin_commit(place, "q", 1) and not begin_commit(place, "q", 2)


def test_each_batch_write_of_an_app_id_is_a_query_of_its_own(tmp_path):
    """With a common id, a later write's accounts would replace the earlier ones and letters."""
    for delivery in ("at_least_once", ONCE):
        options = SinkOptions.parse(
            nameServer="n:1", topic="t", ledger=str(tmp_path), delivery=delivery, appId="nightly"
        )
        writes = [begin_named_write(options, run) for run in ("one", "two")]
        # The first write has not ended, and effectively once continues it.
        second = "nightly/one" if delivery == ONCE else "nightly/two"
        assert writes == [("nightly/one", False), (second, True)]
        end_named_write(resolve_path(tmp_path), options, second, "two", is_done=False)
        assert begin_named_write(options, "three")[1]
        with pytest.raises(CheckpointError, match=f"'nightly' was begun with delivery={delivery},"):
            begin_named_write(options.with_(delivery="transactional"), "four")
        end_named_write(resolve_path(tmp_path), options, second, "three", is_done=True)
    assert begin_named_write(options.with_(appId=""), "one") == ("one", False)
    # A client of Spark Connect may not see the driver's folder, and takes nothing over.
    begin_named_write(options, "five")
    assert begin_named_write(options, "six", takes_over=False) == ("nightly/six", True)
    (tmp_path / "_notes" / "writes" / "q-nightly.json").rename(tmp_path / "_notes" / "away")
    (tmp_path / "_notes" / "writes" / "q-nightly.json").mkdir()
    assert begin_named_write(options, "six", takes_over=False) == ("nightly/six", False)


@pytest.mark.parametrize(
    ("names", "is_done", "kept"),
    [
        ({}, False, {"writes"}), ({"batchId": "b"}, False, {"starts", "writes"}),
        ({"appId": "a"}, False, {"starts", "writes"}), ({"appId": "a"}, True, set()),
        ({"appId": "a", "batchId": "b"}, True, {"writes"}),
        ({"appId": "a", "delivery": "at_least_once"}, True, {"starts"}),
    ],
)  # fmt: skip
def test_which_notes_of_a_write_go_at_its_end(place, names, is_done, kept):
    options = SinkOptions.parse({"ledger": place.root, "delivery": ONCE, **names})
    NoteStore(place, "starts").write("q-id/0/note", {})
    begin_write(place, "a", "r", ONCE)
    end_named_write(place, options, "id", "r", is_done=is_done)
    assert {kind for kind in ("starts", "writes") if NoteStore(place, kind).names()} == kept


def test_an_app_id_names_the_query_that_had_it_first(tmp_path, place):
    for _ in range(2):
        claim_app_id.cache_clear()
        claim_app_id(place, "jobs/a", "q1")
    claim_app_id(place, "another", "q2")
    claim_app_id(resolve_path(tmp_path / "ledger"), "jobs/a", "q2")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"names the streaming query q1, and this .* q2"):
            claim_app_id(place, "jobs/a", "q2")


def test_an_epoch_that_is_pending_at_the_first_start_stays_unrecorded(tmp_path):
    start = functools.partial(unrecorded_epoch, resolve_path(tmp_path))
    assert start("new", "run 1", "x", "") == ""
    assert start("new", "run 2", "x", "4") == ""
    # The first start of a copy may be refused before it sends, so later starts know the epoch too.
    assert [start("copy", run, "x", epoch) for run, epoch in enumerate("779")] == ["7"] * 3
    away = LedgerPath("weird://x/y", "x/y", is_local=False)
    assert unrecorded_epoch(away, "new", "run 3", "x", "4") == "4"


def test_a_way_that_the_last_run_did_not_take_is_new(tmp_path):
    """A run with another `appId` may have sent rows of the pending epoch in between."""
    start = functools.partial(unrecorded_epoch, resolve_path(tmp_path), "q")
    starts = [("1", "x", ""), ("2", "y", "5"), ("3", "x", "5"), ("4", "x", "5"), ("5", "x", "6")]
    assert [start(*each) for each in starts] == ["", "5", "5", "5", "5"]
    # A run with two sinks has two ways.
    starts = [(run, way, "6") for run in "678" for way in "xz"]
    assert [start(*each) for each in starts] == ["5", "6"] * 3


NAMES = [
    "jobs/a", "jobs-a", "jobs_a", "jobs a", "jobs=2Fa", "订单", "物流", 40 * "订", 40 * "订" + "a",
]  # fmt: skip


def test_each_name_has_notes_of_its_own(place):
    for number, name in enumerate(NAMES):
        claim_app_id(place, name, f"q{number}")
        assert begin_write(place, name, f"w{number}", ONCE) == (f"w{number}", False)
        assert not begin_epoch(place, name, number, ONCE)
    for number, name in enumerate(NAMES):
        assert claimant(place, name) == f"q{number}"
        assert begin_write(place, name, "again", ONCE) == (f"w{number}", True)
        assert begin_epoch(place, name, number, ONCE)


def test_names_that_the_file_system_does_not_tell_apart_are_refused(tmp_path, place):
    """The file system of a Mac has one file for `Jobs` and `jobs`."""
    begin_write(place, "Jobs", "w", ONCE)
    begin_epoch(place, "Jobs", 5, ONCE)
    claim_app_id(place, "Jobs", "q")
    for kind in ("writes", "epochs", "queries"):
        (tmp_path / "_notes" / kind / "q-Jobs.json").rename(
            tmp_path / "_notes" / kind / "q-jobs.json"
        )
    for call in (begin_write, begin_epoch, claim_app_id):
        with pytest.raises(CheckpointError, match="notes of 'Jobs' are in the files of 'jobs'"):
            call(place, "jobs", 5 if call is begin_epoch else "q", ONCE)


def test_a_new_ledger_at_the_path_of_a_deleted_one_is_claimed_again(tmp_path):
    place = resolve_path(tmp_path / "ledger")
    for name in ("first", "second"):
        claim_app_id(place, "a", "q1", LedgerToken(place.uri, name, spools=True))
        assert claimant(place, "a") == "q1"
        shutil.rmtree(place.root)
