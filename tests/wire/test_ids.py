"""The message ids of clients and brokers."""

from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.ids import (
    MessageIds,
    decode_offset_message_id,
    offset_message_id,
)
from tests.decoding import decode_message_id

LOCAL = bytes([127, 0, 0, 1])


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("127.0.0.1", 9103, "7F0000010000238F000000000001E240"),
        ("::1", 0, "0000000000000000000000000000000100000000000000000001E240"),
    ],
)  # fmt: skip
def test_c26_the_brokers_ids(host, port, expected):
    assert offset_message_id(host, port, 123456) == expected
    assert decode_offset_message_id(expected) == 123456


def test_c26_only_addresses_have_ids():
    with pytest.raises(LocalProtocolError, match="IP address"):
        offset_message_id("broker.example", 1, 1)
    with pytest.raises(LocalProtocolError, match="4 or 16"):
        MessageIds(ip=b"123", pid=1, class_hash=1)
    for text in ("", "7F", "7F0000010000238F000000000001E24X", "7F" * 17, "７F" + "0" * 30):
        with pytest.raises(RemoteProtocolError):
            decode_offset_message_id(text)


def test_c28_consecutive_ids_count_up_and_hold_process_and_time():
    ids = MessageIds(ip=LOCAL, pid=70_000, class_hash=0xCAFEBABE, tz=timezone.utc)
    first, second = (decode_message_id(ids.next(1_700_000_000_123 + n)) for n in range(2))
    assert second.counter - first.counter == 1
    parts = {(each.ip, each.pid, each.class_hash) for each in (first, second)}
    assert parts == {(LOCAL, 70_000 & 0xFFFF, 0xCAFEBABE)}
    assert first.nearest_time_ms(1_700_000_000_140, timezone.utc) == 1_700_000_000_123


def test_the_month_of_ids_moves_on_and_no_id_comes_again():
    """As Java's does: mqadmin dates an id to this month or the last one."""
    ids = MessageIds(ip=LOCAL, pid=1, class_hash=1, tz=timezone.utc)
    created = []
    for month in (11, 12, 1, 2, 3):
        noon = datetime(2024 if month < 11 else 2023, month, 15, 12, tzinfo=timezone.utc)
        now_ms = int(noon.timestamp() * 1000)
        created += ids.several(0x10000, now_ms)
        decoded = decode_message_id(created[-1])
        assert decoded.nearest_time_ms(now_ms + 1, timezone.utc) == now_ms
    assert len(set(created)) == len(created)


@pytest.mark.parametrize("times", [[1000] * 150_000, [1000, 999, 998] * 30_000])
def test_ids_never_repeat_even_when_the_clock_stands_still_or_goes_back(times):
    ids = MessageIds(ip=LOCAL, pid=1, class_hash=1)
    created = [ids.next(now_ms) for now_ms in times]
    assert len(set(created)) == len(created)


@given(
    asked=st.lists(
        st.tuples(st.sampled_from([1, 300, 65_535, 65_537]), st.integers(995, 1005)), max_size=4
    )
)
@settings(deadline=None, max_examples=20)
def test_several_ids_are_those_of_so_many_calls(asked):
    """The calls cross a full counter, a full millisecond, and a clock that goes back."""
    together, one_by_one = (MessageIds(ip=LOCAL, pid=1, class_hash=1) for _ in range(2))
    for count, now_ms in asked:
        expected = [one_by_one.next(now_ms) for _ in range(count)]
        assert together.several(count, now_ms) == expected
    assert together.several(0, 2000) == []
    assert together.next(2000) == one_by_one.next(2000)
