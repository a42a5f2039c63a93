"""File systems without hard links are refused before rows are sent."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rocket_sink import cli
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import ledger_token
from rocket_sink.ledger.path import resolve_path
from rocket_sink.testing import FakeCluster


def no_links(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_the_first_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a start on file systems like FAT, blobfuse and some SMB mounts."""
    monkeypatch.setattr(os, "link", no_links)
    place = resolve_path(tmp_path / "ledger")
    with pytest.raises(LedgerError, match=r"the file system \w+ at /.*: it has no hard links"):
        ledger_token(place, spools=True)
    assert not list(tmp_path.iterdir())


def test_check_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    with FakeCluster(brokers=1) as cluster:
        code = cli.main(["check", "-n", cluster.name_server, "-t", "t", "--ledger", str(tmp_path)])
    assert code == 1
    assert "no hard links" in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_with_links_is_left_as_it_was(tmp_path: Path) -> None:
    ledger_token(resolve_path(tmp_path / "ledger"), spools=False)
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["_notes"]
