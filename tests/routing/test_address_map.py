"""The option `addressMap`: brokers' addresses as this client reaches them."""

import pytest

from rocket_sink.errors import ConnectError, OptionError, RequestTimeoutError
from rocket_sink.options import SinkOptions
from rocket_sink.routing.address_map import mapped_addresses, mapped_route, with_origin
from rocket_sink.wire.route import BrokerData, TopicRoute


@pytest.mark.parametrize(
    ("text", "address", "mapped"),
    [
        ("", "10.1.2.3:10911", "10.1.2.3:10911"),
        ("10.1.2.3:10911=host:30911", "10.1.2.3:10911", "host:30911"),
        ("10.1.2.3:10911=host:30911", "10.1.2.3:10921", "10.1.2.3:10921"),
        ("10.1.2.3:*=host:*", "10.1.2.3:10921", "host:10921"),
        ("10.1.0.0/16:*=gateway:*", "10.1.255.3:10911", "gateway:10911"),
        ("10.1.0.0/16:*=gateway:*", "10.2.0.3:10911", "10.2.0.3:10911"),
        ("10.1.0.0/16:*=gateway:*", "pod-7:10911", "pod-7:10911"),
        ("10.1.0.0/16:*=gateway:*", "[fd00::1]:10911", "[fd00::1]:10911"),
        ("[fd00::/8]:*=[::1]:*", "[fd00::1]:10911", "[::1]:10911"),
        ("[fd00::1]:*=gateway:1", "[fd00::1]:10911", "gateway:1"),
        # The broker's name fits all its addresses; the first entry that fits counts.
        ("broker-a:*=one:1; *:*=two:2", "10.1.2.3:10911", "one:1"),
        ("broker-b:*=one:1, *:*=two:2", "10.1.2.3:10911", "two:2"),
        ("broker-b:*=one:1; broker-a:10912=three:3", "pod-7:10911", "pod-7:10911"),
    ],
)
def test_the_first_entry_that_fits_counts(text, address, mapped):
    entries = SinkOptions.parse(addressMap=text).address_map
    assert mapped_addresses(entries, "broker-a", {0: address}) == {0: mapped}
    route = TopicRoute(brokers=(BrokerData("c", "broker-a", {0: address, 1: "x:1"}),))
    broker = mapped_route(entries, route).brokers[0]
    assert broker.master == mapped
    assert broker.registered.get(0, address) == address
    assert SinkOptions.parse(addressMap=dict(entries)).address_map == entries


@pytest.mark.parametrize(
    "text",
    ["a", "a:1", "a:1=b", "a=b:1", "a:1=b:x", "a:1=b:1;a:1=c:1", "10.1.0.0/33:*=b:1", "=b:1"],
)
def test_an_illegal_map_is_refused(text):
    with pytest.raises(OptionError, match=r"addressMap.*pairs of HOST:PORT"):
        SinkOptions.parse(addressMap=text)


def test_only_brokers_that_were_not_reached_get_the_remedy():
    cause = OSError("refused")
    error = ConnectError("cannot connect to h:1", address="h:1")
    error.__cause__ = cause
    explained = with_origin(error, "broker-a")
    assert "broker-a, which registered it (brokerIP1" in str(explained)
    assert "from addressMap" in explained.text and "=broker-a:*=HOST:PORT" in explained.text
    assert (explained.address, explained.__cause__) == ("h:1", cause)  # type: ignore[attr-defined]
    late = RequestTimeoutError("late")
    assert with_origin(late, "broker-a") is late
