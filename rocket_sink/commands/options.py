"""`rocket-sink options`: the option table, as a table, as a configuration file, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rocket_sink.commands.common.base import Command
from rocket_sink.commands.common.output import print_json, show, table
from rocket_sink.commands.conf_file import conf_text, default_text, markdown_table
from rocket_sink.option_spec import Option
from rocket_sink.options import GROUPS, options_in


@click.command(
    cls=Command,
    example="""
    rocket-sink options --group delivery
    rocket-sink options --conf > rocket-sink.conf""",
)
@click.option("--group", type=click.Choice(GROUPS), multiple=True, help="Only this group.")
@click.option("--conf", "form", flag_value="conf", help="As a commented configuration file.")
@click.option("--markdown", "form", flag_value="markdown", help="As the README's tables.")
@click.option("--json", "form", flag_value="json", help="As JSON.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write --conf or --markdown here.")
def options(group: tuple[str, ...], form: str | None, out: str | None) -> None:
    """List every option of the sink, or write a configuration.

    Names match in any spelling: nameServer, name_server and NAME-SERVER are one option.
    """
    if out and form not in ("conf", "markdown"):
        raise click.UsageError("--out goes with --conf or --markdown")
    if group and form in ("conf", "markdown"):
        raise click.UsageError("--group goes with the table and with --json")
    if form in ("conf", "markdown"):
        text = conf_text() if form == "conf" else markdown_table()
        if out:
            Path(out).write_text(text, encoding="utf-8")
        else:
            click.echo(text, nl=False)
        return
    chosen = options_in(group or GROUPS)
    if form == "json":
        print_json([_as_json(known) for known in chosen])
        return
    for name in group or GROUPS:
        rows = [(o.name, default_text(o), _words(o)) for o in options_in([name])]
        show(table(name, ("option", "default", "what it is"), rows))


def _words(known: Option) -> str:
    if known.choices and not all(choice in known.help for choice in known.choices):
        return f"{known.help} ({', '.join(known.choices)})"
    return known.help


def _as_json(known: Option) -> dict[str, Any]:
    return {
        "name": known.name,
        "default": known.default,
        "kind": known.kind.value,
        "unit": known.unit,
        "group": known.group,
        "choices": list(known.choices),
        "aliases": list(known.aliases),
        "java": known.java,
        "help": known.help,
    }
