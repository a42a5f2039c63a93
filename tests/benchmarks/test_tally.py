"""The counters of senders: pauses, longest sends, doubles."""

from benchmarks.rows import body_of, number_of, record_batch
from benchmarks.sender.tally import Tally


def test_a_pause_is_the_longest_time_without_a_good_end():
    tally = Tally(10.0)
    tally.succeeded(10.0, 10.5, range(1))
    tally.failed_with(10.5, 12.0, ValueError(), range(1), unknown=False)
    tally.succeeded(12.0, 13.5, range(1))
    tally.succeeded(13.5, 13.6, range(1))
    counted = tally.as_dict()
    assert (counted["pause_ms"], counted["longest_ms"]) == (3000.0, 1500.0)
    assert (counted["ok"], counted["failed"], counted["causes"]) == (3, 1, {"ValueError": 1})


def test_announced_are_the_doubtful_and_the_unknown():
    tally = Tally(0.0, keep=True)
    tally.succeeded(0, 1, range(3))
    tally.succeeded(0, 1, range(3, 5), maybe_duplicate=True)
    tally.failed_with(0, 1, ValueError(), range(7, 8), unknown=True)
    tally.failed_with(0, 1, ValueError(), range(8, 9), unknown=False)
    assert tally.acked == [0, 1, 2, 3, 4]
    assert tally.announced == [3, 4, 7]
    assert tally.as_dict()["doubtful"] == 3


def test_a_restart_forgets_the_warm_up():
    """The time before the first end is a pause, too."""
    tally = Tally(0.0, keep=True)
    tally.succeeded(0, 9, range(3), maybe_duplicate=True)
    tally.restart(10.0)
    tally.succeeded(11, 12, range(1))
    assert (tally.ok, tally.doubtful, tally.acked, tally.announced) == (1, 0, [0], [])
    assert (tally.as_dict()["longest_ms"], tally.as_dict()["pause_ms"]) == (1000.0, 2000.0)


def test_numbers_are_read_back_from_bodies_of_either_sender():
    for number in (0, 7, 10**18, -3):
        assert number_of(memoryview(body_of(number, 256))) == number
        assert len(body_of(number, 256)) == 256
    java = str(2**63 - 1).encode().ljust(256, b"\0")
    assert number_of(java) == 2**63 - 1


def test_record_batches_have_as_many_keys_as_asked_for():
    assert "sharding_key" not in record_batch(10, 100).schema.names
    assert len(record_batch(10, 100, 3).column("sharding_key").unique()) == 3
    assert len(record_batch(10, 100, -1).column("sharding_key").unique()) == 10
