"""The account of bytes decides between NOT_SENT and UNKNOWN: it must be exact."""

from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.net.channel import WriteQueue


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=80),
)
def test_any_writes_give_the_same_bytes_and_complete_frames_exactly(frames, writes):
    write_queue, expected, ends = WriteQueue(), b"", []
    for number, sizes in enumerate(frames):
        buffers = [bytes([number]) * size for size in sizes]
        write_queue.put(number, buffers, sum(sizes))
        expected += b"".join(buffers)
        ends.append(len(expected))
    sent, complete = b"", []
    for count in [*writes, len(expected)]:
        if not write_queue:
            break
        written = b"".join(bytes(b) for b in write_queue.gather())[:count]
        sent += written
        complete += write_queue.wrote(len(written))
        assert complete == [n for n, end in enumerate(ends) if end <= len(sent)]
        assert write_queue.size == len(expected) - len(sent)
    assert expected.startswith(sent)


def test_withdraw_leaves_what_is_partly_written():
    write_queue = WriteQueue()
    for owner in "abc":
        write_queue.put(owner, [b"12345"], 5)
    write_queue.wrote(1)
    assert write_queue.first_owner == "a"
    assert write_queue.withdraw() == ["b", "c"]
    assert b"".join(bytes(b) for b in write_queue.gather()) == b"2345"
    assert write_queue.wrote(4) == ["a"]
    assert not write_queue and write_queue.size == 0


def test_withdraw_one_owner():
    write_queue, owners = WriteQueue(), [object(), object(), object()]
    for owner in owners:
        write_queue.put(owner, [b"12345"], 5)
    assert write_queue.withdraw([owners[1]]) == [owners[1]]
    assert write_queue.withdraw([owners[1]]) == []
    assert write_queue.wrote(10) == [owners[0], owners[2]]


def test_a_frame_without_an_owner_completes_silently():
    write_queue = WriteQueue()
    write_queue.put(None, [b"123"], 3)
    write_queue.put("a", [b"1"], 1)
    assert write_queue.wrote(4) == ["a"]
    write_queue.put("b", [b"123"], 3)
    write_queue.disown("b")
    assert write_queue.wrote(3) == []


def test_a_frame_of_very_many_buffers_goes_in_parts():
    write_queue = WriteQueue()
    buffers = [bytes([n % 251]) for n in range(5000)]
    write_queue.put("a", buffers, 5000)
    sent, rounds = b"", 0
    while write_queue:
        part = b"".join(bytes(b) for b in write_queue.gather())
        sent += part
        rounds += 1
        write_queue.wrote(len(part))
    assert sent == b"".join(buffers) and 5 <= rounds < 10
