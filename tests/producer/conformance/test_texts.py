"""Texts of tags, keys and properties: those that the official Java client accepts and carries."""

import time

import pyarrow as pa
import pytest

from rocket_sink import cli
from rocket_sink.errors import MessageError, SendError
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.rows.checks import validate
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.requests import request
from tests.clusters import make_topic
from tests.java_client import FOLDER, GENERATIONS, read_with_java, run_java
from tests.producer.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

GROUP = "texts"
CHARACTERS = [
    *map(chr, range(0x21)), "|", "\x7f", "\x85", "\u00a0", "\u00ad", "\u1680", "\u180e", "\u2003",
    "\u2007", "\u200b", "\u2028", "\u202e", "\u202f", "\u205f", "\u3000", "\ufeff", "é", "中", "😀",
]  # fmt: skip
TEXTS = [
    "", *CHARACTERS, *(f"a{c}b" for c in CHARACTERS), *(f"a{c}" for c in CHARACTERS),
    *(f"{c}b" for c in CHARACTERS), "\t\n \r", "\u00a0\t", "plain",
]  # fmt: skip
LEGAL = [
    "plain", "a\u00a0b", "a\tb", "\u00a0", "\u3000", "\u2028", "a\nb", "a\x85b", "a\x7fb", "a\x00b",
    "\ufeffa", "中文", "😀", "a\x1bb",
]  # fmt: skip
"""Texts that may be the tag, a key, and a property's name and value of a message."""


def hex_lines(texts):
    return "".join(f"x{text.encode().hex()}\n" for text in texts)


def takes(**fields):
    try:
        message = Message("t", b"x", **fields)
    except MessageError:
        return False
    for name, value in fields.items():
        assert getattr(message, name) == value
    return True


def column_takes(name, values, kind):
    options = SinkOptions.parse(nameServer="h:1", topic="t", ledger="/l")
    table = pa.table({"body": [b"x"] * len(values), name: pa.array(values, kind)})
    rows = normalise(table, resolve_columns(table.schema, options))
    refused = {refusal.row for refusal in validate(rows, options).refused}
    return [row not in refused for row in range(len(values))]


def is_refused_by_us(text):
    """Return whether we refuse a text that Java carries.

    With 0x01 in a value, other clients may see the end of a name. With 0x00 at the end, our readers
    see a message that a killed broker wrote in part.
    """
    return "\x01" in text or text.endswith("\x00")


@pytest.mark.parametrize("version", GENERATIONS)
def test_properties_are_legal_where_java_takes_and_carries_them(version):
    answers = run_java(FOLDER / "Texts.java", version=version, lines=hex_lines(TEXTS))
    as_value, as_name, carried = [], [], []
    for text, (_, *taken, value_carried, name_carried) in zip(TEXTS, answers, strict=True):
        is_ours = not is_refused_by_us(text)
        as_value.append("true" == taken[0] == value_carried and is_ours)
        as_name.append("true" == taken[1] == name_carried and is_ours)
        carried.append(value_carried == "true" and is_ours)
    kind = pa.map_(pa.string(), pa.string())
    values, names = [("n", text) for text in TEXTS], [(text, "v") for text in TEXTS]
    for wanted, pairs in ((as_value, values), (as_name, names)):
        assert [takes(properties=dict([pair])) for pair in pairs] == wanted
        assert column_takes("properties", [[pair] for pair in pairs], kind) == wanted
    for name in ("sharding_key", "message_id"):
        assert [takes(**{name: text}) for text in TEXTS] == carried
        assert column_takes(name, TEXTS, pa.string()) == carried
    # A blank separates the keys of a message.
    keys = [ok and " " not in text for ok, text in zip(carried, TEXTS, strict=True)]
    assert [takes(keys=(text,)) for text in TEXTS] == keys
    assert column_takes("keys", TEXTS, pa.string()) == keys


def give_up(admin, topic):
    """Give up each message for good, as a consumer does (ConsumerSendMsgBackRequestHeader)."""
    addresses = {name: brokers[0] for name, brokers in admin.cluster().items()}
    count = 0
    for queue in admin.queues(topic):
        for message in admin.read_queue(queue):
            fields = {
                "offset": message.commit_log_offset, "group": GROUP, "delayLevel": -1,
                "originMsgId": message.offset_message_id, "originTopic": topic, "unitMode": False,
                "maxReconsumeTimes": 16,
            }  # fmt: skip
            frame = request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)
            admin._call(queue.broker_name, addresses[queue.broker_name], frame, {0})
            count += 1
    return count


def count_of(admin, topic):
    try:
        return admin.count(topic)
    except SendError:
        time.sleep(0.1)
        return 0


def test_dead_letters_of_java_are_sent_again_to_a_new_topic(real):
    """The letters have every text that Java sends; the send creates their topic."""
    origin, target = "texts-origin", "texts-new"
    make_topic(real, origin)
    arguments, lines = (real.name_server, origin), hex_lines(LEGAL)
    sent = run_java(FOLDER / "SendTexts.java", *arguments, version=GENERATIONS[0], lines=lines)
    assert len(sent) == len(LEGAL)
    with Admin(nameServer=real.name_server, timeout_s=20.0) as admin:
        until(lambda: count_of(admin, origin) == len(LEGAL), 60.0)
        assert give_up(admin, origin) == len(LEGAL)
        until(lambda: count_of(admin, f"%DLQ%{GROUP}") == len(LEGAL), 60.0)
    line = ["dlq", "resend", "-n", real.name_server, "-g", GROUP, "--to-topic", target]
    assert cli.main(line) == 0
    assert cli.main(line) == 0  # The target has all of them, so nothing is sent.
    for version in GENERATIONS:
        messages = {each.message_id: each for each in read_with_java(real, target, version)}
        assert len(messages) == len(LEGAL)
        for text, before in zip(LEGAL, read_with_java(real, origin, version), strict=True):
            message = messages[before.message_id]
            assert (message.tags, message.keys, message.body) == (text, text, before.body)
            assert (message.properties["value"], message.properties[text]) == (text, "name")
