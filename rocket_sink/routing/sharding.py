"""The queue of a sharding key, by the option `shardingHash`.

`java` and `java_long` agree with Java's SelectMessageQueueByHash for a String or a Long, and
`siphash24` with the gRPC clients. Keys are texts; `java_long` hashes the text of a whole number as
a number. If the number of queues changes, these three hashes move most keys. `rendezvous` moves as
few keys as possible: it first chooses a broker, weighted by the number of its queues, then one of
the broker's queues by jump hashing.

A lite topic's queue does not depend on the option (`LITE_TOPIC_HASH`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rocket_sink.message import MessageQueue
from rocket_sink.routing import hashing
from rocket_sink.routing.hashing import IntArray
from rocket_sink.routing.topic_publish_info import TopicPublishInfo

LITE_TOPIC_HASH: Final = "lite_topic"
"""The hash of lite topics in brokers (LiteShardingImpl) and proxies (SendMessageActivity): Guava's
consistent hash of `String.hashCode`, over the number of queues. A broker wakes waiting consumers
for a lite topic's first message only if the hash chooses one of its queues."""


def queue_for_key(info: TopicPublishInfo, key: str, sharding_hash: str = "java") -> MessageQueue:
    """Return the key's home queue; raise ValueError if the route has no queues."""
    hash_of, _ = _HASHES[sharding_hash]
    index: int = _queue_index(hash_of(key), info, sharding_hash)
    return info.queues[index]


def queues_for_keys(
    info: TopicPublishInfo, keys: pa.Array, sharding_hash: str = "java"
) -> IntArray:
    """Return the home queue of each key, as int64 indices into `info.queues`. Null counts as the
    empty key. Raise ValueError like `queue_for_key`."""
    _, hashes_of = _HASHES[sharding_hash]
    indices: IntArray = _queue_index(hashes_of(keys), info, sharding_hash)
    return indices


def _sip_hash(key: str) -> int:
    return hashing.sip_hash24(key.encode("utf-8", "surrogatepass"))


_HASHES: Final[dict[str, tuple[Callable[[str], int], Callable[[pa.Array], IntArray]]]] = {
    "java": (hashing.java_hash, hashing.java_hash_array),
    "java_long": (hashing.java_long_hash, hashing.java_long_hash_array),
    LITE_TOPIC_HASH: (hashing.java_hash, hashing.java_hash_array),
    "siphash24": (_sip_hash, hashing.siphash_array),
    "rendezvous": (_sip_hash, hashing.siphash_array),
}
"""{name of the hash: (function of a key, function of a column of keys)}"""


def _queue_index(hashes: Any, info: TopicPublishInfo, sharding_hash: str) -> Any:
    """Return the queue index of a hash, or the indices of an array of hashes."""
    if not info.ok:
        raise ValueError(f"topic {info.topic!r} has no writable queue that could own a key")
    if sharding_hash in ("java", "java_long"):
        return hashing.java_index(hashes, len(info.queues))
    if sharding_hash == "siphash24":
        return hashing.sip_index(hashes, len(info.queues))
    if sharding_hash == LITE_TOPIC_HASH:
        return hashing.jump_index(hashes, len(info.queues))
    by_broker = info.queues_by_broker
    weights = [len(queues) for queues in by_broker.values()]
    brokers = hashing.rendezvous(hashes, list(by_broker), weights)
    inside = hashing.jump_index(hashes, np.array(weights, np.int64)[brokers])
    indices = np.concatenate([np.asarray(queues, np.int64) for queues in by_broker.values()])
    starts = np.concatenate(([0], np.cumsum(weights)[:-1])).astype(np.int64)
    queue_index = indices[starts[brokers] + inside]
    return int(queue_index) if isinstance(hashes, int) else queue_index


def fallback_queue(
    info: TopicPublishInfo, home: MessageQueue, available: Callable[[str], bool]
) -> MessageQueue | None:
    """Return the queue for the keys of the queue `home` at present (ordering=best_effort). If its
    broker is available, or if no broker is, return `home`. Otherwise return a queue of an available
    broker, by rendezvous hashing of the name of `home`, so that all workers choose the same queue.
    Return None if the route has no queue."""
    has_home = info.index_of(home) is not None
    if has_home and available(info.broker_of(home)):
        return home
    usable = [name for name in info.queues_by_broker if available(name)]
    if not usable and has_home:
        return home
    names = usable or list(info.queues_by_broker)
    if not names:
        return None
    value = _sip_hash(f"{home.topic}\x00{home.broker_name}\x00{home.queue_id}")
    queues = info.queues_by_broker[names[hashing.rendezvous(value, names)]]
    return info.queues[queues[hashing.jump_index(value, len(queues))]]
