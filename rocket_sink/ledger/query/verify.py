"""Compares the messages of a topic with the rows that a ledger says are stored there, or with the
keys of a table. DuckDB keeps the messages' places and ids in a temporary file, so the memory is
bounded for any number of messages.

A request that was stored names its queue, the offset of its first message, and the number of its
messages, whose offsets follow. Delayed messages, timers and half messages are the exception: a
broker keeps a hidden copy in a system topic, and the message gets its place when it is due. The
ledger has no place of theirs, so they are recognised by their ids. If some are not there, the
hidden copies tell whether they wait. A copy stays as long as the broker's log reaches back."""
# ruff: noqa: S608 (the SQL has our own names only)

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from rocket_sink.ledger.sql import STORED, Query, is_text
from rocket_sink.ledger.views import ATTEMPT
from rocket_sink.wire.stored import StoredMessage

HiddenCopies = Callable[[], Iterable[tuple[str, bool]]]
"""A function that yields (id, whether the message waits for its time) of the hidden copies of the
topic's messages. Reading them takes long, so it is called only if a delayed message is absent."""

_EXAMPLES: Final = 5
_CHUNK: Final = 20_000
"""Number of messages that are inserted at once."""
_PREFIX: Final = 20
"""Hex digits that the ids of one batch of a task share (`task.message_ids`)."""
_SCHEMA: Final = pa.schema(
    [("broker", pa.string()), ("queue", pa.int64()), ("place", pa.int64()), ("id", pa.string()),
     ("key", pa.string())]
)  # fmt: skip
_SAME_ATTEMPT: Final = " AND ".join(f"a.{name} IS NOT DISTINCT FROM c.{name}" for name in ATTEMPT)


@dataclass(frozen=True)
class Verification:
    """The result for one topic, in messages.

    `acknowledged` = `found` + `missing` + `not_due` + `expired` + `unchecked`. `expired`: retention
    has deleted their part of the queue, or of delayed messages, the hidden copy and a part of the
    broker's queues. `unchecked`: they were sent one by one, with ids that do
    not tell which batch they belong to. `twice`: further copies of found messages. `unacknowledged`
    messages have ids of the ledger, but no attempt that counts has an answer for them. `foreign`
    messages are of other producers. `examples` has places by the name of the figure."""

    topic: str
    acknowledged: int
    found: int
    missing: int
    twice: int
    foreign: int
    not_due: int = 0
    expired: int = 0
    unacknowledged: int = 0
    unchecked: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def adds_up(self) -> bool:
        """Whether each acknowledged message is there once, and no other message is."""
        faults = self.missing + self.twice + self.foreign + self.unacknowledged + self.unchecked
        return not faults


def sent_topics(query: Query) -> list[str]:
    """Return the topics to which the ledger's requests were stored."""
    select = f"SELECT DISTINCT topic FROM answered WHERE {STORED} AND request > 0 ORDER BY topic"
    topics: list[str] = query(select)["topic"].to_pylist()
    return topics


class StoredPlaces:
    """The places, ids and keys of a topic's messages, in a temporary file."""

    def __init__(self) -> None:
        import duckdb

        self._folder = tempfile.TemporaryDirectory(prefix="rocket-sink-verify-")
        self._session = duckdb.connect(
            f"{self._folder.name}/places",
            config={"memory_limit": "1GB", "temp_directory": self._folder.name},
        )
        self._session.execute("SET enable_progress_bar = false")
        columns = "broker VARCHAR, queue BIGINT, place BIGINT, id VARCHAR, key VARCHAR"
        self._session.execute(f"CREATE TABLE stored ({columns})")
        self._session.execute("CREATE TABLE begins (broker VARCHAR, queue BIGINT, least BIGINT)")

    def close(self) -> None:
        self._session.close()
        self._folder.cleanup()

    def add(self, broker: str, queue: int, least: int, messages: Iterable[StoredMessage]) -> None:
        """Add the messages of a queue whose oldest message has the offset `least`."""
        self._session.execute("INSERT INTO begins VALUES (?, ?, ?)", [broker, queue, least])
        rows = iter(messages)
        while part := list(islice(rows, _CHUNK)):
            ids = [message.message_id or "" for message in part]
            keys = [message.properties.get("KEYS", "") for message in part]
            places = [message.queue_offset for message in part]
            columns = [[broker] * len(part), [queue] * len(part), places, ids, keys]
            self._insert(pa.table(columns, schema=_SCHEMA), "stored")

    def _insert(self, rows: pa.Table, table: str) -> None:
        self._session.register("rows", rows)
        self._session.execute(f"INSERT INTO {table} SELECT * FROM rows")
        self._session.unregister("rows")

    def compare(
        self, query: Query, topic: str, hidden: HiddenCopies, query_id: str | None = None
    ) -> Verification:
        """Compare the messages with a ledger's rows; with `query_id` count the rows and messages of
        this query only. Messages of the ledger's other queries are not foreign."""
        self._session.register("sent", query(_requests(topic, query_id)))
        self._session.register("known", query(_known(topic, query_id)))
        self._run(_MATCHES, _ABSENT, "CREATE TEMP TABLE hidden (id VARCHAR, is_waiting BOOLEAN)")
        if self._rows("SELECT 1 FROM absent LIMIT 1"):
            copies = iter(hidden())
            while part := list(islice(copies, _CHUNK)):
                columns = [list(column) for column in zip(*part, strict=True)]
                self._insert(pa.table(columns, names=["id", "is_waiting"]), "hidden")
        self._run(_CANDIDATES)
        (sums,), (late,) = self._rows(_SUMS), self._rows(_LATE)
        kinds = {row["what"]: row["n"] for row in self._rows(_OTHERS)}
        examples = {row["what"]: row["examples"] for row in self._rows(_OTHER_EXAMPLES)}
        examples["missing"] = [row["example"] for row in self._rows(_MISSING_EXAMPLES)]
        names = ("acknowledged", "expired", "unchecked", "missing", "not_due")
        counts = {name: int(sums.get(name) or 0) + int(late.get(name) or 0) for name in names}
        absent = sum(counts.values()) - counts["acknowledged"]
        return Verification(
            topic, found=counts["acknowledged"] - absent,
            twice=kinds.get("twice", 0), foreign=kinds.get("foreign", 0),
            unacknowledged=kinds.get("unacknowledged", 0), **counts,
            examples={name: shown[:_EXAMPLES] for name, shown in examples.items() if shown},
        )  # fmt: skip

    def compare_keys(self, topic: str, path: str, key: str) -> Verification:
        """Compare the messages' keys with a column of a table: Parquet, CSV or JSON files."""
        name = key.replace('"', '""')
        source = path.replace("'", "''")
        self._run(
            f"""CREATE TEMP TABLE wanted_keys AS
            SELECT CAST("{name}" AS VARCHAR) AS key, count(*) AS n FROM '{source}' GROUP BY 1""",
            """CREATE TEMP TABLE keys AS
            SELECT coalesce(w.key, s.key) AS key, coalesce(w.n, 0) AS wanted, coalesce(s.n, 0) AS n
            FROM wanted_keys w FULL OUTER JOIN (
                SELECT key, count(*) AS n FROM stored GROUP BY key
            ) s ON w.key = s.key""",
        )
        (sums,) = self._rows(
            """SELECT sum(wanted) AS acknowledged, sum(least(wanted, n)) AS found,
                sum(greatest(wanted - n, 0)) AS missing,
                sum(CASE WHEN wanted > 0 THEN greatest(n - wanted, 0) END) AS twice,
                sum(CASE WHEN wanted = 0 THEN n END) AS foreign_ FROM keys"""
        )
        names = {"acknowledged", "found", "missing", "twice"}
        counts = {name: int(sums[name] or 0) for name in names}
        tests = {
            "missing": "n < wanted",
            "twice": "n > wanted AND wanted > 0",
            "foreign": "wanted = 0",
        }
        examples = {
            what: [row["key"] for row in self._rows(
                f"SELECT key FROM keys WHERE {test} ORDER BY key LIMIT {_EXAMPLES}"
            )]
            for what, test in tests.items()
        }  # fmt: skip
        shown = {what: keys for what, keys in examples.items() if keys}
        return Verification(topic, foreign=int(sums["foreign_"] or 0), **counts, examples=shown)

    def _run(self, *statements: str) -> None:
        for statement in statements:
            self._session.execute(statement)

    def _rows(self, select: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._session.sql(select).to_arrow_table().to_pylist()
        return rows


def _requests(topic: str, query_id: str | None) -> str:
    """Return the query for the requests and resent dead letters whose messages must be there."""
    is_wanted = "true" if query_id is None else is_text("a.query_id", query_id)
    of_letter = "true" if query_id is None else is_text("l.query_id", query_id)
    of_topic = partial(is_text, text=topic)
    return f"""
        SELECT broker_name AS broker, queue_id AS queue, queue_offset AS first,
            CAST(message_count AS BIGINT) AS n, message_id AS id, last_message_id AS last_id,
            coalesce(half, false) OR frames IS NOT NULL OR queue_offset IS NULL AS is_timed,
            {is_wanted} AS is_wanted
        FROM (SELECT * FROM answered WHERE {STORED} AND request > 0 AND {of_topic("topic")}) a
        SEMI JOIN (SELECT * FROM accounts WHERE counts) c ON {_SAME_ATTEMPT}
        UNION ALL
        SELECT DISTINCT r.broker_name, r.queue_id, r.queue_offset, CAST(1 AS BIGINT),
            r.message_id, r.message_id, r.queue_offset IS NULL, {of_letter}
        FROM (SELECT * FROM resolutions WHERE resolution = 'resent' AND {of_topic("topic")}) r
        LEFT JOIN letters l ON r.letter_id = l.letter_id"""


def _known(topic: str, query_id: str | None) -> str:
    """Return the query for the beginnings of all ids that the ledger knows, and whether an id with
    this beginning is of the query."""
    is_wanted = "true" if query_id is None else is_text("query_id", query_id)
    parts = " UNION ALL ".join(
        f"SELECT substr(message_id, 1, {_PREFIX}) AS head, {is_wanted} AS is_wanted FROM {name} "
        f"WHERE {is_text('topic', topic)}"
        for name in ("send_rows", "letters", "resolutions")
    )
    return f"SELECT head, bool_or(is_wanted) AS is_wanted FROM ({parts}) i GROUP BY head"


_MATCHES: Final = """CREATE TEMP TABLE requests AS
    SELECT row_number() OVER () AS number, s.*, coalesce(b.least, 0) AS least,
        CASE WHEN n = 1 THEN id ELSE left(id, 20) END AS head,
        is_timed AND n > 1 AND (left(id, 20) IS DISTINCT FROM left(last_id, 20)
            OR coalesce(try_cast('0x' || substr(last_id, 21) AS BIGINT)
                - try_cast('0x' || substr(id, 21) AS BIGINT), -1) NOT BETWEEN n - 1 AND 1000000
        ) AS is_unchecked
    FROM sent s LEFT JOIN begins b ON s.broker = b.broker AND s.queue = b.queue;
    CREATE TEMP TABLE matches AS
    SELECT s.*, r.number, r.is_wanted FROM stored s
    ASOF LEFT JOIN (SELECT * FROM requests WHERE NOT is_timed) r
        ON s.broker = r.broker AND s.queue = r.queue AND s.place >= r.first;
    UPDATE matches SET number = NULL FROM requests r
    WHERE r.number = matches.number
        AND (place >= r.first + r.n OR place = r.first AND matches.id <> r.id);
    CREATE TEMP TABLE timed AS
    SELECT head, bool_or(is_wanted) AS is_wanted FROM requests WHERE is_timed GROUP BY head"""
"""Stored messages with the request that covers their place; `number` is null if none does. `timed`
has the ids, or beginnings of ids, by which messages without a place are recognised."""
_ABSENT: Final = """CREATE TEMP TABLE absent AS
    WITH loose AS (SELECT DISTINCT id FROM matches WHERE number IS NULL),
    wanted AS (
        SELECT head, sum(n) AS wanted, bool_or(broker IN (SELECT broker FROM begins
            WHERE least > 0)) AS is_deleted
        FROM requests WHERE is_timed AND is_wanted AND NOT is_unchecked GROUP BY head
    ),
    came AS (
        SELECT head, count(DISTINCT id) AS messages FROM (
            SELECT id AS head, id FROM loose
            UNION ALL
            SELECT left(id, 20), id FROM loose
            ANTI JOIN (SELECT id FROM requests WHERE is_timed AND n = 1) r USING (id)
        ) h GROUP BY head
    )
    SELECT head, wanted - coalesce(messages, 0) AS n, is_deleted
    FROM wanted LEFT JOIN came USING (head) WHERE wanted > coalesce(messages, 0)"""
"""Per id or beginning of ids, the number of timed messages that the topic does not have, and
whether retention has deleted messages of the topic at their broker."""
_CANDIDATES: Final = """CREATE TEMP TABLE candidates AS
    WITH wanted AS (
        SELECT * FROM requests SEMI JOIN absent USING (head)
        WHERE is_timed AND is_wanted AND NOT is_unchecked
    )
    SELECT DISTINCT head, id FROM (
        SELECT head, id FROM wanted WHERE n = 1
        UNION ALL
        SELECT head, head || printf('%012X', unnest(range(
            ('0x' || substr(id, 21))::BIGINT, ('0x' || substr(last_id, 21))::BIGINT + 1
        ))) FROM wanted WHERE n > 1
    ) i ANTI JOIN matches USING (id);
    CREATE TEMP TABLE late AS
    SELECT head, n, least(n, waiting) AS not_due,
        least(n - least(n, waiting), CASE WHEN is_deleted THEN due ELSE n END) AS missing
    FROM absent JOIN (
        SELECT head, count(CASE WHEN is_waiting THEN 1 END) AS waiting,
            count(CASE WHEN NOT is_waiting THEN 1 END) AS due
        FROM absent LEFT JOIN candidates USING (head) LEFT JOIN (
            SELECT id, bool_or(is_waiting) AS is_waiting FROM hidden GROUP BY id
        ) h USING (id) GROUP BY head
    ) c USING (head)"""
"""Ids of absent messages. The ids of a batch are numbered, and a request has some of them."""
_LATE: Final = """SELECT sum(not_due) AS not_due, sum(missing) AS missing,
    sum(n - not_due - missing) AS expired FROM late"""
_SUMS: Final = """SELECT sum(n) AS acknowledged,
        sum(CASE WHEN NOT is_timed THEN gone END) AS expired,
        sum(CASE WHEN NOT is_timed THEN n - gone - coalesce(c.messages, 0) END) AS missing,
        sum(CASE WHEN is_unchecked THEN n END) AS unchecked
    FROM (SELECT *, greatest(least(least - first, n), 0) AS gone FROM requests WHERE is_wanted) p
    LEFT JOIN (SELECT number, count(*) AS messages FROM matches GROUP BY 1) c
        ON p.number = c.number"""
_KINDS: Final = """(
    SELECT u.*, CASE
        WHEN p.id IS NOT NULL THEN if(p.is_wanted, 'twice', 'other query')
        WHEN coalesce(t.is_wanted, b.is_wanted) THEN if(nth > 1, 'twice', 'timed')
        WHEN coalesce(t.head, b.head) IS NOT NULL THEN 'other query'
        WHEN k.head IS NOT NULL THEN if(k.is_wanted, 'unacknowledged', 'other query')
        ELSE 'foreign' END AS what
    FROM (
        SELECT *, row_number() OVER (PARTITION BY id ORDER BY broker, queue, place) AS nth
        FROM matches WHERE number IS NULL
    ) u
    LEFT JOIN (
        SELECT id, bool_or(is_wanted) AS is_wanted FROM matches
        WHERE number IS NOT NULL AND id <> '' GROUP BY id
    ) p ON u.id = p.id
    LEFT JOIN timed t ON t.head = u.id
    LEFT JOIN timed b ON b.head = left(u.id, 20)
    LEFT JOIN known k ON k.head = left(u.id, 20)
) o"""
"""The messages at no request's place, by what they are: `timed` messages and those of an `other
query` are no fault."""
_OTHERS: Final = f"SELECT what, count(*) AS n FROM {_KINDS} GROUP BY what"
_OTHER_EXAMPLES: Final = f"""
    SELECT what, list(broker || ':' || queue || ' @' || place || ' ' || id) AS examples FROM (
        SELECT *, row_number() OVER (PARTITION BY what ORDER BY broker, queue, place) AS shown
        FROM {_KINDS} WHERE what NOT IN ('timed', 'other query')
    ) e WHERE shown <= {_EXAMPLES} GROUP BY what"""
_MISSING_EXAMPLES: Final = f"""
    SELECT broker || ':' || queue || ' @' || place AS example FROM (
        SELECT broker, queue, unnest(range(greatest(first, least), first + n)) AS place
        FROM requests p LEFT JOIN (SELECT number, count(*) AS messages FROM matches GROUP BY 1) c
            ON p.number = c.number
        WHERE NOT is_timed AND is_wanted AND first + n > least
            AND coalesce(c.messages, 0) < n - greatest(least(least - first, n), 0)
    ) a ANTI JOIN (SELECT * FROM matches WHERE number IS NOT NULL) m
        USING (broker, queue, place)
    UNION ALL
    SELECT c.id FROM candidates c SEMI JOIN (SELECT head FROM late WHERE missing > 0) l
        USING (head) ANTI JOIN (SELECT id FROM hidden WHERE is_waiting) h USING (id)
    ORDER BY 1 LIMIT {_EXAMPLES}"""
