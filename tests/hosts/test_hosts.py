"""Hosts and bad cables work as described, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.hosts import world
from tests.hosts.forwarder import IN, OUT, Impairment, Line, Segment, _checksum, _tcp
from tests.producer.waiting import until

LACKS = world.missing()
needs_hosts = pytest.mark.skipif(bool(LACKS), reason=f"no hosts can be made here: {LACKS}")


@needs_hosts
@pytest.mark.parametrize("trial", ["hosts", "cables"])
def test_hosts_and_bad_cables_work_as_described(trial):
    line = world.command([sys.executable, "-m", "tests.hosts.trial", trial])
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_nothing_behind(number):
    mark = f"bed_{uuid.uuid4().hex}"
    # The owner is a process in between, like a command that a person stops.
    code = (
        "import sys; from tests.hosts import world; sys.argv = ['trial', 'alive']; "
        "world.enter('tests.hosts.trial')"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "MARK": mark},
    )  # fmt: skip
    assert owner.stdout.readline() == "standing\n"
    assert len(_marked(mark)) > 5, "the host's processes can be seen from here"
    owner.send_signal(number)
    owner.wait()
    until(lambda: not _marked(mark), poll_s=0.05)
    owner.stdout.close()
    assert not Path("/tmp", mark).exists()
    assert not Path("/run", mark).exists()
    interfaces = [name for name in os.listdir("/sys/class/net") if name[:4] in ("bed0", "veth")]
    assert not interfaces


def _marked(mark):
    matches = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark:
                matches.append(process)
        except psutil.Error:
            continue
    return matches


def _segment(number, *, payload=10, back=False):
    """Return a frame with a payload that no test checks."""
    ends, ports = [bytes((10, 99, 0, 2)), bytes((10, 99, 0, 3))], [1000, 9]
    order = -1 if back else 1
    addresses = b"".join(ends[::order])
    frame = bytearray(_tcp(b"\2" * 6, b"\4" * 6, addresses, tuple(ports[::order]), number, 77, 16))
    frame[16:18] = (40 + payload).to_bytes(2, "big")
    return bytes(frame) + b"x" * payload


def _line(**what):
    line = Line(1)
    line.impair(Impairment(**what), 0.0)
    return line


def test_frames_are_delayed_and_never_overtake():
    line = _line(delay_ms=100, jitter_ms=400)
    frames = [_segment(number) for number in range(200)]
    for number, frame in enumerate(frames):
        line.take(OUT, frame, number / 1000)
    assert line.due(0.099) == []
    assert line.wait_s(0.05) is not None
    assert [frame for _, frame in line.due(10)] == frames
    assert line.wait_s(10) is None


def test_loss_is_of_one_direction_and_of_the_share_asked_for():
    line = _line(loss_in=0.3)
    for number in range(2000):
        line.take(IN, _segment(number), 0.0)
        line.take(OUT, _segment(number), 0.0)
    passed = [direction for direction, _ in line.due(1)]
    assert passed.count(OUT) == 2000
    assert 1300 < passed.count(IN) < 1500


def test_a_slow_line_has_a_rate_and_a_queue_that_ends():
    line = _line(rate_bps=64_000)
    for number in range(1000):
        line.take(IN, _segment(number, payload=946), 0.0)
    # A frame of 1000 bytes takes an eighth of a second, and two seconds' worth of frames wait.
    assert len(line.due(1.01)) == 8
    assert len(line.due(100)) == 9


def test_a_reset_ends_each_connection_once_in_a_period():
    line = _line(reset_every_s=1.0)
    for moment in (0.1, 0.2, 0.3, 1.1, 1.2):
        line.take(IN, _segment(5), moment)
        line.take(OUT, _segment(6, back=True), moment)
    flags = [Segment.of(frame).flags & 4 for _, frame in line.due(2)]
    assert [bool(flag) for flag in flags].count(True) == 4, "both ends, in two periods"


def test_made_segments_are_right():
    frame = _segment(1000, payload=10)
    sender = Segment.of(frame)
    assert (sender.sequence, sender.acknowledged, sender.payload) == (1000, 77, 10)
    answer = Segment.of(sender.refusal())
    assert (answer.ports, answer.sequence, answer.flags) == ((9, 1000), 77, 4)
    assert answer.flow == sender.flow
    for packet in (sender.refusal(), sender.as_reset()):
        assert _checksum(packet[14:34]) == 0
        assert _checksum(packet[26:34] + b"\0\6\0\24" + packet[34:54]) == 0
