"""The command line in general: help texts, exit codes, imported modules, streams of output."""

import json

import click
import pytest

from rocket_sink import cli
from rocket_sink.commands.common.base import Command, Group, one_line
from rocket_sink.errors import ClusterError, RocketSinkError
from tests.python import run_python

HEAVY = (
    "pyspark",
    "pyarrow",
    "numpy",
    "rich",
    "psutil",
    "rocket_sink.wire",
    "rocket_sink.producer",
)


def leaves() -> list[tuple[str, ...]]:
    context = click.Context(cli.cli)
    paths = []
    for name in cli.COMMANDS:
        command = cli.cli.get_command(context, name)
        if isinstance(command, Group):
            paths += [(name, child) for child in command.list_commands(context)]
        else:
            paths.append((name,))
    return paths


def find(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli.cli
    for name in path:
        assert isinstance(command, click.Group)
        child = command.get_command(click.Context(command), name)
        assert child is not None
        command = child
    return command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from rocket_sink.cli import main; main(['--help']); "
        f"sys.exit(','.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    )
    done = run_python("-c", script)
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("path", leaves(), ids=" ".join)
def test_every_command_has_help_with_an_example(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *path, "--help")
    assert code == 0
    example = out.partition("Example:")[2]
    assert f"rocket-sink {' '.join(path)}" in example


@pytest.mark.parametrize("path", leaves(), ids=" ".join)
def test_examples_use_only_options_that_exist(path: tuple[str, ...]) -> None:
    command = find(path)
    assert isinstance(command, Command)
    names = {name for parameter in command.params for name in parameter.opts}
    names |= {name for parameter in command.params for name in parameter.secondary_opts}
    for line in command.example.splitlines():
        own_part = line.partition("rocket-sink")[2].partition("|")[0]
        used = {word for word in own_part.split() if word.startswith("-") and len(word) > 1}
        assert used <= names | {"--help"}, line


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_short_help_is_the_commands_own_first_line(name: str) -> None:
    command = find((name,))
    assert command.help is not None
    assert command.help.strip().splitlines()[0] == cli.COMMANDS[name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["send", "-O", "nonsense", "x"], "NAME=VALUE"),
        (["send", "-t", "t", "-O", "nameServr=x", "x"], "did you mean 'nameServer'"),
        (["send", "-n", "a:1", "-t", "t", "-O", "ordering=strct", "x"], "strict"),
        (["stream", "--format", "rate"], "--checkpoint"),
        (["stream", "--format", "rate", "--batch", "--checkpoint", "c"], "--batch"),
        (["options", "--out", "x"], "--conf"),
        (["backfill"], "--ledger"),
        (["transactions", "list"], "--ledger"),
        (["transactions", "settle", "-n", "a:1"], "--ledger"),
        (["tail", "-n", "a:1"], "--topic"),
    ],
)
def test_a_wrong_command_line_exits_2_with_a_reason(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert out == ""


def test_a_failure_is_one_line_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "tail", "-n", "127.0.0.1:1", "-t", "t")
    assert (code, out) == (1, "")
    assert err.startswith("rocket-sink: ")
    assert "127.0.0.1:1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--debug", "tail"), ("tail", "--debug")])
def test_debug_shows_the_traceback(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments, "-n", "127.0.0.1:1", "-t", "t")
    assert code == 1
    assert "Traceback" in err


def test_debug_after_two_dashes_is_the_users_text() -> None:
    assert not cli.debug_wanted(["send", "--", "--debug"])


def test_an_unexpected_error_is_a_line_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(find(("options",)), "callback", lambda **_: explode())
    code, _, err = run(capsys, "options")
    assert code == 1
    assert err.splitlines()[0] == "rocket-sink: ZeroDivisionError: division by zero"
    assert "--debug" in err
    assert "Traceback" not in err


def test_a_command_stopped_by_the_user_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(find(("options",)), "callback", interrupt)
    assert run(capsys, "options")[0] == 130


def test_json_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "options", "--json")
    assert (code, err) == (0, "")
    assert {option["name"] for option in json.loads(out)} >= {"nameServer", "ordering"}


class TestOneLine:
    def test_our_error_is_its_first_line(self) -> None:
        assert one_line(ClusterError("no port.\nlog 1\nlog 2")).startswith("no port. (--debug")

    def test_our_error_inside_sparks(self) -> None:
        error = RuntimeError(
            "[STREAM_FAILED] Query terminated\nTraceback ...\n"
            "rocket_sink.errors.DeliveryError: a row cannot be sent\n\tat org.apache..."
        )
        assert one_line(error) == "a row cannot be sent"

    def test_a_workers_error_is_the_end_of_its_traceback(self) -> None:
        trace = (
            "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most "
            "recent call last):\n  File \"worker.py\", line 1, in main\nKeyError: 'a'\n\nDuring "
            "handling of the above exception:\n\nValueError: no such row\n\n"
            "\tat org.apache.spark.Task.run\nCaused by: java.io.IOException: gone\n"
        )
        from pyspark.errors import PySparkException

        assert one_line(PySparkException(trace)) == "ValueError: no such row"

    def test_executors_without_the_package(self) -> None:
        error = RuntimeError(
            "[STREAM_FAILED] Query terminated\nTraceback (most recent call last):\n"
            "ModuleNotFoundError: No module named 'rocket_sink'\n\tat org.apache..."
        )
        assert "--py-files as a .zip" in one_line(error)

    def test_long_text_is_cut(self) -> None:
        assert len(one_line(RocketSinkError("x" * 5000))) == 600
