"""Routes from name servers old and new, honest and hostile."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.headers import Limits, quote_numeric_keys
from rocket_sink.wire.route import (
    BrokerData,
    QueueData,
    QueueMapping,
    TopicRoute,
    decode_route,
    encode_route,
)

ROUTE = TopicRoute(
    (QueueData("a", 8, 8), QueueData("a", 4, 2, perm=4), QueueData("b", 0, 0, 0)),
    (
        BrokerData("c", "a", {0: "192.168.0.47:10911", 2**63 - 1: "192.168.0.48:10911"}),
        BrokerData("", "b", {1: "h:1"}),
    ),
    "a:4;b:2",
    {"a": QueueMapping("a", 8, 5, "__global__", {0: 0, 3: 1})},
)


@pytest.mark.parametrize("legacy", [False, True], ids=["strict", "bare keys"])
def test_c16_c18_c74_a_route_survives_both_forms(legacy):
    body = encode_route(ROUTE, legacy_keys=legacy)
    assert (b'{0:"' in body) == legacy
    route = decode_route(body)
    assert route == ROUTE
    assert [queue.writable for queue in route.queues] == [True, False, False]
    assert [broker.master for broker in route.brokers] == ["192.168.0.47:10911", None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{0:1, 1 : 2,\n-3:4}", b'{"0":1,"1" : 2,"-3":4}'), (b'{"a":[1,2:3]}', b'{"a":[1,"2":3]}'),
        (b'{"a":"{0:1,2:3}"}', b'{"a":"{0:1,2:3}"}'), (b'{"a\\"{0:":1}', b'{"a\\"{0:":1}'),
        (b'{"unclosed{0:', b'{"unclosed{0:'), (b'"\\', b'"\\'),
    ],
)  # fmt: skip
def test_only_keys_outside_of_text_are_quoted(text, expected):
    assert quote_numeric_keys(text) == expected


def test_quoting_takes_linear_time():
    """A pattern that tries again at each unclosed text would take 2.5e11 steps here."""
    assert len(quote_numeric_keys(b'"\\' * 500_000)) == 1_000_000
    assert len(quote_numeric_keys(b'{"' + b'\\"' * 500_000)) == 1_000_002


@given(
    st.recursive(
        st.integers() | st.text() | st.booleans() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_strict_json_is_unchanged(value):
    text = json.dumps(value).encode()
    assert quote_numeric_keys(text) == text


def test_an_empty_mapping_marks_a_static_topic():
    """C43 has to tell "no mapping" from "a mapping without entries"."""
    assert decode_route(b'{"topicQueueMappingByBroker":{}}').mappings == {}
    assert decode_route(b'{"topicQueueMappingByBroker":null}').mappings is None


def body(**fields):
    queue = {"brokerName": "b", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    return json.dumps({"queueDatas": [queue | fields], "brokerDatas": []}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "no body", id="nothing"),
        pytest.param(None, "no body", id="None"),
        pytest.param(b"[]", "no JSON object", id="a list"),
        pytest.param(body(writeQueueNums=2**31 - 1), "0 to 65536", id="F75 two billion queues"),
        pytest.param(body(writeQueueNums=-1), "0 to 65536", id="negative"),
        pytest.param(body(writeQueueNums=True), "writeQueueNums", id="true"),
        pytest.param(body(writeQueueNums="8"), "writeQueueNums", id="text"),
        pytest.param(body(readQueueNums=None), "readQueueNums", id="missing"),
        pytest.param(body(brokerName=""), "no brokerName", id="nameless"),
        pytest.param(body(brokerName=5), "brokerName", id="number as a name"),
        pytest.param(body(perm=2**31), "perm", id="permission of 32 bits"),
        pytest.param(
            b'{"topicQueueMappingByBroker":{"b":{"epoch":9223372036854775808}}}', "64 bits",
            id="epoch of 64 bits",
        ),
        pytest.param(b'{"queueDatas":[1]}', "no JSON object", id="number as queue data"),
        pytest.param(b'{"queueDatas":{}}', "queueDatas", id="object as a list"),
        pytest.param(
            b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"x":"h:1"}}]}', "number", id="id x"
        ),
        pytest.param(
            b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"\xc2\xb2":"h:1"}}]}', "number",
            id="a digit that is no number",
        ),
        pytest.param(
            b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"0":5}}]}', "address", id="address 5"
        ),
        pytest.param(b'{"orderTopicConf":5}', "orderTopicConf", id="order conf 5"),
        pytest.param(b'{"a":1,"a":2}', "twice", id="doubled key"),
        pytest.param(b'{"queueDatas":' + b"[" * 99 + b"]" * 99 + b"}", "deeper", id="depth"),
        pytest.param(b"\xff{}", "UTF-8", id="not UTF-8"),
    ],
)  # fmt: skip
def test_broken_and_hostile_routes_are_refused(data, said):
    with pytest.raises(RemoteProtocolError, match=said):
        decode_route(data)


def test_limits_of_a_route(monkeypatch):
    many = TopicRoute(tuple(QueueData(f"b{n}", 1, 40_000) for n in range(2)), ())
    with pytest.raises(RemoteProtocolError, match="80000 queues; the limit is 65536"):
        decode_route(encode_route(many))
    assert decode_route(body(readQueueNums=0, writeQueueNums=65_536)).queues[0].writable
    brokers = TopicRoute((), tuple(BrokerData("c", f"b{n}") for n in range(11)))
    assert decode_route(encode_route(brokers)) == brokers
    monkeypatch.setattr(Limits, "ROUTE_BROKERS", 10)
    with pytest.raises(RemoteProtocolError, match="brokerDatas has 11 entries"):
        decode_route(encode_route(brokers))
    with pytest.raises(RemoteProtocolError, match="bytes; the limit"):
        decode_route(b" " * (1024 * 1024 + 1))
