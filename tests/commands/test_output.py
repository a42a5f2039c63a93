"""The places of printed text, and its look outside a terminal."""

import ast
import datetime as dt
import json
import re
import sys
import time
from pathlib import Path
from types import MappingProxyType

import click
import pytest

import rocket_sink
from rocket_sink.cli import main
from rocket_sink.commands.common import output
from rocket_sink.commands.common.output import Bar, Steps, cell, print_json, step, table
from rocket_sink.commands.common.output import show as show_tables
from rocket_sink.errors import Outcome
from rocket_sink.spark.backfill.parking import Parked

COMMANDS = Path(rocket_sink.__file__).parent / "commands"
PRINTS = re.compile(r"click\.s?echo|print|.*Console.*|sys\.std(out|err)\.write.*")


def test_a_long_step_says_that_it_goes_on(capsys):
    until_s = time.monotonic() + 60
    text = ""
    with step("reading", every_s=0.01):
        while text.count("so far") < 2 and time.monotonic() < until_s:
            text += capsys.readouterr().err
            time.sleep(0.01)
    assert text.startswith("reading ...\nreading: 0 s so far\n")


def test_commands_print_by_this_module_only():
    """Only this module cleans text: other ways would bring a peer's text to the terminal raw."""
    printing = set()
    for path in [*COMMANDS.rglob("*.py"), COMMANDS.parent / "cli.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                if PRINTS.fullmatch(function):
                    printing.add(path.relative_to(COMMANDS.parent).as_posix())
    # options.py prints the configuration file that it makes, which holds no peer's text.
    assert printing == {"commands/common/output.py", "commands/options.py"}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_counted_steps_are_one_changing_line_or_quarters(is_terminal, capsys, monkeypatch):
    """Show a second count as well: jars with wrong digests are fetched again."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    steps = Steps()
    for total in (134, 3):
        steps("fetching")
        for number in range(1, total + 1):
            steps(f"fetching: {number} of {total} jars")
    steps("fetching: 1 of 9 jars")
    steps("done")
    text = capsys.readouterr().err
    if is_terminal:
        assert text.startswith("fetching\n\rfetching: 1 of 134 jars\rfetching: 2 of 134")
        assert text.endswith("\rfetching: 3 of 3 jars\n\rfetching: 1 of 9 jars\ndone\n")
        assert text.count("\n") == 6
    else:
        numbers = [line.partition(" of ")[0] for line in text.splitlines()]
        assert numbers == ["fetching", *(f"fetching: {n}" for n in (34, 67, 101, 134)),
                           "fetching", *(f"fetching: {n}" for n in (1, 2, 3)), "done"]  # fmt: skip


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 140), ("0", 140)])
def test_a_pipe_is_as_wide_as_columns_says(columns, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    show_tables(table("", ("text",), [["word " * 100]]))
    lines = capsys.readouterr().out.splitlines()
    assert width - 5 <= max(map(len, lines)) <= width


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar(is_terminal, capsys, monkeypatch):
    """Texts in brackets and names of emoji stay as they are."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    long = "a thing [b]happened[/b] :bomb: " * 9
    with Bar("send [b]", 1000, every_s=0) as bar:
        bar.advance_to(500, "half [i]")
        bar.say(long)
        bar.advance_to(1000, "all [i]")
    captured = capsys.readouterr()
    assert captured.out == "" and long.rstrip() in captured.err
    if is_terminal:
        assert all(part in captured.err for part in ("send [b]", "1000/1000", "all [i]"))
    else:
        lines = captured.err.splitlines()
        assert lines[:2] == ["send [b] ...", "send [b]: 500 of 1,000 half [i]"]
        assert lines[3] == "send [b]: 1,000 of 1,000 all [i]"
        assert re.fullmatch(r"send \[b\]: 1,000 in 0\.\d s|send .* in [1-9].*", lines[4])


def test_a_bar_that_fails_does_not_say_done(capsys):
    with pytest.raises(ValueError, match="x"), Bar("send", 10) as bar:
        bar.advance_to(5)  # Lines come every few seconds only.
        raise ValueError("x")
    assert capsys.readouterr().err == "send ...\n"


@pytest.mark.parametrize("existing", [None, "earlier"])
def test_a_file_that_cannot_be_written_is_refused_and_one_that_can_be_stays(
    existing, tmp_path, capsys
):
    file = tmp_path / "report.html"
    if existing:
        file.write_text(existing)
    output.check_writable(file)
    assert (file.read_text() if file.exists() else None) == existing
    output.write_file(file, "zażółć")
    assert file.read_text(encoding="utf-8") == "zażółć"
    assert capsys.readouterr().err == f"written to {file}\n"
    with pytest.raises(click.ClickException, match=r"cannot write .*: Is a directory"):
        output.write_file(tmp_path, "x")


def test_rows_are_cut_and_joined_for_a_table(capsys):
    at = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
    row = {"error_text": "x" * 61, "keys": ["a", "b"], "at": at, "count": 1000, "other": 1}
    show_tables(output.rows_table("two [b]", ("error_text", "keys", "at", "count"), [row]))
    out = " ".join(capsys.readouterr().out.split())
    assert "two [b]" in out and "error text" in out and " a b 01-02 03:04:05 1,000" in out
    assert "x" * 56 in out and "x" * 61 not in out and "other" not in out


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (True, "yes"), (False, "no"), (1234567, "1,234,567"), (1.25, "1.25"),
        (250.25, "250.2"),
        ("[red]x[/]", "[red]x[/]"), (dt.date(2026, 1, 2), "2026-01-02"),
    ],
)  # fmt: skip
def test_cells(value, shown):
    assert cell(value) == shown
    (column,) = table("", ("value",), [[value]]).columns
    assert (column.justify == "right") == (type(value) in (int, float, type(None)))


def test_json_takes_our_values(capsys):
    print_json({
        "outcome": Outcome.ACKED, "at": dt.datetime(2026, 1, 2, 3), "body": b"\xff1",
        "map": MappingProxyType({"a": 1}), "day": dt.date(2026, 1, 2), "path": Path("/a"),
        "report": Parked(1, ("b",)),
    })  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {
        "outcome": "acked", "at": "2026-01-02T03:00:00", "body": "\ufffd1", "map": {"a": 1},
        "day": "2026-01-02", "path": "/a", "report": {"count": 1, "left_out": ["b"]},
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 72, 80, 85, 90, 100, 120])
def test_tables_break_no_word_that_fits_a_line(width, capsys, monkeypatch):
    names = ["broker", "attempts", "not acked", "p99 ms", "cause", "last (UTC)", "example"]
    example = "cannot connect to 127.0.0.1:29126: ECONNREFUSED"
    row = ["broker-of-the-night", 1234567, 8, 676.25, "CONNECTION_LOST", "11-23 08:04:31", example]
    words = {word for text in (*names, *map(cell, row)) for word in text.split()}
    monkeypatch.setattr(output, "_PIPE_WIDTH", width)
    show_tables(table("Latency per broker", names, [row, row]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(lines).split()
    assert words <= set(shown) and shown.count("broker-of-the-night") == 2
    monkeypatch.setattr(output, "_PIPE_WIDTH", 16)
    show_tables(table("", ["", "two"], [["lost-msg", "more"]]))
    assert capsys.readouterr().out == "lost-msg\n  two more\n\n"


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (".venv/bin/rocket-sink", ".venv/bin/rocket-sink"),
        ("/opt/my venv/bin/rocket-sink", "'/opt/my venv/bin/rocket-sink'"),
        ("/on/path/rocket-sink", "rocket-sink"),
        ("/usr/lib/python3/site-packages/pytest/__main__.py", "rocket-sink"),
    ],
)
def test_commands_to_type_next_are_called_as_this_one(typed, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", [typed, "demo"])
    monkeypatch.setattr("shutil.which", lambda name: f"/on/path/{name}")
    assert output.program() == shown


def test_a_width_that_is_no_number_is_none(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "\N{SUPERSCRIPT TWO}")
    assert main(["options"]) == 0
    out, err = capsys.readouterr()
    assert "nameServer" in out and err == ""
