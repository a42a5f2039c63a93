"""Filters of a query that narrow what is pulled: equal tags, and a range of store times.

Spark evaluates all filters again, because none of them is exact at the brokers. Brokers compare the
hash codes of tags (ExpressionMessageFilter). They find offsets by time in a binary search, and the
clock of a broker may have stepped back between two messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from rocket_sink.message_rules import TAG_BLANKS

_CLOCK_MS: Final = 60_000
"""The largest step back of a broker's clock for which the range of times makes room."""
ALL_TAGS: Final = "*"
_OR: Final = "||"
_MOST_CHARS: Final = 4096


@dataclass(frozen=True)
class Narrowed:
    """The messages that a query's filters leave to be pulled.

    Attributes:
        tags: the tags of the messages; empty: all messages, also those without a tag.
        start_ms, end_ms: the times (ms since 1970) between which messages are stored; `end_ms` is
            exclusive. -1: no limit.
    """

    tags: tuple[str, ...] = ()
    start_ms: int = -1
    end_ms: int = -1

    @classmethod
    def by(cls, filters: Iterable[Any]) -> Narrowed:
        """Return what is left by all filters. Filters of other kinds and columns leave all."""
        narrowed = cls()
        for each in filters:
            step = _STEPS.get((type(each).__name__, getattr(each, "attribute", ())))
            if step is not None:
                narrowed = step(narrowed, each.value)
        return narrowed

    @property
    def expression(self) -> str:
        """The brokers' filter by tags (FilterAPI)."""
        return f" {_OR} ".join(self.tags) or ALL_TAGS

    def with_tags(self, tags: Iterable[Any]) -> Narrowed:
        texts = sorted({tag for tag in tags if tag is not None})
        if self.tags or not texts or not all(map(_is_plain, texts)):
            return self
        narrowed = replace(self, tags=tuple(texts))
        return narrowed if len(narrowed.expression) <= _MOST_CHARS else self

    def from_time(self, time: datetime) -> Narrowed:
        return replace(self, start_ms=max(self.start_ms, _ms(time) - _CLOCK_MS))

    def to_time(self, time: datetime) -> Narrowed:
        end_ms = max(0, _ms(time) + 1 + _CLOCK_MS)
        return replace(self, end_ms=end_ms if self.end_ms < 0 else min(end_ms, self.end_ms))


_TAGS: Final = ("tags",)
_TIME: Final = ("store_timestamp",)
_STEPS: Final[dict[tuple[str, tuple[str, ...]], Callable[[Narrowed, Any], Narrowed]]] = {
    ("EqualTo", _TAGS): lambda narrowed, tag: narrowed.with_tags([tag]),
    ("In", _TAGS): Narrowed.with_tags,
    ("EqualTo", _TIME): lambda narrowed, time: narrowed.from_time(time).to_time(time),
    ("GreaterThan", _TIME): Narrowed.from_time,
    ("GreaterThanOrEqual", _TIME): Narrowed.from_time,
    ("LessThan", _TIME): Narrowed.to_time,
    ("LessThanOrEqual", _TIME): Narrowed.to_time,
}
"""{(class of a filter in pyspark.sql.datasource, column): how it narrows}"""


def _is_plain(tag: str) -> bool:
    """Return whether an expression can name the tag, and both sides read its bytes alike."""
    is_name = bool(tag) and tag != ALL_TAGS and tag == tag.strip(TAG_BLANKS)
    return is_name and _OR not in tag and "\ufffd" not in tag


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)
