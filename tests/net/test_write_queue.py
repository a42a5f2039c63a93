"""The account of bytes decides between NOT_SENT and UNKNOWN: it must be exact."""

from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.net import channel as channels
from rocket_sink.net.channel import WriteQueue


def queue_of(*owners, size=5):
    write_queue = WriteQueue()
    for owner in owners:
        write_queue.put(owner, [bytes(size)], size)
    return write_queue


def gathered(write_queue):
    return [len(part) for part in write_queue.gather()]


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
    write_queue = queue_of("a", "b", None, "c")
    assert write_queue.withdraw(["b"]) == ["b"] and write_queue.withdraw(["b"]) == []
    write_queue.wrote(1)
    assert (write_queue.first_owner, write_queue.partly_written_owner) == ("a", "a")
    assert write_queue.withdraw() == ["c"]
    assert gathered(write_queue) == [4, 5] and write_queue.unowned_bytes == 5
    assert write_queue.wrote(4) == ["a"] and not write_queue.first_owner
    assert write_queue.wrote(5) == [] and not write_queue.unowned_bytes
    assert not write_queue and write_queue.size == 0 and not write_queue.partly_written_owner


def test_a_frame_without_an_owner_completes_silently():
    write_queue = queue_of("a", "b", size=3)
    write_queue.disown("a")
    assert write_queue.wrote(6) == ["b"]


def test_few_bytes_and_buffers_are_gathered_at_once(monkeypatch):
    monkeypatch.setattr(channels, "GATHER_BYTES", 9)
    monkeypatch.setattr(channels, "GATHER_BUFFERS", 20)
    write_queue = queue_of(*range(6), size=3)
    assert gathered(write_queue) == [3, 3, 3], "nine bytes are enough"
    write_queue.wrote(2)
    assert gathered(write_queue) == [1, 3, 3, 3]
    assert (write_queue.partly_written_owner, write_queue.first_owner) == (0, 0)
    assert len(gathered(queue_of(*range(9), size=1))) == 4
    many = WriteQueue()
    many.put("a", [b"a"] * 25, 25)
    assert len(gathered(many)) == 20
