"""The look-up of rows by id in an epoch that was begun before, so that no row is stored twice.

An epoch was begun before if it is the first after a restart, or if this is a later attempt of the
task (`ledger.epoch_starts`). Then each row is looked up at every broker of its topic. It would not
be enough to look up the first and the last message of each request:

- A broker that is killed while it writes a batch keeps the first messages of the batch (observed),
  and perhaps the next one without some of its properties (observed; `StoredMessage.torn`). Such a
  torn message is sent again.
- Nobody knows which rows an earlier request had. The replay may cut other batches, and a request
  may have been split, or sent to another broker. The ledger gets a request's row after the send.

To look up requests, the sink would have to make all ids durable before each send, in every epoch,
although few epochs run again. A look-up of a million rows takes about 60 CPU seconds of the client
if two brokers lack the rows, and twice as much if they have the rows (measured with
`rocket_sink.testing`, 2,500 to 10,000 rows)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import CheckpointError, ConfigurationError
from rocket_sink.ledger.epoch_starts import FRAME_FACT, EpochStarts, IdFacts, PriorAttempts
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.net import log
from rocket_sink.net.resolve import resolved
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.task.message_ids import ContentIds
from rocket_sink.task.pending import PendingRequest
from rocket_sink.task.totals import RowTotals
from rocket_sink.wire.columns.properties import property_pieces
from rocket_sink.wire.properties import UNIQ_KEY, decode_properties
from rocket_sink.wire.stored import StoredMessage

_ADVICE: Final = (
    "An epoch runs again: start the brokers that it was sent to; or, when one is gone for good, "
    "set replayCheck=never for one run, which may double messages"
)
_TORN: Final = (
    "%s was killed while it wrote: it kept %d of %d messages of the topic %s. The others are sent "
    "again. It may also have kept the body of the next message, without its id and other "
    "properties; docs/guarantees/effectively-once.md says how to prevent this"
)
_OTHER_PLAN: Final = (
    "an epoch runs again under settings by which Spark may cut it into other partitions: %s. Rows "
    "in another partition have other ids, so the rows of the epoch count as possible duplicates. "
    "To prevent this, start the query with the old values until the epoch is done"
)
_OTHER_CLUSTER: Final = (
    "an epoch runs again, and neither a broker of the topic %s nor a name server has an address of "
    "the earlier attempt: that was in another cluster, or all addresses have changed since. In "
    "another cluster the earlier attempt's messages are not found, so all rows are sent to this "
    "one. The rows of the epoch count as possible duplicates"
)
_WRITING: Final = ("body_format", "columns", "namespace", "namespace_v2")
"""Options by which a row becomes a message of a topic."""
_FIRST_IDS: Final = 8
_ANY_TIME: PriorAttempts = PriorAttempts(0, {})
_LOG: Final = log.logger(__name__)


class ReplayCheck:
    """Gives the rows of one task the ids of an earlier attempt, and removes rows that are stored
    already. Raises a ConfigurationError if `replayCheck=auto` has no ledger to learn from.

    Raises from all methods:
        DeliveryError: a broker does not answer the look-ups.
        LedgerError: the ledger's folder cannot be read or written.
    """

    def __init__(
        self, options: SinkOptions, ctx: RunContext, engine: SendEngine, settings: IdFacts
    ) -> None:
        if options.replay_check == "auto" and not options.ledger:
            raise ConfigurationError(
                "delivery=effectively_once learns from the ledger which epochs run again; give "
                "the option ledger=PATH, or replayCheck=always to look up all rows"
            )
        self._engine = engine
        self._ids = ContentIds(ctx)
        self._mode = options.replay_check
        self._starts = EpochStarts(resolve_path(options.ledger), ctx) if options.ledger else None
        self._noted: dict[str, frozenset[str]] = {}
        """{topic: brokers that a later attempt will look at}, as noted in the ledger."""
        self._stored: StoredMessages | None = None
        own = {name: str(getattr(options, name)) for name in _WRITING}
        self._facts = replace(settings, written_by={**settings.written_by, **own})
        self._is_unseen = settings.unrecorded_epoch == str(ctx.epoch)
        """Whether an earlier attempt may have stored rows that this attempt cannot look up."""
        self._absent: set[str] = set()
        """First ids of the partition's earlier attempts that no row had so far."""
        self._later: IdFacts | None = None
        """The facts while all rows have brought their ids, which depend on no fact."""
        self._earlier: Sequence[IdFacts] = ()

    @property
    def may_double(self) -> bool:
        """Whether, after all rows, some of them may be stored under ids that this attempt cannot
        know: an earlier attempt had another plan, ledger or cluster, or rows that this one
        lacks, or made ids of rows that bring their own now."""
        made_ids = any(attempt.first_ids and attempt.written_by for attempt in self._earlier)
        return self._is_unseen or bool(self._absent) or (made_ids and self._later is not None)

    def with_ids(self, rows: RowBatch) -> RowBatch:
        """Return the rows with ids, which an earlier attempt gave them, too."""
        own = rows.message_id
        if own is not None and not own.null_count:
            return rows
        ids = self._ids.ids(rows)
        return rows.with_(message_id=ids if own is None else pc.coalesce(own, ids.cast(own.type)))

    def unsent(self, rows: RowBatch, info: TopicPublishInfo, totals: RowTotals) -> RowBatch:
        """Return the rows that no broker has stored, with their ids; count the stored rows."""
        own, topic = rows.message_id, rows.topic
        assert isinstance(topic, str)
        makes_ids = own is None or bool(own.null_count)
        rows = self.with_ids(rows)
        ids = rows.message_id
        assert ids is not None
        if not self._noted:
            if not makes_ids:
                self._later, self._facts = self._facts, IdFacts()
            self._begin(topic, info, ids[:_FIRST_IDS].to_pylist())
        elif makes_ids and self._later is not None:
            self._note_facts(self._later)
        if self._absent:
            self._absent -= set(ids.filter(_is_in(ids, self._absent)).to_pylist())
        self._noted.setdefault(topic, frozenset())
        if self._stored is None or not len(rows):
            return rows
        self._stored.settle(topic)
        timed = bool(rows.kinds()[0])
        stored_ids = self._stored.find(topic, ids.to_pylist(), timed=timed)
        if torn := self._stored.torn:
            texts = property_pieces(len(rows), **rows.property_columns(ids)).strings()
            stored_ids |= _whole(
                torn, ids.to_pylist(), [text.decode() for text in texts.to_pylist()]
            )
            totals.add_torn(len(torn.keys() - stored_ids))
        if not stored_ids:
            return rows
        kept = pc.invert(_is_in(ids, stored_ids))
        unsent_rows = rows.take(np.flatnonzero(kept.to_numpy(zero_copy_only=False)))
        totals.add_found_stored(len(rows) - len(unsent_rows))
        return unsent_rows

    def check(self) -> None:
        """Check before each request that the run may still send, and note new brokers. Raise a
        CheckpointError if a later run of the query has begun: this run must send nothing more."""
        if self._starts is None:
            return
        self._starts.check()
        # A new broker may have left the route when the epoch is replayed, so note it now.
        routes, now_s, is_new = self._engine.routes, self._engine.clock(), False
        for topic, noted in self._noted.items():
            info = routes.get(topic, now_s)
            if info is not None and not noted.issuperset(info.masters):
                self._noted[topic] = noted.union(info.masters)
                is_new = True
        if is_new:
            self._starts.note_brokers(self._noted)
            # `always` has no note of an earlier attempt, so nothing names the brokers that it used.
            # Rows that were looked up before the new broker came may be stored there.
            self._is_unseen |= self._stored is not None and not self._stored.brokers

    def rest_of(
        self, request: PendingRequest, broker: str, totals: RowTotals
    ) -> list[PendingRequest]:
        """Return a batch's messages that the killed `broker` did not store; count stored messages.

        The broker may have stored the first missing message without some of its properties, so this
        message is counted as a possible duplicate. The route may lack the broker (observed): a name
        server forgets a broker when the connection closes, and learns late of its return."""
        texts = [message.properties for message in request.messages()]
        ids = [decode_properties(text)[UNIQ_KEY] for text in texts]
        now_ms = time.time_ns() // 1_000_000
        stored = StoredMessages(
            self._engine, since_ms=now_ms, brokers={request.topic: [broker]}, advice=_ADVICE,
            by_route=False,
        )  # fmt: skip
        stored_ids = stored.find(request.topic, ids, timed=request.timed)
        last = _whole(stored.torn, ids, texts)
        stored_ids |= last
        missing = request.select([message_id not in stored_ids for message_id in ids])
        kept = request.message_count - (missing.message_count if missing else 0)
        totals.add_found_stored(kept)
        if missing is None:
            return []
        totals.add_torn(0 if last else 1)
        _LOG.warning(_TORN, broker, kept, request.message_count, request.topic)
        missing.maybe_duplicate = False
        return [missing]

    def _begin(self, topic: str, info: TopicPublishInfo, first_ids: list[str]) -> None:
        """Note the attempt's start in the ledger; prepare look-ups after an earlier attempt. Raise
        a CheckpointError if an earlier attempt wrote its messages under other settings."""
        self._noted[topic] = frozenset(info.masters)
        cluster = [*info.masters.values(), *resolved(self._engine.options.name_servers)]
        self._facts, earlier = replace(self._facts, first_ids=first_ids, cluster=cluster), None
        if self._starts is not None:
            earlier = self._starts.begin(self._noted, self._facts)
        if self._mode == "always":
            earlier = earlier or _ANY_TIME
        if earlier is None:
            return
        if self._mode == "never":
            self._is_unseen = True
            return
        self._stored = StoredMessages(
            self._engine, since_ms=earlier.since_ms, brokers=earlier.brokers, advice=_ADVICE
        )
        self._absent.update(*(attempt.first_ids for attempt in earlier.facts))
        self._earlier = earlier.facts
        if self._later is None:
            try:
                self._compare()
            except CheckpointError:
                assert self._starts is not None
                self._starts.withdraw()
                raise
        if any(set(cluster).isdisjoint(each) for each in earlier.clusters):
            _LOG.warning(_OTHER_CLUSTER, topic)
            self._is_unseen = True

    def _note_facts(self, facts: IdFacts) -> None:
        """Compare and note the facts before this attempt makes its first ids."""
        own = self._facts
        self._facts = replace(facts, first_ids=own.first_ids, cluster=own.cluster)
        self._compare()
        self._later = None
        if self._starts is not None:
            self._starts.note_brokers(self._noted, self._facts)

    def _compare(self) -> None:
        """Compare the facts of earlier attempts with those of this one."""
        own = self._facts.planned_by.get(FRAME_FACT)
        for attempt in self._earlier:
            if not attempt.written_by:
                continue  # The attempt has made no ids.
            if attempt.planned_by.get(FRAME_FACT, own) != own:
                # The failed write of the `appId` had another frame, whose equal rows are not these.
                self._stored = None
            if changes := _changes(attempt.written_by, self._facts.written_by):
                raise CheckpointError(
                    f"an epoch runs again, and would write its messages otherwise: {changes}. So "
                    "the rows that are stored already would be sent again. Start the query with "
                    "the old values until the epoch is done, or set replayCheck=never for one "
                    "run, which counts all rows of the epoch as possible duplicates"
                )
            if changes := _changes(attempt.planned_by, self._facts.planned_by):
                if not self._is_unseen:
                    _LOG.warning(_OTHER_PLAN, changes)
                self._is_unseen = True


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a text that names the settings that differ, with both values; empty if none does."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    pairs = ((name, before.get(name) or "not set", now.get(name) or "not set") for name in names)
    return ", ".join(f"{name} was {old}, is {new}" for name, old, new in pairs)


def _is_in(ids: pa.Array, wanted: set[str]) -> pa.Array:
    return pc.is_in(ids, value_set=pa.array(sorted(wanted), ids.type))


def _whole(torn: Mapping[str, StoredMessage], ids: Sequence[str], texts: Sequence[str]) -> set[str]:
    """Return the ids of torn messages that have all properties that were sent. They lack only
    properties that the broker adds at the end. `texts` are the wire properties that were sent."""
    return {
        message_id
        for message_id, text in zip(ids, texts, strict=True)
        if message_id in torn
        and decode_properties(text).items() <= torn[message_id].properties.items()
    }
