"""The window of a proxy, which drops answers while more than 64 KiB of earlier ones are unwritten
(AbstractRemotingActivity.writeResponse, and Netty's default high-water mark).
"""

import pytest

from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.testing import Drop
from rocket_sink.testing.script import is_send
from tests.producer.conftest import drive_until
from tests.producer.engine.test_two_proxies import ScriptedProxy

_HIGH_WATER = 64 << 10


def answer_bytes(messages):
    """Return the size of an answer of a broker of 5.5 with an IPv6 address, or the largest one to
    a single message (with a recall handle)."""
    return 230 + 57 * messages if messages > 1 else 420


@pytest.mark.parametrize(
    ("messages", "arrive"),
    [([1] * 300, 120), ([500] * 9, 2), ([4000] * 3, 1), ([1] * 70 + [500, 4000] + [1] * 80, 120)],
    ids=["singles", "batches", "large batches", "both"],
)
def test_a_proxy_has_room_for_all_answers(cluster, closing, make_engine, messages, arrive):
    proxy, broker = closing(ScriptedProxy(cluster)), cluster.brokers[0]
    broker.on_send(Drop(), times=None)
    engine = make_engine(nameServer=proxy.front.address, sendMsgTimeout=90_000)
    engine.publish_info("orders")
    for count in messages:
        engine.submit(
            SendRequest("orders", b"x" * count, message_count=count, batch=count > 1, token=count)
        )

    def sent():
        return [len(frame.body) for frame in broker.requests if is_send(frame)]

    drive_until(engine, lambda: len(sent()) + engine.flow.waiting.size == len(messages))
    assert len(sent()) == arrive
    assert len(sent()) == 1 or sum(map(answer_bytes, sent())) < _HIGH_WATER
