import pytest

from tests.clusters import repair


@pytest.fixture
def cluster(local_cluster):
    """Return the worker's two real brokers, both of them at work."""
    return repair(local_cluster)
