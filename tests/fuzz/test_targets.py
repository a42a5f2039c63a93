"""The fuzzer's short form; the long one is `python -m tests.fuzz`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import _MANY, TARGETS, feed


@pytest.mark.parametrize("name", TARGETS)
def test_the_samples_themselves_decode(name: str) -> None:
    for sample in TARGETS[name].samples:
        found = feed(TARGETS[name], sample)
        assert sample is _MANY or not isinstance(found, Exception), found


@pytest.mark.skipif(find_spec("atheris") is None, reason="no wheel of atheris for this Python")
def test_twenty_thousand_inputs_find_nothing(tmp_path: Path) -> None:
    done = fuzz("all", 20_000, tmp_path)
    assert not done.finding, done.finding
    assert done.inputs >= 20_000
    assert done.coverage > 100


def test_a_wrong_error_is_a_find() -> None:
    def wrong(data: bytes) -> object:
        raise KeyError(data)

    with pytest.raises(KeyError):
        feed(TARGETS["route"]._replace(decode=wrong), b"x")
