"""Options take effect: brokers see what a producer does with each."""

import json
from random import Random

import pytest

from rocket_sink.errors import BrokerBusyError, NoRouteError
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.routing.sharding import LITE_TOPIC_HASH, queue_for_key
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode, mq_version
from rocket_sink.wire.compress import CompressionType, compress
from tests.producer.conftest import send
from tests.producer.waiting import until


@pytest.mark.parametrize("sharding_hash", ["java", "java_long", "siphash24", "rendezvous"])
def test_sharding_hash(cluster, make_producer, sharding_hash):
    for broker in cluster.brokers:
        broker.version = mq_version(5, 5, 0)
    producer = make_producer(shardingHash=sharding_hash)
    info = TopicPublishInfo.of("orders", cluster.route("orders"))
    keys = [*(f"key-{number}" for number in range(6)), *map(str, range(1 << 40, (1 << 40) + 6))]
    queues = [producer.send(Message("orders", b"x", sharding_key=key)).queue for key in keys]
    assert queues == [queue_for_key(info, key, sharding_hash) for key in keys]
    lite = [producer.send(Message("orders", b"x", lite_topic=key)).queue for key in keys]
    assert lite == [queue_for_key(info, key, LITE_TOPIC_HASH) for key in keys]


@pytest.mark.parametrize(
    ("options", "kind", "level"),
    [
        ({}, CompressionType.ZLIB, 5), ({"compressLevel": 9}, CompressionType.ZLIB, 9),
        ({"compressType": "zstd"}, CompressionType.ZSTD, 1),
        ({"compressType": "zstd-all", "compressLevel": 5}, CompressionType.ZSTD, 5),
        ({"compressType": "LZ4"}, CompressionType.LZ4, 0), ({"compressType": "none"}, None, 0),
    ],
)  # fmt: skip
def test_compression(cluster, make_producer, options, kind, level):
    body = b"".join(b"%d %d," % (n, n * n % 977) for n in range(4000))
    make_producer(**options).send(Message("orders", body))
    (request,) = cluster.requests(RequestCode.SEND_MESSAGE_V2)
    flags = int(request.ext["f"])
    assert (CompressionType.of_sys_flag(flags) if flags else None) is kind
    assert request.body == (body if kind is None else compress(body, kind, level))
    assert [message.body for message in cluster.messages("orders")] == [body]


def test_retry_response_codes(cluster, make_engine):
    engine = make_engine(retryResponseCodes="14,1")
    cluster.on_send(Answer(2, "busy"))
    completion = send(engine)
    assert isinstance(completion.error, BrokerBusyError) and len(completion.attempts) == 1


def test_topics_made_on_the_fly(cluster, make_producer):
    cluster.create_topic("template", 8)
    producer = make_producer(createTopic="template:2")
    producer.send(Message("new", b"x"))
    producer.send_batch([Message("new", b"y")] * 2)
    producer.send_oneway(Message("new", b"z"))
    until(lambda: len(cluster.messages("new")) == 4)
    sends = cluster.requests(RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    assert [(r.ext["c"], r.ext["d"]) for r in sends] == [("template", "2")] * 3
    assert len(producer.fetch_publish_message_queues("new")) == 4


def test_strict_order_makes_no_topic_unless_it_is_told_to(cluster, make_producer):
    """A topic that its first send makes is on one broker, and keys of the other one are lost."""
    message = Message("new", b"x", sharding_key="k")
    with pytest.raises(NoRouteError, match="does not exist"):
        make_producer(ordering="strict", sendMsgTimeout=500).send(message)
    assert cluster.messages("new") == []
    make_producer(ordering="strict", createTopicKey="TBW102").send(message)
    make_producer(ordering="best_effort").send(Message("newer", b"x", sharding_key="k"))
    assert len(cluster.messages("new")) == len(cluster.messages("newer")) == 1


def test_client_id(cluster, make_producer):
    producer = make_producer(clientIp="10.1.2.3", instanceName="one", heartbeatBrokerInterval=100)
    producer.send(Message("orders", b"x"))
    until(lambda: cluster.requests(RequestCode.HEART_BEAT))
    (beat, *_) = cluster.requests(RequestCode.HEART_BEAT)
    assert json.loads(bytes(beat.body))["clientID"] == "10.1.2.3@one"


@pytest.mark.parametrize("seed", range(4))
def test_any_name_server_that_answers_will_do(cluster, seed):
    """From then on the producer asks the server that answers first, whichever it drew at random."""
    options = SinkOptions.parse(nameServer=f"127.0.0.1:1;{cluster.name_server}")
    engine = SendEngine(options, rng=Random(seed))
    assert send(engine).outcome.delivered
    assert repr(engine.routes._name_servers) == f"<NameServers {cluster.name_server};127.0.0.1:1>"
    engine.close(0.2)
