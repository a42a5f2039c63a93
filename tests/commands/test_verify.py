"""`rocket-sink verify` against the scripted cluster: planted faults, retention, delays, keys."""

import contextlib
import dataclasses
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocket_sink.commands.verify import _MEANING, _show
from rocket_sink.ledger.query.verify import StoredPlaces, Verification
from rocket_sink.ledger.records import in_order, resolution_rows, send_rows
from rocket_sink.message import Message
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.stored import StoredMessage
from tests.clusters import scripted_cluster
from tests.docs.checks import check_command
from tests.ledger.night import store
from tests.ledger.values import accounts, attempt, confirmed, context, letter, write_spool
from tests.ledger.views import quick_ledger
from tests.recorded import ROWS, run, verified
from tests.run_command import run_command

cluster = scripted_cluster(t=2)


@pytest.fixture
def delete(monkeypatch):
    """Return a function that makes a message unreadable."""
    read = Admin.read_queue
    gone = []

    def reading(self, queue, *ends):
        return (message for message in read(self, queue, *ends) if message.message_id not in gone)

    monkeypatch.setattr(Admin, "read_queue", reading)
    monkeypatch.setattr(Admin, "hidden_copies", lambda *_: iter(()))  # Scripted brokers have none.
    return lambda message: gone.append(message.message_id)


def queue_of(cluster):
    """Return the messages of a queue, as its broker has them."""
    messages = cluster.brokers[0].store._queues["t", 1]
    assert len(messages) > 40
    return messages


DELAYED = {"delay_level": [*[3] * 200, *[None] * 100]}


ONCE = {"delivery": "effectively_once", "replayCheck": "always"}
FORMS = {"of batches": {}, "of contents": {"timed": True}, "effectively once": {"options": ONCE},
         "of the rows": {"message_id": [f"order-{n}" for n in range(ROWS)]}}  # fmt: skip


@pytest.mark.parametrize("is_delayed", [True, False], ids=["delayed", "plain"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_deleted_doubled_and_foreign_messages_are_told(cluster, tmp_path, delete, form, is_delayed):
    """The messages have each form of ids."""
    ledger = tmp_path / "ledger"
    run(cluster.name_server, ledger, context(), **DELAYED, **form)
    sums = verified(cluster.name_server, "--ledger", str(ledger))
    assert sums == {"topic": "t", "acknowledged": ROWS, "found": ROWS, "adds_up": True}
    done = run_command("verify", "-n", cluster.name_server, "--ledger", str(ledger))
    assert done.code == 0 and done.out.endswith("It adds up.\n") and "expired" not in done.out
    messages = [m for broker in cluster.brokers for m in broker.store.messages("t")]
    lost, doubled = [m for m in messages if ("DELAY" in m.properties) is is_delayed][:2]
    delete(lost)
    cluster.brokers[0].store.append(doubled)
    with Producer(nameServer=cluster.name_server) as producer:
        producer.send(Message("t", b"somebody else's", delay_level=3 if is_delayed else 0))
    faults = verified(cluster.name_server, "--ledger", str(ledger), code=1)
    counts = {"acknowledged": ROWS, "found": ROWS - 1, "missing": 1, "twice": 1, "foreign": 1}
    assert faults == {"topic": "t", **counts}
    text = run_command("verify", "-n", cluster.name_server, "-t", "t", "--ledger", str(ledger)).out
    assert "It does not add up." in text
    assert all(f"{name} {n} " in " ".join(text.split()) for name, n in counts.items())
    place = lost.message_id if is_delayed else f"broker-a:{lost.queue_id} @{lost.queue_offset}"
    assert f"missing: {place}\n" in text and f"{doubled.message_id}" in text


@pytest.mark.parametrize(("missing", "end"), [(5, "e"), (6, "e, ...")])
def test_examples_end_in_dots_only_if_there_are_more(capsys, missing, end):
    _show(Verification("t", 9, 9, missing, 0, 0, examples={"missing": list("abcde")}), _MEANING)
    out = capsys.readouterr().out
    assert f"missing: a, b, c, d, {end}\n" in out
    assert "twice 0 further" in " ".join(out.split()) and "not due" not in out


def test_rows_of_one_query_and_of_attempts_that_do_not_count(cluster, tmp_path):
    names = cluster.name_server, "--ledger", str(tmp_path)
    run(cluster.name_server, tmp_path, context())
    run(cluster.name_server, tmp_path, context(query_id="other"), 2)
    assert verified(*names, "--query", "other")["acknowledged"] == ROWS
    run(cluster.name_server, tmp_path, context(run_id="run-2", task_attempt_id=99), 3)
    sums = verified(*names, code=1)
    assert (sums["acknowledged"], sums["twice"]) == (2 * ROWS, ROWS)


def compared(path, first, ids, copies=None, query_id=None):
    """Compare a queue that has these ids by offset, and begins at the offset `first`. `copies` says
    of hidden copies whether they wait."""
    quick = quick_ledger(path)
    messages = [
        StoredMessage("t", b"", 3, place, properties={"UNIQ_KEY": text})
        for place, text in ids.items()
    ]

    def hidden():
        assert copies is not None, "nothing is absent, so no copy is of interest"
        return copies.items()

    with contextlib.closing(StoredPlaces()) as places:
        places.add("broker-a", 3, first, messages)
        result = places.compare(quick.query, "t", hidden, query_id)
    assert not Path(places._folder.name).exists()
    return result


def test_what_retention_has_deleted_is_no_fault(tmp_path):
    """The request has the offsets 42 to 48; the queue begins at 45 now."""
    ctx = context()
    rows = [sends_of("A" * 32), accounts(ctx, acked=7), confirmed(ctx, 7)]
    path = Path(store(tmp_path, in_order(rows, 1 << 32)))
    result = compared(path, 45, {place: f"{place}" for place in range(45, 49)})
    assert (result.expired, result.found, result.missing, result.adds_up) == (3, 4, 0, True)


def sends_of(message_id, **more):
    return send_rows([attempt(message_id=message_id, **more)], context(), requests=[1])


OWN, OTHER = "B" * 32, {42: "C" * 32}


@pytest.mark.parametrize(
    ("first", "ids", "copies", "result"),
    [
        (0, OTHER, {OWN: True}, {"not_due": 1, "foreign": 1}),
        (0, {**OTHER, 43: OWN}, None, {"found": 1, "foreign": 1}),
        (0, {43: OWN, 44: OWN}, None, {"found": 1, "twice": 1}),
        (0, {}, {OWN: False}, {"missing": 1}),
        (0, {}, {}, {"missing": 1}),
        (50, {}, {OWN: True}, {"not_due": 1}),
        (50, {}, {OWN: False}, {"missing": 1}),
        (50, {}, {}, {"expired": 1}),
    ],
    ids=["waits", "delivered", "twice", "lost", "never there", "waits after retention",
         "lost after retention", "expired"],
)  # fmt: skip
def test_a_delayed_message(tmp_path, first, ids, copies, result):
    """A hidden copy says more about an absent message than the queue does."""
    ctx = context()
    rows = [sends_of(OWN, message_count=1, queue_offset=-1), accounts(ctx, acked=1)]
    path = Path(store(tmp_path, in_order([*rows, confirmed(ctx, 1)], 1 << 32)))
    assert figures_of(compared(path, first, ids, copies)) == {"acknowledged": 1, **result}


def test_the_place_in_a_system_topic_is_not_in_the_ledger(cluster, tmp_path):
    run(cluster.name_server, tmp_path / "ledger", context(), delay_level=[3] * ROWS)
    quick = quick_ledger(tmp_path / "ledger")
    assert quick.query("SELECT count(queue_offset) AS n FROM answered").to_pylist() == [{"n": 0}]


def figures_of(result):
    return {name: n for name, n in vars(result).items() if isinstance(n, int) and n}


def test_copies_of_other_messages_are_no_copies_of_a_querys(tmp_path):
    """Of the messages, 42 to 48 are acknowledged, and 42 is there again. Query `q` has none."""
    ctx = context()
    rows = [sends_of("A" * 32), accounts(ctx, acked=7), confirmed(ctx, 7),
            *(letter(ctx, message_id=text) for text in ("E" * 32, "the order of March, 1")),
            accounts(context(query_id="q"), acked=0)]  # fmt: skip
    path = Path(store(tmp_path, in_order(rows, 1 << 32)))
    ids = {42: "A" * 32, **{place: f"{place}" for place in range(43, 49)}, 49: "A" * 32}
    ids |= {50: "F" * 32, 51: "the order of March, 2", 52: "E" * 32, 53: "E" * 32}
    result = {"acknowledged": 7, "found": 7, "twice": 1, "foreign": 2, "unacknowledged": 2}
    assert figures_of(compared(path, 0, ids)) == result
    assert figures_of(compared(path, 0, ids, query_id="query")) == result
    assert figures_of(compared(path, 0, ids, query_id="q")) == {"foreign": 2}


def test_a_resent_letter_that_is_elsewhere(tmp_path):
    """The resolution says offset 60 for the letter. The first five examples are named."""
    ctx = context()
    values = {"resolution": "resent", "topic": "t", "broker_name": "broker-a", "queue_id": 3}
    resent = [
        resolution_rows(
            {**values, "letter_id": [f"{n}"], "message_id": "D" * 31 + f"{n}", "queue_offset": n},
            ctx,
        )
        for n in range(60, 67)
    ]
    path = Path(store(tmp_path, in_order(resent, 1 << 32)))
    result = compared(path, 0, {70: "D" * 31 + "60"})
    assert figures_of(result) == {"acknowledged": 7, "missing": 7, "unacknowledged": 1}
    assert result.examples["missing"] == [f"broker-a:3 @{n}" for n in range(60, 65)]


@pytest.mark.parametrize("fault", ["missing", "twice", "foreign", "unacknowledged"])
def test_one_fault_of_any_kind_does_not_add_up(fault):
    sound = Verification("t", 9, 9, 0, 0, 0, not_due=1, expired=1)
    assert sound.adds_up and not dataclasses.replace(sound, **{fault: 1}).adds_up


def test_keys_of_a_table_are_compared(cluster, tmp_path, delete):
    run(cluster.name_server, tmp_path / "ledger", context())
    file, column = tmp_path / "today's orders.parquet", 'order "no."'
    keys = [f"key-{n}" for n in range(ROWS)]
    pq.write_table(pa.table({column: keys}), file)
    named = ("--path", str(file), "--key", column)
    sums = verified(cluster.name_server, *named)
    assert sums == {"topic": "t", "acknowledged": ROWS, "found": ROWS, "adds_up": True}
    queue = queue_of(cluster)
    cluster.brokers[0].store.append(queue[3])
    delete(queue[7])
    pq.write_table(pa.table({column: [*keys, "not sent"][1:]}), file)
    faults = verified(cluster.name_server, *named, code=1)
    assert (faults["missing"], faults["twice"], faults["foreign"]) == (2, 1, 1)


def test_rows_that_are_not_folded_are_by_the_advised_command(cluster, tmp_path, monkeypatch):
    ledger = store(tmp_path / "my ledger", in_order([accounts(context(), acked=1)], 1))
    write_spool(ledger, context(epoch=1), accounts(context(epoch=1), acked=1))
    done = run_command("verify", "-n", cluster.name_server, "-l", ledger)
    assert done.code == 1 and "1 epoch is not folded yet" in done.err
    program, *words = shlex.split(done.err.split("`")[1])
    assert (program, words) == ("rocket-sink", ["ledger", "fold", "--ledger", ledger])
    check_command(words)
    (tmp_path / "my ledger" / "_spool" / "x").parent.rename(tmp_path / "aside")
    done = run_command("verify", "-n", cluster.name_server, "-l", ledger)
    assert done.code == 0 and "no stored message: there is nothing to verify" in done.err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run_command("verify", "-n", cluster.name_server, "-l", ledger)
    assert done.code == 1 and "needs DuckDB: pip install 'rocket-sink[fast]'" in done.err
