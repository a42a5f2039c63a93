"""The fuzzer's short form; `python -m tests.fuzz` is the long form."""

import json
from importlib.util import find_spec

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.recorded import RECORDED, recorded
from tests.fuzz.targets import TARGETS, feed


@pytest.mark.parametrize("name", TARGETS)
def test_the_samples_themselves_decode(name):
    for sample in TARGETS[name].samples:
        result = feed(TARGETS[name], sample)
        assert not isinstance(result, Exception), result


@pytest.mark.parametrize("name", [name for name in TARGETS if recorded(name)])
def test_recorded_traffic_decodes(name):
    results = [feed(TARGETS[name], sample) for sample in recorded(name)]
    # A piece of the traffic may be cut, and not every header belongs to a send answer.
    assert name in ("frame", "send answer") or not any(
        isinstance(result, Exception) for result in results
    )


def test_recorded_traffic_is_small_and_from_both_generations():
    assert RECORDED.stat().st_size < 200_000
    assert set(json.loads(RECORDED.read_text())) == {"5.5.0", "4.9.7"}
    assert sum(bool(recorded(name)) for name in TARGETS) >= 17


@pytest.mark.skipif(find_spec("atheris") is None, reason="no wheel of atheris for this Python")
def test_twenty_thousand_inputs_find_nothing(tmp_path):
    done = fuzz("all", 20_000, tmp_path)
    assert not done.finding, done.finding
    assert done.inputs >= 20_000
    assert done.coverage > 100


def test_a_wrong_error_is_a_find():
    def wrong(data):
        raise KeyError(data)

    with pytest.raises(KeyError):
        feed(TARGETS["route"]._replace(decode=wrong), b"x")
