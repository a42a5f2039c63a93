"""The causes of failed sends, as a report's verdict says them: by error code, a sentence about the
broker, and a remedy. The broker's own remark follows the sentence."""

from __future__ import annotations

from typing import Final, NamedTuple


class Remedy(NamedTuple):
    """The meaning of a code, and what mends the fault. `{broker}` and `{topic}` are names."""

    says: str
    remedy: str


_REFUSES: Final = "{broker} refuses the messages of {topic}"
_WAY: Final = "start {broker}, or mend the way to it"
_LOG: Final = "look at the log of {broker}"
_SILENT: Final = "{broker} does not answer"

CAUSES: Final[dict[str, Remedy]] = {
    "AUTH_FAILED": Remedy(
        "{broker} does not accept the user or the signature",
        "set the options accessKey and secretKey to a user of the brokers",
    ),
    "NO_PERMISSION": Remedy(
        "{topic} is closed on {broker} to this account",
        "allow the account to write there (mqadmin updateTopicPerm, updateAcl)",
    ),
    "REQUEST_CODE_NOT_SUPPORTED": Remedy(
        "{broker} does not know the request of a send",
        "look at the address of {broker}: another program or a name server has it",
    ),
    "TLS_REFUSED": Remedy(
        "{broker} and this client do not accept each other's certificate or protocol",
        "look at the options tlsMode, tlsCa, tlsCert and tlsKey",
    ),
    "TLS": Remedy("the TLS handshake with {broker} fails", "look at the option tlsMode"),
    "NAME_SERVER_UNAVAILABLE": Remedy(
        "no name server answers", "start a name server, or mend the option nameServer"
    ),
    "NO_ROUTE": Remedy(
        "{topic} has no queue that may be written to",
        "create the topic, open it (mqadmin updateTopicPerm), or start its brokers",
    ),
    "TOPIC_NOT_FOUND": Remedy(
        "{broker} does not have {topic}", "create the topic on {broker} (mqadmin updateTopic)"
    ),
    "INVALID_QUEUE": Remedy(
        "{broker} does not have a queue of {topic} that the route or the row names",
        "give the topic its queues back, or set onRouteChange",
    ),
    "QUEUE_MOVED": Remedy(
        "a queue of {topic} is on another broker than {broker} now", "run the query again"
    ),
    "MESSAGE_ILLEGAL": Remedy(
        "{broker} refuses messages of {topic} as illegal",
        "compare maxMessageSize and the topic's type with the limits of {broker}",
    ),
    "BATCH_TOO_LARGE": Remedy(
        "{broker} refuses messages of {topic} as too large",
        "raise maxMessageSize of {broker}, or send smaller bodies",
    ),
    "SERVICE_NOT_AVAILABLE": Remedy(
        "{broker} takes no messages", "look at the disk and the role of {broker}, and at its log"
    ),
    "BROKER_BUSY": Remedy("{broker} is too busy", "look at the disk and page cache of {broker}"),
    "GO_AWAY": Remedy("{broker} shuts down", "start {broker}"),
    "NOT_STORED": Remedy("{broker} cannot store messages", _LOG + " and its disk"),
    "BROKER_ERROR": Remedy("{broker} answers with an error", _LOG),
    "BROKER_TOO_OLD": Remedy(
        "{broker} is too old for the delays of {topic}", "upgrade {broker} to 5.0 or later"
    ),
    "REJECTED": Remedy(_REFUSES, _LOG),
    "CONNECT": Remedy("{broker} cannot be reached", _WAY),
    "UNKNOWN_HOST": Remedy(
        "the host name of {broker} has no address", "mend the DNS, or brokerIP1 of {broker}"
    ),
    "LOCAL_RESOURCES": Remedy(
        "the workers have no descriptor or memory for a connection", "raise ulimit -n"
    ),
    "WINDOW_FULL": Remedy(
        "the window of requests in flight stayed full", "raise backPressureForAsyncSendSize"
    ),
    "CONNECTION_LOST": Remedy("{broker} closes connections without an answer", _WAY),
    "UNWRITTEN": Remedy("{broker} does not take bytes", _WAY),
    "REQUEST_TIMEOUT": Remedy(_SILENT, _WAY + ", or raise sendMsgTimeout"),
    "INVALID_ANSWER": Remedy(
        "{broker} answers with bytes that are no valid answer",
        "look at what stands before {broker}: a proxy, or another program",
    ),
    "NOT_SENT": Remedy("nothing was written to {broker}", _WAY),
    "UNKNOWN": Remedy(_SILENT, _WAY),
    "ACKED_DEGRADED": Remedy(
        "{broker} stores messages less durably than asked for, and onDegraded=fail refuses that",
        "look at the disk and the replicas of {broker}",
    ),
}
"""{error code: what it means and what mends it}; of a row without code, its outcome."""
