"""The lock of object stores: a live holder keeps it, a killed holder keeps it for the lease."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
from pyarrow import fs

from rocket_sink import owner, private_file
from rocket_sink.errors import LedgerError
from rocket_sink.ledger import lock as lease_module
from rocket_sink.ledger.lock import Lease, LedgerLock
from rocket_sink.ledger.path import LedgerPath

from .values import refusal

LOCAL = fs.LocalFileSystem()
LONG_S = 120.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease_module, "_SETTLE_S", 0.2)
    monkeypatch.setattr(lease_module, "_POLL_S", 0.05)


@pytest.fixture
def elsewhere(monkeypatch):
    """Let this process look at locks like a process of another machine."""
    monkeypatch.setattr(owner.Owner, "is_alive", lambda self: None)


HOLDER = """
import sys
from pyarrow import fs
from rocket_sink.ledger import lock as lease
lease._SETTLE_S = 0.1
lock = lease.Lease(fs.LocalFileSystem(), sys.argv[1], lease_s=1.5)
assert lock.acquire(0)
print("held", flush=True)
sys.stdin.read()
"""


def held(path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    return holder


def end(holder):
    holder.kill()
    holder.communicate()


@pytest.mark.usefixtures("elsewhere")
def test_a_holder_of_another_host_keeps_it_while_it_lives_and_no_longer(tmp_path):
    path = tmp_path / "locks" / "lock"
    holder = held(path)
    other = Lease(LOCAL, str(path), lease_s=1.5)
    waits = []
    try:
        # The wait is three leases long.
        assert not other.acquire(4.5, on_wait=waits.append)
        assert waits == [f"process {holder.pid} on {owner.this_process().host}"]
    finally:
        end(holder)
    assert path.exists()
    for _ in range(2):  # The lock is renewed, too, when its object takes it again.
        assert other.acquire(LONG_S)
        (beats,) = (each for each in threading.enumerate() if each.name == "rocket-sink-lease")
        beats.join(0.2)
        assert beats.is_alive()
        other.release()
        assert not path.exists()


def test_a_dead_process_of_this_machine_blocks_nobody(tmp_path):
    path = tmp_path / "lock"
    holder = held(path)
    other = Lease(LOCAL, str(path), lease_s=1000)
    assert not other.acquire(0)
    holder.communicate(timeout=LONG_S)  # The holder ends without a release of the lock.
    assert other.acquire(0)
    path.unlink()
    other.release()
    assert other.holder() == "another process"


def refuse(self):
    raise OSError("the store is away")


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_holder_that_lost_it_or_cannot_renew_it_says_so(tmp_path, monkeypatch, is_lost):
    lock = Lease(LOCAL, str(tmp_path / "lock"), lease_s=0.3)
    assert lock.acquire(0)
    if is_lost:
        (tmp_path / "lock").write_text("another~boot~1~2~3 aa 30000 1")
    else:
        monkeypatch.setattr(Lease, "_write", refuse)
    until_s = time.monotonic() + LONG_S
    with pytest.raises(LedgerError, match=r"could not be renewed.*another\s+process may hold it"):
        while time.monotonic() < until_s:
            lock.check()
            time.sleep(0.05)
    lock.release()
    if is_lost:
        assert (tmp_path / "lock").read_text().startswith("another~")


def test_a_holder_that_was_stopped_before_its_write_does_not_take_it_for_renewed(
    tmp_path, monkeypatch
):
    """A successor may take the lock between the look and the write, if the look is late, too."""
    lock = Lease(LOCAL, str(tmp_path / "lock"), lease_s=0.5)
    assert lock.acquire(0)
    written = threading.Event()
    plain = Lease._write

    def write(self):
        self._renewed_s -= 0.8  # The process was stopped before the look.
        plain(self)
        written.set()

    monkeypatch.setattr(Lease, "_write", write)
    assert written.wait(LONG_S)
    lock.release()
    with pytest.raises(LedgerError, match="could not be renewed"):
        lock.check()


def test_a_holder_must_have_it_until_what_it_begins_is_over(tmp_path):
    lock = Lease(LOCAL, str(tmp_path / "lock"), lease_s=LONG_S)
    assert lock.acquire(0)
    lock.check(LONG_S / 2)
    with refusal(tmp_path / "lock", "could not be renewed for 120 s"):
        lock.check(LONG_S)
    if not (child := os.fork()):  # A forked process has it no more than others.
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    # The last heartbeat is over before the lock's file goes.
    lock._thread = heartbeat = mock.Mock()
    heartbeat.join.side_effect = (tmp_path / "lock").read_bytes
    lock.release()
    heartbeat.join.assert_called_once_with()
    lock.release()


def test_what_a_live_process_could_not_give_up_is_taken_after_its_lease(tmp_path, monkeypatch):
    """Release the lock: otherwise no process of the host could ever fold again."""
    path = tmp_path / "lock"
    lock = Lease(LOCAL, str(path), lease_s=0.3)
    assert lock.acquire(0)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_is_ours", refuse)
        with pytest.raises(OSError, match="away"):
            lock.release()
    assert path.exists()
    assert not Lease(LOCAL, str(path)).acquire(0)
    again = Lease(LOCAL, str(path))
    assert again.acquire(30.0)
    again.release()


def test_of_many_at_once_one_holds_it(tmp_path):
    inside = threading.Lock()

    def work(_):
        lock = LedgerLock(LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False))
        assert lock.acquire(LONG_S)
        assert inside.acquire(blocking=False)
        time.sleep(0.1)
        lock.check()
        inside.release()
        lock.release()

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(work, range(4)))) == 4
    assert not (tmp_path / "_notes" / "locks" / "lock").exists()


@pytest.mark.parametrize(
    ("text", "own", "pauses"),
    [
        *((text, {}, 31) for text in ("", "host~12~34 abcdef", "nonsense", "a b c d")),
        ("a b \u00b2 4", {}, 31), ("a b 4000 4", {}, 5), ("a b 9000000 4", {}, 3601),
        ("a b c d", {"lease_s": 1.5}, 4),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_taken_for_alive_for_a_lease(
    tmp_path, monkeypatch, text, own, pauses
):
    monkeypatch.undo()
    (tmp_path / "lock").write_text(text)
    pauses_s = []
    clock = SimpleNamespace(monotonic=lambda: 5.0 + sum(pauses_s), sleep=pauses_s.append)
    for module in (lease_module, private_file):
        monkeypatch.setattr(module, "time", clock)
    lock, earlier = (Lease(LOCAL, str(tmp_path / "lock"), **own) for _ in range(2))
    assert not earlier.acquire(0) and (tmp_path / "lock").read_text() == text
    # The background fold looks again and again without waiting: its looks count, too.
    pauses_s.append(0.5 if own else 1.0)
    assert lock.acquire() and f" {1500 if own else 30000} 1" in (tmp_path / "lock").read_text()
    assert pauses_s == [pauses_s[0]] * pauses + [3.0]
    lock.release()
