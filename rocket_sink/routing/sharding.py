"""The queue of a sharding key, by the option `shardingHash`.

`java` and `java_long` agree with Java's SelectMessageQueueByHash for a String or a Long, and
`siphash24` with the gRPC clients. Keys are texts; `java_long` hashes the text of a whole number as
a number. If the number of queues changes, these three hashes move most keys. `rendezvous` moves as
few keys as possible: it first chooses a broker, weighted by the number of its queues, then one of
the broker's queues by jump hashing.

A lite topic's queue does not depend on the option (`LITE_TOPIC_HASH`).
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


LITE_TOPIC_HASH: Final = "lite_topic"
"""The hash of lite topics: Guava's consistent hash of `String.hashCode`, over the number of queues.

Brokers (LiteShardingImpl) and proxies (SendMessageActivity) use this hash. A broker wakes waiting
consumers for a lite topic's first message only if the hash chooses one of its queues."""


def queue_for_key(info: TopicPublishInfo, key: str, sharding_hash: str = "java") -> MessageQueue:
    """Return the key's home queue.

    Raises:
        ValueError: the route has no queues.
    """
    if not info.ok:
        raise ValueError(f"topic {info.topic!r} has no writable queue that could own a key")
    count = len(info.queues)
    if sharding_hash in _JAVA:
        hash_of, index_of = _JAVA[sharding_hash]
        return info.queues[index_of(hash_of(key), count)]
    value = hashing.sip_hash24(key.encode("utf-8", "surrogatepass"))
    if sharding_hash == "siphash24":
        return info.queues[hashing.sip_index(value, count)]
    return info.queues[int(_BY_HASH[sharding_hash](np.array([value], np.int64), info)[0])]


def queues_for_keys(
    info: TopicPublishInfo, keys: pa.Array, sharding_hash: str = "java"
) -> IntArray:
    """Return the home queue of each key, as int64 indices into `info.queues`. Null counts as the
    empty key."""
    if not info.ok:
        raise ValueError(f"topic {info.topic!r} has no writable queue that could own a key")
    if sharding_hash in _JAVA:
        hashes_of, indices_of = _JAVA_ARRAYS[sharding_hash]
        return indices_of(hashes_of(keys), len(info.queues))
    return _BY_HASH[sharding_hash](hashing.siphash_array(keys), info)


def _by_rendezvous(hashes: IntArray, info: TopicPublishInfo) -> IntArray:
    weights = [len(queues) for queues in info.queues_by_broker.values()]
    brokers = hashing.rendezvous_of_hashes(hashes, list(info.queues_by_broker), weights)
    inside = hashing.jump_index_array(hashes, np.array(weights, np.int64)[brokers])
    indices = np.concatenate(
        [np.asarray(queues, np.int64) for queues in info.queues_by_broker.values()]
    )
    starts = np.concatenate(([0], np.cumsum(weights)[:-1])).astype(np.int64)
    queue_indices: IntArray = indices[starts[brokers] + inside]
    return queue_indices


_JAVA: Final[dict[str, tuple[Callable[[str], int], Callable[[int, int], int]]]] = {
    "java": (hashing.java_hash, hashing.java_index),
    "java_long": (hashing.java_long_hash, hashing.java_index),
    LITE_TOPIC_HASH: (hashing.java_hash, hashing.jump_index),
}
"""{name of the hash: (function of a key, function of hash and number of queues)}"""
_JAVA_ARRAYS: Final[dict[str, tuple[Callable[[Any], IntArray], Callable[..., IntArray]]]] = {
    "java": (hashing.java_hash_array, hashing.java_index_array),
    "java_long": (hashing.java_long_hash_array, hashing.java_index_array),
    LITE_TOPIC_HASH: (hashing.java_hash_array, hashing.jump_index_array),
}
"""`_JAVA` for columns of keys."""
_BY_HASH: Final[dict[str, Callable[[IntArray, TopicPublishInfo], IntArray]]] = {
    "siphash24": lambda hashes, info: hashing.sip_index(hashes, len(info.queues)),
    "rendezvous": _by_rendezvous,
}


def fallback_queue(
    info: TopicPublishInfo, home: MessageQueue, available: Callable[[str], bool]
) -> MessageQueue | None:
    """Return the queue for the keys of the queue `home` at present (ordering=best_effort).

    If its broker is available, or if no broker is, return `home`. Otherwise return a queue of an
    available broker, by rendezvous hashing of the name of `home`, so that all workers choose the
    same queue. Return None if the route has no queue.
    """
    has_home = info.index_of(home) is not None
    if has_home and available(info.broker_of(home)):
        return home
    usable = [name for name in info.queues_by_broker if available(name)]
    if not usable and has_home:
        return home
    names = usable or list(info.queues_by_broker)
    if not names:
        return None
    key = f"{home.topic}\x00{home.broker_name}\x00{home.queue_id}"
    queues = info.queues_by_broker[names[hashing.rendezvous(key, names)]]
    return info.queues[queues[hashing.jump_index(hashing.sip_hash24(key.encode()), len(queues))]]
