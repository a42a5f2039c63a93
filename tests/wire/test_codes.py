"""Numbers that are computed, or easy to mistype."""

import pytest

from rocket_sink.wire.codes import (
    CURRENT_VERSION,
    LanguageCode,
    RequestCode,
    ResponseCode,
    mq_version,
    version_name,
)
from rocket_sink.wire.headers import Limits
from rocket_sink.wire.trace import MessageType


@pytest.mark.parametrize(
    ("ordinal", "name"),
    [(479, "5.3.3"), (478, "5.3.3-SNAPSHOT"), (401, "4.9.4"), (213, "4.0.0"), (611, "5.9.9"),
     (0, "unknown (0)"), (613, "unknown (613)"), (-7, "unknown (-7)")],
)  # fmt: skip
def test_version_names(ordinal, name):
    assert version_name(ordinal) == name
    if name[0].isdigit() and "-" not in name:
        assert mq_version(*map(int, name.split("."))) == ordinal


def test_a_newer_client_gets_go_away():
    """Brokers send GO_AWAY to clients newer than 5.3.1 only; others just lose the connection."""
    assert mq_version(5, 3, 1) < mq_version(5, 3, 3) == CURRENT_VERSION


_REQUEST_CODES = (
    "11 12 14 15 17 28 29 30 31 33 34 35 36 37 39 103 105 106 206 220 310 320 325 326 351 370"
)


@pytest.mark.parametrize(
    ("codes", "numbers"),
    [
        (RequestCode, _REQUEST_CODES),
        (ResponseCode, "0 1 2 3 10 11 12 13 14 16 17 19 20 21 22 26 29 215 604 1500"),
        (LanguageCode, "0 1 2 3 4 5 6 7 8 9 10 11 12 13"),
        (MessageType, "0 1 2 3 4"),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_java(codes, numbers):
    """In the order of Java's classes RequestCode and ResponseCode."""
    assert " ".join(str(int(code)) for code in codes) == numbers
    assert len(codes) == len(codes.__members__)


def test_the_limits_of_received_data():
    """Each is the largest that a broker sends by default, or bounds the memory of one answer."""
    sizes = {name: value for name, value in vars(Limits).items() if name.isupper()}
    assert sizes == {
        "FRAME_BYTES": 16 << 20, "HEADER_BYTES": 1 << 20, "EXT_ENTRIES": 4096, "JSON_DEPTH": 64,
        "REMARK_CHARS": 2048, "BODY_BYTES": 8 << 20, "ANSWER_BYTES": 64 << 20,
        "POLL_BYTES": 16 << 20, "ROUTE_BYTES": 1 << 20, "ROUTE_QUEUES": 65_536,
        "ROUTE_BROKERS": 4096,
    }  # fmt: skip
