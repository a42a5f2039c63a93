"""The mark in a half message, which names the task attempt that sent the message. A broker asks any
client of the producer group whether to commit a half message, and all half messages of a ledger
have one group. So any client can read the mark, and find the decision (`spark.transactions`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.records import RunContext
from rocket_sink.message_rules import with_namespace
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import HALF_BYTES
from rocket_sink.wire.properties import PGROUP, TRAN_MSG, encode_properties

TRANSACTION_PROPERTY: Final = "ROCKET_SINK_TRANSACTION"
"""The property with the mark. Consumers see the property, too."""


@dataclass(frozen=True)
class HalfMark:
    """The mark in a half message; its text is a JSON list of the fields."""

    query_id: str
    run_id: str
    epoch: int
    partition: int | None
    task_attempt_id: int | None

    @classmethod
    def read(cls, properties: Mapping[str, str]) -> HalfMark | None:
        """Return the mark in a message's properties; None if there is no readable mark."""
        try:
            query, run, epoch, partition, attempt = json.loads(properties[TRANSACTION_PROPERTY])
            return cls(str(query), str(run), int(epoch), partition, attempt)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None  # Any producer may set the property.

    def __str__(self) -> str:
        return json.dumps(astuple(self))


def check_group(ledger_id: str, options: SinkOptions) -> str:
    """Return the producer group of a ledger's half messages, as brokers know it."""
    return with_namespace(options.namespace, f"rocket-sink-{ledger_id}")


def half_properties(ctx: RunContext, group: str) -> str:
    """Return the properties (wire text) that make a task attempt's messages half messages; raise a
    ConfigurationError if the query's name is too long for them."""
    mark = str(HalfMark(ctx.query_id, ctx.run_id, ctx.epoch, ctx.partition, ctx.task_attempt_id))
    text = encode_properties({TRAN_MSG: "true", PGROUP: group, TRANSACTION_PROPERTY: mark})
    if len(text.encode()) > HALF_BYTES:
        raise ConfigurationError(
            f"the query's name {ctx.query_id[:40]!r}... is too long for a property of each "
            "half message; give a shorter appId"
        )
    return text


def needs_append(options: SinkOptions, lane: str) -> None:
    """Raise ConfigurationError for `delivery=transactional`. Lanes call this if no single append to
    the ledger decides on an epoch's half messages."""
    if options.delivery == "transactional":
        raise ConfigurationError(
            f"delivery=transactional needs the one ledger append that decides on an epoch, and "
            f"{lane} has none: use writeStream.foreachBatch(sink.write_batch), or sink.write(df)"
        )
