"""File systems without hard links are refused before rows are sent, and before each commit."""

import datetime as dt
import errno
import os
from pathlib import Path

import pytest

from rocket_sink import Ledger, cli
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import ledger_token
from rocket_sink.ledger.path import resolve_path
from rocket_sink.testing import FakeCluster

from ..values import accounts, context, session, write_spool

SPARK = session()


def refuse_links(monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV]
)
def test_the_first_start_is_refused(tmp_path, monkeypatch, number):
    """Refuse a start on file systems like FAT, blobfuse and some SMB mounts."""
    refuse_links(monkeypatch, number)
    place = resolve_path(tmp_path / "ledger")
    with pytest.raises(LedgerError, match=r"the file system \w+ at /.*: it has no hard links"):
        ledger_token(place, spools=True)
    assert not list(tmp_path.iterdir())


def test_check_says_so(tmp_path, monkeypatch, capsys):
    refuse_links(monkeypatch, errno.EPERM)
    with FakeCluster(brokers=1) as cluster:
        code = cli.main(["check", "-n", cluster.name_server, "-t", "t", "--ledger", str(tmp_path)])
    assert code == 1
    assert "no hard links" in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EXDEV])
def test_nothing_commits_and_a_report_reads(tmp_path, monkeypatch, caplog, number):
    """Mount a ledger that was made elsewhere on a disk without links, with rows in its spool."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(SPARK, accounts(context(), acked=1))
    write_spool(ledger.path, context(epoch=1), accounts(context(epoch=1), acked=1))
    refuse_links(monkeypatch, number)
    before = sorted(Path(ledger.path).rglob("*"))
    for work, *arguments in (
        (ledger.sync,), (ledger.append, accounts(context(epoch=2), acked=1)), (ledger.optimize,),
        (ledger.vacuum,), (ledger.expire, {"send": dt.timedelta(days=1)}),
        (Ledger(tmp_path / "other").create,),
    ):  # fmt: skip
        with pytest.raises(LedgerError, match="no hard links"):
            work(SPARK, *arguments)
    report = ledger.report(SPARK)
    assert (report.totals.epochs, report.unfolded_epochs) == (1, 1)
    assert "lacks the rows that are not folded yet" in caplog.text
    assert sorted(Path(ledger.path).rglob("*")) == before
