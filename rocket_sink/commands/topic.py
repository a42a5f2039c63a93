"""`rocket-sink topic`: create topics on all brokers of a cluster, show and list them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any, Final

import click
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from rocket_sink.commands.common.base import Group, count_option, json_option
from rocket_sink.commands.common.output import print_if_json, show, table
from rocket_sink.commands.common.sink_input import resolved_options, sink_options
from rocket_sink.errors import ConfigurationError, NoRouteError, RocketSinkError
from rocket_sink.message_rules import check_topic, is_system_topic, with_namespace
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.text import counted
from rocket_sink.wire.codes import PermName
from rocket_sink.wire.route import QueueData, TopicRoute

_PERMISSIONS: Final = {
    "read and write": PermName.READ | PermName.WRITE,
    "read": PermName.READ,
    "write": PermName.WRITE,
}
_TYPE: Final = "message.type"
_TYPES: Final = ("normal", "fifo", "delay", "transaction", "lite", "priority")
_QUEUES: Final = 4
_ROUTE_S: Final = 30.0
"""Longest wait until name servers know of the topic; brokers register it at once."""
_COLUMNS: Final = {
    "topic": "topic", "broker": "broker", "master": "master", "slaves": "slaves",
    "writeQueues": "write queues", "readQueues": "read queues", "permission": "permission",
    "type": "type",
}  # fmt: skip


@click.group(cls=Group)
def topic() -> None:
    """Create topics on all brokers of a cluster, show and list them."""


@topic.command(
    example="""
    rocket-sink topic create flights -n 127.0.0.1:9876
    rocket-sink topic create orders --queues 16 --type fifo --conf rocket-sink.conf"""
)
@click.argument("name")
@sink_options("nameServer")
@count_option("--queues", help="Queues per broker. Default: as many as the topic has, else 4.")
@click.option("--type", "kind", type=click.Choice(_TYPES, case_sensitive=False),
              help="Type of its messages (brokers from 5.0 on). Default: as it is.")  # fmt: skip
@click.option("--permission", type=click.Choice(_PERMISSIONS),
              help="Default: as it is, else read and write.")  # fmt: skip
@click.option("--broker", "brokers", multiple=True, metavar="NAME",
              help="Only on this broker; repeatable. Default: on all.")  # fmt: skip
@click.option("--cluster", metavar="NAME", help="Only on the brokers of this cluster.")
@click.option("--force", is_flag=True, help="Also take queues away, with their messages.")
@json_option
def create(
    name: str, queues: int | None, kind: str | None, permission: str | None,
    brokers: tuple[str, ...], cluster: str | None, force: bool,
) -> None:  # fmt: skip
    """Create a topic on all brokers, or change it, so that all have the same settings.

    May be repeated: a topic that has these settings stays as it is. Brokers that lack the topic get
    it with the settings of the others.
    """
    options = resolved_options()
    check_topic(with_namespace(options.namespace, name))
    with Admin(options) as admin:
        chosen = _chosen(admin, brokers, cluster)
        present: list[dict[str, Any]] = []
        with contextlib.suppress(NoRouteError):
            present = _rows(admin, name)
        sizes = {row["broker"]: max(row["readQueues"], row["writeQueues"]) for row in present}
        count = queues or max(sizes.values(), default=_QUEUES)
        for broker in chosen:
            if sizes.get(broker, 0) > count and not force:
                raise ConfigurationError(
                    f"topic {name} has {sizes[broker]} queues on {broker}: with {count}, nobody "
                    "can read the messages of the others. --force takes these queues away"
                )
        perm = max((_PERMISSIONS.get(row["permission"], 0) for row in present), default=0)
        perm = _PERMISSIONS[permission] if permission else perm or PermName.READ | PermName.WRITE
        types = [kind.upper()] if kind else [row["type"] for row in present if row["type"]]
        attributes = {_TYPE: types[0]} if types else {}
        admin.create_topic(name, queues=count, perm=perm, attributes=attributes, brokers=chosen)
        _await_route(admin, name, {QueueData(broker, count, count, perm) for broker in chosen})
        rows = _rows(admin, name)
    _print(f"topic {name}", rows)
    old = [row["broker"] for row in rows if row["broker"] in chosen and row["type"] is None]
    if kind and old:
        raise ConfigurationError(f"{', '.join(old)} keeps no type: types need a broker from 5.0 on")


@topic.command("show", example="    rocket-sink topic show flights -n 127.0.0.1:9876")
@click.argument("name")
@sink_options("nameServer")
@json_option
def show_topic(name: str) -> None:
    """Show a topic's brokers in its route, and its queues, permission and type on each.

    Types are missing if a broker does not answer.
    """
    with Admin(resolved_options()) as admin:
        rows = _route_rows(admin.topic_route(name))
        with contextlib.suppress(RocketSinkError):
            rows = _rows(admin, name)
    _print(f"topic {name}", rows)


@topic.command("list", example="    rocket-sink topic list -n 127.0.0.1:9876 --json")
@sink_options("nameServer")
@click.option("--all", "with_system", is_flag=True, help="Also RocketMQ's own topics.")
@json_option
def list_topics(with_system: bool) -> None:
    """List the topics that the name servers know, with their queues on each broker."""
    rows: list[dict[str, Any]] = []
    with Admin(resolved_options()) as admin:
        for name in admin.topics():
            with contextlib.suppress(NoRouteError):  # The topic was deleted meanwhile.
                of_topic = _route_rows(admin.topic_route(name))
                if with_system or not _is_brokers_own(name, of_topic):
                    rows += ({"topic": name, **row} for row in of_topic)
    _print(counted(len({row["topic"] for row in rows}), "topic"), rows)


def _chosen(admin: Admin, names: Collection[str], cluster: str | None) -> list[str]:
    """Return the brokers to create a topic on. Raise ConfigurationError if one is unknown or has no
    master, because the topic would be missing there."""
    registered = admin.cluster(cluster)
    chosen = sorted(names or registered)
    absent = [name for name in chosen if 0 not in registered.get(name, {})]
    if absent or not chosen:
        where = f" in the cluster {cluster}" if cluster else ""
        raise ConfigurationError(
            f"the name servers know no master of {', '.join(absent) or 'any broker'}{where}: start "
            f"it, or name others by --broker (known: {', '.join(sorted(registered)) or 'none'})"
        )
    return chosen


@retry(
    stop=stop_after_delay(_ROUTE_S), wait=wait_fixed(0.1), reraise=True,
    retry=retry_if_exception_type(NoRouteError),
)  # fmt: skip
def _await_route(admin: Admin, name: str, wanted: set[QueueData]) -> None:
    if missing := wanted.difference(admin.topic_route(name).queues):
        brokers = ", ".join(sorted(data.broker_name for data in missing))
        raise NoRouteError(
            f"{brokers} took the topic {name}, but the name servers do not know its settings yet: "
            "look whether the broker registers with them (its option namesrvAddr)"
        )


def _is_brokers_own(name: str, rows: list[dict[str, Any]]) -> bool:
    """Return whether brokers make the topic themselves: it is a system topic, or has the name of a
    broker or a cluster (TopicConfigManager.init)."""
    named_after = {row[part] for row in rows for part in ("broker", "cluster")}
    return is_system_topic(name) or name.removesuffix("_REPLY_TOPIC") in named_after


def _route_rows(route: TopicRoute) -> list[dict[str, Any]]:
    """Return a row per broker that has queues of the topic."""
    brokers = {broker.name: broker for broker in route.brokers}
    words = {perm: text for text, perm in _PERMISSIONS.items()}
    rows = []
    for queue in sorted(route.queues, key=lambda queue: queue.broker_name):
        broker = brokers.get(queue.broker_name)
        addresses = broker.addresses if broker else {}
        rows.append(
            {
                "broker": queue.broker_name,
                "cluster": broker.cluster if broker else None,
                "master": addresses.get(0),
                "slaves": [address for number, address in sorted(addresses.items()) if number],
                "writeQueues": queue.write,
                "readQueues": queue.read,
                "permission": words.get(queue.perm & 6, "none"),
            }
        )
    return rows


def _rows(admin: Admin, name: str) -> list[dict[str, Any]]:
    rows, attributes = _route_rows(admin.topic_route(name)), admin.topic_attributes(name)
    return [{**row, "type": attributes.get(row["broker"], {}).get(_TYPE)} for row in rows]


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    if print_if_json(rows):
        return
    columns = [name for name in _COLUMNS if not rows or name in rows[0]]
    rows = [{**row, "slaves": ", ".join(row["slaves"]) or None} for row in rows]
    cells = ([row[name] for name in columns] for row in rows)
    show(table(title, [_COLUMNS[name] for name in columns], cells))
