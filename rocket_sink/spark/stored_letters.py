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

_ADVICE: Final = (
    "Start the brokers that they may be on; if these never come back, delivery=at_least_once sends "
    "the letters without them."
)
_TIMES: Final = ("delay_level", "delay_ms", "delivery_timestamp")


class StoredLetters:
    """Asks the brokers in the routes of the topics that a backfill sends to.

    With `delivery=effectively_once` also the broker that did not answer when the letter was made
    (column `unknown_at`), which may be in no route just now. The first question to a broker waits
    until what is on its way to it has arrived.
    """

    def __init__(self, options: SinkOptions, engine: SendEngine) -> None:
        self._options = options
        # A letter does not tell when its message was sent.
        self._silent: dict[str, set[str]] = {}
        self._stored = StoredMessages(engine, since_ms=0, brokers=self._silent, advice=_ADVICE)

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
        self._note_silent(letters)
        found = (self._find(topic, some, timed=timed) for (topic, timed), some in ids.items())
        return set().union(*found)

    def _note_silent(self, letters: pa.RecordBatch) -> None:
        """Under another topic a letter's message is another message."""
        options = self._options
        if options.delivery != "effectively_once" or options.topic:
            return
        if "unknown_at" not in letters.schema.names:
            return
        pairs = zip(letters["topic"].to_pylist(), letters["unknown_at"].to_pylist(), strict=True)
        for topic, broker in set(pairs):
            if broker:
                name = with_namespace(options.namespace, topic)
                self._silent.setdefault(name, set()).add(broker)

    def _find(self, topic: str, ids: list[str], *, timed: bool) -> set[str]:
        try:
            self._stored.settle(topic)
            return self._stored.find(topic, ids, timed=timed)
        except NoRouteError:
            return set()
