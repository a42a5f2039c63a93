"""The view of `rocket-sink stream` while it runs."""

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink.commands.common.stream_run import Report, RunView
from rocket_sink.ledger.query.live import BrokerSums

SOON = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)


def figures() -> Any:
    return SimpleNamespace(
        standing=SimpleNamespace(pending={"transport": 100}),
        brokers={"broker-a": BrokerSums(), "broker-b": BrokerSums(isolated_until=SOON, cause="X")},
        refresh=lambda: True,
    )


def test_events_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = RunView(Report(), figures())
    view.epoch(12, 10_000, 1.2)
    view.refresh()
    view.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "epoch 12: 10,000 rows in 1.2 s"
    assert lines[1].startswith("broker-b is isolated until ")
    assert lines[2:] == ["100 dead letters are pending"]


def test_a_run_ends_with_what_to_do_about_letters_that_wait() -> None:
    done = Report(ledger="/data/my ledger", pending={"transport": 100, "data": 1})
    *_, waiting, refused = done.as_text().splitlines()
    assert "transport 100; " in waiting
    assert "rocket-sink backfill --ledger '/data/my ledger' -n HOST:9876" in waiting
    assert "takes: 1; " in refused and "show dead-letters --ledger '/data/my ledger'" in refused
    assert "backfill" not in Report(ledger="/data/ledger").as_text()
