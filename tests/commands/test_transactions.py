"""`rocket-sink transactions settle` with several epochs, on a stub that ends them."""

from typing import Any

from pyspark.sql import Row

from rocket_sink.commands.common.output import Bar
from rocket_sink.commands.transactions import settle_in_order
from rocket_sink.errors import DeliveryError
from rocket_sink.spark.transactions import EndReport


class Stub:
    """A TransactionCommitter with prepared reports by (query, epoch)."""

    def __init__(self, reports: dict[tuple[str, int], Any]) -> None:
        self.reports = reports
        self.asked: list[tuple[str, int]] = []

    def end(self, query_id: str, epoch: int, **more: Any) -> EndReport:
        self.asked.append((query_id, epoch))
        report = self.reports.get((query_id, epoch), EndReport(query_id, epoch, committed=2))
        if isinstance(report, Exception):
            raise report
        assert isinstance(report, EndReport)
        return report


def run(stub: Any, *epochs: tuple[str, int]) -> list[Any]:
    rows = [Row(query_id=query, epoch=epoch, halves=2) for query, epoch in epochs]
    with Bar("settle", 2 * len(rows)) as bar:
        return settle_in_order(stub, rows, bar)


def test_an_epoch_that_stays_open_keeps_back_those_of_its_query_only(capsys: Any) -> None:
    stub = Stub({("a", 1): DeliveryError("broker-a is away")})
    done = run(stub, ("a", 0), ("a", 1), ("b", 0), ("a", 2))
    assert stub.asked == [("a", 0), ("a", 1), ("b", 0)]
    assert [epoch.is_good for epoch in done] == [True, False, True, False]
    assert done[3].as_dict()["error"] == "an earlier epoch of its query is open"
    assert "query a epoch 1 stays open: broker-a is away" in capsys.readouterr().err


def test_lost_messages_and_a_busy_ledger_are_no_success() -> None:
    lost, busy = EndReport("a", 0, committed=1, refused=1), EndReport("a", 1, busy=True)
    done = run(Stub({("a", 0): lost, ("a", 1): busy}), ("a", 0), ("a", 1))
    assert not any(epoch.is_good for epoch in done)
    assert done[0].as_dict()["refused"] == 1 and not done[0].error and done[1].error
