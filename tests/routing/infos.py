"""Routes of topics as the routing sees them."""

from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.route import BrokerData, QueueData, QueueMapping, TopicRoute


def info_of(queues, topic="orders"):
    """Return the info of a topic with so many queues at each broker."""
    return TopicPublishInfo.of(
        topic,
        TopicRoute(
            tuple(QueueData(name, count, count) for name, count in queues.items()),
            tuple(BrokerData("c", name, {0: f"{name}:1"}) for name in queues),
        ),
    )


def static_info(**queue_ids):
    """Return the info of a static topic of four queues, from {broker: {queue: number there}}."""
    mappings = {name: QueueMapping(name, 4, 1, queue_ids=ids) for name, ids in queue_ids.items()}
    hosts = tuple(BrokerData("c", name, {0: name}) for name in queue_ids)
    return TopicPublishInfo.of("t", TopicRoute((), hosts, mappings=mappings))
