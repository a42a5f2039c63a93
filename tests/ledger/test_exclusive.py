"""A store that denies access for a moment settles nothing about who commits to its ledger."""

from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import exclusive
from rocket_sink.ledger.path import resolve_path

PLACE = resolve_path("s3a://bucket/ledger")


class Denied(Exception):
    """The error of a store that denies access, as Java raises it."""

    java_exception = SimpleNamespace(toString=lambda: "java.nio.file.AccessDeniedException: 403")


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the session's file system be asked without Java; returns the pauses between."""
    pauses: list[float] = []
    monkeypatch.setattr(exclusive, "_has_own_log_store", lambda *_: True)
    monkeypatch.setattr(exclusive, "_encrypts", lambda *_: False)
    monkeypatch.setattr(exclusive, "_may_pass", lambda spark, error: isinstance(error, Denied))
    monkeypatch.setattr("rocket_sink.ledger.append.exclusive.time.sleep", pauses.append)
    return pauses


def answer_with(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    remaining = iter(answers)

    def ask(*_: Any) -> bool:
        answer = next(remaining)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(exclusive, "_ask", ask)


def test_a_store_is_asked_again_after_a_denied_look(
    monkeypatch: pytest.MonkeyPatch, pauses_s: list[float]
) -> None:
    answer_with(monkeypatch, Denied(), Denied(), True)
    assert exclusive.store_refuses(None, PLACE)  # type: ignore[arg-type]
    assert len(pauses_s) == 2


def test_a_store_that_goes_on_denying_ends_the_write(
    monkeypatch: pytest.MonkeyPatch, pauses_s: list[float]
) -> None:
    answer_with(monkeypatch, *[Denied()] * 4)
    with pytest.raises(LedgerError, match="cannot be asked now"):
        exclusive.store_refuses(None, PLACE)  # type: ignore[arg-type]
    assert len(pauses_s) == 3


def test_a_file_system_without_conditions_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, pauses_s: list[float]
) -> None:
    answer_with(monkeypatch, TypeError("no such option"), True)
    assert not exclusive.store_refuses(None, PLACE)  # type: ignore[arg-type]
    assert pauses_s == []
