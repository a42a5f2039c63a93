"""The verdict of a report: rules over its figures, each with a sentence and the next command. This
module reads no ledger."""

from __future__ import annotations

import datetime as dt
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from rocket_sink.ledger.report.causes import CAUSES, name_servers, remedy_of
from rocket_sink.ledger.report.values import BrokerFigures, Cause, Figures, Finding
from rocket_sink.ledger.sql import Scope
from rocket_sink.text import clean, counted

LINES: Final = 3
"""Number of findings that a console shows above all tables."""
SLOW_TIMES: Final = 3.0
SLOW_MS: Final = 50.0
SLOW_REQUESTS: Final = 100
"""A broker is slow if its p99 is `SLOW_TIMES` the median of the others, and `SLOW_MS` above it.
Brokers with fewer than `SLOW_REQUESTS` are left out: their p99 is the latency of one request."""
_SENT_AGAIN: Final = ("transport", "held_back", "unknown", "consumer")
"""Reasons of letters that a backfill may send as they are."""
_REMARK: Final = 160
"""Number of characters that a finding shows of a broker's remark."""
_name: Final = partial(clean, max_chars=80)

Case = Mapping[str, object]


@dataclass(frozen=True)
class Rule:
    """A rule of the verdict. `when` yields the values of its sentence `says`, and of `next`, once
    for each case. The other attributes are those of its findings."""

    name: str
    level: str
    when: Callable[[Figures], Iterable[Case]]
    says: str
    next: str = ""


def verdict(facts: Figures) -> list[Finding]:
    """Return the findings, the gravest first. If there is nothing worse than notes, say so."""
    commands, findings = _commands(facts.ledger), list[Finding]()
    for rule in RULES:
        for case in rule.when(facts):
            words = {**commands, **case}
            says, following = rule.says.format_map(words), rule.next.format_map(words)
            findings.append(Finding(rule.name, rule.level, says, following))
    if any(finding.level != "note" for finding in findings):
        return findings
    return [_well(facts), *findings]


def backfill_command(ledger: str) -> str:
    """Return the command that sends the ledger's dead letters."""
    return f"rocket-sink backfill --ledger {shlex.quote(clean(ledger))} -n {name_servers()}"


def _commands(ledger: str) -> dict[str, str]:
    path = shlex.quote(clean(ledger))
    return {
        "backfill": backfill_command(ledger),
        "park": f"rocket-sink ledger park --ledger {path}",
        "show": f"rocket-sink ledger show epochs --ledger {path}",
        "letters": f"rocket-sink ledger show dead-letters --ledger {path}",
        "accounts": f"rocket-sink ledger show attempts --ledger {path}",
        "report": f"rocket-sink report --ledger {path}",
        "ledger": clean(ledger),
    }


def _well(facts: Figures) -> Finding:
    totals = facts.totals
    last = [b.last_at for b in facts.brokers]
    if not totals.epochs and not last:
        of = "this part of the ledger" if facts.scope != Scope() else "the ledger"
        return Finding("empty", "well", f"There is nothing in {of} yet: no epoch and no send")
    brokers = _brokers(facts)
    resent = facts.resent.rows
    rows = totals.acked + totals.degraded + resent
    stored = (
        f"{counted(rows, 'row')} of {counted(totals.epochs, 'epoch', 'is', 'are', of=rows)} stored"
    )
    if resent:
        stored += f", {resent:,} of them by a backfill,"
    if not totals.epochs:
        stored = "no epoch is in it, only sends as those of a backfill,"
    text = f"All is well: {stored} and none waits to be sent"
    p99 = max((b.p99_ms for b in brokers if b.p99_ms is not None), default=None)
    if p99 is not None:
        text += f"; {counted(len(brokers), 'broker')}, p99 at most {_ms(p99)}"
    if last:
        text += f"; last send {moment(max(last))}"
    return Finding("all_is_well", "well", text)


# --- conditions ----------------------------------------------------------------------------------


def _nonzero(
    name: str, figure: Callable[[Figures], int], noun: str, singular: str = "", plural: str = ""
) -> Callable[[Figures], Iterator[Case]]:
    """Return a condition that yields a case if the figure is not 0. The case is {name: the figure
    with its noun and verb}; see `counted`."""

    def condition(facts: Figures) -> Iterator[Case]:
        if count := figure(facts):
            yield {name: counted(count, noun, singular, plural)}

    return condition


def _unfolded(facts: Figures) -> Iterator[Case]:
    if facts.unfolded_epochs:
        letters = counted(facts.unfolded_letters, "dead letter", "waits", "wait")
        yield {
            "epochs": counted(facts.unfolded_epochs, "epoch"),
            "letters": f"; {letters} to be folded" if facts.unfolded_letters else "",
            "then": f", then `{backfill_command(facts.ledger)}`" if facts.unfolded_letters else "",
        }


def _causes(facts: Figures) -> Iterator[Case]:
    """Yield the failures that hold, once per code, if rows still suffer from them: an epoch or a
    send failed, or dead letters with the code are pending. Leave out brokers that are away, because
    other findings report them; a wait for such a broker may name no broker, only the same code."""
    absent, totals = _absent_brokers(facts), facts.totals
    away = {("", a.cause) for a in facts.absences if a.broker in absent}
    pending = {letters.error_code for letters in facts.dead_letters if letters.pending}
    is_cut = bool(totals.unfinished or totals.failed_sends)
    by_code: dict[str, list[Cause]] = {}
    for cause in facts.causes:
        is_felt = is_cut or cause.error_code in pending
        is_away = cause.broker in absent or (cause.broker, cause.error_code) in away
        if is_felt and cause.error_code in CAUSES and not is_away:
            by_code.setdefault(cause.error_code, []).append(cause)
    for code, causes in by_code.items():
        first = causes[0]
        brokers = list(dict.fromkeys(cause.broker for cause in causes if cause.broker))
        more = f" and {counted(len(brokers) - 1, 'other broker')}" if len(brokers) > 1 else ""
        broker = _name(brokers[0]) + more if brokers else "the broker"
        topic = f"the topic {_name(first.topic)}" if first.topic else "the topic"
        then = ", then start the query again" if totals.unfinished else ""
        if code in pending:
            then += f", then `{backfill_command(facts.ledger)}`"
        remark = f": {clean(first.remark, max_chars=_REMARK)}" if first.remark else ""
        yield {
            "says": CAUSES[code].says.format(broker=broker, topic=topic),
            "code": f"{code}{remark}", "since": moment(first.last_at),
            "remedy": remedy_of(code, broker=broker, topic=first.topic) + then,
        }  # fmt: skip


def _away(facts: Figures, *, left_route: bool) -> Iterator[Case]:
    for absence in facts.absences:
        if absence.back_at is not None or absence.left_route is not left_route:
            continue
        waits = [w for w in facts.waiting if w.broker == absence.broker]
        rows, keys = sum(w.rows for w in waits), sum(w.keys for w in waits)
        waiting = f"{counted(rows, 'row')} of {counted(keys, 'key', 'waits', 'wait', of=rows)}"
        yield {
            "broker": _name(absence.broker), "since": moment(absence.since),
            "last": moment(absence.last_failed_at), "cause": _name(absence.cause),
            "remedy": remedy_of(absence.cause, broker=_name(absence.broker)),
            "held": f"; {waiting} for it" if waits else "",
            "then": f", then `{backfill_command(facts.ledger)}`" if waits else "",
        }  # fmt: skip


def _was_away(facts: Figures) -> Iterator[Case]:
    """Yield one case per broker: its last outage, and the number of outages."""
    past_absences = [absence for absence in facts.absences if absence.back_at is not None]
    for broker in dict.fromkeys(absence.broker for absence in past_absences):
        outages = [absence for absence in past_absences if absence.broker == broker]
        last = outages[-1]
        length_s = sum((o.back_at - o.since).total_seconds() for o in outages if o.back_at)
        yield {
            "broker": _name(broker), "since": moment(last.since),
            "back": moment(last.back_at or last.last_failed_at),
            "last": moment(last.last_failed_at),
            "times": f"{counted(len(outages), 'time')}, at most {_seconds(length_s)} in all, "
            "the last " if len(outages) > 1 else "",
            "cause": _name(last.cause),
        }  # fmt: skip


def _keys_wait(facts: Figures) -> Iterator[Case]:
    absent = _absent_brokers(facts)
    waits = [w for w in facts.waiting if w.broker not in absent]
    if waits:
        rows = sum(w.rows for w in waits)
        yield {
            "rows": counted(rows, "row"),
            "keys": counted(sum(w.keys for w in waits), "key", "waits", "wait", of=rows),
            "oldest": moment(min(w.oldest for w in waits)),
        }


def _letters(facts: Figures, *reasons: str) -> Iterator[Case]:
    letters = [d for d in facts.dead_letters if d.reason in reasons and d.pending]
    if not letters:
        return
    by_class = Counter[str]()
    for d in letters:
        by_class[f"{d.reason} {_name(d.error_code)}"] += d.pending
    shown = ", ".join(f"{count:,} {name}" for name, count in by_class.most_common(3))
    oldest = [d.oldest for d in letters if d.oldest is not None]
    pending = by_class.total()
    yield {
        "pending": counted(pending, "dead letter", "is", "are"),
        "classes": shown + (", ..." if len(by_class) > 3 else ""),
        "oldest": f", the oldest since {moment(min(oldest))}" if oldest else "",
        "count": pending,
    }


def _sent_again(facts: Figures) -> Iterator[Case]:
    """Yield the pending letters that a backfill may send. Yield nothing if all of them have keys
    that wait, because other findings count these letters."""
    waiting_rows = sum(w.rows - w.forbidden for w in facts.waiting)
    for case in _letters(facts, *_SENT_AGAIN):
        if case["count"] != waiting_rows:
            yield case


def _brokers(facts: Figures) -> list[BrokerFigures]:
    return [b for b in facts.brokers if b.broker != "-"]


def _absent_brokers(facts: Figures) -> set[str]:
    return {a.broker for a in facts.absences if a.back_at is None}


def _isolated(facts: Figures, *, still: bool) -> Iterator[Case]:
    """Yield the brokers that were isolated at the last attempt (`still`), or only before. Leave out
    brokers that another finding reports as away."""
    absent = _absent_brokers(facts)
    for isolation in facts.isolated:
        is_still = facts.last_at is not None and isolation.last_end > facts.last_at
        if isolation.broker not in absent and is_still is still:
            yield {
                "broker": _name(isolation.broker), "since": moment(isolation.last_start),
                "cause": _name(isolation.cause), "times": counted(isolation.times, "time"),
                "length": _seconds(isolation.length_ms / 1000),
            }  # fmt: skip


def _slow(facts: Figures) -> Iterator[Case]:
    brokers = [broker for broker in _brokers(facts) if broker.requests >= SLOW_REQUESTS]
    measured = {each.broker: each.p99_ms for each in brokers if each.p99_ms is not None}
    for broker, p99 in measured.items():
        usual = median([other for name, other in measured.items() if name != broker] or [p99])
        if p99 >= SLOW_TIMES * usual and p99 - usual >= SLOW_MS:
            times = f"{p99 / usual:,.0f} times" if usual > 0 else "far above"
            yield {"broker": _name(broker), "p99": _ms(p99), "times": times, "usual": _ms(usual)}


def _replays(facts: Figures) -> Iterator[Case]:
    totals = facts.totals
    attempts = totals.superseded_attempts - totals.failed_sends
    if attempts and totals.superseded_rows:
        yield {
            "attempts": counted(attempts, "task attempt", "was", "were"),
            "rows": counted(totals.superseded_rows, "row"),
        }


def _late(facts: Figures) -> Iterator[Case]:
    resent = facts.resent
    if resent.late_rows:
        yield {
            "rows": counted(resent.late_rows, "row"), "keys": counted(resent.late_keys, "key"),
        }  # fmt: skip


def _successors(facts: Figures) -> Iterator[Case]:
    for successor in facts.successors[-1:]:
        yield {
            "query": _name(successor.query_id), "earlier": _name(successor.earlier),
            "topic": _name(successor.topic), "began": moment(successor.began),
        }  # fmt: skip


def _consumed(facts: Figures, *, waiting: bool) -> Iterator[Case]:
    if facts.consumption is not None:
        for query in facts.consumption.queries:
            if query.waiting if waiting else not (query.waiting or query.deleted):
                yield {"text": query.says(facts.consumption.group)}


def _deleted(facts: Figures) -> Iterator[Case]:
    """Yield the queries with messages that retention has removed before the group read them."""
    if facts.consumption is not None:
        for query in facts.consumption.queries:
            if query.deleted:
                yield {
                    "messages": counted(query.deleted, "message"),
                    "were": "was" if query.deleted == 1 else "were",
                    "topic": _name(query.topic), "group": _name(facts.consumption.group),
                }  # fmt: skip


RULES: Final = (
    Rule("sends_fail", "problem", _causes, "{says} ({code}), last at {since}", "{remedy}"),
    Rule("broker_left_route", "problem", partial(_away, left_route=True),
         "{broker} left the route at {since}, and nothing was stored there since; the last attempt "
         "failed at {last}{held}", "start {broker} if it is not back{then}"),
    Rule("broker_unreachable", "problem", partial(_away, left_route=False),
         "{broker} has stored nothing since {since} ({cause}); the last attempt failed at "
         "{last}{held}",
         "{remedy}{then}"),
    Rule("rows_missing", "problem", _nonzero("rows", lambda f: f.totals.missing_rows, "row"),
         "no accounts have {rows} that Spark handed to tasks: the workers wrote to another folder "
         "than this ledger's, or files are gone", "`{show} --where 'missing_rows > 0'`"),
    Rule("spool_damaged", "problem",
         _nonzero("files", lambda f: f.quarantined_files, "damaged spool file", "is", "are"),
         "{files} put aside: the rows in there are in no figure",
         "look into {ledger}/_spool/_quarantine"),
    Rule("epochs_do_not_add_up", "problem",
         _nonzero("epochs", lambda f: 0 if f.totals.missing_rows else
                  f.totals.not_adding_up - f.totals.unfinished, "epoch", "does", "do"),
         "{epochs} not add up: some of the rows that came in have no outcome in any account",
         "`{show} --where 'NOT adds_up'`"),
    Rule("epochs_unfinished", "problem",
         _nonzero("epochs", lambda f: f.totals.unfinished, "epoch"),
         "{epochs} failed or ended early, and did not run again: some of the rows were not sent",
         "start the query again from its checkpoint, or write the batch again"),
    Rule("keys_wait", "problem", _keys_wait,
         "{rows} of {keys} for a backfill, in strict order, the oldest since {oldest}",
         "`{backfill}`"),
    Rule("letters_pending", "problem", _sent_again,
         "{pending} pending ({classes}){oldest}", "`{backfill}`"),
    Rule("letters_refused", "problem", lambda f: _letters(f, "data"),
         "{pending} pending that no broker would take ({classes}){oldest}",
         "write corrected copies of the rows that `{letters} --where \"reason = 'data'\"` lists "
         "as new rows, then close the letters: `{park} --dropped --where \"reason = 'data'\" "
         "--reason 'sent corrected'`"),
    Rule("letters_forbidden", "problem", lambda f: _letters(f, "permission"),
         "{pending} pending of topics closed to this account ({classes}){oldest}",
         "allow it to write there, then `{backfill} --reason permission`"),
    Rule("query_began_again", "warning", _successors,
         "The query {query} began at epoch 0 at {began} and writes to {topic}, as the query "
         "{earlier} did before it: if a checkpoint was deleted, all rows are there twice",
         "none if they are two queries; with the option appId such a start is refused"),
    Rule("not_folded", "warning", _unfolded,
         "rows of {epochs} are not folded yet and in no table below{letters}",
         "`{report} --fold`{then}"),
    Rule("broker_isolated", "warning", partial(_isolated, still=True),
         "{broker} has been isolated since {since} ({cause})",
         "look at {broker}'s disk and log: it was slow or failed just before the last send"),
    Rule("broker_slow", "warning", _slow,
         "{broker} is slow: p99 {p99}, {times} the others' {usual}",
         "look at {broker}'s disk and page cache"),
    Rule("requests_in_flight", "warning",
         _nonzero("requests", lambda f: f.in_flight, "request", "has", "have"),
         "{requests} no known outcome, because a task died before an answer",
         "nothing if the epoch was run again; `{show} --where 'NOT confirmed'` lists the epochs "
         "that were not"),
    Rule("sends_failed", "warning",
         _nonzero("sends", lambda f: f.totals.failed_sends, "send"),
         "{sends} of a TableProducer failed, with an error to the caller: a part of the table may "
         "be stored, and is not in the sums of rows",
         "`{accounts} --where \"lane = 'table' AND NOT counts\"`; send the table again, if nobody "
         "has: rows stored before are then there twice"),
    Rule("rows_degraded", "warning",
         _nonzero("rows", lambda f: f.totals.degraded, "row", "is", "are"),
         "{rows} stored, but less durably than asked for (flush or replica not awaited)",
         "look at the brokers' disks and replicas"),
    Rule("deleted_unread", "warning", _deleted,
         "{messages} of {topic} {were} deleted before the group {group} came to them",
         "start the group's consumers, and keep messages longer (fileReservedTime of the brokers)"),
    Rule("not_consumed", "note", partial(_consumed, waiting=True), "{text}"),
    Rule("consumed", "note", partial(_consumed, waiting=False), "{text}"),
    Rule("duplicates_announced", "note",
         _nonzero("rows", lambda f: f.totals.duplicates_possible, "stored row"),
         "{rows} may be there twice, under one message id (UNIQ_KEY)"),
    Rule("keys_late", "note", _late,
         "{rows} of {keys} were stored by a backfill after later epochs: without "
         "onPendingKey=hold, they are behind later rows of their keys"),
    Rule("replays", "note", _replays,
         "{attempts} run again or cut off: {rows} sent before may be there twice"),
    Rule("broker_was_away", "note", _was_away,
         "{broker} could not be reached {times}from {since} to {last} ({cause}); the next message "
         "was stored there at {back}"),
    Rule("broker_was_isolated", "note", partial(_isolated, still=False),
         "{broker} was isolated {times}, {length} in all, the last at {since} ({cause})"),
    Rule("epochs_unconfirmed", "note",
         _nonzero("epochs", lambda f: f.totals.unconfirmed, "epoch", "is", "are"),
         "{epochs} not confirmed by Spark (yet): still running, or the driver ended first"),
)  # fmt: skip
"""The rules: problems, then warnings, then notes, each by weight."""


# --- words ---------------------------------------------------------------------------------------


def moment(at: dt.datetime) -> str:
    return at.astimezone(dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value < 120 else f"{value / 60:,.1f} min"
