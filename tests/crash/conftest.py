import pytest

from tests.clusters import two_brokers

cluster = pytest.fixture(two_brokers, scope="package")
"""Two real brokers for all rounds."""
