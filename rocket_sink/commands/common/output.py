"""Output of commands: results to standard output, everything else to standard error. All commands
print through this module. It removes control characters (`rocket_sink.text`), escapes JSON, and
interprets no markup. Progress bars are for terminals; pipes and files get plain lines."""

from __future__ import annotations

import contextlib
import datetime
import enum
import io
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rocket_sink.tables import cell as cell
from rocket_sink.tables import table as table
from rocket_sink.text import clean, clean_lines, json_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

JSON: Final = "rocket_sink.json"
"""The key in a click context of the function that prints values as JSON."""
_PIPE_WIDTH: Final = 140
_TERMINAL_WIDTH: Final = 80
_TEXT_SHOWN: Final = 60
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")
_COUNT: Final = re.compile(r"\b(\d+) of (\d+)\b")


def escape_what_streams_lack() -> None:
    """Print characters that a stream's encoding (PYTHONIOENCODING, locale) lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def ignore_odd_sizes() -> None:
    """Remove $COLUMNS and $LINES if they are not decimal: rich fails with a text such as `²`."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "0").isdecimal():
            del os.environ[name]


def program() -> str:
    """Return the name by which the user called `rocket-sink`, for commands that a note suggests."""
    typed = Path(sys.argv[0])
    if typed.name != "rocket-sink" or shutil.which(typed.name) == str(typed):
        return "rocket-sink"
    return shlex.quote(sys.argv[0])


def line(text: str) -> None:
    """Print a line on standard output."""
    click.echo(clean(text))


def note(text: str) -> None:
    """Print a line on standard error. A terminal gets it wrapped at blanks; commands stay whole."""
    text = clean(text)
    if sys.stderr.isatty() and not text.startswith("  rocket-sink "):
        text = textwrap.fill(
            text, _stderr_columns(), break_long_words=False, break_on_hyphens=False,
            subsequent_indent=" " * (len(text) - len(text.lstrip()) + 2),
        )  # fmt: skip
    click.echo(text, err=True)


def _stderr_columns() -> int:
    """Return $COLUMNS, as for tables, else the width of standard error's terminal."""
    if wanted := _wanted_columns():
        return wanted
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _TERMINAL_WIDTH
    except (OSError, ValueError):
        return _TERMINAL_WIDTH


def _wanted_columns() -> int:
    """Return $COLUMNS; 0 if it is not set."""
    wanted = os.environ.get("COLUMNS", "")
    return int(wanted) if wanted.isdecimal() else 0


def note_lines(text: str) -> None:
    """Print lines on standard error."""
    click.echo(clean_lines(text), err=True)


def check_writable(path: Path) -> None:
    """Raise click.BadParameter if a file cannot be written; commands call this before the work."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise click.BadParameter(
            f"cannot write {path}: {error.strerror or error}; name a file in a folder that is "
            "there and may be written to"
        ) from error
    if not existed:
        path.unlink()


def write_file(path: Path, text: str) -> None:
    """Write a file and print a note; raise click.ClickException if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from error
    note(f"written to {path}")


class Steps:
    """Prints texts such as `3 of 134 jars`: in a terminal on one changing line, else four times."""

    def __init__(self) -> None:
        self._quarter = 0
        self._open = False

    def __call__(self, text: str) -> None:
        text = clean(text)
        match = _COUNT.search(text)
        if match is None:
            click.echo(("\n" if self._open else "") + text, err=True)
            self._open = False
        elif sys.stderr.isatty():
            done = match[1] == match[2]
            click.echo(f"\r{text}", err=True, nl=done)
            self._open = not done
        elif (quarter := 4 * int(match[1]) // int(match[2])) > self._quarter:
            self._quarter = quarter % 4  # Another count may begin after the last item.
            click.echo(text, err=True)


def show(*things: RenderableType) -> None:
    """Print tables and texts on standard output. Without a terminal, $COLUMNS is their width."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _wanted_columns() or _PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for thing in things:
        console.print(_Guarded(thing))


def rows_table(title: str, names: Sequence[str], rows: Iterable[Any]) -> Table:
    """Return a table of the columns `names`; long texts are cut, and heads have no underscores."""
    cells = ([_short(row[name]) for name in names] for row in rows)
    return table(title, [name.replace("_", " ") for name in names], cells)


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, datetime.datetime):
        return value.strftime("%m-%d %H:%M:%S")
    return clean(value, _TEXT_SHOWN) if isinstance(value, str) else value


class _Guarded:
    """A renderable without control characters in its texts."""

    def __init__(self, thing: RenderableType) -> None:
        self._thing = thing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for segment in console.render(self._thing, options):
            if segment.control:
                yield segment
            else:
                yield Segment(clean_lines(segment.text), segment.style)


def print_json(value: Any) -> None:
    """Print the value as one JSON document on standard output."""
    click.echo(_in_encoding(json_text(value, default=_plain, indent=2)))


def print_json_line(value: Any) -> None:
    click.echo(_in_encoding(json_text(value, default=_plain)))


def json_printer() -> Callable[[Any], None] | None:
    """Return the function that prints a value as JSON; None if no command with --json runs in this
    thread."""
    context = click.get_current_context(silent=True)
    return context.meta.get(JSON) if context else None


def print_if_json(value: Any) -> bool:
    """Print the value if the running command has --json; return whether it has."""
    if printer := json_printer():
        printer(value)
    return printer is not None


def _in_encoding(document: str) -> str:
    """Return JSON text that standard output can encode."""
    try:
        document.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return _NOT_ASCII.sub(lambda run: json.dumps(run[0])[1:-1], document)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return str(value)


@contextlib.contextmanager
def step(text: str, *, every_s: float = 5.0) -> Iterator[None]:
    """Print `text`, and then every few seconds the time that the context has taken so far."""
    note(f"{text} ...")
    is_over, started_s = threading.Event(), time.monotonic()

    def remind() -> None:
        while not is_over.wait(every_s):
            note(f"{text}: {time.monotonic() - started_s:.0f} s so far")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    finally:
        is_over.set()
        reminder.join()


class Bar:
    """A step's progress: a bar in a terminal, else a line every few seconds. Not thread-safe."""

    def __init__(self, label: str, total: int, *, every_s: float = 5.0) -> None:
        self.label = label
        self.total = total
        self._every_s = every_s
        self._done = 0
        self._started_s = self._shown_s = time.monotonic()
        self._rich: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if not sys.stderr.isatty():
            note(f"{self.label} ...")
            return self
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._rich = Progress(
            TextColumn("{task.description:<26}", markup=False), BarColumn(bar_width=30),
            MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[remark]}", markup=False),
            console=console,
        )  # fmt: skip
        self._task = self._rich.add_task(clean(self.label), total=self.total or None, remark="")
        self._rich.start()
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif failure is None:
            seconds = time.monotonic() - self._started_s
            note(f"{self.label}: {self._done:,} in {seconds:.1f} s")

    def advance_to(self, done: int, remark: str = "") -> None:
        """Show that `done` of `total` items are finished, with `remark` beside the bar."""
        self._done = done
        if self._rich is not None:
            self._rich.update(self._task, completed=done, remark=clean(remark))
            return
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            note(f"{self.label}: {done:,} of {self.total:,} {remark}".rstrip())

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._rich is not None:
            self._rich.console.print(clean(text))
        else:
            note(text)
