"""Private files, and locks on them, in folders that other users may write to.

Another user may have put something at the path: a link to one of our files, a pipe that blocks, or
a file that the other user can lock. So this module opens only plain files of this user. It does not
overwrite text that it did not write."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from rocket_sink.owner import Owner, this_process

_POLL_S: Final = 0.1
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_TEXT: Final = 512


def open_private(path: Path) -> int:
    """Open a plain file of this user for reading and writing, or create it with mode 0600.

    Return a descriptor, which the caller closes. The file may also belong to the folder's owner, so
    that root can use the files of a user. A file of this user gets the mode 0600, because others
    who can open a file can lock it.

    Raises:
        OSError: from `os.open`.
        PermissionError: the file is a link, has several names, is not plain, or is another user's.
    """
    try:
        handle = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refused(path, "is a symbolic link") from error
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise refused(path, "is not a plain file")
        if status.st_nlink > 1:
            raise refused(path, "has a second name (a hard link)")
        own = status.st_uid == os.geteuid()
        if not own and status.st_uid != path.parent.stat().st_uid:
            raise refused(path, f"belongs to another user (uid {status.st_uid})")
        if own and stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(handle, 0o600)
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_folder(path: Path) -> None:
    """Raise PermissionError if the path is a symbolic link; the path need not exist."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        raise refused(path, f"is a symbolic link (of uid {status.st_uid})")


def refused(path: Path | str, what: str) -> PermissionError:
    """Return the error for a path that somebody may have put there; `what` says what is wrong."""
    text = f"{what}, and is not used: remove it, and see who can write to its folder"
    return PermissionError(errno.EPERM, text, str(path))


class FileLock:
    """A kernel lock (`flock`) on a file, which the kernel releases when the process ends. The file
    is never removed: otherwise two processes could lock two files of the same name. It contains the
    identity of the lock's process (`Owner`). `acquire` raises the errors of `open_private`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(
        self, wait_s: float | None = None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> bool:
        """Take the lock; return False after `wait_s` (None: no limit). Before the first wait, call
        `on_wait` once with the holder's description."""
        handle = open_private(self._path)
        try:
            if not wait_for(
                partial(_try_lock, handle), wait_s, _POLL_S, lambda: on_wait(_holder(handle))
            ):
                return False
            _note_holder(handle)
            self._handle, handle = handle, -1
            return True
        finally:
            if handle >= 0:
                os.close(handle)

    def release(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    def holder(self) -> str:
        """Return a description of the lock's present or last holder."""
        handle = open_private(self._path)
        try:
            return _holder(handle)
        finally:
            os.close(handle)


def wait_for(
    attempt: Callable[[], bool], wait_s: float | None, poll_s: float, on_wait: Callable[[], None]
) -> bool:
    """Repeat `attempt` until it succeeds; return False after `wait_s` (None: no limit). Call
    `on_wait` once, before the first wait."""
    until_s = None if wait_s is None else time.monotonic() + wait_s
    waiting = False
    while not attempt():
        remaining_s = poll_s if until_s is None else until_s - time.monotonic()
        if remaining_s <= 0:
            return False
        if not waiting:
            waiting = True
            on_wait()
        time.sleep(min(poll_s, remaining_s))
    return True


def describe_holder(text: str) -> str:
    """Return a description of the holder that a lock file's text names."""
    owner = Owner.parse(text.partition(" ")[0].strip())
    return owner.describe() if owner else "another process"


def _holder(handle: int) -> str:
    return describe_holder(_text(handle))


def _text(handle: int) -> str:
    return os.pread(handle, _MOST_TEXT, 0).decode(errors="replace")


def _note_holder(handle: int) -> None:
    text = _text(handle)
    if not text or Owner.parse(text.strip()):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{this_process()}\n".encode(), 0)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
