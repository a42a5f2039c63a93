"""The queue that owns a sharding key, for one key and for a column of keys.

`java` and `java_long` are what the Java remoting clients compute when their selector is given a
String or a Long, `siphash24` what the gRPC clients do, so that producers of all kinds agree. A key
is a text here: `java_long` alone takes that of a whole number for a number. A changed number of
queues moves most keys. `rendezvous` first chooses the broker, by weight of its queues, then the
queue on it by jump hashing, and moves only the keys that it must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rocket_sink.message import MessageQueue
from rocket_sink.routing import hashing
from rocket_sink.routing.hashing import IntArray
from rocket_sink.routing.topic_publish_info import TopicPublishInfo

if TYPE_CHECKING:
    import pyarrow as pa


def owner(info: TopicPublishInfo, key: str, sharding_hash: str = "java") -> MessageQueue:
    """The queue that owns the key. Strict order never sends it anywhere else.

    Raises:
        KeyError: no such hash.
        ValueError: the route has no queues.
    """
    if not info.ok:
        raise ValueError(f"topic {info.topic!r} has no writable queue that could own a key")
    count = len(info.queues)
    if sharding_hash in _JAVA:
        return info.queues[hashing.java_index(_JAVA[sharding_hash][0](key), count)]
    value = hashing.sip_hash24(key.encode("utf-8", "surrogatepass"))
    if sharding_hash == "siphash24":
        return info.queues[hashing.sip_index(value, count)]
    return info.queues[int(_OWNERS[sharding_hash](np.array([value], np.int64), info)[0])]


def owners(info: TopicPublishInfo, keys: pa.Array, sharding_hash: str = "java") -> IntArray:
    """`owner` for a column: int64 indices into `info.queues`. A null counts as the empty key.

    Raises: as `owner`.
    """
    if not info.ok:
        raise ValueError(f"topic {info.topic!r} has no writable queue that could own a key")
    if sharding_hash in _JAVA:
        return hashing.java_index_array(_JAVA[sharding_hash][1](keys), len(info.queues))
    return _OWNERS[sharding_hash](hashing.siphash_array(keys), info)


def _by_remainder(hashes: IntArray, info: TopicPublishInfo) -> IntArray:
    return hashing.sip_index_array(hashes, len(info.queues))


def _by_rendezvous(hashes: IntArray, info: TopicPublishInfo) -> IntArray:
    weights = [len(home) for home in info.queues_by_broker.values()]
    brokers = hashing.rendezvous_of_hashes(hashes, list(info.queues_by_broker), weights)
    inside = hashing.jump_index_array(hashes, np.array(weights, np.int64)[brokers])
    indices = np.concatenate(
        [np.asarray(home, np.int64) for home in info.queues_by_broker.values()]
    )
    starts = np.concatenate(([0], np.cumsum(weights)[:-1])).astype(np.int64)
    found: IntArray = indices[starts[brokers] + inside]
    return found


_JAVA: Final[dict[str, tuple[Callable[[str], int], Callable[[Any], IntArray]]]] = {
    "java": (hashing.java_hash, hashing.java_hash_array),
    "java_long": (hashing.java_long_hash, hashing.java_long_hash_array),
}
"""Of a key and of a column of keys."""
_OWNERS: Final[dict[str, Callable[[IntArray, TopicPublishInfo], IntArray]]] = {
    "siphash24": _by_remainder,
    "rendezvous": _by_rendezvous,
}


def place(
    info: TopicPublishInfo, home: MessageQueue, available: Callable[[str], bool]
) -> MessageQueue | None:
    """Best effort: where the keys of `home` go now; None when the route has no queue.

    Home while its broker is available; else a queue of an available broker by rendezvous over the
    home queue's name, so that every worker moves its keys to the same place, and back. Home too
    when no broker is available.
    """
    known = info.index_of(home) is not None
    if known and available(info.broker_of(home)):
        return home
    usable = [name for name in info.queues_by_broker if available(name)]
    if not usable and known:
        return home
    names = usable or list(info.queues_by_broker)
    if not names:
        return None
    key = f"{home.topic}\x00{home.broker_name}\x00{home.queue_id}"
    queues = info.queues_by_broker[names[hashing.rendezvous(key, names)]]
    return info.queues[queues[hashing.jump_index(hashing.sip_hash24(key.encode()), len(queues))]]
