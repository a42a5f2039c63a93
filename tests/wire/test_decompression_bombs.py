"""The memory of one answer's messages is bounded, however well they are compressed."""

import tracemalloc

import pytest

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.compress import CompressionType, compress
from rocket_sink.wire.headers import Frame, Limits
from rocket_sink.wire.responses import decode_pull_answer, decode_transaction_check
from rocket_sink.wire.stored import (
    Allowance,
    StoredMessage,
    decode_stored,
    encode_stored,
    memory_bytes,
)
from tests.memory import memory_below

MIB = 1 << 20
KINDS = list(CompressionType)


def bomb(kind, size, key="k", offset=0):
    """Return a stored message whose body of zeros inflates to `size` bytes."""
    message = StoredMessage(
        "t", b"", queue_offset=offset, sys_flag=kind.sys_flag,
        properties={"KEYS": key, "UNIQ_KEY": key},
    )  # fmt: skip
    return encode_stored(message, stored_body=compress(bytes(size), kind))


def inner_bomb(offset=0):
    """Return an inner batch of under 1 kB, and the number of its messages."""
    count = 8 * MIB // len(encode_inner(b"", ""))
    batch = compress(encode_inner(b"", "") * count, CompressionType.ZSTD, 19)
    flag = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | CompressionType.ZSTD.sys_flag
    message = StoredMessage("t", b"", queue_offset=offset, sys_flag=flag)
    return encode_stored(message, stored_body=batch), count


def pull_answer(body):
    return Frame(0, {"nextBeginOffset": "1000000", "minOffset": "0", "maxOffset": "9"}, body)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_read_whole(kind):
    answer = bomb(kind, 8 * MIB) * 64
    with memory_below(90 * MIB), pytest.raises(RemoteProtocolError, match="ask for fewer"):
        decode_stored(answer)
    assert len(decode_stored(bomb(kind, 4 * MIB) * 15)) == 15


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_wanted_is_not_inflated(kind):
    """A look-up may return other messages with the same hash; a broker may send anything."""
    answer = bomb(kind, 8 * MIB, "other") * 500 + bomb(kind, 8 * MIB, "mine")

    def wanted(properties):
        return bool(properties["KEYS"] == "mine")

    with memory_below(2 * MIB):
        (found,) = decode_stored(answer, wanted=wanted, bodies=False)
    assert (found.body, found.properties["UNIQ_KEY"]) == (b"", "mine")
    with memory_below(20 * MIB):
        (found,) = decode_stored(answer, wanted=wanted)
    assert len(found.body) == 8 * MIB


@pytest.mark.parametrize("is_inner", [False, True])
def test_answers_that_are_kept_together_share_an_allowance(is_inner):
    allowance = Allowance(20 * MIB)
    answer = bomb(CompressionType.ZLIB, 8 * MIB)
    if is_inner:
        batch = compress(encode_inner(bytes(2 * MIB), "") * 2, CompressionType.ZLIB)
        flag = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | CompressionType.ZLIB.sys_flag
        answer = encode_stored(StoredMessage("t", b"", sys_flag=flag), stored_body=batch)
    kept = [decode_stored(answer, allowance=allowance) for _ in range(2)]
    assert len(kept) == 2
    with pytest.raises(RemoteProtocolError, match="too much memory"):
        decode_stored(answer, allowance=allowance)


@pytest.mark.parametrize(
    "read", [lambda frame: decode_stored(frame.body), decode_transaction_check]
)
def test_an_inner_batch_of_a_kilobyte(read):
    data, count = inner_bomb()
    assert len(data) < 1000 and count > 381_000
    for bodies in (data, data * 1000):
        with memory_below(90 * MIB), pytest.raises(RemoteProtocolError):
            read(Frame(0, {}, bodies))


def test_looking_for_one_id_among_inner_batches_ends():
    data, _ = inner_bomb()
    with memory_below(40 * MIB), pytest.raises(RemoteProtocolError, match="ask for fewer"):
        decode_stored(data * 10_000, wanted=lambda properties: False, bodies=False)


def pulled(pages, end):
    """Yield all messages to a reader that asks again from where the last answer ended."""
    begin = 0
    while begin < end:
        messages, following = decode_pull_answer(pages(begin), begin=begin)
        assert sum(map(memory_bytes, messages)) <= Limits.POLL_BYTES
        yield from messages
        assert following > begin
        begin = following


@pytest.mark.parametrize("kind", KINDS)
def test_a_pull_takes_what_it_has_room_for(kind):
    encoded = [bomb(kind, 4 * MIB, offset=offset) for offset in range(20)]
    with memory_below(40 * MIB):
        offsets = []
        for message in pulled(lambda begin: pull_answer(b"".join(encoded[begin:])), 20):
            assert len(message.body) == 4 * MIB
            offsets.append(message.queue_offset)
    assert offsets == list(range(20))


def test_a_pull_into_the_middle_of_an_inner_batch(monkeypatch):
    """Brokers answer with the whole batch, although its earlier messages were read before."""
    monkeypatch.setattr(Limits, "POLL_BYTES", 100_000)
    count = 1000
    batch = encode_inner(b"", "") * count
    flag = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
    data = encode_stored(StoredMessage("t", batch, queue_offset=0, sys_flag=flag))
    offsets = [message.queue_offset for message in pulled(lambda _: pull_answer(data), count)]
    assert offsets == list(range(count))


def test_a_message_over_the_limit_of_a_poll_is_the_only_one():
    large = encode_stored(StoredMessage("t", bytes(Limits.POLL_BYTES - 900)))
    messages, left_out = decode_pull_answer(pull_answer(large * 2))
    assert (len(messages), left_out) == (1, 0)


def test_many_small_properties():
    """64 kB of text become a mapping of megabytes."""
    properties = {f"{number:x}": "v" for number in range(9000)}
    data = encode_stored(StoredMessage("t", b"x", properties=properties)) * 200
    assert len(data) < Limits.FRAME_BYTES
    with memory_below(90 * MIB), pytest.raises(RemoteProtocolError, match="ask for fewer"):
        decode_stored(data)
    with memory_below(30 * MIB):
        decode_pull_answer(pull_answer(data))


def test_the_estimate_is_no_less_than_the_truth():
    for message in (
        StoredMessage("topic", b"", properties={}),
        StoredMessage("topic", bytes(100_000), properties={"a": "b"}),
        StoredMessage("topic", b"", properties={f"{n:x}": f"{n}" for n in range(5000)}),
        StoredMessage("topic", b"", properties={"name": "x" * 30_000 + "😀"}),
    ):
        data = encode_stored(message) * 10
        tracemalloc.start()
        kept = decode_stored(data)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used / len(kept) <= memory_bytes(kept[0]) <= 5 * used / len(kept)


def test_the_error_names_the_message():
    """The error allows a reader to go on behind the message."""
    data = bomb(CompressionType.LZ4, 9 * MIB, offset=41)
    with pytest.raises(RemoteProtocolError, match=r"offset 41 of queue 0 of t: .*8388608"):
        decode_pull_answer(pull_answer(data))
