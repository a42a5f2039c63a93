"""Numbers that are computed, or easy to mistype."""

from __future__ import annotations

import pytest

from rocket_sink.wire.codes import (
    CURRENT_VERSION,
    RequestCode,
    mq_version,
    version_name,
)


def test_version_ordinals():
    releases = [(4, 9, 3), (4, 9, 4), (5, 0, 0), (5, 3, 1)]
    assert [mq_version(*release) for release in releases] == [399, 401, 413, 475]


@pytest.mark.parametrize(
    ("ordinal", "name"),
    [(479, "5.3.3"), (478, "5.3.3-SNAPSHOT"), (401, "4.9.4"), (213, "4.0.0"), (611, "5.9.9"),
     (0, "unknown (0)"), (613, "unknown (613)"), (-7, "unknown (-7)")],
)  # fmt: skip
def test_version_names(ordinal: int, name: str):
    assert version_name(ordinal) == name


def test_a_newer_client_gets_go_away():
    """Brokers send GO_AWAY to clients newer than 5.3.1 only; others just lose the connection."""
    assert mq_version(5, 3, 1) < CURRENT_VERSION
    assert mq_version(5, 3, 3) == CURRENT_VERSION


def test_no_command_that_changes_a_servers_configuration():
    assert not [code.name for code in RequestCode if "CONFIG" in code.name and code.name[0] == "U"]
