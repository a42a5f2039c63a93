"""`rocket-sink routes`: the route of a topic."""

from __future__ import annotations

from typing import Any, Final

import click

from rocket_sink.commands.common.base import Command, json_option
from rocket_sink.commands.common.output import print_if_json, show, table
from rocket_sink.commands.common.sink_input import resolved_options, sink_options
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.codes import PermName
from rocket_sink.wire.route import TopicRoute

PERMISSIONS: Final = {
    "read and write": PermName.READ | PermName.WRITE,
    "read": PermName.READ,
    "write": PermName.WRITE,
}


@click.command(
    cls=Command,
    example="""
    rocket-sink routes -n 127.0.0.1:9876 -t flights""",
)
@sink_options("nameServer", "topic")
@json_option
def routes() -> None:
    """Show the brokers and queues of a topic."""

    options = resolved_options()
    if not options.topic:
        raise click.UsageError("which topic? give --topic NAME")
    with Admin(options) as admin:
        route = admin.topic_route(options.topic)
    rows = route_rows(route)
    facts = {"topic": options.topic, "orderTopicConf": route.order_topic_conf, "brokers": rows}
    if print_if_json(facts):
        return
    columns = ("broker", "master", "slaves", "write queues", "read queues", "permission")
    show(
        table(
            f"topic {options.topic}", columns,
            ([row["broker"], row["master"], ", ".join(row["slaves"]) or None, row["writeQueues"],
              row["readQueues"], row["permission"]] for row in rows),
        )
    )  # fmt: skip


def route_rows(route: TopicRoute) -> list[dict[str, Any]]:
    """Return a row per broker that has queues of the topic."""
    brokers = {broker.name: broker for broker in route.brokers}
    words = {perm: text for text, perm in PERMISSIONS.items()}
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
