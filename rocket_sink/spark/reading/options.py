"""The options of reads. The sink has the connection options (name servers, credentials, TLS,
time-outs) and `topic`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from rocket_sink.errors import OptionError
from rocket_sink.option_spec import Kind, Option, option, option_of
from rocket_sink.options import OPTIONS, SinkOptions, constructor_options
from rocket_sink.text import nearest

# ruff: noqa: E501 (one option per line: it is read as a table)


_R: Final = "reading"
EARLIEST: Final = -2
LATEST: Final = -1
"""The numbers that mean "earliest" and "latest", as in Spark's Kafka source."""
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


_OF_BATCHES: Final = frozenset({"ending_offsets", "end_timestamp"})
_OF_STREAMS: Final = frozenset({
    "max_offsets_per_trigger", "min_offsets_per_trigger", "max_trigger_delay_ms", "consumer_group",
})  # fmt: skip


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read; made by `ReadOptions.parse`."""

    # fmt: off
    starting_offsets: str = option("startingOffsets", Kind.TEXT, "earliest", _R, "earliest, latest, or an offset per queue as JSON: {\"broker-a:0\": 12, \"broker-b:3\": \"latest\"}; queues that are not named: earliest; a stream begins with latest by default")
    ending_offsets: str = option("endingOffsets", Kind.TEXT, "latest", _R, "as startingOffsets, exclusive; queues that are not named: latest, as it is when the read is planned")
    start_timestamp: int = option("startTimestamp", Kind.INTEGER, -1, _R, "messages stored at or after this time, ms since 1970; instead of startingOffsets", low=-1)
    end_timestamp: int = option("endTimestamp", Kind.INTEGER, -1, _R, "messages stored before this time, ms since 1970; instead of endingOffsets", low=-1)
    max_messages_per_partition: int = option("maxMessagesPerPartition", Kind.INTEGER, 0, _R, "a longer queue is read by several tasks; 0: one task per queue", low=0)
    fail_on_data_loss: bool = option("failOnDataLoss", Kind.BOOLEAN, True, _R, "fail when offsets that were asked for are not there any more (retention); else read what is left")
    max_offsets_per_trigger: int = option("maxOffsetsPerTrigger", Kind.INTEGER, 0, _R, "readStream, from Spark 4.2 on: most messages of an epoch, shared out by the messages that wait in each queue; 0: all that wait", low=0)
    min_offsets_per_trigger: int = option("minOffsetsPerTrigger", Kind.INTEGER, 0, _R, "readStream, from Spark 4.2 on: an epoch begins when so many messages wait, or after maxTriggerDelay", low=0)
    max_trigger_delay_ms: int = option("maxTriggerDelay", Kind.MILLISECONDS, 900_000, _R, "readStream: longest time from one epoch to the next for minOffsetsPerTrigger", low=0)
    consumer_group: str = option("consumerGroup", Kind.TEXT, "", _R, "readStream: a group whose offsets at the brokers follow the epochs, so that consoles show the lag; the query itself never reads them")
    # fmt: on

    @classmethod
    def parse(
        cls, given: Mapping[str, Any], *, is_stream: bool = False
    ) -> tuple[ReadOptions, SinkOptions]:
        """Split options in any spelling into the reader's and the sink's. Raise an OptionError for
        an unknown name, a bad value, a contradiction, an option of the other kind of read, or a
        missing topic or name server. A stream begins with the latest messages by default, as a
        stream of Spark's Kafka source does."""
        read_options: dict[str, Any] = {}
        sink_options: dict[str, Any] = {}
        for name, value in given.items():
            option = _BY_NAME.get(_plain(name))
            if option is None:
                sink_options[name] = value
            else:
                read_options[option.attribute] = option.parse(value)
        for name in (_OF_BATCHES if is_stream else _OF_STREAMS) & read_options.keys():
            kind = "read, not readStream" if is_stream else "readStream, not read"
            spelled = next(item.name for item in READ_OPTIONS if item.attribute == name)
            raise OptionError(f"the option {spelled} is for {kind}", option=spelled)
        if is_stream and not {"starting_offsets", "start_timestamp"} & read_options.keys():
            read_options["starting_offsets"] = "latest"
        read = cls(**read_options)
        if not (sink := _sink_options(sink_options)).topic:
            raise OptionError("option topic is missing: which topic is read?", option="topic")
        _ = sink.name_servers
        for side in ("start", "end"):
            if {f"{side}_timestamp", f"{side}ing_offsets"} <= read_options.keys():
                name = f"{side}Timestamp"
                raise OptionError(f"give {name} or {side}ingOffsets, not both", option=name)
        read.starts, read.ends  # noqa: B018 (checked now, where the user sees it)
        return read, sink

    @property
    def starts(self) -> tuple[int, dict[str, int]]:
        """The first offsets: (default, {"broker:queue": offset of this queue})."""
        return _offsets(self.starting_offsets, "startingOffsets", EARLIEST)

    @property
    def ends(self) -> tuple[int, dict[str, int]]:
        """The end offsets, in the form of `starts`."""
        return _offsets(self.ending_offsets, "endingOffsets", LATEST)


READ_OPTIONS: Final[tuple[Option, ...]] = tuple(option_of(item) for item in fields(ReadOptions))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().removeprefix("rocketmq.") if c not in "_.-")


_BY_NAME: Final = {_plain(option.name): option for option in READ_OPTIONS}


def _sink_options(given: Mapping[str, Any]) -> SinkOptions:
    try:
        return constructor_options(None, given)
    except OptionError as error:
        name = str(getattr(error, "option", ""))
        near = nearest(_plain(name), _BY_NAME)
        if not near or any(_plain(option.name) == _plain(name) for option in OPTIONS):
            raise
        raise OptionError(
            f"unknown option {name!r}; did you mean {_BY_NAME[near].name!r}?", option=name
        ) from None


def _offsets(text: str, name: str, default: int) -> tuple[int, dict[str, int]]:
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return word, {}
    try:
        values = json.loads(text)
        offsets = {str(queue): _offset(value) for queue, value in values.items()}
    except (ValueError, AttributeError, TypeError):
        raise OptionError(
            f'option {name}: {text!r} is neither earliest nor latest nor JSON as {{"broker-a:0": 12'
            "}, with offsets of 0 and more, earliest or latest",
            option=name,
        ) from None
    return default, offsets


def _offset(value: Any) -> int:
    offset = _WORDS.get(value.lower()) if isinstance(value, str) else value
    if type(offset) is not int or offset < EARLIEST:
        raise ValueError(value)
    return offset
