"""The verdict: each rule that holds prints its sentence and its next command."""

import datetime as dt
import shlex
from dataclasses import replace

import pytest

from rocket_sink.commands.ledger import park
from rocket_sink.ledger.query.consumption import Consumption, QueryConsumption
from rocket_sink.ledger.report.values import (
    Absence,
    BrokerFigures,
    Cause,
    DeadLetterFigures,
    Figures,
    IsolationSums,
    ResentFigures,
    Successor,
    Totals,
    WaitFigures,
)
from rocket_sink.ledger.report.verdict import RULES, verdict
from rocket_sink.ledger.sql import Scope

AT = dt.datetime(2024, 5, 6, 14, 15, 3, tzinfo=dt.timezone.utc)
LATER = AT + dt.timedelta(minutes=10)
BACKFILL = "`rocket-sink backfill --ledger /data/ledger -n HOST:9876`"


def broker(name, p99=12.0, **changes):
    figures = BrokerFigures(
        name, 100, 1000, 10_000, 0, {"acked": 100}, 1.0, 5.0, p99, 2 * p99, 0.5, LATER, LATER
    )
    return replace(figures, **changes)


HEALTHY = Figures(
    "/data/ledger",
    Scope(),
    Totals(epochs=3, rows_in=1000, acked=1000),
    [broker("broker-a"), broker("broker-b", 480.0, requests=99), broker("-", outcomes={})],
    last_at=LATER,
)
GONE = Absence("broker-b", AT, AT, None, 500, True, "INVALID_QUEUE")
WAITS = WaitFigures("broker-b", 300, 6, AT)


def letters(reason, code="CONNECT", pending=2):
    return {"dead_letters": [DeadLetterFigures(reason, code, 5, pending, "text", 0, AT)]}


def totals(**changes):
    return {"totals": replace(HEALTHY.totals, **changes)}


def isolated(end):
    return {"isolated": [IsolationSums("broker-b", 12, 192_000.0, AT, AT, end, "LATENCY")]}


def consumed(**changes):
    values = {
        "topic": "flights", "messages": 100, "waiting": 0, "deleted": 0, "oldest": None,
        "query_id": "5b2f", "last_epoch": 42, "first_waiting": None, "epochs_waiting": 0,
    }  # fmt: skip
    return {"consumption": Consumption("boarding", 0, [], [QueryConsumption(**values | changes)])}


CASES = [
    ("broker_left_route", {"absences": [GONE], "waiting": [WAITS]},
     ("broker-b left the route at 2024-05-06 14:15:03 UTC, and nothing was stored there since; the "
     "last attempt failed at 2024-05-06 14:15:03 UTC; 300 rows of 6 keys wait for it; next: start "
     f"broker-b if it is not back, then {BACKFILL}")),
    ("broker_left_route", {"absences": [GONE]},
     ("broker-b left the route at 2024-05-06 14:15:03 UTC, and nothing was stored there since; the "
     "last attempt failed at 2024-05-06 14:15:03 UTC; next: start broker-b if it is not back")),
    ("broker_unreachable", {"absences": [replace(GONE, left_route=False, cause="CONNECT")]},
     ("broker-b has stored nothing since 2024-05-06 14:15:03 UTC (CONNECT); the last attempt "
     "failed at 2024-05-06 14:15:03 UTC; next: start broker-b if it is not back, or mend the "
     "way to it")),
    ("rows_missing", totals(missing_rows=17, not_adding_up=1),
     ("no accounts have 17 rows that Spark handed to tasks: the workers wrote to another folder "
     "than this ledger's, or files are gone; next: `rocket-sink ledger show epochs --ledger "
     "/data/ledger --where 'missing_rows > 0'`")),
    ("spool_damaged", {"quarantined_files": 1},
     ("1 damaged spool file is put aside: the rows in there are in no figure; next: look into "
     "/data/ledger/_spool/_quarantine")),
    ("epochs_do_not_add_up", totals(not_adding_up=2),
     ("2 epochs do not add up: some of the rows that came in have no outcome in any account; "
     "next: `rocket-sink ledger show epochs --ledger /data/ledger --where 'NOT adds_up'`")),
    ("sends_fail", {"causes": [Cause("AUTH_FAILED", "t", "broker-b", 3, AT, "no such user")],
                    **totals(unfinished=1, not_adding_up=1)},
     ("broker-b does not accept the user or the signature (AUTH_FAILED: no such user), last at "
     "2024-05-06 14:15:03 UTC; next: set the options accessKey and secretKey to a user of the "
     "brokers, then start the query again")),
    ("epochs_unfinished", totals(unfinished=1, not_adding_up=1),
     ("1 epoch failed or ended early, and did not run again: some of the rows were not sent; next: "
     "start the query again from its checkpoint, or write the batch again")),
    ("keys_wait", {"waiting": [replace(WAITS, rows=1, keys=1)]},
     ("1 row of 1 key waits for a backfill, in strict order, the oldest since 2024-05-06 14:15:03 "
     f"UTC; next: {BACKFILL}")),
    ("letters_pending", letters("transport"),
     ("2 dead letters are pending (2 transport CONNECT), the oldest since 2024-05-06 14:15:03 UTC; "
     f"next: {BACKFILL}")),
    ("letters_refused", letters("data", "NULL_BODY", 1),
     ("1 dead letter is pending that no broker would take (1 data NULL_BODY), the oldest since "
     "2024-05-06 14:15:03 UTC; next: write corrected copies of the rows that `rocket-sink ledger "
     "show dead-letters --ledger /data/ledger --where \"reason = 'data'\"` lists as new rows, then "
     "close the letters: `rocket-sink ledger park --ledger /data/ledger --dropped "
     "--where \"reason = 'data'\" --reason 'sent corrected'`")),
    ("letters_forbidden", letters("permission", "NO_PERMISSION"),
     ("2 dead letters are pending of topics closed to this account (2 permission NO_PERMISSION), "
     "the oldest since 2024-05-06 14:15:03 UTC; next: allow it to write there, then "
     f"{BACKFILL[:-1]} --reason permission`")),
    ("not_folded", {"unfolded_epochs": 3},
     ("rows of 3 epochs are not folded yet and in no table below; next: `rocket-sink report "
     "--ledger /data/ledger --fold`")),
    ("not_folded", {"unfolded_epochs": 1, "unfolded_letters": 1},
     ("rows of 1 epoch are not folded yet and in no table below; 1 dead letter waits to be folded; "
     f"next: `rocket-sink report --ledger /data/ledger --fold`, then {BACKFILL}")),
    ("broker_isolated", isolated(LATER + dt.timedelta(seconds=1)),
     ("broker-b has been isolated since 2024-05-06 14:15:03 UTC (LATENCY); next: look at "
     "broker-b's disk and log: it was slow or failed just before the last send")),
    ("broker_slow", {"brokers": [broker("broker-a"), broker("broker-b", 480.0)]},
     ("broker-b is slow: p99 480 ms, 40 times the others' 12 ms; next: look at broker-b's disk and "
     "page cache")),
    ("broker_slow", {"brokers": [broker("broker-a", 40.0), broker("broker-b", 120.0)]},
     ("broker-b is slow: p99 120 ms, 3 times the others' 40 ms; next: look at broker-b's disk and "
     "page cache")),
    ("broker_slow", {"brokers": [broker("broker-a", 20.0), broker("broker-b", 70.0)]},
     ("broker-b is slow: p99 70 ms, 4 times the others' 20 ms; next: look at broker-b's disk and "
     "page cache")),
    ("broker_slow", {"brokers": [broker("broker-a", 0.0), broker("broker-b", 70.0)]},
     ("broker-b is slow: p99 70 ms, far above the others' 0.0 ms; next: look at broker-b's disk "
     "and page cache")),
    ("requests_in_flight", {"brokers": [broker("broker-a", outcomes={"in_flight": 1})]},
     ("1 request has no known outcome, because a task died before an answer; next: nothing if "
     "the epoch was run again; `rocket-sink ledger show epochs --ledger /data/ledger --where "
     "'NOT confirmed'` lists the epochs that were not")),
    ("sends_failed", totals(failed_sends=2, superseded_attempts=2, superseded_rows=50),
     ("2 sends of a TableProducer failed, with an error to the caller: a part of the table may be "
     "stored, and is not in the sums of rows; next: `rocket-sink ledger show attempts --ledger "
     "/data/ledger --where \"lane = 'table' AND NOT counts\"`; send the table again, if nobody "
     "has: rows stored before are then there twice")),
    ("rows_degraded", totals(degraded=4),
     ("4 rows are stored, but less durably than asked for (flush or replica not awaited); next: "
     "look at the brokers' disks and replicas")),
    ("duplicates_announced", totals(duplicates_possible=7),
     "7 stored rows may be there twice, under one message id (UNIQ_KEY)"),
    ("query_began_again", {"successors": [Successor("new", "old", "flights", AT)]},
     ("The query new began at epoch 0 at 2024-05-06 14:15:03 UTC and writes to flights, as the "
     "query old did before it: if a checkpoint was deleted, all rows are there twice; next: none "
     "if they are two queries; with the option appId such a start is refused")),
    ("replays", totals(superseded_attempts=1, superseded_rows=50),
     "1 task attempt was run again or cut off: 50 rows sent before may be there twice"),
    ("broker_was_away", {"absences": [replace(GONE, back_at=LATER, left_route=False)]},
     ("broker-b could not be reached from 2024-05-06 14:15:03 UTC to 2024-05-06 14:15:03 UTC "
     "(INVALID_QUEUE); the next message was stored there at 2024-05-06 14:25:03 UTC")),
    ("broker_was_away", {"absences": [
        replace(GONE, back_at=AT + dt.timedelta(seconds=40), left_route=False),
        replace(GONE, since=LATER, back_at=LATER + dt.timedelta(seconds=30), left_route=False),
     ]},
     ("broker-b could not be reached 2 times, at most 70.0 s in all, the last from 2024-05-06 "
     "14:25:03 UTC to 2024-05-06 14:15:03 UTC (INVALID_QUEUE); the next message was stored there "
     "at 2024-05-06 14:25:33 UTC")),
    ("keys_late", {"resent": ResentFigures(300, 250, 10)},
     ("250 rows of 10 keys were stored by a backfill after later epochs: without "
     "onPendingKey=hold, they are behind later rows of their keys")),
    ("broker_was_isolated", isolated(LATER),
     ("broker-b was isolated 12 times, 3.2 min in all, the last at 2024-05-06 14:15:03 UTC "
     "(LATENCY)")),
    ("epochs_unconfirmed", totals(unconfirmed=1),
     "1 epoch is not confirmed by Spark (yet): still running, or the driver ended first"),
    ("deleted_unread", consumed(deleted=3),
     ("3 messages of flights were deleted before the group boarding came to them; "
     "next: start the group's consumers, and keep messages longer (fileReservedTime of the "
     "brokers)")),
    ("not_consumed", consumed(waiting=60, oldest=AT, first_waiting=41, epochs_waiting=2),
     ("60 messages of flights by the query 5b2f wait for the group boarding, in 2 epochs from "
     "epoch 41 on; the oldest was sent at 2024-05-06 14:15:03 UTC")),
    ("consumed", consumed(),
     "The group boarding is past all 100 messages of flights by the query 5b2f, up to epoch 42"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "sentence"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_says_its_sentence(name, changes, sentence):
    findings = verdict(replace(HEALTHY, **changes))
    assert [str(finding) for finding in findings if finding.name == name] == [sentence]
    (level,) = [rule.level for rule in RULES if rule.name == name]
    wells = [finding for finding in findings if finding.level == "well"]
    assert bool(wells) == (level == "note"), "all is well, unless it is a problem or a warning"
    others = [
        finding.name for finding in findings if finding.name != name and finding.level != "well"
    ]
    assert others == (["epochs_unfinished"] if name == "sends_fail" else [])


def test_each_rule_has_a_case():
    assert {name for name, *_ in CASES} == {rule.name for rule in RULES}


def test_a_refused_letter_is_parked_by_the_command_as_it_stands():
    (found,) = verdict(replace(HEALTHY, **letters("data", "NULL_BODY", 1)))
    command = shlex.split(found.next.split("`")[3])
    assert command[:3] == ["rocket-sink", "ledger", "park"]
    parsed = park.make_context("park", command[3:])
    assert parsed.params["where"] == "reason = 'data'" and parsed.params["reason"]


@pytest.mark.parametrize("p99", [(40.0, 119.9), (19.0, 68.9), (12.0,), (9.0, 9.96)])
def test_all_is_well_where_no_broker_is_slow(p99):
    brokers = [broker(f"broker-{n}", ms) for n, ms in enumerate(p99)]
    (found,) = verdict(replace(HEALTHY, brokers=brokers))
    most = {119.9: "120 ms", 68.9: "69 ms", 12.0: "12 ms", 9.96: "10.0 ms"}[p99[-1]]
    assert f" {len(p99)} broker{'s' if len(p99) > 1 else ''}, p99 at most {most}" in found.text


@pytest.mark.parametrize(("length_ms", "text"), [(119_960, "120.0 s"), (120_000, "2.0 min")])
def test_isolations_have_a_length(length_ms, text):
    sums = replace(isolated(LATER)["isolated"][0], length_ms=length_ms)
    assert f" 12 times, {text} in all" in verdict(replace(HEALTHY, isolated=[sums]))[1].text


def test_the_most_frequent_classes_are_named():
    """Three of them, by the sums of their letters; a remark is cut after 160 characters."""
    (one,) = letters("transport")["dead_letters"]
    many = [replace(one, error_code=code, pending=n, oldest=None)
            for code, n in (("A", 1), ("B", 2000), ("C", 3), ("A", 4), ("D", 2))]  # fmt: skip
    (found,) = verdict(replace(HEALTHY, dead_letters=many))
    classes = "2,000 transport B, 5 transport A, 3 transport C"
    assert found.text == f"2,010 dead letters are pending ({classes}, ...)"
    (found,) = verdict(replace(HEALTHY, dead_letters=[*many[:2], many[2]]))
    assert found.text.endswith("(2,000 transport B, 3 transport C, 1 transport A)")
    causes = [Cause("AUTH_FAILED", "t", name, 3, AT, "x" * 500) for name in "abc"]
    (found, _) = verdict(replace(HEALTHY, causes=causes, **totals(unfinished=1, not_adding_up=1)))
    assert found.text.startswith("a and 2 other brokers does not accept the user")
    (two, _) = verdict(replace(HEALTHY, causes=causes[1:], **totals(unfinished=1, not_adding_up=1)))
    assert two.text.startswith("b and 1 other broker does not accept the user")
    remark = found.text.partition("AUTH_FAILED: ")[2].partition(")")[0]
    assert 150 < len(remark) <= 160


def test_all_is_well():
    (found,) = verdict(HEALTHY)
    assert str(found) == (
        "All is well: 1,000 rows of 3 epochs are stored and none waits to be sent; 2 brokers, "
        "p99 at most 480 ms; last send 2024-05-06 14:25:03 UTC"
    )
    backfilled = verdict(replace(HEALTHY, resent=ResentFigures(500)))[0]
    assert backfilled.text.startswith(
        "All is well: 1,500 rows of 3 epochs are stored, 500 of them by a backfill, and none waits"
    )
    (sends,) = verdict(replace(HEALTHY, totals=Totals()))
    assert "0 rows" not in sends.text and sends.text.startswith("All is well: no epoch")
    (nothing,) = verdict(Figures("/data/ledger", Scope(), Totals()))
    assert nothing.text == "There is nothing in the ledger yet: no epoch and no send"
    assert {*vars(Totals()).values(), *vars(ResentFigures()).values()} == {0}
    (nothing,) = verdict(Figures("/data/ledger", Scope("q"), Totals()))
    assert nothing.text.startswith("There is nothing in this part of the ledger yet")


def test_the_gravest_comes_first():
    worst = replace(
        HEALTHY, absences=[GONE], waiting=[WAITS], unfolded_epochs=1,
        **totals(duplicates_possible=1, not_adding_up=1),
    )  # fmt: skip
    names = [finding.name for finding in verdict(worst)]
    assert names == [
        "broker_left_route", "epochs_do_not_add_up", "not_folded", "duplicates_announced"
    ]  # fmt: skip


def test_letters_that_the_line_of_a_broker_tells_of_are_not_told_twice():
    facts = replace(HEALTHY, absences=[GONE], waiting=[WAITS], **letters("transport", pending=300))
    assert [finding.name for finding in verdict(facts)] == ["broker_left_route"]
    more = replace(facts, **letters("transport", pending=301))
    assert [finding.name for finding in verdict(more)] == ["broker_left_route", "letters_pending"]
    closed = replace(facts, waiting=[replace(WAITS, forbidden=1)])
    assert [finding.name for finding in verdict(closed)] == ["broker_left_route", "letters_pending"]


def test_names_of_the_network_stay_in_their_line():
    hostile = "b\n\x1b[2J{ledger}" + "x" * 500
    facts = replace(
        HEALTHY, ledger="/data/my ledger", absences=[replace(GONE, broker=hostile)],
        waiting=[replace(WAITS, broker=hostile)],
    )  # fmt: skip
    (finding,) = verdict(facts)
    assert finding.text.isprintable() and len(finding.text) < 300
    assert "{ledger}" in finding.text
    assert "--ledger '/data/my ledger'" in finding.next
