"""The files of a folder without its links, whoever made the links and whenever."""

import errno
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from pyarrow import fs

from rocket_sink.plain_files import check_plain, plain_files


@pytest.fixture(autouse=True)
def no_descriptor_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def stranger(tmp_path):
    """A folder of another owner; no test may change it."""
    folder = tmp_path / "stranger"
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "f.arrow").write_bytes(b"precious")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder):
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def root(tmp_path):
    """The folder itself may be behind a link, as `/tmp` is on macOS."""
    (tmp_path / "real").mkdir()
    (tmp_path / "ledger").symlink_to(tmp_path / "real")
    return str(tmp_path / "ledger")


CALLS = {
    "read": lambda files, root: files.open_input_file(f"{root}/q/0/f.arrow").read(),
    "stream": lambda files, root: files.open_input_stream(f"{root}/q/0/f.arrow").read(),
    "write": lambda files, root: files.open_output_stream(f"{root}/q/0/new"),
    "whole": lambda files, root: files.handler.write_whole(f"{root}/q/0/x", b"", replace=True),
    "delete": lambda files, root: files.delete_file(f"{root}/q/0/f.arrow"),
    "delete folder": lambda files, root: files.delete_dir(f"{root}/q/0"),
    "delete link": lambda files, root: files.delete_dir(f"{root}/q"),
    "move away": lambda files, root: files.move(f"{root}/q/0/f.arrow", f"{root}/f.arrow"),
    "move there": lambda files, root: files.move(f"{root}/own", f"{root}/q/0/own"),
    "make": lambda files, root: files.create_dir(f"{root}/q/1"),
    "look": lambda files, root: files.get_file_info(f"{root}/q/0/f.arrow"),
    "list": lambda files, root: files.get_file_info(
        fs.FileSelector(f"{root}/q", allow_not_found=True)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_goes_through_a_link(stranger, root, call):
    Path(root, "q").symlink_to(stranger)
    Path(root, "own").write_bytes(b"own")
    with pytest.raises(PermissionError, match="is a link or no plain file"):
        call(plain_files(root), root)


@pytest.mark.parametrize("path", ["../stranger/0/f.arrow", "a/../../stranger/0/f.arrow", "./a", ""])
def test_a_path_that_leads_elsewhere_is_refused(stranger, root, path):
    for name in (f"{root}/{path}", str(stranger / "0" / "f.arrow")):
        with pytest.raises(PermissionError, match="is not below the folder"):
            plain_files(root).open_input_file(name)


def test_a_link_in_a_files_place_is_not_opened(stranger, root):
    Path(root, "f").symlink_to(stranger / "0" / "f.arrow")
    files = plain_files(root)
    assert files.get_file_info(f"{root}/f").type is fs.FileType.Unknown
    for call in (files.open_input_file, files.open_output_stream):
        with pytest.raises((PermissionError, FileExistsError)):
            call(f"{root}/f")
    files.delete_file(f"{root}/f")
    assert not os.path.lexists(f"{root}/f")


def test_a_pipe_makes_nobody_wait(root):
    os.mkfifo(f"{root}/_last_checkpoint")
    with pytest.raises(PermissionError, match="no plain file"):
        plain_files(root).open_input_stream(f"{root}/_last_checkpoint")


def test_links_in_a_circle_are_listed_once(root):
    """Two links to `.` made a list of 2^40 paths."""
    Path(root, "_spool/q-x/0").mkdir(parents=True)
    Path(root, "_spool/q-x/0/f.arrow").touch()
    for name in ("a", "b"):
        Path(root, "_spool", name).symlink_to(".")
    selector = fs.FileSelector(f"{root}/_spool", recursive=True)
    paths = [info.path for info in plain_files(root).get_file_info(selector)]
    names = ("a", "b", "q-x", "q-x/0", "q-x/0/f.arrow")
    assert sorted(paths) == [f"{root}/_spool/{name}" for name in names]


def test_a_folder_without_end_is_listed_to_a_depth(root):
    Path(root, "/".join(["d"] * 100)).mkdir(parents=True)
    selector = fs.FileSelector(root, recursive=True)
    assert len(plain_files(root).get_file_info(selector)) < 10
    with pytest.raises(PermissionError):
        check_plain(root, "d")


def test_a_folder_goes_without_what_its_links_show(stranger, root):
    Path(root, "tasks/7").mkdir(parents=True)
    Path(root, "tasks/7/note.json").touch()
    Path(root, "tasks/link").symlink_to(stranger)
    plain_files(root).delete_dir(f"{root}/tasks")
    assert not Path(root, "tasks").exists()


def test_what_is_there_is_not_written_over(root):
    files = plain_files(root)
    with files.open_output_stream(f"{root}/a") as out:
        out.write(b"first")
    with pytest.raises(FileExistsError):
        files.open_output_stream(f"{root}/a")
    assert files.open_input_file(f"{root}/a").read() == b"first"


def test_a_file_is_on_disk_before_it_has_its_name(root, monkeypatch):
    """The folder is synced last, because only then the new name is durable."""
    calls = []

    def noted(name, do, *args, **more):
        calls.append(name)
        do(*args, **more)

    for name in ("fsync", "rename", "link", "unlink"):
        monkeypatch.setattr(os, name, partial(noted, name, getattr(os, name)))
    files, expected = plain_files(root), []
    for replace, is_written in ((False, True), (False, False), (True, True)):
        text = f"{replace}".encode()
        assert files.handler.write_whole(f"{root}/a", text, replace=replace) is is_written
        expected += ["fsync", "rename" if replace else "link", "unlink", "fsync"]
    files.move(f"{root}/a", f"{root}/b")
    assert calls == [*expected, "rename", "fsync"]
    assert Path(root, "b").read_bytes() == b"True" and os.listdir(root) == ["b"]
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="is full"):
        files.handler.write_whole(f"{root}/c", b"", replace=False)
    assert os.listdir(root) == ["b"]


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o777])
def test_what_is_made_has_the_mode_of_the_folder(root, mode):
    before = os.umask(0o077)
    try:
        if os.getuid() == 0:
            os.chown(root, -1, 12345)
        Path(root).chmod(mode)
        files = plain_files(root)
        files.create_dir(f"{root}/a/b", recursive=True)
        with files.open_output_stream(f"{root}/a/b/c") as out:
            out.write(b"12345")
    finally:
        os.umask(before)
    made = [Path(root, name).stat() for name in ("a", "a/b", "a/b/c")]
    assert [status.st_mode & 0o7777 for status in made] == [mode, mode, mode & 0o666]
    group = os.getgid() if mode == 0o777 else Path(root).stat().st_gid
    assert {status.st_gid for status in made} == {group}
    folder, file = files.get_file_info([f"{root}/a", f"{root}/a/b/c"])
    assert (folder.type, folder.size) == (fs.FileType.Directory, None)
    assert (file.type, file.size) == (fs.FileType.File, 5)
    assert file.mtime_ns == Path(root, "a/b/c").stat().st_mtime_ns


def test_a_folder_is_made_below_folders_that_are_there(root):
    files = plain_files(root)
    with pytest.raises(FileNotFoundError):
        files.create_dir(f"{root}/kind=send/sub", recursive=False)
    for _ in range(2):
        files.create_dir(f"{root}/kind=send", recursive=False)
        files.create_dir(f"{root}/_spool/_folds", recursive=True)
    assert Path(root, "kind=send").is_dir() and Path(root, "_spool/_folds").is_dir()
    Path(root, "link").symlink_to(root)
    with pytest.raises(PermissionError, match="is a link"):
        files.create_dir(f"{root}/link", recursive=False)


def test_folders_are_said_to_be_missing(root):
    files = plain_files(root)
    assert files.get_file_info(f"{root}/no/file").type is fs.FileType.NotFound
    assert files.get_file_info(fs.FileSelector(f"{root}/no", allow_not_found=True)) == []
    with pytest.raises(FileNotFoundError):
        files.get_file_info(fs.FileSelector(f"{root}/no"))
    for call in (files.open_input_file, files.delete_file, files.delete_dir):
        with pytest.raises(FileNotFoundError, match=os.strerror(errno.ENOENT)) as caught:
            call(f"{root}/no/file")
        assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("what", ["link", "link to a file", "pipe"])
def test_other_readers_get_plain_files_only(stranger, root, what):
    Path(root, "kind=epoch").mkdir()
    Path(root, "kind=epoch/part.parquet").touch()
    check_plain(root, "kind=epoch", "kind=send")
    if what != "pipe":
        target = stranger if what == "link" else stranger / "0/f.arrow"
        Path(root, "kind=epoch/sub").symlink_to(target)
    else:
        os.mkfifo(f"{root}/kind=epoch/sub")
    with pytest.raises(PermissionError, match="kind=epoch/sub"):
        check_plain(root, "kind=epoch")
