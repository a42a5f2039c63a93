"""The command line in general: help texts, exit codes, imported modules, streams of output."""

import datetime as dt
from unittest.mock import MagicMock

import click
import pytest
from pyspark.errors import PySparkException

from rocket_sink import cli
from rocket_sink.commands.common.base import (
    Group,
    one_line,
    time_ms,
    time_value,
    usage_line,
)
from rocket_sink.errors import ClusterError, RocketSinkError
from tests.python import run_python

HEAVY = (
    "pyspark", "pyarrow", "numpy", "rich", "psutil", "rocket_sink.wire", "rocket_sink.producer",
)  # fmt: skip


def leaves():
    """Return the path of each command, as (name,) or (group, name)."""
    paths = []
    for name in cli.COMMANDS:
        command = find((name,))
        children = command.commands if isinstance(command, Group) else ()
        paths += [(name, child) for child in children] or [(name,)]
    return paths


def find(path):
    command = cli.cli
    for name in path:
        command = command.get_command(click.Context(command), name)
    return command


def run(capsys, *arguments):
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from rocket_sink.cli import main; main(['--help']); "
        f"sys.exit(','.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    )
    done = run_python("-c", script)
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout


ANY_TEXT = {
    "version", "tags", "keys", "sharding_key", "key", "tag", "form", "path", "checkpoint", "group",
}  # fmt: skip


@pytest.mark.parametrize("path", leaves(), ids=" ".join)
def test_every_command_has_help_with_an_example(path, capsys):
    """The help of an option says what the option does. Few options call their value just TEXT."""
    code, out, _ = run(capsys, *path, "--help")
    assert code == 0 and "[default: ]" not in out
    example = out.partition("Example:")[2]
    assert f"rocket-sink {' '.join(path)}" in example
    for option in find(path).params:
        if isinstance(option, click.Option) and not option.hidden:
            has_name = option.metavar or option.is_flag or option.type is not click.STRING
            assert option.help and (has_name or option.name in ANY_TEXT), option.name
    for number, name in enumerate(path):
        shown = " ".join(run(capsys, *path[:number], "--help")[1].split())
        first = find(path[: number + 1]).get_short_help_str(limit=1000)
        assert f" {name} {' '.join(first.split())}" in shown


def test_defaults():
    shown = {
        " ".join((*path, option.opts[0])): option.default
        for path in leaves()
        for option in find(path).params
        if type(option.default) in (int, float, str) and option.default
    }
    assert shown == {
        "demo --rows": 336_776, "demo --fault": "freeze", "cluster up --brokers": 2,
        "cluster up --queues": 4, "stream --lane": "foreach", "stream --stop-timeout": 60.0,
        "backfill --format": "delta", "backfill --max-tries": 3, "dlq resend --max-resends": 3,
        "transactions list --limit": 50, "report --epochs": 20, "tune --attempts": 200_000,
        "ledger expire --settled-bodies": "7d", "ledger show --limit": 20,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["send", "-O", "nonsense", "x"], "NAME=VALUE"),
        (["send", "-t", "t", "-O", "nameServr=x", "x"], "did you mean 'nameServer'"),
        (["send", "-n", "a:1", "-t", "t", "-O", "ordering=strct", "x"], "strict"),
        (["stream", "--format", "rate"], "--checkpoint"),
        (["stream", "--format", "rate", "--batch", "--checkpoint", "c"], "--batch"),
        (["options", "--out", "x"], "--conf"), (["backfill"], "--ledger"),
        (["transactions", "list"], "--ledger"),
        (["ledger", "park", "-l", "l", "--reason", "r"], "which dead letters? give --letter"),
        (["transactions", "settle", "-n", "a:1"], "--ledger"), (["tail", "-n", "a:1"], "--topic"),
        (["tail", "-t"], "rocket-sink tail: option '-t' requires"),
        (["verify", "-n", "a:1", "-t", "t"], "--path FILES and --key COLUMN"),
        (["verify", "-n", "a:1", "--path", "x", "--key", "k"], "which topic? give --topic NAME"),
        (["ledger", "expire", "-l", "l", "--kind", "send"], "which age? give --older-than"),
        (["ledger", "expire", "-l", "l", "--older-than", "x"], "'x' is no age, as 30d or 12h"),
        (["tail", "-n", "a:1", "-t", "t", "--last", "1", "--from-start"], "give one of --from"),
        (["stream", "--format", "rate", "--batch", "--trigger", "1 s"], "not to --batch"),
        (["send", "-n", "a:1", "-t", "no such!", "x"], "'no such!'"),
        (["dlq", "list", "-n", "a:1", "--key", "k"], "give --group"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_exits_2_with_a_reason(arguments, words, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("arguments", [("--debug", "tail"), ("tail", "--debug")])
def test_debug_shows_the_traceback(arguments, capsys):
    code, _, err = run(capsys, *arguments, "-n", "127.0.0.1:1", "-t", "t")
    assert code == 1
    assert "Traceback" in err


def test_debug_after_two_dashes_is_the_users_text():
    assert not cli.debug_wanted(["send", "--", "--debug"])


def test_an_unexpected_error_is_a_line_with_a_hint(monkeypatch, capsys):
    explode = MagicMock(side_effect=ZeroDivisionError("division by zero"))
    monkeypatch.setattr(find(("options",)), "callback", explode)
    code, _, err = run(capsys, "options")
    assert code == 1
    assert err.splitlines()[0] == "rocket-sink: ZeroDivisionError: division by zero"
    assert "--debug" in err
    assert "Traceback" not in err


class JavaError(Exception):
    """Stands for py4j's error."""

    __module__ = "py4j.protocol"


WORKER = (
    "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent "
    "call last):\n  File \"worker.py\", line 1, in main\nKeyError: 'a'\n\nDuring handling of the "
    "above exception:\n\nValueError: no such row\n\n\tat org.apache.spark.Task.run\n"
    "Caused by: java.io.IOException: gone\n"
)
STREAM = "[STREAM_FAILED] Query terminated\nTraceback ...\n"
CALLING = "An error occurred while calling o1.load.\n: "


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ClusterError("no port.\nlog 1\nlog 2"), "no port. (--debug shows them all)"),
        (ClusterError(" no  port.\n"), "no port."),
        (RuntimeError(STREAM + "rocket_sink.errors.DeliveryError: early\n\tat org.apache...\n"
                      "rocket_sink.errors.DeliveryError: a row cannot be sent\n"),
         "a row cannot be sent"),
        (PySparkException(WORKER), "ValueError: no such row"),
        (PySparkException("[PYTHON] none"), "[PYTHON] none"),
        (PySparkException("first\nsecond"), "first"),
        (JavaError(""), "JavaError"),
        (JavaError(CALLING), "An error occurred while calling o1.load."),
        (JavaError(CALLING + "java.lang.Exception: x\n\tat a.b"), "Exception: x"),
        (JavaError(CALLING + "a.SparkException: x\n\tat a.b\nCaused by: a.b.GoneError: y\n\tat\n"
                   "Caused by: a.b.LastError: z"), "GoneError: y"),
        (RuntimeError(STREAM + "ModuleNotFoundError: No module named 'rocket_sink'\n\tat org..."),
         "the executors have no rocket_sink: give it to them by --py-files as a .zip"),
        (ValueError(), "ValueError"),
        (ValueError("a  b\nc"), "ValueError: a b c"),
        (RocketSinkError("x" * 601), "x" * 597 + "..."),
    ],
)  # fmt: skip
def test_an_error_is_one_line(error, line):
    shown = one_line(error)
    assert shown == line if not line.endswith(".zip") else shown.startswith(line)


@pytest.mark.parametrize(
    ("text", "has_context", "line"),
    [
        ("No such option.", True, "top sub: no such option; top sub --help shows what it takes"),
        ("No such  option\nx.", False, "rocket-sink: no such option x"),
        ("Wait ...", True, "top sub: wait ...; top sub --help shows what it takes"),
        ("NAME=VALUE; give it", True, "top sub: NAME=VALUE; give it"),
        ("did you mean x?", True, "top sub: did you mean x?"),
    ],
)
def test_a_wrong_use_is_one_line(text, has_context, line):
    parent = click.Context(click.Command("top"), info_name="top")
    context = click.Context(click.Command("sub"), parent, info_name="sub")
    assert usage_line(click.UsageError(text, context if has_context else None)) == line


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T12:00", dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)),
        ("2026-01-31", dt.datetime(2026, 1, 31, tzinfo=dt.timezone.utc)),
        ("2026-01-31T12:00:05+08:00", dt.datetime(2026, 1, 31, 4, 0, 5, tzinfo=dt.timezone.utc)),
    ],
)
def test_a_time_without_a_zone_is_utc(text, moment):
    context, option = click.Context(cli.cli), click.Option(["--since"])
    assert time_value(context, option, text) == moment
    assert time_ms(context, option, text) == moment.timestamp() * 1000
    assert time_value(context, option, None) is time_ms(context, option, None) is None


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("0s", dt.timedelta()), ("90s", dt.timedelta(seconds=90)), ("5m", dt.timedelta(minutes=5)),
        ("7h", dt.timedelta(hours=7)), ("10d", dt.timedelta(days=10)),
    ],
)  # fmt: skip
def test_an_age_is_counted_from_now(text, age):
    context, option = click.Context(cli.cli), click.Option(["--since"])
    before = dt.datetime.now(dt.timezone.utc)
    since = time_value(context, option, text)
    since_ms = time_ms(context, option, text)
    after = dt.datetime.now(dt.timezone.utc)
    assert before <= since + age <= after
    in_ms = dt.datetime.fromtimestamp(since_ms / 1000, dt.timezone.utc)
    assert before - dt.timedelta(milliseconds=1) < in_ms + age <= after
