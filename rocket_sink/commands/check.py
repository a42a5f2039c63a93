"""`rocket-sink check`: checks of name servers, brokers, topic, ledger and Java before a run."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from rocket_sink.commands.common.base import Command, json_option
from rocket_sink.commands.common.output import cell, print_if_json, show, table
from rocket_sink.commands.common.sink_input import group_option, resolved_options, sink_options
from rocket_sink.errors import NoRouteError, NotSentError, PermissionDeniedError, RocketSinkError
from rocket_sink.java import find_java
from rocket_sink.ledger.path import resolve_path
from rocket_sink.message import MessageQueue
from rocket_sink.message_rules import check_topic, with_namespace
from rocket_sink.options import NO_TEMPLATE, SinkOptions
from rocket_sink.producer.admin.admin import Admin, closed_queues, create_command, proxy_error
from rocket_sink.text import counted
from rocket_sink.wire.route import BrokerData, TopicRoute, broker_addresses

_RECENT = dt.timedelta(days=1)
"""A missing broker is a fault only if its last send in the ledger is younger than this."""
_DISK_FULL = 0.9
"""Used part of a disk above which a broker may refuse messages (the highest value of
DefaultMessageStore.getDiskSpaceWarningLevelRatio)."""
_TYPE = "message.type"
_POLICY = "cleanup.policy"
_COLUMNS = {
    "DELAY": {"delay_level", "delay_ms", "delivery_timestamp"},
    "PRIORITY": {"priority"},
    "LITE": {"lite_topic"},
}
"""{type of a topic: columns that only its messages have}"""
_WANTS = {
    "NORMAL": "rows without sharding key and delay",
    "FIFO": "ordering=strict or best_effort, and rows with a sharding_key",
    "DELAY": "rows with delay_level, delay_ms or delivery_timestamp",
    "TRANSACTION": "delivery=transactional",
    "PRIORITY": "rows with a priority",
    "LITE": "rows with a lite_topic",
}
"""{type of a topic: the messages that fit it} (TopicMessageType.parseFromMessageProperty)."""


@dataclass(frozen=True)
class Finding:
    """The result of one check; `state` is ok, note or fail."""

    what: str
    state: str
    text: str


@click.command(
    cls=Command,
    example="""
    rocket-sink check -n '10.0.0.1:9876;10.0.0.2:9876' -t flights
    rocket-sink check --conf rocket-sink.conf --json
    rocket-sink check -n 127.0.0.1:9876 --ledger ledger/ --group billing""",
)
@sink_options("nameServer", "topic", "ledger")
@group_option
@json_option
def check(group: str) -> int:
    """Check whether name servers, brokers and topic are ready.

    Nothing is sent. Exits 0 only if no check failed. Name servers forget a dead broker after two
    minutes: give --ledger, which knows the brokers of its sends.
    """
    options = resolved_options()
    if group and not options.ledger:
        raise click.UsageError("--group compares with a ledger: give --ledger PATH")
    findings = list(look(options))
    findings += _consumed(options, group) if group else ()
    failed = sum(finding.state == "fail" for finding in findings)
    if print_if_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]}):
        return 1 if failed else 0
    from rich.text import Text

    colours = {"ok": "green", "note": "yellow", "fail": "bold red"}
    findings_table = table("", ("", "what", "found"), ())
    for finding in findings:
        state = Text(finding.state, style=colours[finding.state])
        findings_table.add_row(state, cell(finding.what), cell(finding.text))
    notes = sum(finding.state == "note" for finding in findings)
    ready = "ready" + (f", with {counted(notes, 'note')}" if notes else "")
    show(findings_table, f"{failed} of {len(findings)} failed" if failed else ready)
    return 1 if failed else 0


def look(options: SinkOptions) -> Iterator[Finding]:
    """Yield all findings, in the order of a send's steps."""
    proxy = _proxy(options)
    if proxy and options.delivery != "at_least_once":
        yield Finding(f"proxy {proxy}", "fail", str(proxy_error(options.delivery, proxy)))
    elif proxy:
        yield Finding(
            f"proxy {proxy}", "note",
            "is a RocketMQ proxy, which hides the brokers: they are not looked at, and commands "
            "that ask them do not work (docs/deploy/proxy.md)",
        )  # fmt: skip
    packages = ("pyspark", "delta-spark", "pyarrow")
    versions = (platform.python_version(), *(f"{name} {_version(name)}" for name in packages))
    yield Finding("python", "ok", ", ".join(versions))
    yield _finding("java", _java)
    if not proxy and not (yield from _name_servers(options)):
        return
    if options.topic:
        yield from _topic(options, behind_proxy=proxy is not None)
    elif not proxy:
        yield Finding("topic", "note", "none given (--topic): brokers are not looked at")
    if options.ledger:
        yield _finding("ledger", _ledger, options.ledger)


def _consumed(options: SinkOptions, group: str) -> Iterator[Finding]:
    """Report up to where a consumer group has consumed the ledger's messages."""
    from rocket_sink.ledger.query.consumption import consumption
    from rocket_sink.ledger.query.duckdb_reader import open_quick
    from rocket_sink.ledger.sql import Scope, Scoped

    try:
        ledger = open_quick(options.ledger)
        if ledger is None:
            raise RocketSinkError(
                "only Spark can read the ledger: use `rocket-sink report --group`"
            )
        consumed = consumption(Scoped(ledger.query, Scope()), group, options)
        for query in consumed.queries:
            state = "note" if query.waiting or query.deleted else "ok"
            yield Finding(f"group {group}", state, query.says(group))
        for text in consumed.uncounted:
            yield Finding(f"group {group}", "note", f"besides, {text}")
    except RocketSinkError as error:
        yield Finding(f"group {group}", "fail", str(error))


def _proxy(options: SinkOptions) -> str | None:
    with contextlib.suppress(RocketSinkError), Admin(options) as admin:
        return admin.proxy()
    return None


def _java() -> str:
    java = find_java()
    return f"Java {java.version} from {java.source}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _finding(what: str, check: Callable[..., str], *arguments: Any) -> Finding:
    """Return the text that `check` returns; if it raises, a failure with the error's text."""
    try:
        return Finding(what, "ok", check(*arguments))
    except RocketSinkError as error:
        return Finding(what, "fail", str(error))


def _name_servers(options: SinkOptions) -> Generator[Finding, None, bool]:
    """Compare the brokers that each name server knows; return whether any name server answers."""
    brokers_by_server: dict[str, set[tuple[str, str]]] = {}
    errors = {}
    for server in options.name_servers:
        try:
            with Admin(options.with_(nameServer=server)) as admin:
                brokers_by_server[server] = broker_addresses(admin.cluster())
        except RocketSinkError as error:
            errors[server] = str(error)
    for server in options.name_servers:
        state, text = "fail", errors.get(server)
        if text is None:
            state, text = _compared(server, brokers_by_server)
        yield Finding(f"name server {server}", state, text)
    return bool(brokers_by_server)


def _compared(server: str, brokers: Mapping[str, set[tuple[str, str]]]) -> tuple[str, str]:
    """Compare a name server's brokers with those that other servers know; return (state, text)."""
    names = {name for name, _ in brokers[server]}
    if not names:
        return "fail", (
            "answers, but knows no broker: it was started anew less than 30 s ago, or the brokers "
            "do not register with it (their option namesrvAddr)"
        )
    text = f"answers, knows {counted(len(names), 'broker')}"
    strangers = [o for o in brokers if brokers[o] and not brokers[o] & brokers[server]]
    friends = [other for other in brokers if brokers[other] & brokers[server]]
    if len(strangers) >= len(friends):
        return "fail", (
            f"{text} ({', '.join(sorted(names))}), none that {', '.join(strangers)} knows: one of "
            "them belongs to another cluster, and messages may go there; take it out of nameServer"
        )
    missing = {name for other in friends for name, _ in brokers[other]} - names
    if missing:
        return "note", f"{text}, not {', '.join(sorted(missing))}, which others know"
    return "ok", text


def _topic(options: SinkOptions, *, behind_proxy: bool) -> Iterator[Finding]:
    """Yield the findings about the topic. A proxy answers for name servers and hides brokers."""
    topic = options.topic
    try:
        check_topic(with_namespace(options.namespace, topic))
        with Admin(options) as admin:
            try:
                route = admin.topic_route(topic)
            except NoRouteError:
                if behind_proxy:
                    raise
                yield from _missing(admin, options)
                return
            yield _routed(options, route, len(route.brokers if behind_proxy else admin.cluster()))
            if behind_proxy:
                return
            yield from _unread_queues(options, route)
            if options.ledger:
                yield from _missing_brokers(options, route)
            yield from _type(admin, options)
            for broker in route.brokers:
                yield _finding(f"broker {broker.name}", _broker, admin, options, route, broker)
    except RocketSinkError as error:
        yield Finding(f"topic {topic}", "fail", str(error))


def _missing(admin: Admin, options: SinkOptions) -> Iterator[Finding]:
    """Report a topic that does not exist. Ask the brokers that would make it, because they check
    the credentials, which name servers do not."""
    subject = f"topic {options.topic}"
    template, command = options.template_topic, create_command(options, options.topic)
    if not template:
        yield Finding(
            subject, "fail", f"does not exist, and {NO_TEMPLATE}: create it with {command}"
        )
        return
    try:
        route = admin.topic_route(template)
    except RocketSinkError:
        yield Finding(
            subject, "fail",
            f"does not exist, and no broker makes topics by itself ({template} has no route): "
            f"create it with {command}",
        )  # fmt: skip
        return
    brokers = " or ".join(sorted(queue.broker_name for queue in route.queues))
    only = f", and on no other: create it on all with {command}" if " or " in brokers else ""
    text = f"does not exist{admin.name_hint(options.topic)}; the first send makes it on {brokers}"
    yield Finding(subject, "note", text + only)
    of_template = options.with_(topic=template, namespace="", allowSystemTopics=True)
    for broker in route.brokers:
        yield _finding(f"broker {broker.name}", _broker, admin, of_template, route, broker)


def _missing_brokers(options: SinkOptions, route: TopicRoute) -> Iterator[Finding]:
    """Report brokers that the topic's route lacks, although the ledger has recent sends to them."""
    from rocket_sink.ledger.query.duckdb_reader import open_quick, open_spool
    from rocket_sink.ledger.sql import timestamp

    try:
        ledger = open_quick(options.ledger) or open_spool(options.ledger)
    except RocketSinkError:
        return  # Another finding reports this error.
    if ledger is None:
        return
    recent = dt.datetime.now(dt.timezone.utc) - _RECENT
    rows = ledger.query(
        "SELECT topic, broker_name, max(at) AS last FROM latest_answers "  # noqa: S608
        f"WHERE broker_name <> '' AND at > {timestamp(recent)} GROUP BY 1, 2 ORDER BY 2"
    )
    topic = with_namespace(options.namespace, options.topic)
    named = {queue.broker_name for queue in route.queues}
    for row in rows.to_pylist():
        if row["topic"] == topic and row["broker_name"] not in named:
            yield Finding(
                f"broker {row['broker_name']}", "fail",
                f"is away: it is missing from the topic's route, and the ledger has sends to it "
                f"until {row['last']:%Y-%m-%d %H:%M:%S} UTC: start it. If it was taken away for "
                f"good, this is no fault a day after that send",
            )  # fmt: skip


def _routed(options: SinkOptions, route: TopicRoute, known: int) -> Finding:
    masters = {broker.name for broker in route.brokers if broker.master is not None}
    writable = [queue for queue in route.queues if queue.writable]
    usable = [queue for queue in writable if queue.broker_name in masters]
    count, topic = sum(queue.write for queue in usable), options.topic
    if not count:
        opened = create_command(options, topic, "--permission", "read and write")
        reason = "no broker has a master" if writable else f"it is closed; open it with {opened}"
        return Finding(f"topic {topic}", "fail", f"has no queue to write to: {reason}")
    away = len(route.queues) - len(usable)
    brokers = f"{len(usable)} of {counted(known, 'registered broker')}"
    text = f"{counted(count, 'writable queue')} on {brokers}"
    text += f"; {away} without master or write permission" if away else ""
    if is_single := len(route.queues) == 1 < known:
        text += f"; put it on all brokers with {create_command(options, topic)}"
    return Finding(f"topic {topic}", "note" if away or is_single else "ok", text)


def _unread_queues(options: SinkOptions, route: TopicRoute) -> Iterator[Finding]:
    """Report queues that get messages and that no consumer can read."""
    for data in route.queues:
        if data.writable and data.write > data.read:
            text = closed_queues(options, options.topic, data)
            yield Finding(f"topic {options.topic}", "fail", text)


def _type(admin: Admin, options: SinkOptions) -> Iterator[Finding]:
    """Report the topic's type and cleanup policy, if set, and messages that do not fit them.
    Brokers accept messages of any type (in 5.3 the type only labels metrics); proxies refuse
    messages of another type (enableTopicMessageTypeCheck, TopicMessageType)."""
    subject = f"topic {options.topic}"
    try:
        attributes = admin.topic_attributes(options.topic)
    except NotSentError:
        return  # The finding about the broker names the error.
    except RocketSinkError as error:
        yield Finding(
            subject, "note", f"its message.type and cleanup.policy are not known: {error}"
        )
        return
    for name in (_TYPE, _POLICY):
        values = sorted({own[name] for own in attributes.values() if own.get(name)})
        if values:
            yield Finding(subject, "ok", f"{name} is {', '.join(values)}")
    if any(own.get(_POLICY) == "COMPACTION" for own in attributes.values()):
        yield Finding(
            subject, "note",
            "cleanup.policy is COMPACTION, which wants keys in each row: rows without keys become "
            "dead letters (MESSAGE_ILLEGAL)",
        )  # fmt: skip
    types = {settings[_TYPE] for settings in attributes.values() if settings.get(_TYPE)}
    sent, command = _sent_type(options), create_command(options, options.topic)
    for kind in sorted(types - {"MIXED", sent}):
        if sent or kind in ("FIFO", "DELAY", "TRANSACTION", *_COLUMNS):
            yield Finding(
                subject, "note",
                f"message.type is {kind}, which wants {_WANTS.get(kind, 'other messages')}"
                + (f"; these options send {sent} messages" if sent else "")
                + ": brokers take any, proxies refuse others"
                + (f"; change it with {command} --type {sent.lower()}" if sent else ""),
            )  # fmt: skip


def _sent_type(options: SinkOptions) -> str | None:
    """Return the type that the options give to all messages; None if it depends on the rows."""
    if options.delivery == "transactional":
        return "TRANSACTION"
    columns = {name for name, _ in options.columns}
    for kind, names in _COLUMNS.items():
        if names & columns:
            return kind
    return "FIFO" if options.ordering != "none" else None


def _broker(admin: Admin, options: SinkOptions, route: TopicRoute, broker: BrokerData) -> str:
    topic = with_namespace(options.namespace, options.topic)
    if (address := broker.master) is None:
        raise RocketSinkError("has no master now")
    registered = broker.registered.get(0, address)
    place = address if registered == address else f"{address} (registered as {registered})"
    if not any(queue.broker_name == broker.name and queue.read for queue in route.queues):
        return f"{place}, not asked: no readable queue"
    try:
        stored = admin.max_offset(MessageQueue(topic, broker.name, 0))
        if options.delivery == "effectively_once":
            admin.query_by_unique_key(options.topic, "-", max_messages=1)
    except PermissionDeniedError as error:
        if options.delivery == "effectively_once":
            raise
        return f"{place} answers; this user may send at most, not read or look up: {error}"
    if (used := _disk_used(admin, broker.name, address)) > _DISK_FULL:
        raise RocketSinkError(
            f"{address} refuses all messages: the disk of its commit log is {used:.0%} full, "
            f"and brokers stop at {_DISK_FULL:.0%} at the latest; free space there"
        )
    return f"{place} answers (queue 0 is at offset {stored:,})"


def _disk_used(admin: Admin, name: str, address: str) -> float:
    """Return the used part of the broker's disk; 0 if the broker does not report it."""
    with contextlib.suppress(RocketSinkError, ValueError):
        return float(admin.runtime_info(name, address).get("commitLogDiskRatio", 0))
    return 0.0


def _ledger(path: str) -> str:
    from rocket_sink.ledger.append.links import check_links
    from rocket_sink.ledger.driver.ledger import Ledger

    ledger, place = Ledger(path), resolve_path(path)
    if place.is_local:
        there = Path(place.root)
        while not os.access(there, os.F_OK):
            there = there.parent
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise RocketSinkError(
                f"{ledger.path}: {there} is no folder that may be written to; name another"
            )
        check_links(place.root)
    spool = place.filesystem().get_file_info(place.spool)
    is_there = ledger.exists() or spool.type.name != "NotFound"
    return f"{ledger.path}: {'there' if is_there else 'none yet, it will be made'}"
