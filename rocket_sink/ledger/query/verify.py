"""Compares the messages of a topic with the rows that a ledger says are stored there, or with the
keys of a table. DuckDB keeps the messages' places and ids in a temporary file, so the memory does
not grow with the topic.

A request that was stored names its queue, the offset of its first message, and the number of its
messages, whose offsets follow. Delayed messages, timers and half messages are the exception: a
broker keeps a hidden copy in a system topic, and the message gets its place when it is due. The
ledger has no place of theirs but the ids of all, so they are recognised by their ids, which are in
memory (figures in docs/operate/verify.md). If some are not there, the hidden copies tell whether
they wait. A copy stays as long as the broker's log reaches back."""
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

EXAMPLES: Final = 5
"""Largest number of examples of a figure."""
_CHUNK: Final = 20_000
"""Number of messages that are inserted at once."""
_SCHEMA: Final = pa.schema(
    [("broker", pa.string()), ("queue", pa.int64()), ("place", pa.int64()), ("id", pa.string()),
     ("key", pa.string())]
)  # fmt: skip
_SAME_ATTEMPT: Final = " AND ".join(f"a.{name} IS NOT DISTINCT FROM c.{name}" for name in ATTEMPT)


@dataclass(frozen=True)
class Verification:
    """The result for one topic, in messages.

    `acknowledged` = `found` + `missing` + `not_due` + `expired`. `expired`: retention has deleted
    their part of the queue, or of delayed messages, the hidden copy and a part of the broker's
    queues. `twice`: further copies of found messages. `unacknowledged` messages have ids of the
    ledger, but no attempt that counts has an answer for them. `foreign` messages are of other
    producers. `examples` has places by the name of the figure."""

    topic: str
    acknowledged: int
    found: int
    missing: int
    twice: int
    foreign: int
    not_due: int = 0
    expired: int = 0
    unacknowledged: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def adds_up(self) -> bool:
        """Whether each acknowledged message is there once, and no other message is."""
        return not (self.missing or self.twice or self.foreign or self.unacknowledged)


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
        (sums,), (late,) = self._rows(_SUMS), self._rows(_LATE)
        kinds = {row["what"]: row["n"] for row in self._rows(_OTHERS)}
        examples = {row["what"]: row["examples"] for row in self._rows(_OTHER_EXAMPLES)}
        examples["missing"] = [row["example"] for row in self._rows(_MISSING_EXAMPLES)]
        names = ("acknowledged", "expired", "missing", "not_due")
        counts = {name: int(sums.get(name) or 0) + int(late.get(name) or 0) for name in names}
        absent = sum(counts.values()) - counts["acknowledged"]
        return Verification(
            topic, found=counts["acknowledged"] - absent,
            twice=kinds.get("twice", 0), foreign=kinds.get("foreign", 0),
            unacknowledged=kinds.get("unacknowledged", 0), **counts,
            examples={name: shown[:EXAMPLES] for name, shown in examples.items() if shown},
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
                f"SELECT key FROM keys WHERE {test} ORDER BY key LIMIT {EXAMPLES}"
            )]
            for what, test in tests.items()
        }  # fmt: skip
        shown = {what: keys for what, keys in examples.items() if keys}
        return Verification(topic, foreign=int(sums["foreign_"] or 0), **counts, examples=shown)

    def _run(self, *statements: str) -> None:
        for statement in statements:
            self._session.execute(statement)

    def _rows(self, select: str) -> list[dict[str, Any]]:
        return list(self._session.sql(select).to_arrow_table().to_pylist())


def _requests(topic: str, query_id: str | None) -> str:
    """Return the query for the requests and resent dead letters whose messages must be there."""
    is_wanted = "true" if query_id is None else is_text("a.query_id", query_id)
    of_letter = "true" if query_id is None else is_text("l.query_id", query_id)
    of_topic = partial(is_text, text=topic)
    return f"""
        SELECT broker_name AS broker, queue_id AS queue, queue_offset AS first,
            CAST(message_count AS BIGINT) AS n, coalesce(message_ids, message_id) AS ids,
            coalesce(half, false) OR message_ids IS NOT NULL OR queue_offset IS NULL AS is_timed,
            {is_wanted} AS is_wanted
        FROM (SELECT * FROM answered WHERE {STORED} AND request > 0 AND {of_topic("topic")}) a
        SEMI JOIN (SELECT * FROM accounts WHERE counts) c ON {_SAME_ATTEMPT}
        UNION ALL
        SELECT DISTINCT r.broker_name, r.queue_id, r.queue_offset, CAST(1 AS BIGINT),
            r.message_id, r.queue_offset IS NULL, {of_letter}
        FROM (SELECT * FROM resolutions WHERE resolution = 'resent' AND {of_topic("topic")}) r
        LEFT JOIN letters l ON r.letter_id = l.letter_id"""


def _known(topic: str, query_id: str | None) -> str:
    """Return the query for all ids that the ledger has, and whether they are of the query."""
    is_wanted = "true" if query_id is None else is_text("query_id", query_id)
    columns = {"send_rows": "coalesce(message_ids, message_id)"}
    return " UNION ALL ".join(
        f"SELECT {columns.get(name, 'message_id')} AS ids, {is_wanted} AS is_wanted FROM {name} "
        f"WHERE {is_text('topic', topic)}"
        for name in ("send_rows", "letters", "resolutions")
    )


_MATCHES: Final = """CREATE TEMP TABLE requests AS
    SELECT row_number() OVER () AS number, s.*, coalesce(b.least, 0) AS least,
        greatest(least(b.least - first, n), 0) AS gone
    FROM sent s LEFT JOIN begins b ON s.broker = b.broker AND s.queue = b.queue WHERE NOT is_timed;
    CREATE TEMP TABLE matches AS
    SELECT s.*, r.number, r.is_wanted FROM stored s ASOF LEFT JOIN requests r
        ON s.broker = r.broker AND s.queue = r.queue AND s.place >= r.first;
    UPDATE matches SET number = NULL FROM requests r
    WHERE r.number = matches.number
        AND (place >= r.first + r.n OR place = r.first AND matches.id <> r.ids);
    CREATE TEMP TABLE timed AS
    SELECT id, count(CASE WHEN is_wanted THEN 1 END) AS wanted,
        bool_or(broker IN (SELECT broker FROM begins WHERE least > 0)) AS is_deleted
    FROM (SELECT unnest(string_split(ids, chr(2))) AS id, * FROM sent WHERE is_timed) i
    GROUP BY id;
    CREATE MACRO head(id) AS if(regexp_full_match(id, '[0-9A-F]{32}'), left(id, 20), id);
    CREATE TEMP TABLE heads AS
    SELECT head(id) AS head, bool_or(is_wanted) AS is_wanted FROM (
        SELECT unnest(string_split(ids, chr(2))) AS id, is_wanted FROM known
    ) i GROUP BY ALL"""
"""Stored messages with the request that covers their place; `number` is null if none does. `timed`
has the ids by which messages without a place are recognised, and whether retention has deleted
messages of the topic at their broker. `heads` has the beginnings of the ledger's ids: of a batch
the ledger has the first id only, and the ids that a task makes for a batch may share the first 20
of their 32 hex digits (`task.message_ids`). Ids of another form are whole: a user's ids may begin
alike."""
_ABSENT: Final = """CREATE TEMP TABLE absent AS
    SELECT t.id, wanted - coalesce(copies, 0) AS n, is_deleted FROM timed t LEFT JOIN (
        SELECT id, count(*) AS copies FROM matches WHERE number IS NULL GROUP BY id
    ) m ON t.id = m.id WHERE wanted > coalesce(copies, 0)"""
"""The ids of timed messages that the topic does not have."""
_LATE_KINDS: Final = """(
    SELECT a.id, n, CASE WHEN is_waiting THEN 'not_due'
        WHEN is_deleted AND h.id IS NULL THEN 'expired' ELSE 'missing' END AS what
    FROM absent a LEFT JOIN (
        SELECT id, bool_or(is_waiting) AS is_waiting FROM hidden GROUP BY id
    ) h ON a.id = h.id
) l"""
_LATE: Final = f"""SELECT (SELECT sum(wanted) FROM timed) AS acknowledged,
    sum(CASE WHEN what = 'not_due' THEN n END) AS not_due,
    sum(CASE WHEN what = 'missing' THEN n END) AS missing,
    sum(CASE WHEN what = 'expired' THEN n END) AS expired FROM {_LATE_KINDS}"""
_COUNTED: Final = """(
    SELECT r.*, coalesce(c.messages, 0) AS messages FROM requests r
    LEFT JOIN (SELECT number, count(*) AS messages FROM matches GROUP BY 1) c
        ON r.number = c.number WHERE is_wanted
) c"""
"""The requests whose messages have places, with the number of messages there."""
_SUMS: Final = f"""SELECT sum(n) AS acknowledged, sum(gone) AS expired,
    sum(n - gone - messages) AS missing FROM {_COUNTED}"""
_KINDS: Final = """(
    SELECT u.*, CASE
        WHEN p.id IS NOT NULL THEN if(p.is_wanted, 'twice', 'other query')
        WHEN t.wanted > 0 THEN if(nth > t.wanted, 'twice', 'timed')
        WHEN t.id IS NOT NULL THEN 'other query'
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
    LEFT JOIN timed t ON t.id = u.id
    LEFT JOIN heads k ON k.head = head(u.id)
) o"""
"""The messages at no request's place, by what they are: `timed` messages and those of an `other
query` are no fault."""
_OTHERS: Final = f"SELECT what, count(*) AS n FROM {_KINDS} GROUP BY what"
_OTHER_EXAMPLES: Final = f"""
    SELECT what, list(broker || ':' || queue || ' @' || place || ' ' || id) AS examples FROM (
        SELECT *, row_number() OVER (PARTITION BY what ORDER BY broker, queue, place) AS shown
        FROM {_KINDS} WHERE what NOT IN ('timed', 'other query')
    ) e WHERE shown <= {EXAMPLES} GROUP BY what"""
_MISSING_EXAMPLES: Final = f"""
    SELECT broker || ':' || queue || ' @' || place AS example FROM (
        SELECT broker, queue, unnest(range(greatest(first, least), first + n)) AS place
        FROM {_COUNTED} WHERE messages < n - gone
    ) a ANTI JOIN (SELECT * FROM matches WHERE number IS NOT NULL) m
        USING (broker, queue, place)
    UNION ALL
    SELECT id FROM {_LATE_KINDS} WHERE what = 'missing'
    ORDER BY 1 LIMIT {EXAMPLES}"""
