"""Sink options on a command line: `-O name=value`, flags for the common ones, `--conf FILE`.

Priority: flag, `-O`, file, environment (`NAMESRV_ADDR`, as in the Java client), the local cluster
of `rocket-sink cluster up`. A configuration file has `name = value` lines and `#` comments.
`[section]` heads are allowed, but have no meaning."""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from rocket_sink.cluster.detached import status
from rocket_sink.commands.common.base import Decorated, together
from rocket_sink.commands.common.output import note
from rocket_sink.errors import OptionError, RocketSinkError
from rocket_sink.ledger.path import is_table_name
from rocket_sink.message_rules import FORBIDDEN_TOPICS
from rocket_sink.option_spec import REFERENCES, Kind
from rocket_sink.options import SinkOptions, check_topic_option, environ_name_servers, find_option
from rocket_sink.producer.admin.admin import Admin

_SHORT: Final = {
    "nameServer": "-n",
    "topic": "-t",
    "ledger": "-l",
    "maxMessagesPerSecond": "--rate",
}
_TOP: Final = "\0top"
"""The section of the lines before the first heading; no file can have a section of this name."""
_METAVARS: Final = {
    "nameServer": "HOST:PORT[;...]", "ledger": "PATH", "maxMessagesPerSecond": "N",
    "maxBytesPerSecond": "SIZE", "columns": "COLUMN=SOURCE[,...]",
}  # fmt: skip


def sink_options(*names: str) -> Callable[[Decorated], Decorated]:
    """Add `-O`, `--conf` and a flag for each named option to a command; see `given_options`."""
    return together(*map(_flag, names), *_SHARED)


def _flag(name: str) -> Callable[[Decorated], Decorated]:
    option = find_option(name)
    spelled = "--" + "".join(f"-{c.lower()}" if c.isupper() else c for c in option.name)
    spellings = [spelled, _SHORT[name]] if name in _SHORT else [spelled]

    def keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            _given(context, "flags")[option.name] = value

    return click.option(
        *spellings,
        metavar=_METAVARS.get(name, "|".join(option.choices) or "TEXT"),
        help=option.help[0].upper() + option.help[1:] + ".",
        expose_value=False,
        callback=keep,
    )


def _keep_many(context: click.Context, _: click.Parameter, values: tuple[str, ...]) -> None:
    for value in values:
        name, equals, text = value.partition("=")
        if not equals:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        option = find_option(name.strip())
        if option.name in _given(context, "many"):
            raise click.BadParameter(f"option {option.name} is given twice")
        _given(context, "many")[option.name] = text
        if option.kind is Kind.SECRET and not text.startswith(REFERENCES):
            note(
                f"{option.name} on a command line is seen by all users of this host (ps), and "
                "stays in the shell's history; give env:NAME or file:PATH instead"
            )


def _keep_file(context: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is not None:
        _given(context, "file").update(read_conf(path))


def read_conf(path: str | Path) -> dict[str, str]:
    """Return {option name: text} of a configuration file; values are not parsed. Raise OptionError
    if the file is unreadable or malformed, or has an unknown or repeated option."""
    parser = _parsed_conf(Path(path))
    values: dict[str, str] = {}
    for section in parser.sections():
        for name, value in parser.items(section):
            try:
                option = find_option(name)
            except OptionError as error:
                where = path if section == _TOP else f"{path} [{section}]"
                raise OptionError(f"{where}: {error}", option=name) from None
            if option.name in values:
                raise OptionError(f"{path}: option {option.name} is given twice", option=name)
            values[option.name] = value
    return values


def _parsed_conf(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#",), default_section="\0none"
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
        parser.read_string(f"[{_TOP}]\n{text}", source=str(path))
    except OSError as error:
        raise OptionError(
            f"cannot read the configuration {path}: {error.strerror}; rocket-sink options --conf "
            "--out FILE makes one"
        ) from None
    except (configparser.Error, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        raise OptionError(
            f"{path} is not a configuration of 'name = value' lines: {line}"
        ) from None
    return parser


_SHARED: Final = (
    click.option(
        "--conf", metavar="FILE", type=click.Path(dir_okay=False), expose_value=False,
        callback=_keep_file, help="Configuration file (rocket-sink options --conf writes one).",
    ),
    click.option(
        "-O", "--option", metavar="NAME=VALUE", multiple=True, expose_value=False,
        callback=_keep_many,
        help="Any option of the sink (rocket-sink options lists them); repeatable.",
    ),
)  # fmt: skip


group_option: Final = click.option(
    "--group", "-g", default="", metavar="NAME", show_default=False,
    help="Compare the ledger's offsets with the positions of this consumer group.",
)  # fmt: skip


def _given(context: click.Context, source: str) -> dict[str, str]:
    values: dict[str, str] = context.meta.setdefault(f"rocket_sink.{source}", {})
    return values


def given_options() -> dict[str, Any]:
    """Return {option name: value} of the running command, with the ledger's absolute path. If no
    name server is given, add that of the environment or of the local cluster."""
    context = click.get_current_context()
    values: dict[str, Any] = {}
    for source in ("file", "many", "flags"):
        values.update(_given(context, source))
    if ledger := str(values.get("ledger") or "").strip():
        values["ledger"] = absolute(ledger)
    if not values.get("nameServer") and (address := environ_name_servers() or _local_name_server()):
        values["nameServer"] = address
    return values


def resolved_options() -> SinkOptions:
    """Return the running command's options, checked; raise the errors of `checked_options`."""
    return checked_options(given_options())


def checked_options(values: Mapping[str, Any]) -> SinkOptions:
    """Return the options of a command that needs a name server. Raise OptionError if an option is
    wrong, or no name server is among them."""
    options = SinkOptions.parse(values)
    if not options.name_server.strip(" ;"):
        raise OptionError(
            "option nameServer is missing: give --name-server HOST:PORT, or start a local cluster: "
            "rocket-sink cluster up",
            option="nameServer",
        )
    _ = options.name_servers
    check_topic_name(options.topic)
    return options


def check_topic_name(topic: str) -> None:
    """Raise OptionError if a topic cannot have this name. Readers may name system topics."""
    if topic and topic not in FORBIDDEN_TOPICS:
        check_topic_option("topic", topic)


def check_name_server(options: SinkOptions) -> None:
    """Check that a name server answers, before work that takes long.

    Raises:
        NameServerUnavailableError: no name server answers.
        TlsRefusedError: no name server answers, because TLS fails with each.
    """

    with Admin(options) as admin:
        admin.check_name_servers()


def _local_name_server() -> str | None:
    """Return host:port of the name server of the cluster in the default folder, if it runs."""
    try:
        state = status()
    except (RocketSinkError, OSError):
        return None
    if not (state and state.running):
        return None
    note(f"name server: {state.name_server} (the local cluster)")
    return state.name_server


def absolute(path: str) -> str:
    """Return a local path as an absolute path, for Spark's processes; URIs and tables' names are
    unchanged."""
    if re.match(r"[\w+.-]{2,}:/", path) or is_table_name(path):
        return path
    return str(Path(path).expanduser().absolute())
