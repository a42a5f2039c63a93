"""Private files, and locks on them, in folders that other users may write to.

Another user may have put something at the path: a link to one of our files, a pipe that blocks, or
a file that the other user can lock. So this module opens only plain files of users who may use the
folder. It does not overwrite text that it did not write.

Who may use a folder is decided by its mode: its owner, its group if the group may write, or all
users. In a folder with the sticky bit, such as `/tmp`, each user has files of its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rocket_sink.owner import Owner, this_process

_POLL_S: Final = 0.1
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_TEXT: Final = 512


def open_private(path: Path) -> int:
    """Open a plain file for reading and writing, or create it.

    Return a descriptor, which the caller closes. A file of this user gets the mode 0600 and, if the
    group or all users may write to the folder, 0660 or 0666: others who can open a file can lock
    it. The file may belong to the folder's owner, so that root can use the files of a user, or to
    another user who may write to the folder.

    Raises:
        OSError: from `os.open`.
        PermissionError: the file is a link, has several names, is not plain, or is another user's.
            If this user may not open it, the text names owners and modes.
    """
    try:
        handle = os.open(path, _FLAGS, 0o600)
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror} ({rights(path)})", str(path)
        ) from error
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
        folder = path.parent.stat()
        writers = 0 if folder.st_mode & stat.S_ISVTX else folder.st_mode & 0o022
        is_of_group = writers & 0o020 and status.st_gid == folder.st_gid
        if status.st_uid == os.geteuid():
            os.fchmod(handle, 0o600)
            share(handle, folder, 0o600 | writers * 3)
        elif status.st_uid != folder.st_uid and not (is_of_group or writers & 0o002):
            raise refused(path, f"belongs to another user (uid {status.st_uid})")
    except BaseException:
        os.close(handle)
        raise
    return handle


def share(handle: int, folder: os.stat_result, mode: int) -> None:
    """Give an open file or folder of this user the mode and, unless all users may write to the
    folder, the folder's group. Change nothing in a folder with the sticky bit, or if this user is
    not in the group."""
    with contextlib.suppress(OSError):
        if folder.st_mode & stat.S_ISVTX:
            return
        is_for_all = folder.st_mode & stat.S_IWOTH
        if not is_for_all and os.fstat(handle).st_gid != folder.st_gid:
            os.fchown(handle, -1, folder.st_gid)
        os.fchmod(handle, mode)


def rights(path: Path) -> str:
    """Return words for an error: mode, owner and group of a path and of the folder that contains
    it, as far as they exist and this user may see them."""
    lines = []
    for at in (path, path.parent):
        with contextlib.suppress(OSError):
            status = at.lstat()
            owner, group = _name(pwd.getpwuid, status.st_uid), _name(grp.getgrgid, status.st_gid)
            lines.append(f"{at} is {stat.filemode(status.st_mode)} of {owner}:{group}")
    return ", ".join(lines) or f"nothing is to be seen of {path}"


def _name(ask: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(ask(number)[0])
    except KeyError:  # A container's user may have no name.
        return str(number)


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
