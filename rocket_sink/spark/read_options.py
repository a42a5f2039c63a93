"""The options of `spark.read.format("rocketmq")` that the sink does not have; one typed table.

Connection options (name servers, credentials, TLS, time-outs) and `topic` are the sink's own.
"""

# ruff: noqa: E501 (one option per line: it is read as a table)
from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from rocket_sink.errors import OptionError
from rocket_sink.option_spec import Kind, Option, option, option_of
from rocket_sink.options import OPTIONS, SinkOptions

_R: Final = "reading"
EARLIEST: Final = -2
LATEST: Final = -1
"""Offsets that are words, as Spark's Kafka source numbers them."""
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


@dataclass(frozen=True)
class ReadOptions:
    """What is read; made by `ReadOptions.parse`."""

    # fmt: off
    starting_offsets: str = option("startingOffsets", Kind.TEXT, "earliest", _R, "earliest, latest, or an offset per queue as JSON: {\"broker-a:0\": 12, \"broker-b:3\": \"latest\"}; queues that are not named: earliest")
    ending_offsets: str = option("endingOffsets", Kind.TEXT, "latest", _R, "as startingOffsets, exclusive; queues that are not named: latest, as it is when the read is planned")
    start_timestamp: int = option("startTimestamp", Kind.INTEGER, -1, _R, "messages stored at or after this time, ms since 1970; instead of startingOffsets", low=-1)
    end_timestamp: int = option("endTimestamp", Kind.INTEGER, -1, _R, "messages stored before this time, ms since 1970; instead of endingOffsets", low=-1)
    max_messages_per_partition: int = option("maxMessagesPerPartition", Kind.INTEGER, 0, _R, "a longer queue is read by several tasks; 0: one task per queue", low=0)
    fail_on_data_loss: bool = option("failOnDataLoss", Kind.BOOLEAN, True, _R, "fail when offsets that were asked for are not there any more (retention); else read what is left")
    # fmt: on

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple[ReadOptions, SinkOptions]:
        """Split and check what a user gave; names in any spelling.

        Raises:
            OptionError: an unknown name, a bad value, options that exclude each other, no topic,
                no name server.
        """
        ours: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in given.items():
            known = _BY_NAME.get(_plain(name))
            if known is None:
                others[name] = value
            else:
                ours[known.attribute] = known.parse(value)
        read = cls(**ours)
        if not (sink := _sink_options(others)).topic:
            raise OptionError("option topic is missing: which topic is read?", option="topic")
        _ = sink.name_servers
        for time, offsets in (
            ("start_timestamp", "starting_offsets"),
            ("end_timestamp", "ending_offsets"),
        ):
            if time in ours and offsets in ours:
                raise OptionError(
                    f"give {_named(time)} or {_named(offsets)}, not both", option=_named(time)
                )
        read.starts, read.ends  # noqa: B018 (checked now, where the user sees it)
        return read, sink

    @property
    def starts(self) -> tuple[int, dict[str, int]]:
        """(offset of queues that are not named, {broker:queue: offset})."""
        return _offsets(self.starting_offsets, "startingOffsets", EARLIEST)

    @property
    def ends(self) -> tuple[int, dict[str, int]]:
        """As `starts`."""
        return _offsets(self.ending_offsets, "endingOffsets", LATEST)


READ_OPTIONS: Final[tuple[Option, ...]] = tuple(option_of(item) for item in fields(ReadOptions))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().removeprefix("rocketmq.") if c not in "_.-")


_BY_NAME: Final = {_plain(name): known for known in READ_OPTIONS for name in (known.name,)}


def _named(attribute: str) -> str:
    return next(known.name for known in READ_OPTIONS if known.attribute == attribute)


def _sink_options(given: Mapping[str, Any]) -> SinkOptions:
    try:
        return SinkOptions.parse(given)
    except OptionError as error:
        name = str(getattr(error, "option", ""))
        near = difflib.get_close_matches(_plain(name), _BY_NAME, n=1)
        if not near or any(_plain(known.name) == _plain(name) for known in OPTIONS):
            raise
        raise OptionError(
            f"unknown option {name!r}; did you mean {_BY_NAME[near[0]].name!r}?", option=name
        ) from None


def _offsets(text: str, name: str, default: int) -> tuple[int, dict[str, int]]:
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return word, {}
    try:
        given = json.loads(text)
        offsets = {str(queue): _offset(value) for queue, value in given.items()}
    except (ValueError, AttributeError, TypeError):
        raise OptionError(
            f'option {name}: {text!r} is neither earliest nor latest nor JSON as {{"broker-a:0": 12'
            "}, with offsets of 0 and more, earliest or latest",
            option=name,
        ) from None
    return default, offsets


def _offset(value: Any) -> int:
    if isinstance(value, str):
        return _WORDS[value.lower()] if value.lower() in _WORDS else _refused(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < EARLIEST:
        return _refused(value)
    return value


def _refused(value: Any) -> int:
    raise ValueError(value)
