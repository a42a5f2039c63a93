"""Each wrong use of each command prints one helpful line, at each width of a terminal.

The commands run in this process; no case may reach the start of Spark.
"""

import difflib
import io
import re
import sys
from itertools import product
from unittest import mock

import click
import pytest

from rocket_sink import cli
from rocket_sink.testing import FakeCluster
from rocket_sink.text import nearest
from tests.commands.test_cli import find, leaves, run
from tests.run_command import Terminal

WIDTHS = (60, 120)
UNWRITABLE = "/dev/null/no/such/file.json"
NOT_THERE = "/no/such/file"
NOBODY = "127.0.0.1:1"

NO_HOST = "no-such-host.invalid:9876"
WITH_SPARK = (
    ("stream",), ("backfill",), ("transactions", "settle"),
    ("transactions", "serve"),
)  # fmt: skip
"""Commands that need a name server, and a session that takes long to start."""

NEXT = re.compile(
    r"; |[dD]id you mean|give |check |--help|"
    r"|NAME=VALUE|nor a duration|as 127\.0\.0\.1:9876|allowed are|in 3s"
)
"""Words that say what to do next, or which value is right."""


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    started = mock.MagicMock(side_effect=AssertionError("Spark was started"))
    monkeypatch.setattr("rocket_sink.spark.session.build_session", started)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ledger" / "_spool").mkdir(parents=True)


GROUPS = ["", *dict.fromkeys(path[0] for path in leaves() if path[1:])]
RIGHT = {
    "--name-server": NOBODY, "--topic": "flights", "--ledger": "ledger", "--group": "billing",
    "--format": "rate", "--checkpoint": "checkpoint", "--letter": "5e1f-3",
    "--reason": "asked the customer",
}  # fmt: skip
"""Right values for other options, so that a command reaches the wrong value."""
NOT_FOR = {"backfill": {"--format", "--reason"}, "dlq export": {"--ledger"}, "options": {"--group"}}


def right(path, *without):
    """Return a valid command line of this command, without some options."""
    command, words = find(path), list(path)
    skip = {*without, *NOT_FOR.get(" ".join(path), ())}
    if path == ("ledger", "show"):
        words.append("epochs")
    if path == ("send",):
        words.append("a body")
    for name in (opt for parameter in command.params for opt in parameter.opts):
        if name in RIGHT and name not in skip:
            words += [name, RIGHT[name]]
    return words


def wrong_uses(path):
    """Yield command lines with one fault each."""
    command = find(path)
    yield [*path, "--nosuch"]
    yield [*path, "--jsonn"]
    if path != ("send",):
        yield [*path, "epochs", "extra", "more"]
    if any(parameter.required for parameter in command.params):
        yield list(path)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield from wrong_values(path, parameter)
    names = {name for parameter in command.params for name in parameter.opts}
    if "-O" in names:
        valid = right(path)
        yield [*valid, "-O", "x"]
        yield [*valid, "-O", "nameServr=x"]
        yield [*valid, "-O", "banana=x"]
        yield [*valid, "-O", "sendMsgTimeout=long"]
    if names >= {"-O", "--name-server"}:
        yield right(path, "--name-server")
        yield [*right(path, "--name-server"), "--name-server", "nonsense"]
    if names >= {"-O", "--topic"} and path[0] != "dlq":  # where it is a filter
        yield [*right(path, "--topic"), "--topic", "no such!"]
    if path in (("send",), ("tail",), ("dlq", "list"), ("dlq", "resend"), *WITH_SPARK):
        for silent in (NOBODY, NO_HOST):
            valid = right(path, "--name-server")
            yield [*valid, "--name-server", silent, "-O", "sendMsgTimeout=100"]
    if path in (("report",), ("tune",)):
        yield [*path, NOT_THERE]
        yield [*path, "ledger", "--ledger", "ledger"]


def wrong_values(path, option):
    name = max(option.opts, key=len)
    yield [*path, name]
    valid, kind = right(path, name), option.type
    if isinstance(kind, click.IntRange | click.FloatRange):
        yield [*valid, name, "many"]
        yield [*valid, name, "-1"]
    if isinstance(kind, click.Choice):
        yield [*valid, name, "nonsense"]
    if option.metavar == "TIME":
        yield [*valid, name, "yesterday"]
    if option.metavar == "NAME=VALUE":
        yield [*valid, name, "nonsense"]
    if name in ("--out", "--html") and path != ("options",):
        yield [*valid, name, UNWRITABLE]
    if name == "--out" and path == ("options",):
        yield [*path, "--conf", name, UNWRITABLE]
        yield [*path, name, "a-file"]
    if name in ("--file", "--conf", "--baseline"):
        yield [*(word for word in valid if word != "a body"), name, NOT_THERE]
    if name == "--ledger" and path not in (("stream",), ("check",), ("dlq", "export")):
        yield [*valid, name, NOT_THERE]


@pytest.mark.parametrize("path", leaves(), ids=" ".join)
def test_each_wrong_use_is_one_helpful_line(path, monkeypatch, capsys):
    """A terminal gets the line broken between words."""
    cases = list(wrong_uses(path))
    assert len(cases) >= 3
    for arguments, width in product(cases, WIDTHS):
        monkeypatch.setenv("COLUMNS", str(width))
        plain = check(arguments, capsys)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", Terminal())
            cli.main(arguments)
            shown = sys.stderr.getvalue()
        assert shown.split() == plain.split(), arguments
        for line in shown.splitlines():
            assert len(line) <= width or " " not in line.strip(), (arguments, line)


def check(arguments, capsys):
    code, out, err = run(capsys, *arguments)
    assert code in (1, 2) and out == "", (arguments, out)
    assert err.count("\n") == 1 and err.startswith("rocket-sink"), (arguments, err)
    assert NEXT.search(err), (arguments, err)
    assert "Error: " not in err and "Errno" not in err, (arguments, err)
    return err


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_mistyped_command_is_one_helpful_line(group, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    before = [group] if group else []
    command = find(tuple(before))
    names = command.list_commands(click.Context(command))
    for name in names:
        assert f"did you mean {name!r}?" in check([*before, f"{name}x"], capsys)
    assert f"there are {', '.join(names)}" in check([*before, "xyzzy"], capsys)
    assert "--help" in check([*before, "--nosuch"], capsys)


def test_helps_cut_no_sentence(capsys):
    for group in GROUPS:
        out = run(capsys, *([group] if group else []), "--help")[1]
        assert not re.search(r"\w\.\.\.$", out, re.MULTILINE), out


@pytest.mark.parametrize("typed", ["order-00123", "ordres-09876", "paymens", "rders-04711", "none"])
def test_the_closest_of_many_names_is_found_by_few_comparisons(typed, monkeypatch):
    names = [f"orders-{number:05d}" for number in range(10_000)] + ["payments"]
    closest = difflib.get_close_matches(typed, names, n=1, cutoff=0.75)
    ratio = difflib.SequenceMatcher.real_quick_ratio
    compared = mock.create_autospec(ratio, side_effect=ratio)
    monkeypatch.setattr(difflib.SequenceMatcher, "real_quick_ratio", compared)
    assert [nearest(typed, names)] == (closest or [None]) and compared.call_count <= 100


@pytest.mark.parametrize("path", [("backfill",), ("transactions", "settle")], ids=" ".join)
def test_a_dry_run_needs_no_name_server(path, capsys):
    assert "Spark was started" in run(capsys, *right(path), "--dry-run")[2]


@pytest.mark.parametrize("path", WITH_SPARK, ids=" ".join)
def test_one_name_server_that_answers_is_enough(path, capsys):
    with FakeCluster(brokers=1) as cluster:
        names = f"{NOBODY};{cluster.name_server}"
        error_text = run(capsys, *right(path, "--name-server"), "--name-server", names)[2]
    assert "Spark was started" in error_text
