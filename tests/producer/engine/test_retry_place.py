"""The place of the next attempt if only the failure itself speaks against a broker."""

from itertools import pairwise

import pytest

from rocket_sink.testing import CloseConnection
from tests.producer.conftest import send


@pytest.mark.parametrize("selector", ["round_robin", "random", "weighted"])
def test_a_retry_goes_to_another_broker_without_the_fault_table(cluster, make_engine, selector):
    engine = make_engine(faultTable="off", queueSelector=selector)
    send(engine, "warm")
    for number in range(24):
        cluster.behave()
        cluster.on_send(CloseConnection(stores=False), times=1)
        attempts = send(engine, number, attempts=3).attempts
        assert len(attempts) >= 2
        for before, after in pairwise(attempts):
            assert before.broker_name != after.broker_name
