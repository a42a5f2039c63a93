"""The token bucket and the window of a busy broker, by a clock of the test's own."""

import random

import pytest

from rocket_sink.routing.rate_limit import BURST_S, AimdWindow, TokenBucket


def _spend_all(bucket, amounts, now_s):
    """Return the time at which each amount goes, for a sender that waits for `wait_s`."""
    times = []
    for amount in amounts:
        while (wait_s := bucket.wait_s(amount, now_s)) > 0:
            now_s += wait_s
        bucket.spend(amount, now_s)
        times.append(now_s)
    return times


@pytest.mark.parametrize("seed", range(20))
def test_the_rate_is_never_passed_and_always_reached(seed):
    rng = random.Random(seed)
    rate = rng.uniform(0.2, 50_000)
    amounts = [rng.uniform(0.01, 3) * rate * rng.choice((0.001, 0.1, 1)) for _ in range(300)]
    times = _spend_all(TokenBucket(rate, 5.0), amounts, 5.0)
    spent = 0.0
    for amount, at_s in zip(amounts, times, strict=True):
        # An amount larger than a full bucket goes when the bucket is full; later amounts pay for
        # the rest.
        assert spent + min(amount, rate * BURST_S) <= rate * (at_s - 5.0) * 1.000001 + 1e-6
        spent += amount
    last = max(amounts)
    assert times[-1] - 5.0 <= (spent + last) / rate + 1e-6


@pytest.mark.parametrize(
    ("since_s", "spent", "waits"),
    [
        # Otherwise many short-lived workers together would exceed the limit.
        pytest.param(100.0, [], [(1, 100.0, 0.1), (1, 100.11, 0.0)], id="a new sender waits"),
        pytest.param(0.0, [], [(10, 3600.0, 0.0)], id="idle time saves up one burst"),
        pytest.param(0.0, [(10, 3600.0)], [(1, 3600.0, 0.1)], id="and no more"),
        pytest.param(0.0, [], [(50, 0.0, 1.0)], id="a large piece waits for a full bucket"),
        pytest.param(0.0, [(50, 1.0)], [(1, 1.0, 4.1)], id="and leaves a debt"),
        pytest.param(100.0, [(0, 101.0), (0, 50.0)], [(10, 101.0, 0.0)], id="a clock goes back"),
        pytest.param(100.0, [(0, 101.0), (10, 101.0)], [(10, 60.0, 1.0)], id="and gives nothing"),
    ],
)
def test_a_bucket_of_ten_a_second(since_s, spent, waits):
    bucket = TokenBucket(10, since_s)
    for amount, at_s in spent:
        bucket.spend(amount, at_s)
    for amount, at_s, wait_s in waits:
        assert bucket.wait_s(amount, at_s) == pytest.approx(wait_s)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_lets_nothing_pass_is_refused(rate):
    with pytest.raises(ValueError, match="nothing pass"):
        TokenBucket(rate, 0.0)


class TestAimdWindow:
    def test_the_first_busy_answer_halves_what_is_in_flight(self):
        window = AimdWindow(100, 0.0)
        assert window.room_for(1, 49) == 1
        assert window.room_for(1, 50) == 0
        window.busy(1.0, 8, 2.0)
        assert window.limit == 4, "a window that is not used is cut from what is"

    def test_the_answers_to_one_window_cut_once(self):
        window = AimdWindow(100, 10.0)
        for _ in range(60):
            window.busy(9.5, 60, 10.1)
        assert window.limit == 50
        window.busy(10.2, 50, 10.3)
        assert window.limit == 25

    def test_it_never_closes(self):
        window = AimdWindow(1, 0.0)
        for second in range(1, 10):
            window.busy(second, 1, second)
        assert window.room_for(1, 0) == 1
        assert window.room_for(1, 1) == 0

    def test_it_grows_by_about_one_per_window_of_stored_answers(self):
        window = AimdWindow(40, 0.0)
        for _ in range(20):
            window.grow()
        assert 20.9 < window.limit <= 21.0
