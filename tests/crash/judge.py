"""The judge: what is stored against what came in and what the ledger says. Pure.

A row is `(sharding key, number)`; numbers of a key grow in the order in which it must arrive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

Row = tuple[str, int]
Queue = tuple[str, int]
"""Broker address and queue id."""


@dataclass(frozen=True)
class Copy:
    """A message as a broker has it.

    Attributes:
        half: the broker's id of the half message that this was made of.
        life: 1 for a topic that was deleted and made again, whose offsets begin anew.
        torn: a killed broker kept it without all of the properties that were sent.
    """

    row: Row
    message_id: str
    queue: Queue
    offset: int
    half: str = ""
    life: int = 0
    torn: bool = False


@dataclass(frozen=True)
class Sent:
    """A request in the ledger; `queue` is None if it is unknown."""

    outcome: str
    count: int
    queue: Queue | None = None
    offset: int = -1


@dataclass(frozen=True)
class Epoch:
    """An epoch as the ledger's view has it."""

    query: str
    adds_up: bool
    rows_in: int
    accounted: int
    duplicates_possible: int = 0


@dataclass(frozen=True)
class Accounts:
    """What the ledger says of a query.

    Attributes:
        halves: brokers' ids of the half messages that its appends have decided on.
    """

    sent: Sequence[Sent] = ()
    letters: Collection[Row] = ()
    epochs: Sequence[Epoch] = ()
    halves: Collection[str] = ()


@dataclass(frozen=True)
class Verdict:
    """What is wrong, in rows; `stored` and `duplicates` are figures, not faults by themselves.

    Attributes:
        lost: rows that are neither stored nor a dead letter.
        unknown: stored messages that no row asked for.
        disordered: first arrivals of a row after a later row of its key, or in another queue than
            the key's first row.
        duplicates: stored copies beyond the first of a row.
        unlike_ids: rows whose copies do not share one id.
        unaccounted: stored copies of doubled rows that the ledger neither places nor doubts.
        wrong_epochs: epochs whose columns do not add up to their rows.
        missing_rows: rows that came in and are in no epoch that adds up.
        undecided: visible messages that no append has decided on: of an attempt that did not count.
        torn: copies that a killed broker kept in part. No other figure counts them: their rows are
            lost unless they are whole elsewhere. Whether they are in the accounts is not looked at:
            one without its id, whose request the broker kept nothing else of, cannot be.
    """

    stored: int
    lost: int
    unknown: int
    disordered: int
    duplicates: int
    unlike_ids: int
    unaccounted: int
    wrong_epochs: int
    missing_rows: int
    undecided: int
    torn: int = 0

    def faults(self, *, ordering: str, delivery: str, batch: bool = False) -> dict[str, int]:
        """The figures that break what was promised; empty when all is well."""
        wrong = {
            "lost": self.lost, "unknown": self.unknown, "unlike_ids": self.unlike_ids,
            "unaccounted": self.unaccounted, "missing_rows": self.missing_rows,
        }  # fmt: skip
        if not batch:
            # The write of a driver that died is never finished; the one after it is another one.
            wrong["wrong_epochs"] = self.wrong_epochs
        if ordering == "strict":
            wrong["disordered"] = self.disordered
        if delivery != "at_least_once":
            wrong["duplicates"] = self.duplicates
        if delivery == "transactional":
            wrong["undecided"] = self.undecided
        return {name: count for name, count in wrong.items() if count}


def judge(expected: Collection[Row], copies: Sequence[Copy], accounts: Accounts) -> Verdict:
    """Hold the three against each other."""
    torn = sum(copy.torn for copy in copies)
    copies = [copy for copy in copies if not copy.torn]
    times = Counter(copy.row for copy in copies)
    asked = set(expected)
    doubled = {row for row, count in times.items() if count > 1}
    return Verdict(
        stored=len(copies),
        lost=len(asked - times.keys() - set(accounts.letters)),
        unknown=sum(row not in asked for row in times),
        disordered=_disordered(copies),
        duplicates=len(copies) - len(times),
        unlike_ids=_unlike_ids(copies),
        unaccounted=_unaccounted([copy for copy in copies if copy.row in doubled], accounts),
        wrong_epochs=sum(not _adds_up(epoch) for epoch in accounts.epochs),
        missing_rows=max(0, len(asked) - _rows_told(accounts.epochs)),
        undecided=sum(copy.half not in accounts.halves for copy in copies),
        torn=torn,
    )


def _disordered(copies: Iterable[Copy]) -> int:
    """Order within a queue is that of its offsets; over queues there is none."""
    homes: dict[str, Queue] = {}
    last: dict[str, int] = {}
    seen: set[Row] = set()
    wrong = 0
    for copy in sorted(copies, key=lambda copy: (copy.queue, copy.life, copy.offset)):
        if copy.row in seen:
            continue
        seen.add(copy.row)
        key, number = copy.row
        wrong += homes.setdefault(key, copy.queue) != copy.queue or number < last.get(key, -1)
        last[key] = max(number, last.get(key, -1))
    return wrong


def _unlike_ids(copies: Iterable[Copy]) -> int:
    ids: defaultdict[Row, set[str]] = defaultdict(set)
    for copy in copies:
        ids[copy.row].add(copy.message_id)
    return sum(len(found) > 1 for found in ids.values())


def _unaccounted(copies: Sequence[Copy], accounts: Accounts) -> int:
    """Copies at no place that an answer named, less those that the ledger says may be there.

    It doubts messages by request, and rows by epoch: a row that a third attempt sent counts once.
    """
    placed: set[tuple[Queue, int]] = set()
    doubtful = 0
    for sent in accounts.sent:
        if sent.queue is not None and sent.offset >= 0:
            placed.update((sent.queue, sent.offset + i) for i in range(sent.count))
        elif sent.outcome in ("unknown", "in_flight"):
            doubtful += sent.count
    possible = sum(epoch.duplicates_possible for epoch in accounts.epochs)
    elsewhere = [copy.row for copy in copies if (copy.queue, copy.offset) not in placed]
    return max(0, min(len(elsewhere) - doubtful, len(set(elsewhere)) - possible))


def _adds_up(epoch: Epoch) -> bool:
    return epoch.adds_up and epoch.rows_in == epoch.accounted


def _rows_told(epochs: Sequence[Epoch]) -> int:
    """Rows of the epochs that add up, of the query that has most of them."""
    rows: Counter[str] = Counter()
    for epoch in epochs:
        if _adds_up(epoch):
            rows[epoch.query] += epoch.rows_in
    return max(rows.values(), default=0)
