"""Locks and files in folders that others may write to: nothing of the user's is touched.

The judges are the kernel (`flock`, modes) and the bytes of the file that was attacked.
"""

import fcntl
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rocket_sink import owner as owners
from rocket_sink import private_file
from rocket_sink.cluster import detached
from rocket_sink.cluster.jars import only_one
from rocket_sink.errors import ClusterError, LedgerError
from rocket_sink.ledger.lock import ledger_lock
from rocket_sink.ledger.path import resolve_path
from rocket_sink.owner import Owner, this_process
from rocket_sink.private_file import FileLock, check_folder

TEXT = "what the user must not lose\n"


def lock_ledger(folder):
    with ledger_lock(resolve_path(folder), 0):
        pass


def lock_jars(folder):
    with only_one(folder / "jars.lock", print):
        pass


USERS = {
    "ledger": ("_notes/locks/lock", lock_ledger),
    "cluster": (".lock", detached.down),
    "jars": ("jars.lock", lock_jars),
}


def lock_path(home, name):
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (home / "cluster.json").write_text('{"version": "5.3.3", "nodes": []}')
    return path


ATTACKS = {
    "symlink": lambda path, precious, nothing: path.symlink_to(precious),
    "link to nothing": lambda path, precious, nothing: path.symlink_to(nothing),
    "hard link": lambda path, precious, nothing: path.hardlink_to(precious),
    "pipe": lambda path, precious, nothing: os.mkfifo(path),
    "folder": lambda path, precious, nothing: path.mkdir(),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_lock_that_is_no_file_of_ours_is_refused_and_not_touched(tmp_path, user, attack):
    name, take = USERS[user]
    precious, nothing = tmp_path / "precious", tmp_path / "nothing"
    precious.write_text(TEXT)
    path = lock_path(tmp_path / "home", name)
    ATTACKS[attack](path, precious, nothing)
    with pytest.raises((LedgerError, ClusterError), match=path.name) as error:
        take(tmp_path / "home")
    assert ("symbolic link" in str(error.value)) == ("link" in attack and attack != "hard link")
    assert precious.read_text() == TEXT and not nothing.exists()


@pytest.mark.parametrize("user", USERS)
def test_a_lock_file_keeps_its_text_and_has_mode_0600(tmp_path, user):
    """A reader of a lock file could lock it for ever, so an existing file's mode is mended too."""
    name, take = USERS[user]
    path = lock_path(tmp_path, name)
    take(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    lock_path(tmp_path, name).write_text(TEXT)
    path.chmod(0o644)
    take(tmp_path)
    assert (path.read_text(), path.stat().st_mode & 0o777) == (TEXT, 0o600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
def test_another_users_lock_is_refused(tmp_path):
    path = tmp_path / "lock"
    path.touch(mode=0o666)
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="uid 12345"):
        FileLock(path).acquire(0)
    os.chown(tmp_path, 12345, 12345)  # Root may use files of the folder's own user.
    lock = FileLock(path)
    assert lock.acquire(0)
    lock.release()
    tmp_path.chmod(0o770)
    os.chown(path, 999, 12345)  # Members of the folder's group share its files.
    assert FileLock(path).acquire(0)
    os.chown(path, 999, 999)
    with pytest.raises(PermissionError, match="uid 999"):
        FileLock(path).acquire(0)


def test_a_folder_behind_a_link_is_refused(tmp_path):
    (tmp_path / "target").mkdir()
    check_folder(tmp_path / "_notes")
    (tmp_path / "_notes").symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError, match="is a symbolic link"):
        check_folder(tmp_path / "_notes")
    with pytest.raises(LedgerError, match="is a symbolic link"):
        lock_ledger(tmp_path)
    assert not list((tmp_path / "target").iterdir())


def test_a_world_writable_home_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    with pytest.raises(ClusterError, match="chmod o-w"):
        detached.up(tmp_path)
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys
from pathlib import Path
from rocket_sink.private_file import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire(0)
print("held", flush=True)
sys.stdin.read()
"""


def test_waiting_names_the_holder_and_ends_when_it_is_killed(tmp_path):
    path = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    texts = queue.Queue()
    (tmp_path / "cluster.json").write_text('{"version": "5.3.3", "nodes": []}')
    waiter = threading.Thread(target=lambda: detached.down(tmp_path, progress=texts.put))
    try:
        assert holder.stdout.readline() == b"held\n"
        waiter.start()
        text = texts.get(timeout=60)
        assert f"process {holder.pid} on " in text and str(tmp_path) in text
        assert waiter.is_alive()
    finally:
        holder.kill()
        holder.communicate()
    waiter.join(60)
    assert not waiter.is_alive() and texts.empty()


@pytest.mark.parametrize(
    ("wait_s", "tries", "pauses", "succeeds"),
    [(None, 4, [2, 2, 2], True), (5, 4, [2, 2, 1], True), (5, 9, [2, 2, 1], False),
     (0, 9, [], False), (0, 1, [], True)],
)  # fmt: skip
def test_an_attempt_is_repeated_for_its_time(wait_s, tries, pauses, succeeds, monkeypatch):
    now, slept, told = [100.0], [], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(private_file, "time", clock)
    results = iter([False] * (tries - 1) + [True])
    waited = private_file.wait_for(lambda: next(results), wait_s, 2, lambda: told.append("waits"))
    assert (waited, slept, len(told)) == (succeeds, pauses, 1 if pauses else 0)


@pytest.fixture
def without_proc(monkeypatch):
    """Hide /proc, as on macOS."""
    for name in ("_boot_id", "_pid_namespace"):
        monkeypatch.setattr(owners, name, lambda: "")
    this_process.cache_clear()
    yield
    this_process.cache_clear()


@pytest.mark.parametrize("has_proc", [True, False])
def test_an_owner_lives_until_its_process_ends(has_proc, request):
    if not has_proc:
        request.getfixturevalue("without_proc")
    me = this_process()
    assert Owner.parse(str(me)) == me and me.is_alive()
    early_s = time.time() - me.start / 1000
    assert has_proc or 0 < early_s < 86_400, "ms since 1970"
    most = 0 if has_proc else owners._SAME_START_MS
    for later in (most, -most):
        assert replace(me, start=me.start + later).is_alive() is True
    assert replace(me, start=me.start + most + 1).is_alive() is False
    assert replace(me, host="other").is_alive() is (True if has_proc else None)
    for stranger in (replace(me, boot="other"), replace(me, pid_namespace="1")):
        assert stranger.is_alive() is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    dead = replace(me, pid=child.pid)
    assert dead.is_alive() is False, "a zombie"
    child.wait()
    assert dead.is_alive() is False
    assert me.describe() == f"process {os.getpid()} on {me.host}"
    assert me.host == re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())


@pytest.mark.parametrize(
    "text", ["", "a~b", "~~", "~~~~", "h~b~1~2", "h~b~1~2~3~4", "h~b~1~x~3", "h~b~1~2~x",
             "h~b~1~²~3", "h~b~1~~3"],
)  # fmt: skip
def test_other_texts_name_no_owner(text):
    assert Owner.parse(text) is None
    assert Owner.parse("h~b~1~2~3") == Owner("h", "b", "1", 2, 3)


def test_the_kernel_sees_the_lock(tmp_path):
    (tmp_path / "lock").write_text(f"{this_process()}999\n")  # an earlier holder
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(0)
    assert FileLock(tmp_path / "lock").acquire(0) is False
    with (tmp_path / "lock").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.release()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert (tmp_path / "lock").read_text() == f"{this_process()}\n"
