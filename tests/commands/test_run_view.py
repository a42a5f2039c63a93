"""The view of `rocket-sink stream` while it runs."""

from __future__ import annotations

import datetime as dt
import io
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rocket_sink.commands.common.stream_run import Report, RunView
from rocket_sink.ledger.query.live import BrokerSums
from rocket_sink.text import clean

SOON = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)


def figures() -> Any:
    slow = BrokerSums(
        messages=59_900, requests=612, retries=12, failures=Counter(SEND_TIMEOUT=12),
        isolated_until=SOON, cause="latency", answers=Counter({70: 5.0}),
    )  # fmt: skip
    return SimpleNamespace(
        rows=Counter(acked=119_900, dead=100), duplicates_possible=3,
        standing=SimpleNamespace(pending={"transport": 100}),
        brokers={"broker-a": BrokerSums(messages=60_000, requests=600), "broker-b": slow},
        refresh=lambda: True,
    )  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_has_all_and_breaks_no_word(width: int) -> None:
    view = RunView(Report(), figures())
    view.epoch(12, 10_000, 1.2)
    console = Console(file=io.StringIO(), width=width)
    console.print(view.as_table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("10,000 rows", "epoch 12", "acked 119,900", "dead 100", "transport 100",
                 "broker-a", "60,000", "latency", "12"):  # fmt: skip
        assert part in text
    assert max(map(len, text.splitlines())) <= width
    assert clean(text.replace("\n", "")) == text.replace("\n", "")


def test_without_a_terminal_events_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with RunView(Report(), figures()) as view:
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
