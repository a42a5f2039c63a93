"""Commands that need Spark, without it: the work that they ask for, and what users read."""

import datetime as dt
import inspect
import pkgutil
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, call

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import Row

from rocket_sink import cli
from rocket_sink.commands import stream
from rocket_sink.commands.common.stream_run import Report, Source
from rocket_sink.commands.transactions import settle_in_order
from rocket_sink.errors import DeliveryError, LedgerError
from rocket_sink.ledger.driver.fold import FoldSummary
from rocket_sink.ledger.upkeep.erase import Erased
from rocket_sink.ledger.upkeep.expire import Expired
from rocket_sink.options import LEDGER_KINDS
from rocket_sink.spark.backfill.parking import Parked
from rocket_sink.spark.transactions import EndReport
from tests.clusters import scripted_cluster
from tests.run_command import run_command

cluster = scripted_cluster(1)
PARKING = "rocket_sink.spark.backfill.parking."
LEDGER = "rocket_sink.ledger.driver.ledger.Ledger."


@pytest.fixture
def ledger(tmp_path):
    (tmp_path / "my ledger" / "_spool").mkdir(parents=True)
    return str(tmp_path / "my ledger")


def run(words, ledger, *more, code=0, spark=None):
    done = run_command(*shlex.split(words), "-l", ledger, *more, spark=spark or MagicMock())
    assert done.code == code, done.err
    return done


class Case(NamedTuple):
    """A command, the function that does its work, the function's result and some of its arguments,
    and parts of the lines that the command prints."""

    words: str
    work: str
    result: Any
    wanted: Mapping[str, Any]
    lines: Sequence[str]
    code: int = 0


DAY = dt.timedelta(days=1)
CASES = [
    Case("ledger fold", LEDGER + "sync", FoldSummary(rows=12_000, files=1), {},
         ["12,000 rows of 1 file folded in"]),
    Case("ledger fold", LEDGER + "sync", FoldSummary(busy=True, holder="host:7"), {},
         ["another fold is at work (host:7): nothing was done"]),
    Case("ledger fold", LEDGER + "sync", FoldSummary(files=2, damaged=("a",), left=("b",)), {},
         ["0 rows of 2 files folded in", "put aside, the table lacks its rows: a",
          "cannot read it, the table lacks its rows: b"]),
    Case("ledger optimize", LEDGER + "optimize", {"files_removed": 1200, "files_added": 1}, {},
         ["1,200 files became 1; vacuum deletes them"]),
    Case("ledger vacuum --retain-hours 0.5", LEDGER + "vacuum", None, {"retain_hours": 0.5},
         ["done"]),
    Case("ledger expire --older-than 30d --kind send --kind isolation", LEDGER + "expire",
         Expired({"send": 5}, {"send": 1000}, 2, 3, False),
         {"older_than": dict.fromkeys(("send", "isolation"), 30 * DAY), "dry_run": False,
          "settled_bodies": 7 * DAY},
         ["send: 5 rows of that age; 1,000 more stay", "bodies of 2 settled dead letters",
          "3 files gone or written anew. A running query or the next"]),
    Case("ledger expire --older-than 12h --settled-bodies forever --dry-run", LEDGER + "expire",
         Expired({}, {}, 0, 1, True),
         {"older_than": dict.fromkeys(LEDGER_KINDS, DAY / 2), "dry_run": True,
          "settled_bodies": None},
         ["another process rewrote the ledger meanwhile: nothing was done; try again",
          "bodies of 0", "nothing was done: 1 file would go or be written anew"]),
    Case("ledger expire", LEDGER + "expire", Expired({}, {}, 0, 0, False), {"older_than": {}},
         ["bodies of 0 settled dead letters", "0 files gone"]),
    Case("ledger erase --where a=b --reason why", PARKING + "erase", Erased(2, 1, 3, 0),
         {"where": "a=b", "reason": "why"},
         ["2 dead letters erased, 1 of them were pending", "3 files with their contents deleted"]),
    Case("ledger erase --where a=b --reason why", PARKING + "erase",
         Erased(0, 0, 0, 1, quarantined=("x", "y"), unfolded=("q/1", "q/2")), {},
         ["0 dead letters erased", "0 files with", "1 file was left that no version of the table",
          "rows of 2 epochs are not folded yet", "may have such rows: x", "such rows: y"]),
    Case("ledger park --letter a --letter b --reason why", PARKING + "park", Parked(1, ("b",)),
         {"letters": ("a", "b"), "where": None, "note": "why", "resolution": "parked"},
         ["1 dead letter parked", "b is no pending dead letter of this ledger"], 1),
    Case("ledger park --where x --reason why --dropped", PARKING + "park", Parked(2),
         {"letters": (), "where": "x", "resolution": "dropped"}, ["2 dead letters dropped"]),
    Case("ledger unpark --letter a --reason why", PARKING + "unpark", Parked(0, ("a",)),
         {"letters": ("a",), "note": "why"},
         ["0 dead letters unparked", "a is no parked dead letter of this ledger"], 1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.words)
def test_the_work_and_its_result(case, ledger, monkeypatch):
    signature = inspect.signature(pkgutil.resolve_name(case.work))
    calls = []

    def work(*arguments, **named):
        calls.append(signature.bind(*arguments, **named).arguments)
        return case.result

    monkeypatch.setattr(case.work, work)
    done = run(case.words, ledger, code=case.code)
    starting, step, *lines = done.err.splitlines()
    assert starting == "starting Spark ..." and case.words.startswith(step.removesuffix(" ..."))
    assert len(lines) == len(case.lines) and not done.out
    assert all(part in line for part, line in zip(case.lines, lines, strict=True)), lines
    assert case.wanted.items() <= calls[0].items()
    if "vacuum" not in case.words:
        document = run(case.words, ledger, "--json", code=case.code).json()
        assert str(document).count(":") >= len(case.lines) / 3


def test_a_ledger_is_looked_for_before_and_with_the_session(ledger, monkeypatch):
    """Only the session may know a store's address and keys."""
    looked, spark = MagicMock(), MagicMock()
    monkeypatch.setattr("rocket_sink.commands.common.ledger_input.check_exists", looked)
    monkeypatch.setattr(LEDGER + "sync", lambda *_: FoldSummary())
    run("ledger fold", ledger, spark=spark)
    assert looked.mock_calls == [call(ledger), call(ledger, spark)]


@pytest.mark.parametrize("command", ["ledger fold", "stream --format rate --checkpoint c -n"])
def test_flags_of_the_session(command, ledger, cluster, monkeypatch):
    """A session for a ledger is set for small plans, except where the user sets something else."""
    build = MagicMock(side_effect=LedgerError("enough"))
    monkeypatch.setattr("rocket_sink.spark.session.build_session", build)
    words = [*command.split(), *([cluster.name_server, "-t", "t"] if "stream" in command else [])]
    words += ["-l", ledger, "--master", "local[2]", "--package", "a:b:1", "--package", "c:d:2"]
    assert cli.main([*words, "--spark-conf", "spark.sql.codegen.wholeStage=true"]) == 1
    name, more = build.call_args.args[0], build.call_args.kwargs
    assert f"rocket-sink {command}".startswith(name) and len(name) > len("rocket-sink ")
    assert (more["master"], more["packages"]) == ("local[2]", ("a:b:1", "c:d:2"))
    assert more["conf"].pop("spark.sql.codegen.wholeStage") == "true"
    assert ("-XX:TieredStopAtLevel=1" in str(more["conf"])) is ("stream" not in command)


def epoch(query_id, number):
    return Row(
        query_id=query_id, epoch=number, halves=1000, topics=["t"], at=None, committed=0, refused=0,
        open=number < 6,
    )  # fmt: skip


class Committer:
    """Stands for the committer of a ledger's transactions, and for the checker."""

    def __init__(self):
        self.rows = [epoch("b", 0), *(epoch("query", number) for number in (4, 5, 6))]
        self.ends, self.made, self.listed = {}, {}, MagicMock()

    def __call__(self, spark, options, **more):
        self.made = {**more, "ledger": options.ledger}
        return self

    def open_epochs(self, *, refused):
        return [row for row in self.rows if row.open or refused]

    def end(self, query_id, number, *, wait_s, again, progress):
        assert (wait_s, again) == (60, number == 6)
        progress(500, 1000)
        end = self.ends.get((query_id, number), EndReport(query_id, number, committed=1000))
        if isinstance(end, Exception):
            raise end
        return end

    def watch(self, *topics):
        mark, state = SimpleNamespace(query_id="q1", epoch=4), SimpleNamespace(name="COMMIT")
        self.made["on_decision"](mark, "ID1", state)
        self.made["on_end"](EndReport("q1", 4, committed=1, refused=2))
        assert topics == ("mine", "yours", "of the ledger")
        raise KeyboardInterrupt

    def close(self):
        self.made["is_closed"] = True


@pytest.fixture
def committer(monkeypatch):
    committer = Committer()
    for name in ("TransactionCommitter", "TransactionChecker"):
        monkeypatch.setattr(f"rocket_sink.spark.transactions.{name}", committer)
    frame = committer.listed.return_value
    frame.orderBy.return_value.head = lambda limit: committer.rows[:limit]
    frame.select.return_value.distinct.return_value.collect.return_value = [
        Row(topics=["of the ledger"])
    ]

    def query(sql):
        ledger_rows = pa.table({"query_id": [row.query_id for row in committer.rows]})
        return duckdb.from_arrow(ledger_rows).query("ledger_rows", sql).to_arrow_table()

    monkeypatch.setattr("rocket_sink.commands.transactions.reader", lambda rows: query)
    monkeypatch.setattr(LEDGER + "rows", lambda *_: None)
    monkeypatch.setattr(LEDGER + "transactions", committer.listed)
    monkeypatch.setattr(LEDGER + "sync", lambda *_: FoldSummary())
    return committer


AWAY, LOST = DeliveryError("broker-a is away"), EndReport("query", 4, committed=1, refused=2)
VISIBLE = "1,000 messages are visible"
GONE = "2 are not at their brokers: lost, or of another cluster"


@pytest.mark.parametrize(
    ("more", "ends", "lines", "code"),
    [
        ("", {}, [f"b epoch 0: {VISIBLE}", f"query epoch 4: {VISIBLE}",
                  f"query epoch 5: {VISIBLE}"], 0),
        ("--query qu", {("query", 5): EndReport("query", 5, committed=1000, found_stored=3)},
         [f"query epoch 4: {VISIBLE}", f"query epoch 5: {VISIBLE}, 3 were before"], 0),
        ("", {("b", 0): AWAY}, ["b epoch 0 stays open: broker-a is away",
                                f"query epoch 4: {VISIBLE}", f"query epoch 5: {VISIBLE}"], 1),
        ("--query query", {("query", 4): AWAY}, ["query epoch 4 stays open: broker-a is away",
         "query epoch 5 stays open: an earlier epoch of its query is open"], 1),
        ("--query query", {("query", 4): LOST},
         [f"query epoch 4: 1 message is visible; {GONE}", f"query epoch 5: {VISIBLE}"], 1),
        ("--query query --refused", {}, [f"query epoch {n}: {VISIBLE}" for n in (4, 5, 6)], 0),
        ("--query b", {("b", 0): EndReport("b", 0, busy=True)},
         ["b epoch 0 stays open: another process is ending transactions of the ledger"], 1),
    ],
)  # fmt: skip
def test_open_transactions_are_settled(committer, ledger, cluster, more, ends, lines, code):
    """An epoch that stays open keeps back those of its query only; lost messages are no success."""
    committer.ends = ends
    names = ("-n", cluster.name_server, *more.split())
    done = run("transactions settle", ledger, *names, code=code)
    said = [line for line in done.err.splitlines() if line.startswith("query ")]
    assert said == [f"query {line}" for line in lines]
    assert f"settle {len(lines)} transactions: {len(lines)},000 in " in done.err
    assert committer.made == {"ordered": True, "ledger": ledger}
    document = run("transactions settle", ledger, *names, "--json", code=code).json()
    assert [bool(each["error"]) for each in document] == ["stays open" in line for line in lines]
    assert sum(each["refused"] for each in document) == (2 if LOST in ends.values() else 0)


def test_a_query_whose_id_begins_with_anothers_is_not_settled_for_it(committer, ledger, cluster):
    committer.rows = [epoch("orders", 6), epoch("orders-eu", 0)]
    names = ("-n", cluster.name_server, "--query")
    assert "no transaction is open" in run("transactions settle", ledger, *names, "orders").err
    assert "orders, orders-eu" in run("transactions settle", ledger, *names, "ord", code=1).err


def test_the_bar_counts_the_messages_of_all_transactions(committer):
    committer.ends = {("b", 0): AWAY}
    bar = MagicMock()
    settle_in_order(committer, committer.rows[:2], bar)
    assert [each.args[0] for each in bar.advance_to.call_args_list] == [500, 1000, 1500, 2000]


@pytest.mark.parametrize("command", ["settle --dry-run", "list --all --limit 2"])
def test_open_transactions_are_listed(committer, ledger, command):
    names = ("-n", "127.0.0.1:1") if "settle" in command else ()
    done = run(f"transactions {command}", ledger, *names)
    shown = (0, 4, 5) if "settle" in command else (0, 4)
    assert done.out.count("1,000") == len(shown)
    assert done.out.split()[-1] == "t", "topics come last"
    assert "at query id epoch halves " in " ".join(done.out.split())
    *_, last = done.err.splitlines()
    if "settle" in command:
        assert last == "3 transactions of 3,000 messages are open; nothing committed"
    else:
        assert last.startswith("half messages of attempts")
        run("transactions list", ledger)
        pending = [each.kwargs["pending"] for each in committer.listed.call_args_list]
        assert pending == [False, True]
    done = run(f"transactions {command} --json", ledger, *names)
    rows = done.json() if "settle" in command else done.lines()
    assert [(row["epoch"], row["halves"]) for row in rows] == [(epoch, 1000) for epoch in shown]


@pytest.mark.parametrize(
    ("command", "text"),
    [("settle", "no transaction is open"), ("list", "no transaction is open"),
     ("list --all", "there are no transactions")],
)  # fmt: skip
def test_no_transactions(committer, ledger, command, text, cluster):
    committer.rows = []
    names = ("-n", cluster.name_server) if command == "settle" else ()
    assert text in run(f"transactions {command}", ledger, *names).err.splitlines()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_questions_are_answered_until_ctrl_c(committer, ledger, cluster, form):
    words = ("-n", cluster.name_server, "-t", "mine", "-t", "yours", *form)
    done = run("transactions serve", ledger, *words, code=130)
    assert committer.made["is_closed"] and committer.made["ordered"]
    assert f"answering for {ledger}; Ctrl-C ends it" in done.err
    assert "query q1 epoch 4: 1 message is visible; 2 are not at their brokers" in done.err
    answer = {"query_id": "q1", "epoch": 4, "message_id": "ID1", "answer": "COMMIT"}
    if form:
        assert done.json() == answer
    else:
        assert " ".join(f"{name}={value}" for name, value in answer.items()) in done.err
    run("transactions serve --for 0", ledger, *words)


@pytest.mark.parametrize("more", ["--trigger '1 second' --stop-timeout 5", "--batch"])
@pytest.mark.parametrize("lane", ["foreach", "datasource", "foreachBatch"])
@pytest.mark.parametrize("error", [None, "a row cannot be sent"])
def test_a_stream_is_run_and_reported(ledger, cluster, more, error, lane, monkeypatch):
    run_it = MagicMock(return_value=Report(rows_read=2, epochs=1, seconds=0.5, error=error))
    finish = MagicMock()
    is_batch = more == "--batch"
    monkeypatch.setattr(stream, "run_batch" if is_batch else "run_stream", run_it)
    monkeypatch.setattr(stream, "finish", finish)
    place = "" if is_batch else "--checkpoint ck"
    words = (
        f"stream --format rate --path p --schema 'a INT' --where a>1 --select x --select y {place} "
        f"--source-option rows=5=6 --lane {lane} -t t -n {cluster.name_server} {more}"
    )
    done = run(words, ledger, code=bool(error))
    assert done.out == "2 rows in 1 micro-batch, 0.5 s, 4.0 rows/s\n"
    assert done.err.splitlines()[1:] == ([f"rocket-sink: {error}"] if error else [])
    _, source, sink, asked = run_it.call_args.args
    assert source == Source("rate", "p", "a INT", {"rows": "5=6"}, "a>1", ("x", "y"))
    assert sink == {"topic": "t", "ledger": ledger, "nameServer": cluster.name_server}
    assert asked == lane and finish.call_args.args[1:] == (run_it.return_value, sink)
    assert is_batch or run_it.call_args.kwargs == {
        "checkpoint": str(Path("ck").absolute()), "trigger": "1 second", "stop_timeout_s": 5,
    }  # fmt: skip
    assert run(words, ledger, "--json", code=bool(error)).json()["error"] == error


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        (FoldSummary(), ""),
        (FoldSummary(busy=True, holder="host:7"), "host:7 is folding the ledger: what tasks"),
        (FoldSummary(damaged=("a",)), "damaged and put aside, the table lacks its rows: a"),
        (LedgerError("no disk"), "no disk; what is not folded yet is not shown"),
    ],
)
def test_a_report_by_spark_notes_what_it_lacks(ledger, summary, line, tmp_path, monkeypatch):
    """A flag of Spark starts Spark, even if DuckDB could read the ledger."""
    monkeypatch.setattr(LEDGER + "sync", MagicMock(side_effect=[summary]))
    made = MagicMock(**{"return_value.as_dict.return_value": {"a": 1}})
    monkeypatch.setattr(LEDGER + "report", made)
    words = "report --master local --query q --since 2026-01-31 --until 2026-02-01 --epochs 3"
    done = run(f"{words} -g billing -n a:1", ledger, "--json")
    assert done.json() == {"a": 1}
    assert [part.startswith(line) for part in done.err.splitlines()[2:]] == [True] * bool(line)
    asked = made.call_args.kwargs
    assert asked.pop("options").name_server == "a:1"
    since = dt.datetime(2026, 1, 31, tzinfo=dt.timezone.utc)
    assert asked == {"query": "q", "since": since, "until": since + DAY, "epochs": 3,
                     "charts": False, "group": "billing"}  # fmt: skip
