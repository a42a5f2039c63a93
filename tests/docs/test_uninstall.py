"""docs/deploy/uninstall.md names the folders that the package writes to."""

from pathlib import Path

from rocket_sink.cluster.detached import default_home
from rocket_sink.cluster.jars import CACHE_ENV, cache_folder
from rocket_sink.ledger.path import LedgerPath

PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "uninstall.md"


def test_the_page_names_each_folder_in_the_home(monkeypatch):
    for name in (CACHE_ENV, "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    spool = LedgerPath("s3://bucket/ledger", "bucket/ledger", is_local=False).driver_folder
    text = PAGE.read_text(encoding="utf-8").replace("~", "/home/me")
    for folder in (cache_folder(), default_home().parent, Path(spool.root).parents[2]):
        assert f"`{folder}`" in text
    assert f"`{CACHE_ENV}`" in text
