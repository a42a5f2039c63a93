"""A broker sends nonsense by the thousand: the log has few lines, escaped, with the number."""

import io
import logging
import re
import time

from rocket_sink.message import Message
from rocket_sink.net.log import BURST, EVERY_S
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.stored import StoredMessage, encode_stored
from tests.producer.test_request_reply import reply_frame
from tests.producer.waiting import until

COUNT = 3000
HOSTILE = "g\x1b[2J\x9b\u202e\nFORGED"


def foreign_check(number):
    half = StoredMessage(
        "orders", b"x", store_host=("127.0.0.1", 1), properties={"PGROUP": HOSTILE, "UNIQ_KEY": "1"}
    )
    ext = {
        "topic": "orders", "tranStateTableOffset": "1", "commitLogOffset": "1", "msgId": "1",
        "transactionId": f"{number}", "offsetMsgId": "1",
    }  # fmt: skip
    return Frame(RequestCode.CHECK_TRANSACTION_STATE, ext, encode_stored(half))


def test_a_flood_from_a_broker_makes_few_clean_lines(cluster):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("rocket_sink").addHandler(handler)
    begun_s = time.monotonic()
    try:
        with Producer(nameServer=cluster.name_server, producerGroup="ours") as producer:
            producer.on_transaction_check = lambda message: None
            producer.listen_for_checks("orders")
            producer.send(Message("orders", b"x"))
            broker = max(cluster.brokers, key=lambda one: len(one.store.messages("orders")))
            bad_frame = Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, {}, b"")
            for make in (lambda _: bad_frame, foreign_check, lambda _: reply_frame(HOSTILE)):
                for number in range(COUNT):
                    broker.send_request(make(number))
            # The broker has one connection, so the end of the last kind is the end of all.
            until(lambda: producer.late_replies == COUNT)
        text = stream.getvalue()  # The counts are in the log once the producer is closed.
    finally:
        logging.getLogger("rocket_sink").removeHandler(handler)
    windows = 2 + (time.monotonic() - begun_s) // EVERY_S
    lines = text.splitlines()
    assert all(line.isprintable() and not line.startswith("FORGED") for line in lines)
    for words in ("unreadable request", "unknown request", "transaction check of group"):
        shown = [line for line in lines if words in line and "were not logged" not in line]
        assert BURST <= len(shown) <= BURST * windows
        counts = re.findall(
            rf"([\d,]+) more of these from \S+ were not logged; the last logged: .*{words}", text
        )
        assert len(shown) + sum(int(count.replace(",", "")) for count in counts) == COUNT
