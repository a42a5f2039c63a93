"""What to do about failures of a class: the next step beside each on a report's page."""

from __future__ import annotations

from typing import Final

_CHECK: Final = "`rocket-sink check -n HOST:9876 -t TOPIC` tells what is wrong on the way"

ADVICE: Final = {
    "CONNECT": f"start the broker, or open the way to it; {_CHECK}",
    "CONNECTION_LOST": "look at the broker's log: it was stopped, killed, or a proxy cut the way",
    "UNKNOWN_HOST": "mend the DNS entry, or brokerIP1 of the broker",
    "TLS": "compare the certificates of both sides (tlsCa, tlsCert)",
    "TLS_REFUSED": "the broker expects TLS, or does not: set tlsMode as the broker has it",
    "NAME_SERVER_UNAVAILABLE": f"start a name server; {_CHECK}",
    "NO_ROUTE": "create the topic, or start the broker that has it: `rocket-sink routes -t TOPIC`",
    "QUEUE_MOVED": "set sendMsgTimeout longer than a remapping of the static topic takes",
    "INVALID_QUEUE": "start the queue's broker: `rocket-sink routes -t TOPIC` shows who is there",
    "REQUEST_TIMEOUT": "look at the broker's disk and page cache; then raise sendMsgTimeout",
    "UNWRITTEN": "the broker took no bytes: look at its CPU and network",
    "BROKER_BUSY": "the broker's send queue is full: fewer rows at once (maxMessagesPerSecond)",
    "SERVICE_NOT_AVAILABLE": "the broker is starting, stopping, or its disk is full",
    "GO_AWAY": "nothing: the broker was being restarted in good order",
    "TOPIC_NOT_FOUND": "create the topic on the broker: autoCreateTopicEnable is off",
    "MESSAGE_ILLEGAL": "compare maxMessageSize here and on the broker; look at the dead letters",
    "NO_PERMISSION": "the topic is not writable there: its perm has no W",
    "AUTH_FAILED": "compare accessKey and secretKey with the broker's ACL",
    "BROKER_TOO_OLD": "timed messages need a broker from 5.0 on",
    "ACKED_DEGRADED": "look at the disk flush and the replicas of the broker",
    "": "look at the example and at the broker's log of that time",
}
"""{error code: next step}; of an unknown code the last."""
