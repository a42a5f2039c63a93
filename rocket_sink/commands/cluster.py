"""`rocket-sink cluster`: a local RocketMQ, detached from the command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from rocket_sink import cluster as clusters
from rocket_sink.commands.common.base import Group, count_option, json_option
from rocket_sink.commands.common.output import Steps, line, note, print_if_json, show, table

_home = click.option(
    "--home", type=click.Path(file_okay=False, path_type=Path),
    callback=lambda context, parameter, home: home or clusters.default_home(),
    help="Folder of its data. Default: one in the user's data folder.",
)  # fmt: skip


@click.group(cls=Group)
def cluster() -> None:
    """Start, inspect and stop a local RocketMQ cluster.

    A real name server and real brokers on loopback, on free ports; RocketMQ is fetched from Maven
    Central once and cached.
    """


@cluster.command(
    example="""
    rocket-sink cluster up --brokers 3
    rocket-sink cluster up --home ./mq --json | jq -r .name_server"""
)
@_home
@click.option("--brokers", type=click.IntRange(1, 64), default=2, help="Number of brokers.")
@count_option("--queues", default=4, help="Queues per broker of a topic made on the fly.")
@click.option("--version", help="RocketMQ version. Default: 5.5.0.")
@click.option("--tls", type=click.Choice(["permissive", "enforcing"]), help="Serve TLS.")
@json_option
def up(home: Path, brokers: int, queues: int, version: str | None, tls: str | None) -> None:
    """Start the cluster and wait until it stores messages; do nothing if it runs already."""
    state = clusters.up(
        home, brokers, queues=queues, tls=tls, version=version or clusters.DEFAULT_VERSION,
        progress=Steps(),
    )  # fmt: skip
    _print(state)


@cluster.command(example="    rocket-sink cluster status --json")
@_home
@json_option
def status(home: Path) -> int:
    """Show the cluster; exit code 1 unless all of it runs."""
    state = clusters.status(home)
    if state is None:
        if not print_if_json({"running": False, "nodes": []}):
            note(f"no cluster runs in {home}")
        return 1
    _print(state)
    if not state.ready:
        note("it is starting, or its start was cut short: repeat the command that started it")
    elif not state.running:
        words = ["rocket-sink", "cluster", "up", "--home", str(state.home), "--version",
                 state.version, "--brokers", str(len(state.brokers)), "--queues",
                 str(state.queues), *(["--tls", state.tls] if state.tls else [])]  # fmt: skip
        note("start the processes that have ended:")
        note(f"  {shlex.join(words)}")
    return 0 if state.running else 1


@cluster.command(example="    rocket-sink cluster down")
@_home
@json_option
def down(home: Path) -> None:
    """Stop what `up` started, and only that; its data stays."""
    if clusters.status(home):
        note("stopping (brokers take some seconds for a clean shutdown)")
    was_running = clusters.down(home, progress=Steps())
    if not print_if_json({"ended": was_running}):
        note("stopped" if was_running else f"no cluster runs in {home}")


def _print(state: clusters.ClusterState) -> None:
    facts: dict[str, Any] = state.to_dict()
    if print_if_json(facts):
        return
    rows = [
        (node["name"], node["address"], str(node["pid"]), "running" if node["alive"] else "ended")
        for node in facts["nodes"]
    ]
    line(f"RocketMQ {state.version} in {state.home}")
    names = ("process", "address", "pid", "state")
    show(table("", names, rows, numbers="pid"), f"name server: {state.name_server}")
    if state.running:
        is_default = state.home == clusters.default_home()
        folder = "" if is_default else f" --home {shlex.quote(str(state.home))}"
        note("let commands find it, create a topic on all its brokers, stop it:")
        note(f"  export NAMESRV_ADDR={state.name_server}")
        note("  rocket-sink topic create NAME")
        note(f"  rocket-sink cluster down{folder}")
