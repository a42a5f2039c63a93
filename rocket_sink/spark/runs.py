"""The registry of the runs of a session's queries: what Spark has reported of each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rocket_sink.ledger.driver.folded import Epoch, FoldedLedger
from rocket_sink.ledger.transport.files import spooled_epochs
from rocket_sink.spark import lineage
from rocket_sink.spark.console import say_end, say_no_rows, warn_of_losses

_CUT: Final = "; a start with the same checkpoint goes on from here"
_WAITS: Final = "; the last epochs wait for `rocket-sink ledger fold`"


@dataclass
class Run:
    """A run of a streaming query.

    Attributes:
        label: the query on consoles (`console.label_of`).
        ledger: URI of the run's ledger; empty if Spark hides the sink, as with foreachBatch.
        name: query under whose name the run's tasks write to the ledger: its `appId`, or its id.
        has_begun: the run finished an epoch or waited for rows, or Spark has reported its end.
        is_running: Spark has not reported the end.
        has_failed: Spark has reported an error as the end.
        is_awaited: whether to wait for this report; not a second time.
        hands_over: tasks may hand their ledger rows to the driver, so failed ones leave no record.
    """

    label: str
    ledger: str = ""
    name: str = ""
    has_begun: bool = False
    is_running: bool = True
    has_failed: bool = False
    is_awaited: bool = True
    hands_over: bool = False


class Runs:
    """The runs that Spark has reported, until their ends are logged. Several threads may use it."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._runs))

    def start(self, run_id: str, query_id: str) -> None:
        self._runs[run_id] = Run(query_id)

    def name_sink(
        self, run_id: str, label: str, ledger: str = "", name: str = "", *, hands_over: bool = False
    ) -> None:
        """Note what Spark shows of a run's sink; see the attributes of `Run`."""
        if (run := self._runs.get(run_id)) is not None:
            run.label, run.ledger, run.name, run.hands_over = label, ledger, name, hands_over

    def name_in(self, run_id: str, ledger: str) -> str | None:
        """Return the name under which a run's tasks write to the ledger at this URI; None if they
        write to another ledger or to none, or if Spark hides the sink. Ask Spark and not the spool:
        a fold may have emptied the spool before Spark reports an epoch."""
        run = self._runs.get(run_id)
        return run.name if run is not None and run.ledger == ledger else None

    def hands_over(self, run_id: str) -> bool:
        return (run := self._runs.get(run_id)) is not None and run.hands_over

    def begin(self, run_id: str) -> None:
        if run_id in self._runs:
            self._runs[run_id].has_begun = True

    def end(self, run_id: str, error: str) -> None:
        """Note an end. The query itself raises its `error`, so do not warn of a lack of rows."""
        lineage.note_error(run_id, error)
        if (run := self._runs.get(run_id)) is not None:
            run.has_begun, run.is_running, run.has_failed = True, False, bool(error)

    def awaited(self) -> set[str]:
        """Return the runs for the report of whose end a caller may wait."""
        runs = list(self._runs.items())
        return {run_id for run_id, run in runs if run.is_running and run.is_awaited}

    def give_up(self, run_ids: Iterable[str]) -> None:
        """Wait no more for the ends of these runs."""
        for run_id in run_ids:
            self._runs[run_id].is_awaited = False

    def warn_of_losses(self, counts: Mapping[Epoch, Mapping[str, object]], ledger: str) -> None:
        """Warn of these runs' rows that were not delivered to a broker."""
        for (run_id, epoch), facts in counts.items():
            if (run := self._runs.get(run_id)) is not None:
                warn_of_losses(f"epoch {epoch} of the query {run.label}", facts, ledger)

    def ended(self) -> set[str]:
        """Return the runs whose end Spark has reported, and whose end is not logged yet."""
        return {run_id for run_id, run in list(self._runs.items()) if not run.is_running}

    def say_ends(
        self, run_ids: Iterable[str], ledgers: Collection[FoldedLedger], *, is_last: bool = False
    ) -> None:
        """Log the row counts of these runs, and forget the runs. Leave a run whose rows wait for a
        fold to a later call, unless this call `is_last`."""
        for run_id in run_ids:
            if (run := self._runs.get(run_id)) is None:
                continue
            waits = any(each.waits for each in ledgers if run.ledger in ("", each.place.uri))
            if waits and not is_last:
                continue
            counts = Counter[str]()
            for ledger in ledgers:
                counts += _say_end(run_id, run, ledger)
            self._runs.pop(run_id, None)
            uris = [ledger.place.uri for ledger in ledgers if ledger.accounts is not None]
            if run.ledger in uris and not counts and not run.has_failed:
                say_no_rows(run.label, run.ledger, is_early=not run.has_begun)
            lineage.end(run_id, counts)


def _say_end(run_id: str, run: Run, ledger: FoldedLedger) -> Counter[str]:
    counts = ledger.end_run(run_id)
    if counts["rows_in"]:
        more = _WAITS if spooled_epochs(ledger.place) else ""
        # A run whose end Spark has not reported is cut off by the program's end.
        more += _CUT if run.is_running else ""
        say_end(f"the query {run.label}", counts, ledger.place.uri, more)
    return counts
