"""Cases of our producer and of the Java client, with the same modes in one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.figures import Case
from benchmarks.lanes.cases import DELAY_LEVEL

GROUP: Final = "Producers"
ENGINE_GROUP: Final = "Without Spark"
OURS: Final = "ours"
JAVA: Final = "Java"
GRPC: Final = "Python gRPC"


@dataclass(frozen=True)
class PeerCase:
    """A sender's arguments; a slow mode gets a `share` of the messages."""

    who: str
    case: Case
    arguments: Mapping[str, Any]
    share: float = 1.0

    @property
    def stores(self) -> bool:
        """Brokers get its messages."""
        return bool(self.arguments["mode"] != "nothing")

    @property
    def delayed(self) -> bool:
        """Whether the messages have a delay level."""
        return "delay" in self.arguments


@dataclass(frozen=True)
class _Mode:
    title: str
    arguments: Mapping[str, Any]
    share: float
    grpc: bool = False


_ASYNC: Final = (
    _Mode("async", {"mode": "async", "inflight": 400}, 0.3, grpc=True),
    _Mode("async auto-batch", {"mode": "autobatch", "inflight": 400}, 0.3),
)
_NOTHING: Final = _Mode("async nothing", {"mode": "nothing", "inflight": 400}, 0.3)
"""The cost of asynchronous sends in a program before anything is sent; only ours."""
_ONE_BY_ONE: Final = (
    _Mode("sync", {"mode": "sync"}, 0.05, grpc=True),
    _Mode("sync 2 threads", {"mode": "sync", "threads": 2}, 0.05),
    _Mode("sync by hash", {"mode": "hash"}, 0.05),
    *_ASYNC,
)
_DELAYED: Final = _Mode(
    "async delayed", {"mode": "async", "inflight": 400, "delay": DELAY_LEVEL}, 0.3
)
_BATCHES: Final = (1000, 4000)
_BATCH_BYTES: Final = 4 << 20
"""The default maxMessageSize of brokers. The Java client does not split batches."""
_BESIDE_BODY_BYTES: Final = 160
"""Bytes of a message in a batch beside its body: lengths, properties, id (about 110), and what
brokers add."""
_TABLES: Final = (
    _Mode("tables of 4,000", {"mode": "table", "batch": 4000}, 2.0),
    _Mode("tables of 100,000", {"mode": "table", "batch": 100_000}, 2.0),
)
"""Modes that send columns instead of message objects; only ours."""


def peer_cases(body_bytes: int, others: frozenset[str]) -> Iterator[PeerCase]:
    """Our modes, each with those of available `others`."""
    for mode in (*_ONE_BY_ONE, *_batches(body_bytes)):
        java = title(JAVA, mode.title, body_bytes)
        async_java = title(JAVA, "async", body_bytes)
        grpc = title(GRPC, mode.title, body_bytes)
        against = [java, grpc]
        if mode.title == "async auto-batch":
            against.append(async_java)  # the gain of automatic batching
        if mode in _ASYNC:
            against.append(title(OURS, _NOTHING.title, body_bytes))
        yield _case(OURS, mode, body_bytes, tuple(against))
        if JAVA in others:
            yield _case(JAVA, mode, body_bytes, ())
        if GRPC in others and mode.grpc:
            # two orders of magnitude slower
            yield _case(GRPC, mode, body_bytes, (), slow=0.1)
    yield _case(OURS, _NOTHING, body_bytes, ())
    for mode in _TABLES:
        yield _case(OURS, mode, body_bytes, (java_batches_title(body_bytes),))


def single_cases(
    body_bytes: int, others: frozenset[str], *, peers: bool = False
) -> Iterator[PeerCase]:
    """Yield the cases that share no batch, ours beside Java's: delayed rows, asynchronous sends,
    automatic batching.

    Args:
        peers: `peer_cases` has what they have in common.
    """
    nothing = title(OURS, _NOTHING.title, body_bytes)
    if not peers:
        yield _case(OURS, _NOTHING, body_bytes, ())
    for mode in (_DELAYED,) if peers else (*_ASYNC, _DELAYED):
        against = (title(JAVA, mode.title, body_bytes), nothing)
        yield _case(OURS, mode, body_bytes, against)
        if JAVA in others:
            yield _case(JAVA, mode, body_bytes, ())
    yield _engine_delayed(body_bytes)


def java_delayed_title(body_bytes: int) -> str:
    """The name of the Java client's case with a delay."""
    return title(JAVA, _DELAYED.title, body_bytes)


def java_delayed(body_bytes: int) -> PeerCase:
    """The Java client's asynchronous sends with a delay."""
    return _case(JAVA, _DELAYED, body_bytes, ())


def _engine_delayed(body_bytes: int) -> PeerCase:
    against = (java_delayed_title(body_bytes),)
    case = Case(f"engine delayed {body_bytes} B", ENGINE_GROUP, against, body_bytes=body_bytes)
    return PeerCase(OURS, case, {"mode": "arrow", "delay": DELAY_LEVEL}, 0.3)


def java_batches(body_bytes: int) -> PeerCase:
    """The Java client's fastest mode, for a run of the lanes."""
    return _case(JAVA, _batches(body_bytes)[-1], body_bytes, ())


def java_batches_title(body_bytes: int) -> str:
    """The name of that case."""
    return title(JAVA, _batches(body_bytes)[-1].title, body_bytes)


def _batches(body_bytes: int) -> list[_Mode]:
    """Messages per request: as planned, or as many as fit."""
    fit = max(1, _BATCH_BYTES // (body_bytes + _BESIDE_BODY_BYTES))
    counts = dict.fromkeys(min(count, fit) for count in _BATCHES)
    return [
        _Mode(f"batches of {count:,}", {"mode": "batch", "batch": count}, 1.0) for count in counts
    ]


def ceiling(body_bytes: int) -> PeerCase:
    """Frames encoded beforehand, replayed."""
    case = Case(f"ceiling {body_bytes} B", ENGINE_GROUP, body_bytes=body_bytes)
    return PeerCase(OURS, case, {"mode": "replay"}, 4.0)


def engine(body_bytes: int, ordering: str, keys: int, *, ledger: bool = False) -> PeerCase:
    """Arrow encode and send without Spark; with a ledger it is compared with itself without."""
    words = ["engine", *([ordering] if ordering != "none" else [])]
    if keys:
        words.append("all keys" if keys < 0 else f"{keys} keys")
    name = " ".join([*words, f"{body_bytes} B"])
    against: tuple[str, ...] = (f"ceiling {body_bytes} B", java_batches_title(body_bytes))
    arguments = {"mode": "arrow", "keys": keys, "ordering": ordering}
    if ledger:
        name, against = f"{name} ledger", (name,)
        arguments["ledger"] = "yes"
    case = Case(name, ENGINE_GROUP, against, ordering, body_bytes, keys)
    return PeerCase(OURS, case, arguments, 2.0)


def title(who: str, mode: str, body_bytes: int) -> str:
    """A case's name."""
    return f"{who} {mode} {body_bytes} B"


def _case(
    who: str, mode: _Mode, body_bytes: int, against: tuple[str, ...], slow: float = 1.0
) -> PeerCase:
    case = Case(title(who, mode.title, body_bytes), GROUP, against, body_bytes=body_bytes)
    return PeerCase(who, case, mode.arguments, mode.share * slow)
