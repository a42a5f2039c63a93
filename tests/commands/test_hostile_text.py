"""Text of a peer stays plain text on terminals, in pipes and in logs.

The tests run the commands with a terminal and with pipes, and judge their output.
"""

import dataclasses
import json
import os
import re
import unicodedata
from itertools import product
from unittest import mock

import pyarrow as pa
import pytest

from rocket_sink.errors import Outcome
from rocket_sink.ledger.records import isolation_rows, send_rows
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.routing.fault import Isolation
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.stored import StoredMessage
from tests.ledger.night import store
from tests.ledger.values import accounts, attempt, confirmed, context, letter
from tests.run_command import Terminal, run_command

GROUP = "billing"
PLAIN = "".join(map(chr, (*range(3, 32), *range(0x7F, 0xA0))))
"""Control characters: C0 (without NUL and the separators of properties), DEL and C1."""
OTHERS = "\u202e\u202d\u2066\u2069\u200e\u200f\u061c\u200b\ufeff\u2028\u2029\ue000\U000e0001"
HOSTILE = (
    "H\x1b[2J\x1b[31mI\x1b]52;c;ZXZpbA==\x07\r\nFORGED WARNING all is well\n[bold]J[/bold] :bomb: "
    f"\x1b]8;;http://e\x1b\\\x9b2J\x9d0;t\x9c{PLAIN}{OTHERS} [link=http://e]K[/link]"
)
STYLES = re.compile(r"\x1b\[[0-9;]*m")
"""Styles that rich writes; hostile text may not contribute any."""


def obeyed(shown):
    """Return the characters that a terminal would obey; line ends are the command's own."""
    kinds = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    bad = sorted(c for c in set(shown) - {"\n"} if unicodedata.category(c) in kinds)
    return [f"U+{ord(c):04X} in {shown[: shown.index(c) + 10][-30:]!r}" for c in bad]


def judge(arguments, *, stdin="", shows="FORGED"):
    """Run a command on pipes and on a terminal, and check the output.

    `shows` proves that the command had hostile text to print.
    """
    done = run_command(*arguments, stdin=stdin)
    assert obeyed(done.out + done.err) == []
    shown = re.sub(r"\s+", " ", done.out + done.err)  # A table's cell may have several lines.
    assert shows in shown, shown
    for line in (done.out + done.err).splitlines():
        assert not line.startswith("FORGED"), line
    if not stdin:
        terminal = Terminal()
        with mock.patch.dict(os.environ, {"TERM": "xterm-256color", "COLUMNS": "200"}):
            run_command(*arguments, out=terminal, err=terminal)
        shown = terminal.getvalue()
        assert obeyed(STYLES.sub("", shown)) == []
        assert "\x1b[31mI" not in shown and "H\x1b" not in shown
        assert shows.partition(" ")[0] in shown, shown
    return done


@pytest.fixture
def cluster():
    with FakeCluster(brokers=1) as fake:
        topic = f"%DLQ%{GROUP}"
        fake.create_topic("orders", 1)
        fake.create_topic(topic, 1)
        fake.create_topic("%DLQ%" + HOSTILE, 1)
        properties = dict.fromkeys(("UNIQ_KEY", "KEYS", "TAGS", "__SHARDINGKEY", HOSTILE), HOSTILE)
        for name in ("orders", topic):
            fake.brokers[0].store.append(
                StoredMessage(
                    name, HOSTILE.encode() + b"\x9b\xff\xed\xa0\x80", store_ms=1000, born_ms=1,
                    reconsume_times=16, store_host=("10.0.0.1", 10911),
                    properties={**properties, "RETRY_TOPIC": HOSTILE},
                )
            )  # fmt: skip
        yield fake


def at(cluster, *arguments):
    return [*arguments, "-n", cluster.name_server]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_tail(cluster, form):
    done = judge(at(cluster, "tail", "-t", "orders", "--from-start", "--no-follow", *form))
    if form:
        row = done.json()
        assert row["tags"] == HOSTILE and row["properties"][HOSTILE] == HOSTILE
        assert row["body"].startswith(HOSTILE)


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["list"], "FORGED"), (["list", "--json"], "FORGED"),
        (["list", "-g", GROUP], "dead"), (["list", "-g", GROUP, "--json"], "FORGED"),
        (["resend", "-g", GROUP, "--dry-run"], "FORGED"),
        (["resend", "-g", GROUP, "--dry-run", "--json"], "FORGED"),
        (["resend", "-g", GROUP], "error"), (["resend", "-g", GROUP, "--json"], "error"),
        (["list", "-g", "no" + HOSTILE.replace("=", "")], "FORGED"),
    ],
)  # fmt: skip
def test_dlq(cluster, arguments, shows):
    judge(at(cluster, "dlq", *arguments), shows=shows)


def test_an_exported_file_has_escapes(cluster, tmp_path):
    out = tmp_path / f"{HOSTILE.replace('/', '')[:20]}x.json"
    judge(at(cluster, "dlq", "export", "-g", GROUP, "--out", str(out)), shows="exported to")
    assert obeyed(out.read_text()) == []
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["tags"] == HOSTILE and row["properties"][HOSTILE] == HOSTILE


COMMANDS = (
    ["topic", "show", "orders"], ["check", "-t", "orders"],
    ["tail", "--no-follow", "-t", "orders"], ["send", "body", "-t", "orders"],
)  # fmt: skip
FORMS = ([], ["--json"], ["--debug"])


@pytest.mark.parametrize(
    ("command", "more"),
    # `send` runs in one form only: it looks for a better route until its time is over.
    [*product(COMMANDS[:-1], FORMS), (COMMANDS[-1], ["--json", "--debug"])],
    ids=" ".join,
)
def test_a_hostile_broker_name_is_refused(command, more):
    with FakeCluster(brokers=["broker-a", HOSTILE]) as fake:
        fake.create_topic("orders", 1)
        judge(at(fake, *command, *more), shows="cannot be printed")


@pytest.mark.parametrize("more", FORMS)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_remarks(cluster, command, more):
    if command[0] == "topic":
        cluster.on_route(Answer(1, HOSTILE), times=None)
    broker = cluster.brokers[0]
    broker.on_send(Answer(1, HOSTILE), times=None)
    broker.on(RequestCode.GET_MAX_OFFSET, Answer(1, HOSTILE), times=None)
    judge(at(cluster, *command, *more))


def test_send_of_hostile_lines(cluster):
    send = at(cluster, "send", "-t", "orders", "--json-lines")
    for field, more in product(({"tags": HOSTILE}, {"keys": [HOSTILE]}, {HOSTILE: 1}), FORMS):
        judge([*send, *more], stdin=json.dumps({"body": "x", **field}), shows="")
    judge(send, stdin=HOSTILE, shows="JSON")


def test_a_wrong_command_line():
    argument = HOSTILE.replace("=", "")
    judge(["nosuch" + argument])
    judge(["send", "--nosuch" + argument])
    judge(["backfill", "--reason", argument])
    judge(["check", argument])
    judge(["report", "--ledger", "/" + argument], shows="no ledger")


# --- a ledger ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Return a ledger with hostile text in each column that a peer or a row can fill.

    An old or a damaged writer may have left such a ledger.
    """
    ctx = dataclasses.replace(context(), query_id=HOSTILE, worker=HOSTILE)
    bad = attempt(
        broker_name=HOSTILE, broker_address=HOSTILE, topic=HOSTILE, outcome=Outcome.UNKNOWN,
        error_code=HOSTILE, remark=HOSTILE, response_code=1,
    )  # fmt: skip
    half = send_rows([attempt(broker_name=HOSTILE, topic=HOSTILE)], ctx, half=[True])
    lost = letter(
        ctx, topic=HOSTILE, sharding_key=HOSTILE, tags=HOSTILE, keys=pa.array([[HOSTILE]]),
        message_id=HOSTILE, last_error_code=HOSTILE, last_error=HOSTILE,
    )  # fmt: skip
    rows = [
        send_rows([attempt(), bad], ctx), half, lost,
        accounts(ctx, acked=7, dead=1), confirmed(ctx, 8),
        isolation_rows([Isolation(HOSTILE, HOSTILE, 1.0, 5.0, 6.0)], ctx, now_s=5.0, now_us=10**15),
    ]  # fmt: skip
    table = pa.Table.from_batches(rows, LEDGER_SCHEMA)
    # The writer cleans these columns, but a foreign writer may not.
    for name in ("remark", "last_error", "cause"):
        at = LEDGER_SCHEMA.get_field_index(name)
        dirty = [None if text is None else HOSTILE for text in table.column(at).to_pylist()]
        table = table.set_column(at, LEDGER_SCHEMA.field(at), pa.array(dirty, pa.string()))
    return store(tmp_path_factory.mktemp("hostile") / "ledger", table.to_batches())


def test_report(ledger, tmp_path):
    html = tmp_path / "report.html"
    judge(["report", "--ledger", ledger])
    done = run_command("report", "--ledger", ledger, "--html", str(html), "--json")
    assert obeyed(done.out + html.read_text()) == [] and "FORGED" in html.read_text()


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("view", ["sends", "dead-letters", "isolations"])
def test_ledger_show(ledger, view, form):
    judge(["ledger", "show", view, "--ledger", ledger, *form], shows="H" if not form else "FORGED")
