"""File systems without hard links are refused before rows are sent, and before each commit."""

import datetime as dt
import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rocket_sink import Ledger, cli
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import ledger_token
from rocket_sink.ledger.path import resolve_path
from rocket_sink.testing import FakeCluster

from ..values import accounts, context, session, write_spool

SPARK = session()


def no_links(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV]
)
def test_the_first_start_is_refused(tmp_path, monkeypatch, number):
    """Refuse a start on file systems like FAT, blobfuse and some SMB mounts."""

    def no_link(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    place = resolve_path(tmp_path / "ledger")
    with pytest.raises(LedgerError, match=r"the file system \w+ at /.*: it has no hard links"):
        ledger_token(place, spools=True)
    assert not list(tmp_path.iterdir())


def test_check_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "link", no_links)
    with FakeCluster(brokers=1) as cluster:
        code = cli.main(["check", "-n", cluster.name_server, "-t", "t", "--ledger", str(tmp_path)])
    assert code == 1
    assert "no hard links" in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_with_links_is_left_as_it_was(tmp_path):
    ledger_token(resolve_path(tmp_path / "ledger"), spools=False)
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["_notes"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EXDEV])
def test_nothing_commits_and_a_report_reads(tmp_path, monkeypatch, caplog, number):
    """Mount a ledger that was made elsewhere on a disk without links, with rows in its spool."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(SPARK, accounts(context(), acked=1))
    write_spool(ledger.path, context(epoch=1), accounts(context(epoch=1), acked=1))

    def no_link(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    before = sorted(Path(ledger.path).rglob("*"))
    day = dt.timedelta(days=1)
    for work in (
        lambda: ledger.sync(SPARK),
        lambda: ledger.append(SPARK, accounts(context(epoch=2), acked=1)),
        lambda: ledger.optimize(SPARK),
        lambda: ledger.vacuum(SPARK),
        lambda: ledger.expire(SPARK, {"send": day}),
        lambda: Ledger(tmp_path / "other").create(SPARK),
    ):
        with pytest.raises(LedgerError, match="no hard links"):
            work()
    report = ledger.report(SPARK)
    assert (report.totals.epochs, report.unfolded_epochs) == (1, 1)
    assert "lacks the rows that are not folded yet" in caplog.text
    assert sorted(Path(ledger.path).rglob("*")) == before


@pytest.mark.spark
def test_vacuum_makes_no_commit(spark, tmp_path):
    """Spark's Delta makes commits by a rename, which may overwrite a commit of another driver."""
    ledger = Ledger(tmp_path)
    ledger.append(spark, accounts(context(), acked=1))
    version = ledger.version(spark)
    ledger.vacuum(spark)
    assert ledger.version(spark) == version
