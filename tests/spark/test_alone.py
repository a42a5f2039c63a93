"""The helpers of the lanes without a JVM: sessions, plans and trackers are stand-ins."""

import os
import shlex
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pyarrow as pa
import pytest
from pyspark import TaskContext

from rocket_sink import errors
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import BETWEEN_IDS
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport import files
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin import admin as admins
from rocket_sink.producer.engine.limits import per_task_rate
from rocket_sink.spark import console, lineage, packs
from rocket_sink.spark.checks import (
    context,
    driver_options,
    own_input,
    plans,
    queries,
    reach,
    session_settings,
    tokens,
)
from rocket_sink.spark.decided_epoch import commit_log_offsets, read_halves
from rocket_sink.spark.reading.options import ReadOptions
from rocket_sink.spark.runs import Runs

LEDGER = "/data/it's a ledger"


# --- lines for users ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "query", "label"),
    [("job", "0123456789", "job (01234567)"), ("", "0123456789", "0123456789"), ("q", "q", "q")],
)
def test_a_query_has_its_name_on_consoles(name, query, label):
    assert console.label_of(name, query) == label


@pytest.mark.parametrize(
    ("options", "topic", "ledger"),
    [
        ({"topic": "t", "ledger": LEDGER}, "the topic t", LEDGER),
        ({}, "the topics of its rows", "none"),
    ],
)
def test_a_start_names_topic_and_ledger(caplog, options, topic, ledger):
    caplog.set_level("INFO")
    console.say_start(SinkOptions.parse(options), "foreach", "q")
    sends = f"the query q sends to {topic} by foreach, delivery at_least_once, ledger {ledger}"
    assert caplog.messages == [sends]


COUNTS = {"rows_in": 5000, "acked": 4990, "degraded": 2, "unknown": 1, "filtered": 4, "dead": 3}
ALL = (
    "5,000 rows in, 4,990 acknowledged, 2 less durable, 1 of unknown outcome, 4 filtered, "
    "3 dead letters"
)


@pytest.mark.parametrize(
    ("counts", "ledger", "line"),
    [(COUNTS, LEDGER, ALL), ({"rows_in": 1, "dead": 1}, "", "1 row in, 1 dead letter")],
)
def test_an_end_has_the_counts_that_are_not_zero(caplog, counts, ledger, line):
    caplog.set_level("INFO")
    console.say_end("the write w", Counter(counts), ledger, "; cut")
    console.say_repeated(SinkOptions.parse(batchId="b", appId="a", ledger="/l"))
    assert caplog.messages == [
        f"the write w ended: {line}; cut; ledger {ledger or 'none'}",
        "the batchId b is complete in the ledger /l: nothing is sent",
    ]


@pytest.mark.parametrize(
    ("dead", "unknown", "error", "line"),
    [
        (3, 1, "DISK_FULL", "3 dead letters, 1 of unknown outcome, the first for: DISK_FULL"),
        (0, 2, "", "0 dead letters, 2 of unknown outcome"), (0, 0, "", ""),
    ],
)  # fmt: skip
def test_losses_name_the_command_that_shows_them(caplog, dead, unknown, error, line):
    counts = {**COUNTS, "dead": dead, "unknown": unknown, "first_error": error}
    console.warn_of_losses("w", counts, LEDGER)
    show = f"rocket-sink ledger show dead-letters --ledger {shlex.quote(LEDGER)}"
    begin = f"{dead + unknown} of 5,000 rows of w were not delivered"
    assert caplog.messages == ([f"{begin}: {line}. See: {show}"] if line else [])


@pytest.mark.parametrize("ordering", ["none", "strict", "best_effort"])
def test_order_and_delays_are_warned_of_once(caplog, ordering):
    console._warn_of_delays.cache_clear()
    plan: Any = SimpleNamespace(source=lambda name: {"delay_ms": "d", "delay_level": "l"}.get(name))
    for _ in range(2):
        console.warn_of_delays(SinkOptions.parse(ordering=ordering, topic="t"), plan)
    none: Any = SimpleNamespace(source=lambda name: None)
    console.warn_of_delays(SinkOptions.parse(ordering="strict"), none)
    assert len(caplog.messages) == (ordering != "none")
    assert all(
        f"ordering={ordering} " in t and "(delay_level and delay_ms)" in t for t in caplog.messages
    )


# --- the registry of runs ----------------------------------------------------------------------


class Folded:
    """A ledger with so many rows of each run."""

    def __init__(self, uri: str, rows: dict[str, int], *, is_read: bool = True) -> None:
        self.place = resolve_path(uri)
        self.rows, self.accounts = rows, {} if is_read else None

    def end_run(self, run_id):
        count = self.rows.pop(run_id, 0)
        return Counter({"rows_in": count, "acked": count} if count else {})


@pytest.fixture
def runs(monkeypatch):
    """A registry with the runs r1 and r2; `ends` of it are what lineage hears."""
    made: Any = Runs()
    made.ends = []
    monkeypatch.setattr(lineage, "end", lambda *args: made.ends.append(args))
    monkeypatch.setattr(lineage, "note_error", lambda *args: made.ends.append(args))
    for number in (1, 2):
        made.start(f"r{number}", f"q{number}")
    return made


def test_a_run_is_awaited_until_its_end_is_told_or_given_up(runs):
    assert [*runs] == ["r1", "r2"] and runs.awaited() == {"r1", "r2"} and not runs.ended()
    runs.give_up(["r2"])
    runs.end("r1", "")
    runs.end("unknown", "error")
    assert not runs.awaited() and runs.ended() == {"r1"}
    assert runs.ends == [("r1", ""), ("unknown", "error")]
    runs.begin("unknown")
    for run in ("unknown", "r2"):
        runs.name_sink(run, "label")
    assert not any(map(runs.hands_over, ("unknown", "r1", "r2")))
    runs.name_sink("r1", "label", "uri", "job", hands_over=True)
    assert runs.hands_over("r1")
    names = [(run, uri) for run in ("r1", "r2", "unknown") for uri in ("uri", "other")]
    assert [runs.name_in(*name) for name in names] == ["job", *5 * [None]]


@pytest.mark.parametrize(
    ("rows", "is_read", "error", "begun", "is_folded", "line"),
    [
        (5, True, None, False, True, "the query job ended: 5 rows in, 5 acknowledged; a start"),
        (5, True, "", False, True, "the query job ended: 5 rows in, 5 acknowledged; ledger"),
        (5, True, "", False, False, None),
        (0, True, "", False, True, "the query job ended: 0 rows in; ledger"),
        (0, True, None, True, True, "the query job ended: 0 rows in; ledger"),
        (0, True, None, False, True, "the query job ended before its first epoch"),
        (0, True, None, False, False, None), (0, False, None, False, True, None),
        (0, True, "error", False, True, None),
    ],
)  # fmt: skip
def test_the_end_of_a_run(caplog, tmp_path, runs, rows, is_read, error, begun, is_folded, line):
    caplog.set_level("INFO")
    ledger: Any = Folded(str(tmp_path), {"r1": rows}, is_read=is_read)
    runs.name_sink("r1", "job", ledger.place.uri)
    if begun:
        runs.begin("r1")
    if error is not None:
        runs.end("r1", error)
    runs.ends.clear()
    other: Any = Folded(str(tmp_path / "other"), {}, is_read=is_read)
    ledger.waits, other.waits = not is_folded, True
    runs.say_ends(["gone", "r2", "r1"], [ledger, other])
    lines = caplog.messages
    assert (len(lines), lines[0].startswith(line or "") if lines else None) == (
        (0, None) if line is None else (1, True)
    )
    # Spark hides the ledger of r2, so rows of r2 may wait in any ledger.
    assert [*runs] == ["r1", "r2"][is_folded:]
    runs.say_ends(["r2"], [ledger, other], is_last=True)
    ends = [("r1", rows)] * is_folded + [("r2", 0)]
    assert [(run, counts["rows_in"]) for run, counts in runs.ends] == ends


def test_losses_are_those_of_known_runs(caplog, runs):
    runs.name_sink("r1", "job")
    counts = {**COUNTS, "first_error": ""}
    runs.warn_of_losses({("r1", 7): counts, ("other", 7): counts}, LEDGER)
    [text] = caplog.messages
    assert "4 of 5,000 rows of epoch 7 of the query job were not" in text


# --- the task's context ------------------------------------------------------------------------


PARSER = "spark.sql.legacy.timeParserPolicy"
QUERY = {context.QUERY_ID: "query", context.RUN_ID: "run", context.BATCH_ID: "8"}


def task_of(properties):
    """Return a task of Spark with these local properties."""
    numbers = {"partitionId": 3, "stageId": 4, "taskAttemptId": 5, "attemptNumber": 6}
    methods = {name: Mock(return_value=number) for name, number in numbers.items()}
    return SimpleNamespace(getLocalProperty=properties.get, **methods)


@pytest.mark.parametrize(
    ("task", "options", "more", "ids"),
    [
        (QUERY, {}, {}, ("query", "run", 8)), (QUERY, {"appId": "app"}, {}, ("app", "run", 8)),
        (QUERY, {}, {"epoch": 0}, ("query", "run", 0)), ({}, {}, {}, ("unknown", "unknown", 0)),
        (QUERY, {}, {"query_id": "own", "run_id": "r"}, ("own", "r", 8)),
        ({}, {}, {"run_id": "r"}, ("r", "r", 0)), ({}, {"appId": "app"}, {}, ("app", "app", 0)),
        (None, {}, {}, ("local", "local", 0)), (None, {}, {"query_id": "own"}, ("own", "own", 0)),
        (None, {}, {"query_id": "own", "run_id": "r"}, ("own", "r", 0)),
    ],
)  # fmt: skip
def test_the_context_of_a_task_and_of_the_driver(monkeypatch, task, options, more, ids):
    now = None if task is None else task_of(task)
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: now))
    run = context.run_context(SinkOptions.parse(options), "lane", partition=9, **more)
    assert (run.query_id, run.run_id, run.epoch, run.lane) == (*ids, "lane")
    assert run.partition == (9 if task is None else 3)
    if task is not None:
        assert (run.stage_id, run.task_attempt_id, run.attempt_number) == (4, 5, 6)
    assert context.streaming_query() == ("query" if task else "")


@pytest.mark.parametrize(("master", "kept"), [("local[2]", "local[2]"), ("spark://h:7077", "")])
def test_ids_depend_on_settings_and_not_on_a_clusters_address(monkeypatch, master, kept):
    settings = {"spark.master": master, "spark.sql.session.timeZone": "UTC"}
    settings |= {context.PENDING: "7", context.UNRECORDED: "6", context.PLAN: "digest"}
    monkeypatch.setattr(TaskContext, "get", Mock(return_value=task_of(settings)))
    facts = context.id_settings({"the partitions": "4"})
    assert (facts.planned_by["spark.master"], facts.planned_by[context.PLAN]) == (kept, "digest")
    assert facts.planned_by["the partitions"] == "4" and facts.planned_by["spark.cores.max"] == ""
    assert (facts.pending_epoch, facts.unrecorded_epoch) == ("7", "6")
    assert facts.written_by == {"spark.sql.session.timeZone": "UTC", PARSER: ""}
    assert len(facts.planned_by) == 1 + 15  # the partitions, and all settings of `_PLANNING`


@pytest.mark.parametrize(
    ("properties", "run"),
    [
        ({context.QUERY_ID: "q", context.JOB_GROUP: "r"}, "r"),
        ({context.QUERY_ID: "q", context.RUN_ID: "r", context.JOB_GROUP: "user's"}, "r"),
        ({context.QUERY_ID: "q"}, ""), ({context.JOB_GROUP: "a batch's, named by its user"}, ""),
    ],
)  # fmt: skip
def test_the_run_is_told_from_the_query(properties, run):
    assert context.streaming_run(properties.get) == run


@pytest.mark.parametrize(
    ("options", "lane"),
    [({"ledger": "new"}, ""), ({"appId": "a"}, ""), ({"ledgerVia": "spark"}, ""), ({}, "batches")],
)
def test_each_way_to_leave_records_begins_anew(tmp_path, caplog, options, lane):
    # A run with another ledger writes its note there, so this ledger has no note of the run.
    epochs, last = [], "" if "ledger" in options else "0"
    starts = (({}, "", ""), (options, lane, "0"), ({}, "", "0"))
    for run, (more, by, pending) in enumerate(starts):
        ledger = tmp_path / more.get("ledger", "old")
        sink = SinkOptions.parse(**{**more, "ledger": str(ledger)})
        epochs.append(queries.unrecorded_by(sink, None, "q", str(run), pending, by))
    assert epochs == ["", "0", last]
    assert caplog.text.count("epoch 0 was begun before") == len("".join(epochs))


def stage(at_ms: int, attempt: int = 0) -> Any:
    return SimpleNamespace(submissionTime=lambda: at_ms, currentAttemptId=lambda: attempt)


@pytest.mark.parametrize(
    ("jobs", "again"),
    [
        ({1: [stage(150)]}, False), ({1: [stage(150, 1)]}, True), ({}, True), ({1: [None]}, True),
        ({1: [stage(100)]}, False), ({1: [stage(200)]}, False), ({1: [stage(99)]}, True),
        ({1: [stage(201)]}, True), ({1: [stage(150), stage(120, 1)]}, True),
        ({1: [stage(150)], 2: [stage(99)]}, True), ({1: [stage(99, 1)], 2: [stage(150)]}, False),
        ({1: [stage(150)], 2: [stage(300, 1)]}, False), ({1: [stage(150)], 2: None}, False),
    ],
)  # fmt: skip
def test_an_epoch_that_ran_again_is_known_by_its_stages(jobs, again):
    def job(number):
        stages = jobs[number]
        return None if stages is None else SimpleNamespace(stageIds=lambda: stages)

    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda run: [*jobs] if run == "run" else [], getJobInfo=job,
        getStageInfo=lambda each: each,
    )  # fmt: skip
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(_jsc=SimpleNamespace(statusTracker=lambda: tracker))
    )
    assert context.epoch_ran_again(session, "run", 100.0, 200.0) is again


@pytest.mark.parametrize(
    ("jobs", "stages", "again", "waited_s"),
    [
        ([("SUCCEEDED", [1, 2])], {1: 0, 2: 0}, False, 0), ([("FAILED", [1])], {1: 0}, False, 0),
        ([("SUCCEEDED", [1, 2])], {1: 1, 2: 0}, True, 0), ([("RUNNING", [1])], {1: 0}, True, 10),
        ([("SUCCEEDED", [1, 2])], {1: 0}, True, 0), ([("SUCCEEDED", [1, 2])], {2: 0}, False, 0),
        ([], {}, True, 1), ([None], {}, True, 1), ([("SUCCEEDED", [])], {}, True, 0),
    ],
)  # fmt: skip
def test_stages_that_ran_again_are_known_by_their_attempt(
    monkeypatch, jobs, stages, again, waited_s
):
    pauses = list[float]()
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(context, "time", clock)
    infos = [job and SimpleNamespace(status=job[0], stageIds=job[1]) for job in jobs]
    tracker = SimpleNamespace(
        getJobIdsForTag=lambda tag: range(len(jobs)), getJobInfo=infos.__getitem__,
        getStageInfo=lambda n: SimpleNamespace(currentAttemptId=stages[n]) if n in stages else None,
    )  # fmt: skip
    scala = SimpleNamespace(statusTracker=lambda: tracker)
    spark: Any = Mock(statusTracker=lambda: tracker, _jsc=SimpleNamespace(sc=lambda: scala))
    with context.watched_stages(Mock(sparkContext=spark)) as has_run_again:
        assert [each[0] for each in spark.method_calls] == ["addJobTag"]
    assert spark.addJobTag.call_args == spark.removeJobTag.call_args
    assert has_run_again() is again and round(sum(pauses), 1) == waited_s
    connect: Any = object()
    with context.watched_stages(connect) as has_run_again:
        assert has_run_again()


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "other", "is_same"),
    [
        ("Project [a#1, b#2L]", "Project [a#17, b#4L]", True), ("a@1f", "a@2e", True),
        ("Project [a#1]", "Project [b#1]", False), ("Filter (a#1 > 5)", "Filter (a#1 > 6)", False),
        ("CTERelationRef 5, true", "CTERelationRef 6, true", True), ("Limit 5", "Limit 6", False),
        ("lambda x_1#2", "lambda x_3#4", True), ("[a], 5", "[a], 6", True), ("0x1", "0x2", True),
        ("lambda x_1#2", "lambda y_1#2", False), ("UnionLoopRef 1, t", "UnionLoopRef 62, t", True),
        ("EventTimeWatermark a1fea580-462d, t", "EventTimeWatermark a1fea580-625d, t", True),
        ("Map(minPartitions -> 8)", "Map(minPartitions -> 2)", False),
    ],
)  # fmt: skip
def test_the_digest_of_a_plan_leaves_out_its_numbers(text, other, is_same):
    plan = Mock(**{"toString.side_effect": [text, other]})
    conf = plan.conf.return_value
    conf.maxToStringFields.return_value = 25
    digests = [plans.plan_digest(plan) for _ in range(2)]
    assert (digests[0] == digests[1]) is is_same and len(digests[0]) == 12
    sizes = [call(plans._LONGEST_LIST, value) for value in ("2147483647", "25")]
    assert conf.setConfString.call_args_list == 2 * sizes


def leaf(kind: str, **methods: Any) -> Any:
    named = SimpleNamespace(getSimpleName=lambda: kind)
    return SimpleNamespace(getClass=lambda: named, **{n: lambda v=v: v for n, v in methods.items()})


def plan_of(*leaves: Any) -> Any:
    collected = SimpleNamespace(apply=leaves.__getitem__, size=lambda: len(leaves))
    return SimpleNamespace(collectLeaves=lambda: collected)


def relation(kind: str, *paths: str) -> Any:
    files = SimpleNamespace(
        apply=lambda n: SimpleNamespace(toString=lambda: paths[n]), size=lambda: len(paths)
    )
    index = leaf(kind, rootPaths=files)
    return leaf("LogicalRelation", relation=SimpleNamespace(location=lambda: index))


def test_input_folders_are_those_of_plain_files():
    leaves = (
        leaf("StreamingRelation", sourceName="FileSource[/in]"),
        leaf("StreamingRelation", sourceName="DeltaSource[/no]"), leaf("LocalRelation"),
        relation("InMemoryFileIndex", "/a", "/b"), relation("TahoeLogFileIndex", "/no"),
    )  # fmt: skip
    assert plans.input_folders(plan_of(*leaves)) == ["/in", "/a", "/b"]
    assert plans.input_folders(plan_of(leaves[0], leaf("LogicalRelation"))) == ["/in"]
    assert plans.input_folders(object()) == []


def test_the_plan_below_packs():
    def plan(*names: str) -> Any:
        schema = SimpleNamespace(fieldNames=lambda: names)
        return SimpleNamespace(schema=lambda: schema, child=lambda: "child")

    assert packs.plan_below(plan("arrow_batch")) == "child"
    for names in (("body",), ("arrow_batch", "body")):
        other = plan(*names)
        assert packs.plan_below(other) is other


# --- checks of the session ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "path", "is_inside"),
    [
        ("/in", "/in/ledger", True), ("/in", "/in", True),
        (os.getcwd(), "relative/l", True), ("/in", "/input/l", False),
        ("/in/deep", "/in", False), ("/in", "/in/_hidden/l", False), ("/in", "/in/.h", False),
        ("/in", "/in/_day=1/l", True), ("/in/*", "/in/a/l", True), ("/in/a*", "/in/b/l", False),
        ("file:///in", "/in/l", True), ("file:/in", "file:///in/l", True),
        ("s3a://b/in", "s3a://b/in/l", True), ("s3a://b/in", "/in/l", False),
        ("/_in", "/_in/l", True),
    ],
)  # fmt: skip
def test_a_ledger_inside_the_input_is_named(folder, path, is_inside):
    plan = plan_of(leaf("StreamingRelation", sourceName=f"FileSource[{folder}]"))
    text = own_input.own_input_error(plan, [("ledger", "/elsewhere"), ("checkpoint", path)])
    assert bool(text) is is_inside
    if is_inside:
        assert f"the checkpoint {path} is inside {folder}" in text and "Put the checkpoint" in text


class Settings:
    """A session of an application, or of Connect, with settings."""

    def __init__(self, *, classic: bool = True, own: Any = None, **settings: str) -> None:
        values = {name.replace("_", "."): value for name, value in settings.items()}
        self.conf = SimpleNamespace(get=lambda name, *default: {**values, **(own or {})}.get(name))
        if classic:
            self._jsparkSession = object()
            conf = SimpleNamespace(get=values.get)
            self.sparkContext = SimpleNamespace(getConf=lambda: conf)


def test_a_setting_is_that_of_the_application_first():
    session = Settings(own={"spark.speculation": "true", "other": "x"}, spark_speculation="FALSE")
    assert session_settings.setting(session, "spark.speculation") == "FALSE"
    assert not session_settings.speculates(session)
    assert session_settings.setting(session, "other") == "x"
    assert session_settings.setting(session, "none") == ""
    assert session_settings.session_setting(session, "spark.speculation") == "true"
    session.conf = None
    assert session_settings.session_setting(session, "spark.speculation") == "FALSE"
    for is_on in ("true", "TRUE"):
        assert session_settings.speculates(Settings(classic=False, spark_speculation=is_on))
        assert session_settings.pushes_filters(Settings(own={session_settings.PUSHDOWN: is_on}))
    for read in (session_settings.setting, session_settings.session_setting):
        assert read(object(), "none") == ""


ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []), ({"spark.submit.pyFiles": "a.zip,/x/rocket_sink-1.whl"}, ["rocket_sink.zip"]),
        ({"spark.submit.pyFiles": "other.whl,rocket_sink.zip"}, []), ({ROWS: "10000"}, []),
        ({ROWS: "0"}, [f"{ROWS}=0 makes one"]), ({ROWS: "-1"}, [f"{ROWS}=-1 makes one"]),
        ({"spark.python.worker.idleTimeoutSeconds": "9",
          "spark.python.worker.killOnIdleTimeout": "True"},
         ["spark.python.worker.killOnIdleTimeout is on, with idleTimeoutSeconds=9: "]),
        ({"spark.python.worker.idleTimeoutSeconds": "0",
          "spark.python.worker.killOnIdleTimeout": "true"}, []),
        ({"spark.python.worker.killOnIdleTimeout": "true"}, []),
        ({"spark.sql.execution.pyspark.udf.idleTimeoutSeconds": "7"}, []),
    ],
)  # fmt: skip
def test_harmful_settings_are_warned_of_once(caplog, settings, words):
    session_settings._warn_once.cache_clear()
    session = Settings(**{name.replace(".", "_"): value for name, value in settings.items()})
    for _ in range(2):
        session_settings.warn_of_settings(session)
    lines = caplog.messages
    assert len(lines) == len(words) and all(w in t for w, t in zip(words, lines, strict=True))


def session_of(slots):
    """Return a session of an application with so many slots; None if Spark reports none."""
    profiles = SimpleNamespace(defaultResourceProfile=lambda: "default")
    scala: Any = SimpleNamespace(resourceProfileManager=lambda: profiles)
    if slots is not None:
        scala.maxNumConcurrentTasks = lambda profile: slots
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala), defaultParallelism=6)
    return SimpleNamespace(_jsparkSession=object(), sparkContext=context)


LIMIT = SinkOptions.parse(maxMessagesPerSecond=1000)


@pytest.mark.parametrize(
    ("own", "slots", "write", "tasks"),
    [
        # The limit is divided over the task slots, or over the tasks of a write that has few.
        ("", 8, {}, 8), ("", 8, {"tasks": 3}, 3), ("", 8, {"tasks": 300}, 8),
        ("", 8, {"tasks": 0}, 1), ("", 1, {}, 1),
        # If Spark does not tell its slots, its parallelism stands in.
        ("", None, {}, 6), ("", 0, {}, 6),
        # The user's number wins.
        ("2", 8, {}, 2),
    ],
)  # fmt: skip
def test_a_limit_is_divided(own, slots, write, tasks):
    limit = LIMIT.with_(rateTasks=own) if own else LIMIT
    options = session_settings.with_task_rate(limit, session_of(slots), **write)
    assert options.rate_tasks == tasks
    assert per_task_rate(options.max_messages_per_second, options) == 1000 / tasks


@pytest.mark.parametrize("slots", [0, None])
def test_no_slots_to_be_seen_is_an_error_that_names_the_option(slots, monkeypatch):
    monkeypatch.setattr(session_settings, "active_session", lambda: None)
    with pytest.raises(errors.OptionError, match="rateTasks") as caught:
        session_settings.with_task_rate(LIMIT, slots=slots)
    assert caught.value.option == "rateTasks"
    if slots is None:
        monkeypatch.setattr(session_settings, "active_session", lambda: session_of(5))
        assert session_settings.with_task_rate(LIMIT).rate_tasks == 5


def test_sparks_own_options_are_left_out():
    names = ("topic", "checkpointLocation", "PATH", "queryName", "outputMode")
    assert driver_options.own_options(dict.fromkeys(names, "t")) == {"topic": "t"}


@pytest.mark.parametrize(
    ("begun", "ended", "is_late", "pending"),
    [(5, 4, False, "5"), (5, 5, False, None), (5, 4, True, None), (0, None, False, "0"),
     (None, None, False, None)],
)  # fmt: skip
def test_tasks_learn_of_the_pending_epoch(monkeypatch, begun, ended, is_late, pending):
    def entries(number):
        last = SimpleNamespace(_1=lambda: number)
        entry = SimpleNamespace(isDefined=lambda: number is not None, get=lambda: last)
        return SimpleNamespace(getLatest=lambda: entry)

    monkeypatch.setattr(queries, "plan_digest", lambda plan: f"digest of {plan}")
    logs = {"offsetLog": lambda: entries(begun), "commitLog": lambda: entries(ended)}
    query = SimpleNamespace(analyzedPlan=lambda: "plan", **logs)
    told: dict[str, str] = {}
    settings = SimpleNamespace(set=told.__setitem__)
    queries._tell_tasks(query, settings, is_late=is_late)
    assert told.pop(context.PLAN) == "digest of plan"
    assert told == ({} if pending is None else {context.PENDING: pending})


@pytest.mark.parametrize(
    ("failures", "pauses", "is_error"),
    [(0, [], False), (2, [1.0, 2.0], False), (3, [1.0, 2.0], True)],
)
@pytest.mark.parametrize("kind", [errors.NameServerUnavailableError, errors.TlsRefusedError])
def test_name_servers_that_may_be_starting_are_asked_again(
    monkeypatch, failures, pauses, is_error, kind
):
    slept = Mock()
    answers = [*[kind("no answer")] * failures, "a warning"]
    admin_class = MagicMock(
        **{"return_value.__enter__.return_value.check_name_servers.side_effect": answers}
    )
    monkeypatch.setattr(admins, "Admin", admin_class)
    monkeypatch.setattr(time, "sleep", slept)
    options = SinkOptions()
    answer = reach.name_server_answer(options)
    assert slept.call_args_list == [call(pause_s) for pause_s in pauses]
    assert admin_class.call_args_list == [call(options, timeout_s=2.0)] * min(failures + 1, 3)
    assert type(answer) is kind if is_error else answer == "a warning"


@pytest.mark.parametrize(
    ("delivery", "options", "proxy", "age_s", "refused", "asks"),
    [
        ("at_least_once", {}, "", None, False, 0), ("effectively_once", {}, "", None, False, 0),
        ("effectively_once", {"accessKey": "a", "secretKey": "s"}, "", None, False, 1),
        ("effectively_once", {"accessKey": "a", "secretKey": "s"}, "", 59, False, 0),
        ("effectively_once", {"accessKey": "a", "secretKey": "s"}, "", 61, False, 1),
        ("effectively_once", {}, "p:8080", None, True, 0),
        ("transactional", {}, "p:8080", None, True, 0),
        ("effectively_once", {"accessKey": "a", "secretKey": "s"}, "refuse", None, True, 1),
        ("effectively_once", {"accessKey": "a", "secretKey": "s"}, "down", None, False, 1),
    ],
)  # fmt: skip
def test_rights_are_asked_for_once_a_minute(
    monkeypatch, tmp_path, caplog, delivery, options, proxy, age_s, refused, asks
):
    parsed = SinkOptions.parse({"topic": "t", "ledger": "/l", "delivery": delivery, **options})
    stamp = tmp_path / f"rocket-sink-{parsed.digest[:24]}.asked"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    if age_s is not None:
        stamp.touch()
        os.utime(stamp, (time.time() - age_s,) * 2)
    refusals = {
        "refuse": errors.PermissionDeniedError("no right", response_code=16),
        "down": errors.ConnectError("refused"),
    }
    admin_class = MagicMock()
    admin = admin_class.return_value.__enter__.return_value
    admin.proxy.return_value = proxy if ":" in proxy else ""
    admin.query_by_unique_key.side_effect = refusals.get(proxy)
    monkeypatch.setattr(admins, "Admin", admin_class)
    caplog.set_level("INFO")
    if refused:
        with pytest.raises(errors.ConfigurationError, match=r"no right|prox"):
            reach.check_rights(parsed)
    else:
        reach.check_rights(parsed)
    assert admin.query_by_unique_key.call_args_list == [call("t", "-", max_messages=1)] * asks
    assert ("cannot tell whether" in caplog.text) is (proxy == "down")
    is_asked = delivery != "at_least_once" and not refused
    assert stamp.exists() is is_asked
    assert not stamp.exists() or (time.time() - stamp.stat().st_mtime < 60)


@pytest.mark.parametrize(
    ("lane", "begun", "spooled", "rows", "lacks"),
    [
        ("foreachBatch", 5, [], 0, True), ("foreachBatch", 6, [], 0, False),
        ("", 0, [], 0, True), ("", 0, [("q", "6")], 0, False), ("", 9, [("q", "5")], 1, False),
        ("", 0, errors.LedgerError("away"), 1, True), ("", 0, OSError(), 1, True),
    ],
)  # fmt: skip
def test_a_ledger_without_the_epoch_before_is_another_one(
    monkeypatch, caplog, lane, begun, spooled, rows, lacks
):
    rows_of_epoch = Mock(return_value=SimpleNamespace(num_rows=rows))
    monkeypatch.setattr(queries, "rows_of_epoch", rows_of_epoch)
    monkeypatch.setattr(queries, "unrecorded_epoch", lambda *args: "")
    last_begun = Mock(return_value=begun)
    monkeypatch.setattr(queries, "last_begun", last_begun)
    monkeypatch.setattr(files, "spooled_epochs", Mock(side_effect=[spooled]))
    options, place = SinkOptions.parse(ledger="/l"), resolve_path("/l")
    epoch = queries.unrecorded_by(options, "session", "q", "run", "7", lane)
    assert epoch == ("7" if lacks else "") and len(caplog.messages) == lacks
    assert last_begun.mock_calls == [call(place, "q")] * bool(lane)
    if rows_of_epoch.called:
        assert rows_of_epoch.mock_calls == [call("session", place, ("epoch",), "q", 6, ("epoch",))]
    named = options.with_(appId="app")
    for pending in ("", "0"):
        assert queries.unrecorded_by(named, None, "q", "r", pending, "foreachBatch") == ""
    queries.unrecorded_by(named, None, "q", "r", "9", "foreachBatch")
    assert last_begun.mock_calls[-1] == call(place, "app")


def test_a_server_of_connect_that_makes_no_table_is_warned_of(monkeypatch, caplog):
    make = Mock(side_effect=[ValueError("no rights"), "id"])
    monkeypatch.setattr(tokens, "ensure_table", make)
    options, connect = SinkOptions.parse(ledger="/l"), SimpleNamespace()
    assert tokens.spool_token(options, connect) is None
    assert "cannot make the table of the ledger /l (no rights)" in caplog.text
    token = tokens.spool_token(options, connect)
    assert token == LedgerToken("file:/l", "", spools=True)


# --- lineage, half messages, selections --------------------------------------------------------


@pytest.fixture
def events(monkeypatch):
    sent: list[Any] = []
    monkeypatch.setattr(
        lineage, "_emit", lambda kind, run, state, counts: sent.append((kind, run, counts))
    )
    monkeypatch.setattr(lineage, "is_on", lambda: True)
    monkeypatch.setattr(lineage, "_runs", {})
    return sent


@pytest.mark.parametrize("error", ["", "late"])
@pytest.mark.parametrize("noted", ["", "noted"])
def test_the_events_of_a_run(events, error, noted):
    field = SimpleNamespace(name="body", dataType=SimpleNamespace(simpleString=lambda: "binary"))
    schema: Any = SimpleNamespace(fields=[field])
    options = SinkOptions.parse(nameServer="h:1;i:2", topic="t", namespace="ns")
    run = lineage.start(options, "run", "query", schema)
    assert run is lineage.start(options, "run", "query", schema) and len(events) == 1
    assert run == lineage.Run(
        "rocket_sink.query", True, ("rocketmq://h:1", "ns%t"), [("body", "binary")]
    )
    other = lineage.start(
        SinkOptions.parse(appId="app", namespace="n"), "other", "q", schema, is_stream=False
    )
    assert other is not None and (other.job, other.is_stream, other.dataset) == ("app", False, None)
    if noted:
        lineage.note_error("run", noted)
    lineage.note_error("unknown", "error")
    for _ in range(2):
        lineage.end("run", {"acked": 3}, error)
    assert run is not None and run.error == (noted or error)
    kind = "FAIL" if noted or error else "COMPLETE"
    assert events[2:] == [(kind, "run", {"acked": 3})]
    lineage.end_elsewhere("run", None, {})
    assert len(events) == 3


def test_a_silent_collector_is_waited_for_less_the_second_time(monkeypatch):
    waits: list[float] = []
    emitter = SimpleNamespace(events=SimpleNamespace(unfinished_tasks=1), finish=waits.append)
    monkeypatch.setattr(lineage, "emitters", [emitter])
    run = lineage.Run("job", False, None, [])
    lineage.flush(None)
    lineage.flush(run)
    assert run.is_collector_silent
    emitter.events.unfinished_tasks = 0
    lineage.flush(run)
    assert waits == [10.0, 0.5]
    assert not run.is_collector_silent


ID = "7F000001000{}2A9F00000000000003E8"


def test_half_messages_of_rows_and_of_groups():
    next_id = ID.format(0)[:-1] + "9"
    sends = pa.table({
        "topic": ["t", "g"], "broker_name": ["a", "b"], "queue_id": [1, 2],
        "queue_offset": [5, None], "offset_message_id": [ID.format(0), None],
        "message_id": ["I1", None], "message_ids": [None, BETWEEN_IDS.join(("I2", "I3"))],
        "half_messages": [None, BETWEEN_IDS.join((f"{ID.format(0)}:8", f"{next_id}:9"))],
    })  # fmt: skip
    rows = read_halves(sends).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("t", "a", 1, 5, 1000, "I1"), ("g", "b", 2, 8, 1000, "I2"), ("g", "b", 2, 9, 1001, "I3"),
    ]  # fmt: skip
    bad = sends.slice(0, 1).set_column(4, "offset_message_id", [["?"]])
    with pytest.raises(errors.DeliveryError, match="no valid commit-log offset"):
        read_halves(bad)


@pytest.mark.parametrize("text", ["", "7F", ID.format(0)[:-1] + "G", ID.format(0) + "0", None])
def test_ids_without_a_commit_log_offset(text):
    good = pa.array([ID.format(0), "0" * 55 + "7"])
    assert commit_log_offsets(good).to_pylist() == [1000, 7]
    with pytest.raises(errors.RemoteProtocolError):
        commit_log_offsets(pa.array([ID.format(0), text]))


# --- queries at their start --------------------------------------------------------------------


def named_class(name: str) -> Any:
    return lambda: SimpleNamespace(getSimpleName=lambda: name)


def told(text: str) -> Any:
    return lambda: SimpleNamespace(toString=lambda: text)


@pytest.mark.parametrize(
    ("kind", "change", "end", "text"),
    [
        ("foreach", {}, "foreach", ""), ("source", {}, "datasource", ""), ("batch", {}, None, ""),
        ("foreign", {"own": "inside"}, None, ""), ("other", {"own": "inside"}, None, ""),
        ("foreach", {"own": "inside"}, "cancelled", "inside"),
        ("source", {"own": "inside"}, "cancelled", "inside"),
        ("batch", {"own": "inside"}, "refused", "inside"),
        ("foreach", {"columns": "no body"}, "cancelled", "no body"),
        ("planned", {"columns": "no body"}, "foreach", ""),
        ("source", {"columns": "no body"}, "datasource", ""),
        ("foreach", {"class": "ContinuousExecution"}, "cancelled", queries.CONTINUOUS),
        ("source", {"mode": "Update"}, "cancelled", queries._UPDATE),
        ("foreach", {"mode": "Update"}, "foreach", ""),
        ("foreach", {"chance": "anew"}, "cancelled", "anew"),
        ("foreach", {"unreachable": True}, "cancelled", "no server"),
        ("foreach", {"own": "inside", "unreachable": True}, "cancelled", "inside"),
        ("source", {"hidden": True, "unreachable": True}, None, ""),
    ],
)  # fmt: skip
def test_a_query_that_would_lose_rows_fails_before_its_first_epoch(
    monkeypatch, caplog, kind, change, end, text
):
    options = SinkOptions.parse(topic="t", ledger="/own")
    cancelled, notes = [], list[Any]()
    settings = SimpleNamespace(get=lambda *name: "7", set=lambda *pair: notes.append(pair))
    plan = object() if kind == "planned" else None
    foreach = queries._ForeachSink(options, plan)  # type: ignore[arg-type]
    kinds = {"source": "PythonTable", "other": "PythonTable", "batch": "ForeachBatchSink"}
    sink = SimpleNamespace(
        getClass=named_class(kinds.get(kind, "ForeachWriterTable")), writer=lambda: kind,
        name=lambda: "rocketmq" if kind == "source" else "another",
    )  # fmt: skip
    query = SimpleNamespace(
        sink=lambda: sink, getClass=named_class(change.get("class", "MicroBatchExecution")),
        sparkSessionForStream=lambda: SimpleNamespace(conf=lambda: settings),
        resolvedCheckpointRoot=lambda: "/checkpoint", analyzedPlan=lambda: "plan",
        outputMode=told(change.get("mode", "Append")), runId=told("run"),
    )  # fmt: skip
    running = {"q": SimpleNamespace(streamingQuery=lambda: query)}
    jobs = SimpleNamespace(cancelJobGroupAndFutureJobs=lambda *args: cancelled.append(args))
    session: Any = SimpleNamespace(
        _jsparkSession=SimpleNamespace(streams=lambda: running),
        sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: jobs)),
    )

    def reach(options, session):
        if change.get("unreachable"):
            raise errors.NameServerUnavailableError("no server")

    stands_in = {
        "_foreach_sink": lambda writer: None if writer == "foreign" else foreach,
        "_source_options": lambda query: None if change.get("hidden") else options,
        "_tell_tasks": lambda *args, is_late: notes.append((*args, is_late)),
        "unrecorded_by": lambda *args: args[0] is options and (*args[2:],),
        "own_input_error": lambda plan, files: notes.append(files) or change.get("own", ""),
        "_wrong_columns": lambda plan, options: change.get("columns", ""),
        "_chance": lambda *args: change.get("chance", ""), "check_reachable": reach,
        "schema_of": lambda plan: "schema", "resolve_columns": lambda *args: "columns",
        "_refuse_objects": lambda session: None, "refused_runs": {},
    }  # fmt: skip
    for name, stand_in in stands_in.items():
        monkeypatch.setattr(queries, name, stand_in)
    result = queries.refuse_query(session, "q", ["/own", "/other"], is_late=True)
    is_well = end in ("foreach", "datasource")
    assert result == ((options, end, "plan") if is_well else None)
    assert cancelled == ([("run", text)] if end == "cancelled" else [])
    assert queries.refused_runs == ({"run": text} if end == "refused" else {})
    assert ("the query q is ended" in caplog.text) is (end == "cancelled")
    if kind in ("foreign", "other"):
        assert not notes
        return
    assert notes[0] == (query, settings, True)
    is_shown = kind != "batch" and not change.get("hidden")
    assert notes[1:-1] == [(context.UNRECORDED, ("q", "run", "7"))] * is_shown
    ledgers = ["/own"] if kind in ("foreach", "planned") else ["/own", "/other"]
    assert notes[-1] == [*(("ledger", each) for each in ledgers), ("checkpoint", "/checkpoint")]
    assert queries.refuse_query(session, "gone", []) is None


@pytest.mark.parametrize(("kind", "is_failed"), [("FAIL", True), ("COMPLETE", False)])
def test_the_event_of_a_failure_alone_has_an_error(monkeypatch, kind, is_failed):
    pytest.importorskip("openlineage.client")
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
    run = lineage.Run("job", True, ("rocketmq://h:1", "t"), [("body", "binary")], "broken")
    number = "00000000-0000-4000-8000-000000000000"
    counts = {"acked": 3, "degraded": 2, "dead": 7}
    event = lineage._event(kind, number, run, "2026-01-01T00:00:00+00:00", counts)
    assert [*event.run.facets] == ["errorMessage"] * is_failed
    [output] = event.outputs
    assert output.outputFacets["outputStatistics"].rowCount == 5
    [field] = output.facets["schema"].fields
    assert (field.name, field.type, event.job.namespace) == ("body", "binary", "shop")
    assert event.producer.startswith("pkg:pypi/rocket-sink@")
    job_type = event.job.facets["jobType"]
    kinds = job_type.processingType, job_type.integration, job_type.jobType
    assert kinds == ("STREAMING", "SPARK", "QUERY")
    run.is_stream = False
    batch = lineage._event(kind, number, run, "2026-01-01T00:00:00+00:00", {"dead": 1})
    assert batch.job.facets["jobType"].processingType == "BATCH"
    assert batch.outputs[0].outputFacets["outputStatistics"].rowCount == 0
    start = lineage._event("START", number, run, "2026-01-01T00:00:00+00:00", {})
    assert not start.outputs[0].outputFacets and (start.job.name, output.name) == ("job", "t")


@pytest.mark.parametrize(
    ("name", "low", "is_stream"),
    [
        ("startTimestamp", -1, False), ("endTimestamp", -1, False),
        ("maxMessagesPerPartition", 0, False), ("maxOffsetsPerTrigger", 0, True),
        ("minOffsetsPerTrigger", 0, True), ("maxTriggerDelay", 0, True),
    ],
)  # fmt: skip
def test_the_bounds_of_options_to_read(name, low, is_stream):
    given = {"nameServer": "h:1", "topic": "t"}
    ReadOptions.parse({**given, name: str(low)}, is_stream=is_stream)
    with pytest.raises(errors.OptionError, match=name):
        ReadOptions.parse({**given, name: str(low - 1)}, is_stream=is_stream)


def test_what_is_read_without_options():
    for name in ("endingOffsets", "endTimestamp"):
        with pytest.raises(errors.OptionError, match=f"{name} is for read, not readStream"):
            ReadOptions.parse({"topic": "t", name: "5"}, is_stream=True)
    for name in ("minOffsetsPerTrigger", "maxTriggerDelay", "consumerGroup"):
        with pytest.raises(errors.OptionError, match=f"{name} is for readStream, not read"):
            ReadOptions.parse({"topic": "t", name: "5"})
    assert vars(ReadOptions.parse({"nameServer": "h:1", "topic": "t"})[0]) == {
        "starting_offsets": "earliest", "ending_offsets": "latest", "start_timestamp": -1,
        "end_timestamp": -1, "max_messages_per_partition": 0, "fail_on_data_loss": True,
        "max_offsets_per_trigger": 0, "min_offsets_per_trigger": 0,
        "max_trigger_delay_ms": 900_000, "consumer_group": "",
    }  # fmt: skip


def test_the_sender_of_events_is_awaited_at_the_end(monkeypatch, caplog):
    senders: list[Any] = []
    monkeypatch.setattr(lineage, "finish_at_end", senders.append)
    before = set(threading.enumerate())
    emitter = lineage._Emitter()
    assert senders == [emitter] and emitter.of_pid == os.getpid()
    [thread] = set(threading.enumerate()) - before
    assert thread.daemon and thread.name == "rocket-sink-lineage"
    pauses = list[float]()
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(lineage, "time", clock)
    stuck: Any = SimpleNamespace(events=SimpleNamespace(unfinished_tasks=2))
    for silent in (emitter, stuck):
        lineage._Emitter.finish(silent, 0.07)
    assert pauses == [0.02] * 4
    assert "2 events are not taken within 0.07 s" in caplog.text


@pytest.mark.parametrize(
    ("local", "queries", "expected"),
    [
        ({}, {}, ("", "", False)),
        ({context.QUERY_ID: "q", context.RUN_ID: "r"}, {}, ("q", "r", False)),
        ({}, {"other": ("o", "else")}, ("", "", True)),
        ({context.QUERY_ID: "q", context.RUN_ID: "r"}, {"other": ("o", "else")}, ("q", "r", False)),
        ({context.QUERY_ID: "x", context.RUN_ID: "r1"}, {"q1": ("r1", None)}, ("q1", "r1", False)),
        ({context.QUERY_ID: "x", context.RUN_ID: "r1"},
         {"q1": ("r1", None), "q2": ("r2", "own")}, ("q2", "r2", False)),
        ({context.QUERY_ID: "x", context.RUN_ID: "r1"},
         {"q2": ("r2", "own"), "q1": ("r1", None)}, ("q2", "r2", False)),
    ],
)  # fmt: skip
def test_the_run_of_a_frame_is_that_of_its_session(local, queries, expected):
    def execution(query: str, run: str, session: Any) -> Any:
        its = SimpleNamespace(equals=lambda other: session == "own")
        batch = session and SimpleNamespace(sparkSession=lambda: its)
        return SimpleNamespace(
            lastExecution=lambda: batch, runId=told(run), id=told(query),
            name=lambda: "job" if query == "q2" else None,
        )  # fmt: skip

    executions = {q: execution(q, r, s) for q, (r, s) in queries.items()}
    shared = SimpleNamespace(activeStreamingQueries=lambda: executions)
    jvm = SimpleNamespace(sharedState=lambda: shared)
    spark = SimpleNamespace(
        _jsparkSession=object(), sparkContext=SimpleNamespace(getLocalProperty=local.get)
    )
    frame: Any = SimpleNamespace(sparkSession=spark, _jdf=SimpleNamespace(sparkSession=lambda: jvm))
    run = context.run_of(frame)
    assert (run.query_id, run.run_id, run.is_unclear) == expected
    assert run.name == ("job" if expected[0] == "q2" else "")
    assert run.execution is executions.get(expected[0])
    frame.sparkSession = object()  # of Spark Connect
    assert context.run_of(frame) == context.StreamRun()
