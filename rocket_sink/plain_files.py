"""A pyarrow file system of a folder that others may write to. It follows no link below that folder.

A user who can write to a ledger's folder can put a link, a pipe or a device in the place of a file.
So this file system opens the folders on a path one by one (`openat` with O_NOFOLLOW): nobody can
replace a folder between check and use. It opens only plain files and folders. The folder itself and
the folders above it may be links.

Driver and tasks may be different users (YARN), and each must delete the other's files. So whatever
is made here gets the group and the mode of the folder, whatever the umask is."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

import pyarrow as pa
from pyarrow import fs

from rocket_sink.private_file import refused, rights, share

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a file. With O_NONBLOCK, opening a pipe does not wait for its other end."""
_DEEPEST: Final = 6
"""Depth to which folders are listed; a ledger needs four, for its quarantine."""
_NOT_PLAIN: Final = "is a link or no plain file"
_KINDS: Final = {stat.S_IFREG: fs.FileType.File, stat.S_IFDIR: fs.FileType.Directory}


class PlainFiles(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no stubs
    """The handler of a `pyarrow.fs.PyFileSystem`; paths are absolute and below `root`.

    Raises from all methods:
        OSError: from `os`.
        PermissionError: the path is not below the folder, leads through a link, or leads to
            something that is neither a plain file nor a folder. Or this user lacks rights: then the
            text names owners and modes.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def get_type_name(self) -> str:
        return "plain-files"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainFiles) and other._root == self._root

    __hash__ = None  # type: ignore[assignment]

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        infos: list[fs.FileInfo] = []
        try:
            with self._parent(f"{selector.base_dir}/-") as (handle, _):
                depth = _DEEPEST if selector.recursive else 1
                for path, entry in _walk(handle, selector.base_dir, depth):
                    # Another process may have deleted the file since it was listed.
                    with contextlib.suppress(FileNotFoundError):
                        infos.append(_info(path, entry.stat(follow_symlinks=False)))
        except FileNotFoundError:
            if not selector.allow_not_found:
                raise
        return infos

    def create_dir(self, path: str, recursive: bool) -> None:
        if recursive:
            Path(self._root).mkdir(parents=True, exist_ok=True)
        else:
            with self._parent(path) as (handle, name):
                self._make(handle, name, path)
        # Open the folder, to prove that it is a folder.
        with self._parent(f"{path}/-", makes=recursive):
            pass

    def delete_dir(self, path: str) -> None:
        with self._parent(path) as (handle, name):
            _remove(handle, name, path)

    def delete_file(self, path: str) -> None:
        with self._parent(path) as (handle, name):
            os.unlink(name, dir_fd=handle)

    def move(self, src: str, dest: str) -> None:
        with self._parent(src) as (source, name), self._parent(dest) as (target, new_name):
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
            # The new name is durable when its folder is synced.
            os.fsync(target)

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(self.open(path, "rb"), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: object = None) -> pa.PythonFile:
        """Create a file; an existing file is never opened for writing."""
        return pa.PythonFile(self.open(path, "xb"), mode="w")

    def _unused(self, *arguments: object) -> pa.PythonFile:
        raise NotImplementedError

    open_append_stream = copy_file = delete_dir_contents = delete_root_dir_contents = _unused

    def open(self, path: str, mode: str) -> IO[bytes]:
        """Open a plain file to be read ("rb"), or create it ("xb")."""

        def opener(name: str, flags: int) -> int:
            opened = os.open(name, flags | _FILE, 0o666, dir_fd=handle)
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                os.close(opened)
                raise refused(path, _NOT_PLAIN)
            if flags & os.O_CREAT:
                self._share(opened, 0o666)
            return opened

        with self._parent(path) as (handle, name):
            try:
                return open(name, mode, opener=opener)
            except OSError as error:
                raise _named(error, path) from error

    def write_whole(self, path: str, data: bytes, *, replace: bool) -> bool:
        """Write a file durably, so that readers see all of it or no file. Return False if `replace`
        is False and the file exists."""
        # The name is random, because two writers of one partial file would mix their texts.
        part = f"{path}.{uuid.uuid4().hex}.part"
        with self.open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with self._parent(path) as (handle, name):
            partial = part.rpartition("/")[2]
            try:
                if replace:
                    os.rename(partial, name, src_dir_fd=handle, dst_dir_fd=handle)
                else:
                    # A link, unlike a rename, fails if the name is taken.
                    os.link(partial, name, src_dir_fd=handle, dst_dir_fd=handle)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(partial, dir_fd=handle)
                os.fsync(handle)
        return True

    def _info(self, path: str) -> fs.FileInfo:
        try:
            with self._parent(path) as (handle, name):
                return _info(path, os.stat(name, dir_fd=handle, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return fs.FileInfo(path, fs.FileType.NotFound)

    @contextlib.contextmanager
    def _parent(self, path: str, *, makes: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of `path`; yield its descriptor and the last part of the path."""
        *folders, name = self._parts(path)
        handle, at = os.open(self._root, _FOLDER), self._root
        try:
            for folder in folders:
                at = f"{at}/{folder}"
                if makes:
                    self._make(handle, folder, at)
                below = _enter(handle, folder, at)
                os.close(handle)
                handle = below
            yield handle, name
        except PermissionError as error:
            if error.errno != errno.EACCES:
                raise
            text = f"{os.strerror(errno.EACCES)} ({rights(Path(path))})"
            raise PermissionError(errno.EACCES, text, path) from error
        finally:
            os.close(handle)

    def _make(self, handle: int, name: str, path: str) -> None:
        """Make a folder below an open one, unless there is one."""
        try:
            os.mkdir(name, dir_fd=handle)
        except FileExistsError:
            return
        folder = _enter(handle, name, path)
        try:
            self._share(folder, 0o2777)
        finally:
            os.close(folder)

    def _share(self, handle: int, most: int) -> None:
        root = Path(self._root).stat()
        share(handle, root, root.st_mode & most)

    def _parts(self, path: str) -> list[str]:
        if path == self._root:
            return ["."]
        parts = path.removeprefix(f"{self._root}/").split("/")
        if not path.startswith(f"{self._root}/") or {"", ".", ".."}.intersection(parts):
            raise PermissionError(errno.EPERM, f"is not below the folder {self._root}", path)
        return parts


def plain_files(root: str) -> fs.FileSystem:
    """Return the file system of a folder that follows no link below it."""
    return fs.PyFileSystem(PlainFiles(root))


def check_plain(root: str, *folders: str) -> None:
    """Check that these folders below `root` have only plain files and folders. Call this before
    delta-rs, DuckDB or Java read them, which follow links and wait for pipes. Raise PermissionError
    with the first link, pipe or device, or a folder that is too deep."""
    for folder in folders:
        path = f"{root}/{folder}"
        with (
            contextlib.suppress(FileNotFoundError),
            PlainFiles(root)._parent(f"{path}/-") as (handle, _),
        ):
            for at, entry in _walk(handle, path, _DEEPEST + 1):
                is_near = at.count("/") - path.count("/") <= _DEEPEST
                if not entry.is_file(follow_symlinks=False) and not (
                    is_near and entry.is_dir(follow_symlinks=False)
                ):
                    raise refused(at, _NOT_PLAIN)


def _walk(handle: int, path: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (path, entry) of all entries of a folder and of its subfolders, down to a depth. Use
    the types in the listing: a Delta log has thousands of files, so a call per file is slow."""
    with os.scandir(handle) as entries:
        for entry in entries:
            at = f"{path}/{entry.name}"
            yield at, entry
            # Another process may have deleted the folder since it was listed.
            with contextlib.suppress(FileNotFoundError):
                if depth > 1 and entry.is_dir(follow_symlinks=False):
                    below = _enter(handle, entry.name, at)
                    try:
                        yield from _walk(below, at, depth - 1)
                    finally:
                        os.close(below)


def _info(path: str, status: os.stat_result) -> fs.FileInfo:
    """Return the file's information; links, pipes and devices have the type `Unknown`."""
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), fs.FileType.Unknown)
    size = status.st_size if kind is fs.FileType.File else None
    return fs.FileInfo(path, kind, size=size, mtime_ns=status.st_mtime_ns)


def _enter(handle: int, name: str, path: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
    except OSError as error:
        # With O_DIRECTORY the error for a link is ENOTDIR, not ELOOP.
        is_link = error.errno == errno.ENOTDIR and stat.S_ISLNK(
            os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
        )
        raise refused(path, _NOT_PLAIN) if is_link else _named(error, path) from error


def _remove(handle: int, name: str, path: str) -> None:
    below = _enter(handle, name, path)
    try:
        with os.scandir(below) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove(below, entry.name, f"{path}/{entry.name}")
                else:
                    os.unlink(entry.name, dir_fd=below)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=handle)


def _named(error: OSError, path: str) -> OSError:
    """Return the error with the whole path; for a link, an error that says what to do."""
    if error.errno == errno.ELOOP:
        return refused(path, _NOT_PLAIN)
    is_named = error.filename == path
    return error if is_named else OSError(error.errno, os.strerror(error.errno or 0), path)
