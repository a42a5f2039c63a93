"""Which letters of a backfill are stored already: look-ups by their message ids, pipelined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.errors import NoRouteError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.stored import StoredMessages
from rocket_sink.wire.namespace import with_namespace

if TYPE_CHECKING:
    from rocket_sink.producer.engine import SendEngine

_TIMES: Final = ("delay_level", "delay_ms", "delivery_timestamp")


class StoredLetters:
    """Asks the brokers in the routes of the topics that a backfill sends to.

    The first question to a broker waits until what is on its way to it has arrived.
    """

    def __init__(self, options: SinkOptions, engine: SendEngine) -> None:
        self._options = options
        # A letter does not tell when its message was sent.
        self._stored = StoredMessages(engine, since_ms=0)

    def of(self, letters: pa.RecordBatch) -> set[str]:
        """The message ids of those that a broker has; a topic without a route has none.

        Raises:
            DeliveryError: a broker gave no answer within `storedCheckTimeout`.
            SendError: a fatal one, or no name server answers.
        """
        ids: dict[tuple[str, bool], list[str]] = {}
        names = ["topic", "message_id", *(n for n in _TIMES if n in letters.schema.names)]
        columns = (letters[name].to_pylist() for name in names)
        for topic, number, *times in zip(*columns, strict=True):
            name = with_namespace(self._options.namespace, self._options.topic or topic)
            timed = any(time is not None for time in times)
            ids.setdefault((name, timed), []).append(number)
        found = (self._find(topic, some, timed=timed) for (topic, timed), some in ids.items())
        return set().union(*found)

    def _find(self, topic: str, ids: list[str], *, timed: bool) -> set[str]:
        try:
            self._stored.settle(topic)
            return self._stored.find(topic, ids, timed=timed)
        except NoRouteError:
            return set()
