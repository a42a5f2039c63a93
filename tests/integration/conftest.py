from __future__ import annotations

import pytest

from tests.clusters import two_brokers

cluster = pytest.fixture(two_brokers, scope="module")
"""Two real brokers for one file."""
