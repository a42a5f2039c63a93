import pytest

from rocket_sink.cluster import LocalCluster
from tests.clusters import repair


@pytest.fixture
def cluster(local_cluster: LocalCluster) -> LocalCluster:
    """Return the worker's two real brokers, both of them at work."""
    return repair(local_cluster)
