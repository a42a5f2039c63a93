"""The live cases on brokers with ACL and TLS, and on 4.9.7."""

import pytest

from rocket_sink.cluster import LocalCluster
from tests.clusters import TRANSACTIONS
from tests.producer.conformance.test_acl import Keys
from tests.producer.conformance.test_live import (  # noqa: F401 (collected here too)
    producer,
    test_c68_a_batch_with_a_body_near_the_limit,
    test_c68_the_largest_body_and_one_byte_more,
    test_c69_chinese_properties,
    test_c69_the_longest_properties_that_we_let_pass_are_stored,
    test_c71_a_hundred_messages_in_one_batch,
    test_c73_order_per_queue,
)

pytestmark = pytest.mark.cluster


_CLUSTERS = {
    "5.3.3 with ACL and TLS": {"version": "5.3.3", "acl": Keys(), "tls": "enforcing"},
    "4.9.7": {"version": "4.9.7"},
}


@pytest.fixture(scope="module", params=_CLUSTERS)
def real(request):
    with LocalCluster(1, **_CLUSTERS[request.param], broker_config=TRANSACTIONS) as cluster:
        yield cluster
