"""The places of printed text, and its look outside a terminal."""

import ast
import datetime as dt
import json
import time
from pathlib import Path
from types import MappingProxyType

import pytest

import rocket_sink
from rocket_sink.cli import main
from rocket_sink.commands.common import output
from rocket_sink.commands.common.output import Bar, Steps, cell, print_json, step, table
from rocket_sink.commands.common.output import show as show_tables
from rocket_sink.errors import Outcome

COMMANDS = Path(rocket_sink.__file__).parent / "commands"


def test_a_long_step_says_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    until_s = time.monotonic() + 60
    text = ""
    with step("reading", every_s=0.01):
        while text.count("so far") < 2 and time.monotonic() < until_s:
            text += capsys.readouterr().err
            time.sleep(0.01)
    assert text.startswith("reading ...\nreading: 0 s so far\n")


def test_commands_print_by_this_module_only() -> None:
    """Only this module cleans text: other ways would bring a peer's text to the terminal raw."""
    printing = set()
    for path in [*COMMANDS.rglob("*.py"), COMMANDS.parent / "cli.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                if function in ("click.echo", "click.secho", "print") or "Console" in function:
                    printing.add(path.relative_to(COMMANDS.parent).as_posix())
                if function.startswith(("sys.stdout.write", "sys.stderr.write")):
                    printing.add(path.relative_to(COMMANDS.parent).as_posix())
    # options.py prints the configuration file that it makes, which holds no peer's text.
    assert printing == {"commands/common/output.py", "commands/options.py"}


def test_counted_steps_are_printed_by_quarters(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps()
    steps("fetching")
    for number in range(1, 135):
        steps(f"fetching: {number} of 134 jars")
    steps("done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching"
    assert lines[-2:] == ["fetching: 134 of 134 jars", "done"]
    assert len(lines) == 6


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 140), ("0", 140)])
def test_a_pipe_is_as_wide_as_columns_says(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show_tables(table("", ("text",), [["word " * 100]]))
    lines = capsys.readouterr().out.splitlines()
    assert width - 5 <= max(map(len, lines)) <= width


def test_a_bar_outside_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("send", 10, every_s=0) as bar:
        bar.advance_to(5, "half")
        bar.say("a thing happened")
        bar.advance_to(10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "send: 5 of 10 half" in captured.err
    assert "a thing happened" in captured.err
    assert captured.err.splitlines()[-1].startswith("send: 10 in ")


def test_a_bar_that_fails_does_not_say_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), Bar("send", 10):
        raise ValueError("x")
    assert " in " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (True, "yes"), (False, "no"), (1234567, "1,234,567"), (1.25, "1.25"),
        (250.25, "250.2"),
        ("[red]x[/]", "[red]x[/]"), (dt.date(2026, 1, 2), "2026-01-02"),
    ],
)  # fmt: skip
def test_cells(value: object, shown: str) -> None:
    assert cell(value) == shown
    (column,) = table("", ("value",), [[value]]).columns
    assert (column.justify == "right") == (type(value) in (int, float, type(None)))


def test_json_takes_our_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(
        {
            "outcome": Outcome.ACKED, "at": dt.datetime(2026, 1, 2, 3), "body": b"\xff1",
            "map": MappingProxyType({"a": 1}),
        }
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {
        "outcome": "acked",
        "at": "2026-01-02T03:00:00",
        "body": "\ufffd1",
        "map": {"a": 1},
    }


def test_a_backfill_of_nothing_prints_that(capsys: pytest.CaptureFixture[str]) -> None:
    from rocket_sink.commands.backfill import _print_done
    from rocket_sink.spark.backfill.backfill import Plan
    from rocket_sink.spark.backfill.resend import Resent

    for plan, text in (
        (Plan(), "nothing to send: no dead letters are pending"),
        (Plan(pending=3, left_alone=1, behind=2), "--again sends them"),
        (Plan(pending=3, by_reason={"data": 3}), "--reason data tries"),
        (Plan(pending=3, by_reason={"transport": 3}), "none of the 3 pending dead letters"),
        (Plan(pending=3, without_topic=3), "3 have no topic: --to-topic names one"),
    ):
        _print_done(plan, Resent(), "dead letters")
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 60, 72, 80, 85, 90, 100, 120])
def test_tables_break_no_word_that_fits_a_line(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["broker", "attempts", "not acked", "p99 ms", "cause", "last (UTC)", "example"]
    example = "cannot connect to 127.0.0.1:29126: ECONNREFUSED"
    row = [
        "broker-of-the-night",
        1234567,
        8,
        676.25,
        "CONNECTION_LOST",
        "11-23 08:04:31.1",
        example,
    ]
    words = {word for text in (*names, *map(cell, row)) for word in text.split()}
    monkeypatch.setattr(output, "_PIPE_WIDTH", width)
    show_tables(table("Latency per broker", names, [row, row]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    shown = [word for line in lines for word in line.split()]
    assert words <= set(shown)
    assert shown.count("broker-of-the-night") == 2


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (".venv/bin/rocket-sink", ".venv/bin/rocket-sink"),
        ("/opt/my venv/bin/rocket-sink", "'/opt/my venv/bin/rocket-sink'"),
        ("/on/path/rocket-sink", "rocket-sink"),
        ("/usr/lib/python3/site-packages/pytest/__main__.py", "rocket-sink"),
    ],
)
def test_commands_to_type_next_are_called_as_this_one(
    typed: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [typed, "demo"])
    monkeypatch.setattr("shutil.which", lambda name: f"/on/path/{name}")
    assert output.program() == shown


def test_a_width_that_is_no_number_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "\N{SUPERSCRIPT TWO}")
    assert main(["options"]) == 0
    out, err = capsys.readouterr()
    assert "nameServer" in out and err == ""
