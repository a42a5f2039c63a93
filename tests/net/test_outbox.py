"""The account of bytes decides between NOT_SENT and UNKNOWN: it must be exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.net.outbox import Outbox


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=80),
)
def test_any_writes_give_the_same_bytes_and_complete_frames_exactly(frames, writes):
    outbox, expected, ends = Outbox(), b"", []
    for number, sizes in enumerate(frames):
        buffers = [bytes([number]) * size for size in sizes]
        outbox.put(number, buffers, sum(sizes))
        expected += b"".join(buffers)
        ends.append(len(expected))
    sent, complete = b"", []
    for count in [*writes, len(expected)]:
        if not outbox:
            break
        taken = b"".join(bytes(b) for b in outbox.gather())[:count]
        sent += taken
        complete += outbox.wrote(len(taken))
        assert complete == [n for n, end in enumerate(ends) if end <= len(sent)]
        assert outbox.size == len(expected) - len(sent)
    assert expected.startswith(sent)


def test_withdraw_leaves_what_is_partly_written():
    outbox = Outbox()
    for owner in "abc":
        outbox.put(owner, [b"12345"], 5)
    outbox.wrote(1)
    assert outbox.first_owner == "a"
    assert outbox.withdraw() == ["b", "c"]
    assert b"".join(bytes(b) for b in outbox.gather()) == b"2345"
    assert outbox.wrote(4) == ["a"]
    assert not outbox and outbox.size == 0


def test_withdraw_one_owner():
    outbox, owners = Outbox(), [object(), object(), object()]
    for owner in owners:
        outbox.put(owner, [b"12345"], 5)
    assert outbox.withdraw(owners[1]) == [owners[1]]
    assert outbox.withdraw(owners[1]) == []
    assert outbox.wrote(10) == [owners[0], owners[2]]


def test_a_frame_without_an_owner_completes_silently():
    outbox = Outbox()
    outbox.put(None, [b"123"], 3)
    outbox.put("a", [b"1"], 1)
    assert outbox.wrote(4) == ["a"]
    outbox.put("b", [b"123"], 3)
    outbox.disown("b")
    assert outbox.wrote(3) == []


def test_a_frame_of_very_many_buffers_goes_in_parts():
    outbox = Outbox()
    buffers = [bytes([n % 251]) for n in range(5000)]
    outbox.put("a", buffers, 5000)
    sent, rounds = b"", 0
    while outbox:
        part = b"".join(bytes(b) for b in outbox.gather())
        sent += part
        rounds += 1
        outbox.wrote(len(part))
    assert sent == b"".join(buffers) and 5 <= rounds < 10
