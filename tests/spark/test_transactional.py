"""`delivery=transactional` on a scripted cluster: half messages, their commits, lost answers."""

import dataclasses
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pyarrow as pa
import pytest
from pyarrow import fs, ipc

from rocket_sink.errors import ConfigurationError, DeliveryError, LedgerError, OptionError
from rocket_sink.ledger import lock as lock_module
from rocket_sink.ledger.lock import Lease
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.half_commits import HALVES, CommitReport, HalfMessageCommitter
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.producer.transactions import ROLLBACK, UNKNOWN
from rocket_sink.rows.contract import HALF_BYTES, resolve_columns
from rocket_sink.spark import transactions
from rocket_sink.spark.decided_epoch import read_halves
from rocket_sink.spark.transactions import CheckBacks, EndReport, TransactionChecker
from rocket_sink.task import transaction_marker as marker
from rocket_sink.task.runner import TaskRunner
from rocket_sink.task.transaction_marker import HalfMark
from rocket_sink.testing import Answer, CloseConnection, Delay, Drop
from rocket_sink.wire.codes import RequestCode, SysFlag
from rocket_sink.wire.properties import PGROUP
from tests.clusters import are_in_order, scripted_cluster
from tests.producer.waiting import until
from tests.task.one_task import CTX as ONE_TASK

CTX = dataclasses.replace(ONE_TASK, lane="foreach_batch")
GROUP = "rocket-sink-ledger"
ROWS = 60
END = RequestCode.END_TRANSACTION


class World:
    """A cluster, and tasks and commits whose processes may die."""

    def __init__(self, cluster, ledger):
        self.cluster = cluster
        self.pool = ProducerPool()
        self.settings: dict[str, Any] = {
            "nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger),
            "delivery": "transactional", "storedCheckDelay": 100, "storedCheckTimeout": 5000,
            "sendMsgTimeout": 2000, "sendMsgMaxTimeoutPerRequest": 300,
        }  # fmt: skip

    def options(self, **more):
        return SinkOptions.parse({**self.settings, **more})

    def send(self, ctx=CTX, rows=None, **more):
        """Run a task and return the rows that it writes to the ledger."""
        options, written = self.options(**more), list[pa.RecordBatch]()
        table = rows_of(ROWS) if rows is None else rows
        run = TaskRunner(options, ctx, emit=written.append, pool=self.pool, check_group=GROUP)
        for batch in table.to_batches(max_chunksize=25):
            run.feed(batch, resolve_columns(batch.schema, options))
        self.summary = run.finish()
        return pa.Table.from_batches(written)

    def half_messages(self, **more):
        """Run a task and return its half messages."""
        return halves_of(self.send(**more))

    def commit(self, halves, *, doubtful=False, ordered=True, group=GROUP, **more):
        with closing(SendEngine(self.options(**more))) as engine:
            commits = HalfMessageCommitter(engine, group=group, ordered=ordered, since_ms=0)
            return commits.commit(halves, doubtful=doubtful)

    def seen(self):
        return Counter(m.body for m in self.cluster.messages("t"))

    def open(self):
        return [half for broker in self.cluster.brokers for half in broker.half_messages()]

    def ends(self):
        return self.cluster.requests(END)

    def questions(self):
        return len(self.cluster.requests(RequestCode.QUERY_MESSAGE))


def rows_of(count):
    keys = [f"k{number % 5}" for number in range(count)]
    return pa.table({"body": [b"%04d" % n for n in range(count)], "sharding_key": keys})


def halves_of(written):
    """Return the half messages as `TransactionCommitter` reads them from the ledger."""
    sent = (pa.compute.field("kind") == "send") & (pa.compute.field("outcome") == "acked")
    return read_halves(written.filter(sent & pa.compute.field("half")))


def ids_of(halves):
    return frozenset(halves.column("message_id").to_pylist())


ALL = Counter(rows_of(ROWS).column("body").to_pylist())


cluster = scripted_cluster(t=4)


@pytest.fixture
def world(cluster, tmp_path):
    return World(cluster, tmp_path / "ledger")


@pytest.mark.parametrize("ordering", ["none", "best_effort", "strict"])
def test_rows_are_hidden_until_the_commit_and_then_there_once_in_order(world, ordering):
    halves = world.half_messages(ordering=ordering)
    assert not world.seen() and len(world.open()) == len(halves) == ROWS
    assert world.summary.acked == ROWS and world.summary.duplicates_possible == 0
    assert world.commit(halves) == CommitReport(committed=ROWS)
    assert world.seen() == ALL and not world.open() and world.questions() == 0
    assert ordering != "strict" or are_in_order(world.cluster.messages("t"))


def test_a_half_message_says_who_it_is_and_who_answers_for_it(world):
    """Messages that leave a group, because a broker is busy, are sent as single messages."""
    world.cluster.brokers[0].on_send(Answer(2, "busy"), times=3)
    world.send(rows=rows_of(ROWS).append_column("tags", pa.array(["a"] * ROWS)))
    assert Counter(half.body for half in world.open()) == ALL
    for half in world.open():
        assert (half.properties[PGROUP], half.properties["TAGS"]) == (GROUP, "a")
        assert HalfMark.read(half.properties) == HalfMark("q", "r", 3, 0, 7)
        assert half.sys_flag & SysFlag.TRANSACTION_PREPARED
    engine = world.pool.acquire(world.options())
    until(lambda: engine.drive() or len(_heartbeats(world)) >= 2)
    assert not any(GROUP.encode() in body for body in _heartbeats(world))
    engine.close()


def _heartbeats(world):
    return [bytes(r.body or b"") for r in world.cluster.requests(RequestCode.HEART_BEAT)]


@pytest.mark.parametrize("behaviour", [Drop(), CloseConnection(), Answer(1, "boom", stores=True)])
def test_a_lost_answer_leaves_a_half_that_nobody_commits(world, behaviour):
    world.cluster.on_send(behaviour, times=2)
    halves = world.half_messages(retryTimesWhenSendFailed=20)
    orphans = len(world.open()) - ROWS
    assert orphans > 0 and len(halves) == ROWS and world.summary.duplicates_possible == 0
    world.commit(halves)
    assert world.seen() == ALL and len(world.open()) == orphans
    # The visible messages are twins of these: a check-back about one of these rolls it back.
    decide = check_backs(world, ids_of(halves))
    assert {decide(asked(half)) for half in world.open()} == {ROLLBACK}


def letters_of(written, *columns):
    """Return these columns of the dead letters."""
    letters = written.filter(pa.compute.field("kind") == "dead_letter")
    return letters.select(columns).to_pylist()


def test_a_row_given_up_without_an_answer_is_no_unknown_one(world):
    for broker in world.cluster.brokers:
        broker.script.add(Drop(), matches=lambda frame: frame.body == b"0000", times=None)
    written = world.send(rows=rows_of(2), deliveryTimeoutMs=3000, retryTimesWhenSendFailed=0)
    letters = letters_of(written, "outcome", "maybe_duplicate")
    assert letters == [{"outcome": "not_sent", "maybe_duplicate": False}]
    assert (world.summary.dead, world.summary.unknown) == (1, 0)
    assert len(halves_of(written)) == 1


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_half_message_that_cannot_be_committed_fails_the_task(world, rows):
    fields = (("msgId", "no-id"), ("queueId", "0"), ("queueOffset", "1"))
    world.cluster.on_send(Answer(0, ext=fields), times=None)
    with pytest.raises(DeliveryError, match=r"does not say where: .*no-id"):
        world.send(rows=rows_of(rows))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "behaviour",
    [Drop(), CloseConnection(), Answer(1, "boom", stores=True), Answer(1, "boom"), Answer(2, "")],
    ids=["drop", "close", "boom stored", "boom", "busy"],
)
def test_a_commit_without_an_answer_doubles_nothing(world, behaviour, *, ordered):
    halves = world.half_messages(ordering="strict")
    world.cluster.on(END, behaviour, times=3)
    # A busy machine may take long for the look-up of the route.
    report = world.commit(halves, ordered=ordered, sendMsgTimeout=1000)
    assert report.committed == ROWS and world.seen() == ALL
    assert not ordered or are_in_order(world.cluster.messages("t"))


@pytest.mark.parametrize("killed_after", [0, 1, 17, ROWS])
def test_an_ender_that_was_killed_is_mended_by_the_next(world, killed_after):
    halves = world.half_messages()
    world.commit(halves.slice(0, killed_after))
    report = world.commit(halves, doubtful=True)
    assert report == CommitReport(committed=ROWS, found_stored=killed_after)
    assert world.seen() == ALL


COMMITTER = """
import sys
import pyarrow as pa
from pyarrow import fs, ipc
from rocket_sink.ledger import lock as lock_module
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.half_commits import HalfMessageCommitter
from rocket_sink.producer.engine.engine import SendEngine
lock_module._SETTLE_S = 0.1
name_server, group, lock_path, halves = sys.argv[1:]
lease = lock_module.Lease(fs.LocalFileSystem(), lock_path, lease_s=3.0)
assert lease.acquire(0)
engine = SendEngine(SinkOptions.parse({"nameServer": name_server, "sendMsgTimeout": 1500}))
committer = HalfMessageCommitter(engine, group=group, ordered=True, since_ms=0, check=lease.check)
committer.commit(ipc.open_file(halves).read_all(), doubtful=False)
"""


def test_a_committer_that_was_stopped_for_longer_than_its_lease_sends_nothing_more(
    world, tmp_path, monkeypatch
):
    halves = world.half_messages(rows=rows_of(400))
    world.cluster.on(END, Delay(20), times=None)
    with ipc.new_file(tmp_path / "halves", halves.schema) as file:
        file.write_table(halves)
    lock_path = str(tmp_path / "lock")
    arguments = (world.cluster.name_server, GROUP, lock_path, str(tmp_path / "halves"))
    monkeypatch.setattr(lock_module, "_SETTLE_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", COMMITTER, *arguments], stderr=subprocess.PIPE, text=True
    ) as stopped:
        until(lambda: len(world.ends()) >= 40, timeout_s=120)
        stopped.send_signal(signal.SIGSTOP)
        successor = Lease(fs.LocalFileSystem(), lock_path)
        assert successor.acquire(120.0)
        # An answer that is late is asked for again, and the requests are counted.
        patience = {"sendMsgTimeout": 60_000, "sendMsgMaxTimeoutPerRequest": 60_000}
        report = world.commit(halves, doubtful=True, **patience)
        stopped.send_signal(signal.SIGCONT)
        _, stderr = stopped.communicate(timeout=120)
    successor.release()
    assert "another process may hold it now" in stderr
    assert report.committed == 400 and 40 <= report.found_stored < 400
    # The brokers' request log shows one request for the end of each half message.
    requests = Counter(request.ext["msgId"] for request in world.ends())
    assert set(requests.values()) == {1} and set(world.seen().values()) == {1}
    assert len(requests) == len(world.seen()) == 400


def test_a_committer_without_its_lock_writes_nothing_that_still_waits(world):
    halves, engine = world.half_messages(), SendEngine(world.options())
    # Requests to two brokers are queued at the third check, and no byte is written.
    check = Mock(side_effect=[None, None, LedgerError("the lock is lost")])

    def commit(halves, **more):
        commits = HalfMessageCommitter(engine, group=GROUP, ordered=False, since_ms=0, **more)
        commits.commit(halves, doubtful=False)

    opened = pa.concat_tables([halves.slice(0, 10), halves.slice(ROWS - 10)])
    commit(opened)  # The connections of both brokers are open.
    with pytest.raises(LedgerError, match="lost"):
        commit(halves.slice(10, ROWS - 20), check=check)
    engine.close()
    assert check.call_args_list == [call(2.0), call(2.0), call(0.0)]
    assert len(world.ends()) == sum(world.seen().values()) == len(opened)


def test_the_scripted_broker_commits_as_often_as_it_is_told(world):
    """Otherwise the tests here could not see a second commit."""
    halves = world.half_messages()
    world.commit(halves)
    world.commit(halves)
    assert set(world.seen().values()) == {2}


def test_a_broker_that_is_away_is_told_and_its_messages_are_committed_later(world):
    halves = world.half_messages()
    away = world.cluster.brokers[0]
    away.kill()
    with pytest.raises(DeliveryError, match=r"broker-a are decided.*transactions settle"):
        world.commit(halves, storedCheckTimeout=300)
    away_ids = ids_of(halves.filter(pa.compute.field("broker_name") == away.name))
    assert 0 < len(away_ids) == ROWS - sum(world.seen().values())
    away.restart()
    assert world.commit(halves, doubtful=True).committed == ROWS
    assert world.seen() == ALL


def test_what_a_broker_has_lost_is_named(world):
    halves = world.half_messages()
    lost = world.cluster.brokers[0]
    lost.lose_half_messages()
    report = world.commit(halves)
    is_lost = pa.compute.field("broker_name") == lost.name
    assert report.committed == len(halves.filter(~is_lost)) == sum(world.seen().values())
    gone = pa.Table.from_pylist([dataclasses.asdict(half) for half, _ in report.refused], HALVES)
    order = [("half_offset", "ascending")]
    assert gone.sort_by(order) == halves.filter(is_lost).sort_by(order)
    assert {remark for _, remark in report.refused} == {"Find prepared transaction message failed"}


def test_another_group_is_no_loss(world):
    """`settle` without the query's namespace has this group: it must not write messages off."""
    with pytest.raises(DeliveryError, match="producer group wrong"):
        world.commit(world.half_messages(), group="x", storedCheckTimeout=300)


def test_delayed_rows_are_refused_each(world):
    rows = rows_of(4).append_column("delay_level", pa.array([None, 3, 0, 1], pa.int64()))
    written = world.send(rows=rows)
    assert letters_of(written, "last_error_code") == [{"last_error_code": "INVALID_DELAY"}] * 2
    assert len(halves_of(written)) == 2


def test_the_mark_has_room_in_the_properties(world):
    texts = pa.array([[("p", "x" * size)] for size in (31_000, 31_900)],
                     pa.map_(pa.string(), pa.string()))  # fmt: skip
    written = world.send(rows=rows_of(2).append_column("properties", texts))
    assert letters_of(written, "last_error_code") == [{"last_error_code": "PROPERTIES_TOO_LARGE"}]
    room = HALF_BYTES - len(marker.half_properties(dataclasses.replace(CTX, query_id=""), GROUP))
    world.send(dataclasses.replace(CTX, query_id="q" * room))
    with pytest.raises(ConfigurationError, match=f"'{'q' * 40}'.* appId"):
        world.send(dataclasses.replace(CTX, query_id="q" * (room + 1)))


def test_lanes_without_a_decision_are_refused(world):
    with pytest.raises(OptionError, match="ledger"):
        SinkOptions.parse({"nameServer": "a:1", "delivery": "transactional"})
    assert marker.check_group("id", world.options(namespace="ns")) == "ns%rocket-sink-id"
    with pytest.raises(ConfigurationError, match="foreachBatch"):
        TaskRunner(world.options(), dataclasses.replace(CTX, lane="foreach"))


# --- check-backs -----------------------------------------------------------------------------


never = Mock(side_effect=AssertionError("nothing is to be ended"))


def check_backs(world, members, *, end=never, **more):
    def visible(topic, message_id):
        return any(m.message_id == message_id for m in world.cluster.messages(topic))

    return CheckBacks(lambda query, epoch: members, visible, end, **more)


def asked(half):
    """Return the half message in the form of the broker's check-back."""
    return dataclasses.replace(half, topic=half.properties["REAL_TOPIC"])


def test_an_undecided_epoch_is_unknown_and_a_failed_attempts_rows_are_rolled_back(world):
    world.send()
    half = asked(world.open()[0])
    assert check_backs(world, None)(half) is UNKNOWN
    assert check_backs(world, frozenset({"another"}))(half) is ROLLBACK
    foreign = dataclasses.replace(half, properties={"UNIQ_KEY": "x"})
    assert check_backs(world, frozenset())(foreign) is UNKNOWN


@pytest.mark.parametrize("text", ['["q","r",1e999,1,1]', "[" * 30_000, "{}", "null"])
def test_a_mark_that_is_not_ours_is_no_mark(text):
    """Any producer may set the property."""
    assert HalfMark.read({marker.TRANSACTION_PROPERTY: text}) is None


def test_a_listener_that_fails_leaves_the_question_unanswered(world, caplog):
    world.send()
    closed = Mock(side_effect=BrokenPipeError)
    decide = check_backs(world, frozenset({"another"}), on_decision=closed)
    assert decide(asked(world.open()[0])) is UNKNOWN
    assert "a half message was not decided on" in caplog.text


def test_thousands_of_questions_about_an_undecided_epoch_are_one_look(world):
    world.send()
    half, now_s = asked(world.open()[0]), Mock(return_value=0.0)
    members = Mock(return_value=None)
    decide = CheckBacks(members, lambda topic, one: False, never, clock=now_s)
    assert {decide(half) for _ in range(2000)} == {UNKNOWN} and members.call_count == 1
    for now_s.return_value, calls in ((0.19, 1), (0.21, 2), (1.0, 3)):
        decide(half)
        assert members.call_count == calls


def test_the_messages_of_some_decided_epochs_are_remembered():
    members, decisions = Mock(return_value=frozenset()), Mock()
    decide = CheckBacks(members, never, never, on_decision=decisions)
    for epoch, calls in enumerate((1, 2, 3, 4, 4, 5, 5, 6)):
        mark = HalfMark("q", "r", (0, 1, 2, 3, 0, 4, 1, 0)[epoch], 0, 7)
        properties = {marker.TRANSACTION_PROPERTY: str(mark)}
        half: Any = SimpleNamespace(properties=properties, message_id="x", topic="t")
        assert decide(half) is ROLLBACK and members.call_count == calls
        assert decisions.call_args == call(mark, "x", ROLLBACK)
    half.message_id = None
    assert decide(half) is UNKNOWN


def test_a_driver_has_a_checker_per_ledger_of_its_application(monkeypatch):
    monkeypatch.setattr(transactions, "TransactionChecker", Mock(side_effect=lambda *_: Mock()))
    monkeypatch.setattr(transactions, "_answerers", {})

    def checker(application, topic, group):
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(applicationId=application))
        return transactions.driver_answerer(spark, SinkOptions.parse(topic=topic), group)

    first, other = checker("a", "t", "g"), checker("a", "u", "g")
    assert checker("a", "t", "g") is first and not first.close.called and other is not first
    anew = checker("a", "t", "h")
    assert first.close.called and not other.close.called and anew is checker("a", "t", "h")
    assert checker("b", "t", "h") is not anew
    assert anew.close.called and other.close.called


def test_a_question_about_a_decided_message_ends_its_epoch_and_commits_nothing(world):
    halves = world.half_messages()
    end = Mock(side_effect=lambda query_id, epoch: world.commit(halves))
    decide = check_backs(world, ids_of(halves), end=end)
    questions = [asked(half) for half in world.open()]
    assert decide(questions[0]) is UNKNOWN and world.seen() == ALL
    assert {decide(half) for half in questions} == {ROLLBACK}
    end.assert_called_once_with("q", 3)


def test_what_cannot_be_ended_now_is_tried_again_later(world, caplog):
    members, now_s = ids_of(world.half_messages()), Mock()
    end = Mock(side_effect=LedgerError("away"))
    decide = check_backs(world, members, end=end, clock=now_s)
    for now_s.return_value, tries in ((0.0, 1), (1.0, 1), (29.0, 1), (31.0, 2)):
        half = asked(world.open()[0])
        assert decide(half) is UNKNOWN and end.call_count == tries
        assert f"on the half message {half.message_id} now: away" in caplog.text


@pytest.mark.parametrize(("committed", "refused"), [(0, 0), (2, 0), (0, 3)])
def test_an_end_that_a_broker_asked_for_is_reported(caplog, committed, refused):
    report, on_end = EndReport("q", 3, committed, refused=refused), Mock()
    committer = Mock(**{"end.return_value": report})
    TransactionChecker._end(SimpleNamespace(_committer=committer, on_end=on_end), "q", 3)
    assert on_end.call_args_list == [call(report)] * (committed + refused > 0)
    assert ("3 messages of query q epoch 3 are lost" in caplog.text) is (refused > 0)
