"""`rocket-sink options`: the option table in a terminal and as JSON; configurations."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

import click

from rocket_sink.commands.common.base import Command
from rocket_sink.commands.common.output import check_writable, print_json, show, table, write_file
from rocket_sink.option_spec import Kind, Option
from rocket_sink.options import GROUPS, options_in


@click.command(
    cls=Command,
    example="""
    rocket-sink options --group delivery
    rocket-sink options --conf > rocket-sink.conf""",
)
@click.option("--group", type=click.Choice(GROUPS), multiple=True, help="Only this group.")
@click.option("--conf", "form", flag_value="conf", help="As a commented configuration file.")
@click.option("--json", "form", flag_value="json", help="As JSON.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write --conf to this file.")
def options(group: tuple[str, ...], form: str | None, out: str | None) -> None:
    """List every option of the sink, or write a configuration.

    Names match in any spelling: nameServer, name_server and NAME-SERVER are one option.
    """
    if out and form != "conf":
        raise click.UsageError("--out goes with --conf")
    if group and form == "conf":
        raise click.UsageError("--group goes with the table and with --json")
    if out:
        check_writable(Path(out))
        write_file(Path(out), conf_text())
        return
    if form == "conf":
        click.echo(conf_text(), nl=False)
        return
    chosen = options_in(group or GROUPS)
    if form == "json":
        print_json([{fact: getattr(option, fact) for fact in _FACTS} for option in chosen])
        return
    for name in group or GROUPS:
        rows = [(o.name, default_text(o), described(o)) for o in options_in([name])]
        show(table(name, ("option", "default", "what it is"), rows))


def described(spec: Option) -> str:
    """Return the option's help, with its choices."""
    if spec.choices and not all(choice in spec.help for choice in spec.choices):
        return f"{spec.help} ({', '.join(spec.choices)})"
    return spec.help


_FACTS: Final = ("name", "default", "kind", "unit", "group", "choices", "aliases", "java", "help")
_EXAMPLES: Final = {
    "nameServer": "127.0.0.1:9876",
    "topic": "flights",
    "ledger": "/data/ledger",
    "accessKey": "env:ROCKETMQ_ACCESS_KEY",
    "secretKey": "file:/run/secrets/rocketmq",
    "securityToken": "env:ROCKETMQ_SECURITY_TOKEN",
    "tlsKeyPassword": "env:ROCKETMQ_TLS_KEY_PASSWORD",
    "columns": "body=payload, keys=order_id",
}
HEAD: Final = """\
# rocket-sink configuration: every option with its default, commented out.
# Used by `rocket-sink COMMAND --conf FILE`; an option on the command line wins over the file.
# Durations take ms, s, m, h (without a unit: that of the default); sizes take KiB, MiB.
# Secrets: write env:NAME or file:PATH, not the secret itself.
# Made by `rocket-sink options --conf`.
"""


def conf_text() -> str:
    """Return a configuration with every option commented out at its default."""
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"\n[{group}]\n")
        parts += [_conf_entry(option) for option in options_in([group])]
    return "".join(parts)


def _conf_entry(spec: Option) -> str:
    notes = [spec.help]
    if spec.choices:
        notes.append(f"one of: {', '.join(spec.choices)}")
    comment = textwrap.fill("; ".join(notes), 96, initial_indent="# ", subsequent_indent="# ")
    value = default_text(spec) or _EXAMPLES.get(spec.name, "")
    return f"\n{comment}\n#{spec.name} = {value}".rstrip() + "\n"


def default_text(spec: Option) -> str:
    """Return the default with its unit; empty if there is none."""
    shown = spec.shown(spec.default)
    if not shown:
        return ""
    if spec.kind is Kind.BYTES and isinstance(spec.default, int):
        return _size(spec.default)
    return f"{shown} {spec.unit}".rstrip()


def _size(count: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} B"
