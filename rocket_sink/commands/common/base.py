"""Code that commands share: click classes, one-line errors, times as parameters, end by signals."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, TypeVar

import click

from rocket_sink.commands.common.output import JSON, print_json, print_json_line
from rocket_sink.errors import RocketSinkError
from rocket_sink.text import clean, nearest

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def together(*options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Join the options of a command in one decorator, in the order of its help."""
    return lambda function: functools.reduce(
        lambda command, option: option(command), reversed(options), function
    )


def _pairs(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """Return {name: value} of texts of the form `NAME=VALUE`."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        values[name.strip()] = value
    return values


pairs_option: Final = functools.partial(
    click.option, multiple=True, metavar="NAME=VALUE", callback=_pairs
)
"""`click.option` for repeatable texts `NAME=VALUE`; the command gets them as a dict."""
count_option: Final = functools.partial(click.option, type=click.IntRange(1))
"""`click.option` for a whole number from 1 on."""


def _json_option(printer: Callable[[Any], None], text: str) -> Callable[[Decorated], Decorated]:
    def keep(context: click.Context, _: click.Parameter, is_set: bool) -> None:
        if is_set:
            context.meta[JSON] = printer

    return click.option("--json", is_flag=True, expose_value=False, callback=keep, help=text)


json_option: Final = _json_option(print_json, "As JSON.")
json_lines_option: Final = functools.partial(_json_option, print_json_line)
"""The option --json of a command that prints one JSON object per line; the argument is its help."""


class Command(click.Command):
    """A command with an example and the defaults in its help; `--debug` may follow its name."""

    def __init__(self, *, example: str = "", **more: Any) -> None:
        super().__init__(context_settings={"show_default": True}, **more)
        self.example = example
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, hidden=True))

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but let errors about an option without a value name the command."""
        try:
            return super().parse_args(context, args)
        except click.UsageError as error:
            error.ctx = error.ctx or context
            raise

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example, one command per line, unwrapped."""
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n" if line.strip() else "\n")


class Group(click.Group):
    command_class = Command

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names in the order of definition."""
        return list(self.commands)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name suggest the nearest command."""
        name = args[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            names = self.list_commands(context)
            near = nearest(name, names)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"
            raise click.UsageError(f"no such command {name!r}; {hint}", context)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List each command with the whole first sentence of its help, which click would cut."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=1000))
                    for name, command in self.commands.items()
                ]
            )


class LazyGroup(Group):
    """A group that imports a command on use; `lazy` is {command: its line in --help}."""

    def __init__(self, *arguments: Any, lazy: Mapping[str, str], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.lazy = lazy

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.lazy:
            return None
        command = getattr(importlib.import_module(f"rocket_sink.commands.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lazy.items()))


def debug_wanted(arguments: Sequence[str]) -> bool:
    """Return whether --debug is among the raw arguments, which click may be unable to parse."""
    before_end = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--debug" in before_end


_OURS: Final = re.compile(r"rocket_sink\.errors\.(\w+): (.+)")
"""A rocket-sink error at the end of a worker's traceback in a Spark exception."""
_JAVA: Final = re.compile(r"^(?:: |Caused by: )([\w.$]+(?:Exception|Error)): (.+)", re.MULTILINE)
"""The lines of py4j's text that name the error of Java, and then its causes."""
_PYTHON: Final = re.compile(
    r"^(?!Caused by|org\.|java\.)[\w.]+(?:Error|Exception): .+", re.MULTILINE
)
"""The last line of a Python traceback in a Spark exception; lines of Java's traces do not match."""
_NOT_THERE: Final = (
    "the executors have no rocket_sink: give it to them by --py-files as a .zip (a .whl under that "
    "name will do), by --archives, or install it there (docs/deploy/executors.md)"
)
_LONGEST: Final = 600


def one_line(error: BaseException) -> str:
    """Return the error without Spark's Python and Java traces, cut to 600 characters: the innermost
    rocket-sink error in the text, else the first line."""
    text = str(error)
    if isinstance(error, RocketSinkError):
        first, _, more = text.strip().partition("\n")
        return _short(first) + (" (--debug shows them all)" if more else "")
    own_errors = _OURS.findall(text)
    if own_errors:
        return _short(own_errors[-1][1])
    if "No module named 'rocket_sink" in text:
        return _NOT_THERE
    if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
        return _short(_spark_text(error))
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def usage_line(error: click.ClickException) -> str:
    """Return a line that names the command, the mistake in its arguments, and what to do."""
    context: click.Context | None = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "rocket-sink"
    text = " ".join(error.format_message().split())
    if not text.endswith("..."):
        text = text.removesuffix(".")
    if text[1:2].islower():
        text = text[:1].lower() + text[1:]
    if context is not None and not text.endswith("?") and ";" not in text:
        text += f"; {where} --help shows what it takes"
    return clean(f"{where}: {text}")


def _spark_text(error: BaseException) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    workers = _PYTHON.findall(text) if "PYTHON" in first else []
    if workers:
        return str(workers[-1])
    if "An error occurred while calling" in first:
        errors = [f"{name.rpartition('.')[2]}: {more}" for name, more in _JAVA.findall(text)]
        return errors[:2][-1] if errors else first
    return first


def _short(text: str) -> str:
    return clean(" ".join(text.split()), _LONGEST)


_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def time_value(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> dt.datetime | None:
    """Parse a time for click: `2026-01-31T12:00` (UTC), or `90m` or `2d` before now."""
    if value is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)
    except ValueError:
        pass
    if back := re.fullmatch(r"(\d+)([smhd])", value):
        with contextlib.suppress(ValueError, OverflowError):  # too many digits, or too long ago
            seconds = int(back[1]) * _SECONDS[back[2]]
            return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=seconds)
    raise click.BadParameter(
        f"{value!r} is neither a time as 2026-01-31T12:00 nor a duration as 90m"
    )


def time_ms(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse a time as `time_value` does; return milliseconds since 1970."""
    moment = time_value(context, parameter, value)
    return None if moment is None else (moment - _EPOCH) // dt.timedelta(milliseconds=1)


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let a function handle SIGTERM and SIGINT while the context lasts. Main thread only."""
    earlier = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in earlier.items():
            signal.signal(number, previous)
