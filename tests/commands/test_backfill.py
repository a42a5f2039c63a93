"""The final words of `rocket-sink backfill`; tests/spark/backfill tests its work."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.commands import backfill as command
from rocket_sink.spark.backfill import backfill
from rocket_sink.spark.backfill.backfill import Plan
from rocket_sink.spark.backfill.resend import Resent
from tests.run_command import run_command

FAILURES = [
    {"message_id": "7F01", "topic": "orders", "code": "NO_ROUTE", "error": "no writable queue"},
    {"message_id": "7F02", "topic": "flights", "code": "MESSAGE_ILLEGAL", "error": "too long"},
]


@pytest.mark.parametrize(
    ("done", "message", "pending", "code"),
    [
        (Resent(resent=8), "8 dead letters: 8 stored; 4 pending", 4, 0),
        (Resent(resent=2), "2 dead letters: 2 stored; 4 pending", 4, 0),
        (
            Resent(resent=1, found=1, left_out=1, failed=2, held_back=1, failures=FAILURES),
            "6 dead letters",
            7,
            1,
        ),
        (Resent(not_tried=2, waiting=Counter({"broker-a": 3})), "5 dead letters", 9, 1),
    ],
)
def test_it_counts_what_was_done_when_others_change_the_ledger_after_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: Resent, message: str, pending: int,
    code: int,
) -> None:  # fmt: skip
    """The plan counts three of seven letters; then others add letters or park one."""

    class Planned(contextlib.nullcontext[Any]):
        noun = "dead letters"

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(self)

        def plan(self, *, sample: int) -> Plan:
            return Plan(pending=7, selected=3)

        def run(self, selected: int, **more: Any) -> Resent:
            return done

    monkeypatch.setattr(command, "check_exists", lambda *arguments: None)
    monkeypatch.setattr(command, "check_name_server", lambda options: None)
    monkeypatch.setattr(command, "spark_session", lambda *a, **b: contextlib.nullcontext())
    monkeypatch.setattr(backfill, "Backfill", Planned)
    words = ("backfill", "-l", str(tmp_path), "-n", "127.0.0.1:9876")
    shown = run_command(*words)
    assert message in shown.err and shown.code == code
    assert shown.err.startswith("reading the dead letters ...\n")
    printed = run_command(*words, "--json").json()
    assert printed["pending"] == pending
    assert printed["failures"] == (FAILURES if done.failed else [])
