"""Fixtures that the ledger's tests share."""

import pytest

from rocket_sink.ledger.path import resolve_path


@pytest.fixture
def place(tmp_path):
    """Return the path of a ledger in the test's folder, which is empty."""
    return resolve_path(tmp_path)
