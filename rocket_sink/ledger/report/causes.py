"""The causes of failed sends, as a report's verdict and its page say them: by error code, a
sentence about the broker, and a remedy. The broker's own remark follows the sentence."""

from __future__ import annotations

import shlex
from typing import Final, NamedTuple

from rocket_sink.options import environ_name_servers
from rocket_sink.text import clean


class Remedy(NamedTuple):
    """The meaning of a code, and what mends the fault.

    `{broker}` and, in `says`, `{topic}` are names. In `remedy`, `{create}` is the command that puts
    the topic on all brokers, and `{open}` the command that also lets clients write to it there."""

    says: str
    remedy: str


_WAY: Final = "start {broker} if it is not back, or mend the way to it"
_LOG: Final = "look at the log of {broker}"

CAUSES: Final[dict[str, Remedy]] = {
    "AUTH_FAILED": Remedy(
        "{broker} does not accept the user or the signature",
        "set the options accessKey and secretKey to a user of the brokers",
    ),
    "NO_PERMISSION": Remedy(
        "{topic} is closed on {broker} to this account",
        "open the topic: {open}, or give the account its rights (docs/deploy/acl.md)",
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
        "start the topic's brokers, or create or open it: {open}",
    ),
    "TOPIC_NOT_FOUND": Remedy(
        "{broker} does not have {topic}", "put the topic on all brokers: {create}"
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
        "set requestMaxBytes to the maxMessageSize of {broker}, raise that, or send smaller bodies",
    ),
    "SERVICE_NOT_AVAILABLE": Remedy(
        "{broker} takes no messages", "look at the disk and the role of {broker}, and at its log"
    ),
    "BROKER_BUSY": Remedy(
        "{broker} is too busy",
        "look at the disk and page cache of {broker}, or send fewer rows at once "
        "(maxMessagesPerSecond)",
    ),
    "GO_AWAY": Remedy("{broker} shuts down", "start {broker}"),
    "NOT_STORED": Remedy("{broker} cannot store messages", _LOG + " and its disk"),
    "BROKER_ERROR": Remedy("{broker} answers with an error", _LOG),
    "BROKER_TOO_OLD": Remedy(
        "{broker} is too old for the delays of {topic}", "upgrade {broker} to 5.0 or later"
    ),
    "CONNECT": Remedy("{broker} cannot be reached", _WAY),
    "UNKNOWN_HOST": Remedy(
        "the host name of {broker} has no address", "mend the DNS, or brokerIP1 of {broker}"
    ),
    "LOCAL_RESOURCES": Remedy(
        "the workers have no descriptor or memory for a connection", "raise ulimit -n"
    ),
    "CONNECTION_LOST": Remedy("{broker} closes connections without an answer", _WAY),
    "UNWRITTEN": Remedy("{broker} does not take bytes", _WAY),
    "REQUEST_TIMEOUT": Remedy("{broker} does not answer", _WAY + ", or raise sendMsgTimeout"),
    "INVALID_ANSWER": Remedy(
        "{broker} answers with bytes that are no valid answer",
        "look at what stands before {broker}: a proxy, or another program",
    ),
    "UNKNOWN": Remedy(
        "tasks ended before {broker} answered", "look in the tasks' logs why they ended"
    ),
    "ACKED_DEGRADED": Remedy(
        "{broker} stores messages less durably than asked for, and onDegraded=fail refuses that",
        "look at the disk and the replicas of {broker}",
    ),
}
"""{error code: what it means and what mends it}; of a row without code, its outcome."""


def name_servers() -> str:
    """Return the name servers for commands: NAMESRV_ADDR, or a placeholder if that is not set. The
    ledger does not record name servers."""
    return shlex.quote(clean(environ_name_servers() or "HOST:9876"))


def remedy_of(code: str, *, broker: str = "", topic: str = "") -> str:
    """Return what mends the fault. "the broker" and TOPIC stand for names that are not known."""
    create = f"rocket-sink topic create {shlex.quote(clean(topic or 'TOPIC'))} -n {name_servers()}"
    return CAUSES[code].remedy.format(
        broker=broker or "the broker", create=f"`{create}`",
        open=f"`{create} --permission 'read and write'`",
    )  # fmt: skip
