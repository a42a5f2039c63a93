"""The demo's parts: its rows, its verifier, its fault. tests/integration runs the whole demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

from rocket_sink.commands.demo import _empty_folder
from rocket_sink.commands.demo.flights import Verifier, write_flights
from rocket_sink.commands.demo.run import FaultInjector, _leave_running
from rocket_sink.errors import ConfigurationError
from rocket_sink.wire.stored import StoredMessage

ROWS = 3000


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flights")
    write_flights(folder, ROWS)
    return folder


@pytest.fixture(scope="module")
def rows(flights: Path) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(flights).sort_by("row").to_pylist())


def stored(rows: list[dict[str, Any]]) -> Iterator[StoredMessage]:
    for row in rows:
        body = {name: row[name] for name in ("carrier", "flight", "dest", "distance")}
        properties = {
            "row": str(row["row"]), "seq": str(row["seq"]),
            "__SHARDINGKEY": row["sharding_key"], "UNIQ_KEY": f"id-{row['row']}",
        }  # fmt: skip
        yield StoredMessage("flights", json.dumps(body).encode(), properties=properties)


class TestFlights:
    def test_rows_are_numbered_in_time_order(self, rows: list[dict[str, Any]]) -> None:
        assert [row["row"] for row in rows] == list(range(ROWS))
        times = [(row["time_hour"], row["sched_dep_time"]) for row in rows]
        assert times == sorted(times)

    def test_seq_counts_within_the_sharding_key(self, rows: list[dict[str, Any]]) -> None:
        seen: dict[str, int] = {}
        for row in rows:
            assert row["seq"] == seen.get(row["sharding_key"], 0)
            seen[row["sharding_key"]] = row["seq"] + 1

    def test_a_row_without_tail_number_takes_carrier_and_flight(
        self, rows: list[dict[str, Any]]
    ) -> None:
        without = [row for row in rows if row["tailnum"] is None]
        assert without
        assert all(row["sharding_key"] == f"{row['carrier']}-{row['flight']}" for row in without)

    def test_files_are_older_the_earlier_their_rows(self, tmp_path: Path) -> None:
        flights = write_flights(tmp_path, 12_000)
        files = sorted(tmp_path.glob("*.parquet"))
        times = [path.stat().st_mtime for path in files]
        assert flights.files == len(files) > 1
        assert times == sorted(set(times))


class TestJudge:
    def test_everything_there_once_in_order(
        self, flights: Path, rows: list[dict[str, Any]]
    ) -> None:
        verdict = self.verifier(flights, stored(rows))
        assert (verdict.stored, verdict.distinct, verdict.duplicates) == (ROWS, ROWS, 0)
        assert (verdict.foreign, verdict.new_ids) == (0, 0)
        assert (verdict.disordered_keys, verdict.moved_keys) == (0, 0)
        assert verdict.missing == frozenset()

    def test_a_missing_row_is_noticed(self, flights: Path, rows: list[dict[str, Any]]) -> None:
        verdict = self.verifier(flights, stored(rows[:-2]))
        assert verdict.missing == {ROWS - 2, ROWS - 1}

    def test_a_second_copy_is_a_duplicate_and_no_disorder(
        self, flights: Path, rows: list[dict[str, Any]]
    ) -> None:
        verdict = self.verifier(flights, stored([*rows, *rows[:5]]))
        assert (verdict.duplicates, verdict.new_ids, verdict.disordered_keys) == (5, 0, 0)

    def test_a_second_copy_with_a_new_id_is_counted(
        self, flights: Path, rows: list[dict[str, Any]]
    ) -> None:
        (copy,) = stored(rows[:1])
        copy.properties["UNIQ_KEY"] = "another"
        assert self.verifier(flights, [*stored(rows), copy]).new_ids == 1

    def test_two_rows_of_a_key_swapped_are_disorder(
        self, flights: Path, rows: list[dict[str, Any]]
    ) -> None:
        second = next(row for row in rows if row["seq"] == 1)
        first = next(
            r for r in rows if r["sharding_key"] == second["sharding_key"] and r["seq"] == 0
        )
        swapped = [{first["row"]: second, second["row"]: first}.get(r["row"], r) for r in rows]
        assert self.verifier(flights, stored(swapped)).disordered_keys == 1

    def test_a_key_in_two_queues_has_moved(self, flights: Path, rows: list[dict[str, Any]]) -> None:
        verifier = Verifier(flights)
        key = next(row["sharding_key"] for row in rows if row["seq"] == 1)
        for row, message in zip(rows, stored(rows), strict=True):
            elsewhere = row["sharding_key"] == key and row["seq"] > 0
            verifier.feed("broker-b" if elsewhere else "broker-a", message)
        assert verifier.verdict().moved_keys == 1

    def test_another_rows_body_is_foreign(self, flights: Path, rows: list[dict[str, Any]]) -> None:
        wrong = {**rows[0], "dest": "XXX"}
        assert self.verifier(flights, stored([wrong, *rows[1:]])).foreign == 1

    def test_a_message_of_another_sender_is_foreign(
        self, flights: Path, rows: list[dict[str, Any]]
    ) -> None:
        other = StoredMessage("flights", b"hello", properties={})
        assert self.verifier(flights, [*stored(rows), other]).foreign == 1

    @staticmethod
    def verifier(flights: Path, messages: Any) -> Any:
        verifier = Verifier(flights)
        for message in messages:
            verifier.feed("broker-a", message)
        return verifier.verdict()


@dataclass
class StubBroker:
    name: str
    alive: bool = True
    frozen: bool = False

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False

    def kill(self) -> None:
        self.alive = False

    def restart(self, timeout_s: float = 60) -> None:
        self.alive = True


class TestFaultInjector:
    @pytest.mark.parametrize("fault", ["freeze", "kill"])
    def test_breaks_once_and_repairs_after_its_time(self, fault: str) -> None:
        broker, now, lines = StubBroker("broker-b"), [0.0], []  # type: ignore[var-annotated]
        injector = FaultInjector(broker, fault, lines.append, clock=lambda: now[0])  # type: ignore[arg-type]
        injector.step(due=False)
        assert not broker.frozen and broker.alive
        for moment_s, is_broken in ((0.0, True), (5.9, True), (6.0, False), (20.0, False)):
            now[0] = moment_s
            injector.step(due=True)
            assert (broker.frozen or not broker.alive) == is_broken
        assert len(lines) == 2

    def test_a_stream_that_ends_early_ends_the_fault(self) -> None:
        broker = StubBroker("broker-b")
        injector = FaultInjector(broker, "freeze", lambda text: None)  # type: ignore[arg-type]
        injector.step(due=True)
        injector.repair()
        assert not broker.frozen


class TestFolder:
    def test_a_folder_with_other_files_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
            _empty_folder(tmp_path)
        assert (tmp_path / "thesis.tex").exists()

    def test_a_folder_that_may_not_be_made_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="name a folder that may be made"):
            _empty_folder(tmp_path / "file" / "out")

    def test_the_commands_that_end_a_kept_demo_have_lines_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state = SimpleNamespace(name_server="127.0.0.1:1")
        monkeypatch.setattr("rocket_sink.cluster.up", lambda *_: state)
        out = tmp_path / "a b"
        _leave_running(out / "cluster")
        lines = capsys.readouterr().err.splitlines()
        assert f"  rocket-sink cluster down --home '{out}/cluster'" in lines
