"""The judge compares stored messages with the incoming rows and the ledger. It is pure.

A row is `(sharding key, number)`; numbers of a key grow in the order in which it must arrive.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

Row = tuple[str, int]
Queue = tuple[str, int]
"""A queue: broker address and queue id."""
_OUTCOMES = ("acked", "degraded", "dead", "unknown", "filtered")
EPOCH_COLUMNS = ("query_id", "adds_up", "rows_in", *_OUTCOMES, "duplicates_possible")
"""The columns of the view `epochs` that the judge reads."""


@dataclass(frozen=True)
class Copy:
    """A message as a broker stores it.

    Attributes:
        half: the broker's id of the half message that became this message.
        life: 1 for a topic that was deleted and made again, whose offsets begin anew.
        torn: a killed broker kept the message without some of the sent properties.
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
    """A request in the ledger. `queue` is None if the queue is unknown."""

    outcome: str
    count: int
    queue: Queue | None = None
    offset: int = -1


@dataclass(frozen=True)
class Epoch:
    """An epoch in the ledger's view."""

    query: str
    adds_up: bool
    rows_in: int
    accounted: int
    duplicates_possible: int = 0

    @classmethod
    def of(cls, row):
        """Return the epoch of a row of the view."""
        accounted = sum(row[name] for name in _OUTCOMES)
        facts = (row["query_id"], row["adds_up"], row["rows_in"])
        return cls(*facts, accounted, row["duplicates_possible"])


@dataclass(frozen=True)
class Accounts:
    """The ledger's records of a query.

    Attributes:
        halves: brokers' ids of the half messages that the query's appends have decided on.
    """

    sent: Sequence[Sent] = ()
    letters: Collection[Row] = ()
    epochs: Sequence[Epoch] = ()
    halves: Collection[str] = ()


@dataclass(frozen=True)
class Verdict:
    """Counts of faulty rows. `stored` and `duplicates` are figures, not faults by themselves.

    Attributes:
        lost: rows that are neither stored nor a dead letter.
        unknown: stored messages that belong to no row.
        disordered: first arrivals of a row after a later row of its key, or in another queue than
            the key's first row.
        duplicates: stored copies beyond the first of a row.
        unlike_ids: rows whose copies do not share one id.
        unaccounted: stored copies of doubled rows that the ledger neither places nor doubts.
        wrong_epochs: epochs whose columns do not add up to their rows.
        missing_rows: rows that came in and are in no epoch that adds up.
        undecided: visible messages of a task attempt that did not count, so that no append has
            decided on them.
        torn: copies that a killed broker kept in part. No other figure counts them: their rows are
            lost unless another copy is complete. The judge does not look for them in the accounts,
            which cannot have a copy without its id if the broker kept no other of its request.
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

    def faults(self, *, ordering, delivery, batch=False):
        """Return the figures that break a promise; empty if all is well."""
        wrong = {
            "lost": self.lost, "unknown": self.unknown, "unlike_ids": self.unlike_ids,
            "unaccounted": self.unaccounted, "missing_rows": self.missing_rows,
        }  # fmt: skip
        if not batch:
            # The write of a driver that died is never finished; the next write is another one.
            wrong["wrong_epochs"] = self.wrong_epochs
        if ordering == "strict":
            wrong["disordered"] = self.disordered
        if delivery != "at_least_once":
            wrong["duplicates"] = self.duplicates
        if delivery == "transactional":
            wrong["undecided"] = self.undecided
        return {name: count for name, count in wrong.items() if count}


def judge(expected, copies, accounts):
    """Compare the expected rows, the stored copies and the ledger's accounts."""
    torn = sum(copy.torn for copy in copies)
    copies = [copy for copy in copies if not copy.torn]
    times = Counter(copy.row for copy in copies)
    wanted = set(expected)
    doubled = {row for row, count in times.items() if count > 1}
    return Verdict(
        stored=len(copies), lost=len(wanted - times.keys() - set(accounts.letters)),
        unknown=sum(row not in wanted for row in times), disordered=disordered_rows(copies),
        duplicates=len(copies) - len(times), unlike_ids=_unlike_ids(copies),
        unaccounted=_unaccounted([copy for copy in copies if copy.row in doubled], accounts),
        wrong_epochs=sum(not _adds_up(epoch) for epoch in accounts.epochs),
        missing_rows=max(0, len(wanted) - _rows_told(accounts.epochs)),
        undecided=sum(copy.half not in accounts.halves for copy in copies), torn=torn,
    )  # fmt: skip


def disordered_rows(copies):
    """Count disordered rows. Offsets give the order within a queue; queues have no common order."""
    homes = {}
    last = {}
    arrived = set()
    wrong = 0
    for copy in sorted(copies, key=lambda copy: (copy.queue, copy.life, copy.offset)):
        if copy.row in arrived:
            continue
        arrived.add(copy.row)
        key, number = copy.row
        wrong += homes.setdefault(key, copy.queue) != copy.queue or number < last.get(key, -1)
        last[key] = max(number, last.get(key, -1))
    return wrong


def _unlike_ids(copies):
    ids = defaultdict(set)
    for copy in copies:
        ids[copy.row].add(copy.message_id)
    return sum(len(message_ids) > 1 for message_ids in ids.values())


def _unaccounted(copies, accounts):
    """Count copies at places that no answer named and that the ledger does not doubt.

    The ledger doubts messages by request, and rows by epoch: a row that a third attempt sent counts
    once.
    """
    placed = set()
    doubtful = 0
    for sent in accounts.sent:
        if sent.queue is not None and sent.offset >= 0:
            placed.update((sent.queue, sent.offset + i) for i in range(sent.count))
        elif sent.outcome in ("unknown", "in_flight"):
            doubtful += sent.count
    possible = sum(epoch.duplicates_possible for epoch in accounts.epochs)
    elsewhere = [copy.row for copy in copies if (copy.queue, copy.offset) not in placed]
    return max(0, min(len(elsewhere) - doubtful, len(set(elsewhere)) - possible))


def _adds_up(epoch):
    return epoch.adds_up and epoch.rows_in == epoch.accounted


def _rows_told(epochs):
    """Return the rows of the epochs that add up, for the query that has most."""
    rows = Counter()
    for epoch in epochs:
        if _adds_up(epoch):
            rows[epoch.query] += epoch.rows_in
    return max(rows.values(), default=0)
