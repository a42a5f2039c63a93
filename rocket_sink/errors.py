"""The error tree, and the five outcomes of a send.

    RocketSinkError
    ├── ConfigurationError          the caller's settings; raised before anything is sent
    │   ├── OptionError             unknown, missing or illegal option
    │   ├── ColumnError             the DataFrame does not fit the row contract
    │   └── CheckpointError         ledger and checkpoint do not belong together
    ├── MessageError                one message's data (a dead letter in the Spark lanes)
    ├── ProtocolError               the bytes on the wire
    │   ├── LocalProtocolError      a request that cannot be encoded
    │   └── RemoteProtocolError     the peer violated the protocol
    ├── SendError                   a send failed
    │   ├── NotSentError            no complete frame was written: safe to send again
    │   ├── RejectedError           the broker answered that it did not store the message
    │   ├── DegradedError           stored with less durability than required (onDegraded=fail)
    │   └── UnknownOutcomeError     a complete frame was written, no valid answer: maybe stored
    ├── DeliveryError               a Spark task or epoch with rows of unknown or failed delivery
    ├── LedgerError                 the Delta ledger, its spool or its fold
    │   └── DamagedSpoolError       a corrupt spool file
    └── ClusterError                the local RocketMQ cluster

Retry facts are class attributes, from which `rocket_sink.routing.retry` decides. All errors pickle,
for Spark. The first argument is the text; facts are keyword arguments and become attributes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class Outcome(enum.Enum):
    """The outcome of a send attempt.

    Java's exceptions do not distinguish "certainly not stored" from "maybe stored".
    """

    ACKED = "acked"
    """The broker stored the message (response code 0)."""
    ACKED_DEGRADED = "acked_degraded"
    """Stored, but a durability condition was missed (codes 10, 11, 12)."""
    REJECTED = "rejected"
    """The broker answered that it did not store the message."""
    NOT_SENT = "not_sent"
    """The complete frame was not written."""
    UNKNOWN = "unknown"
    """A complete frame was written, without a valid answer: a retry may store a duplicate."""

    @property
    def delivered(self) -> bool:
        """True when the message is stored."""
        return self in (Outcome.ACKED, Outcome.ACKED_DEGRADED)


class Isolate(enum.Enum):
    """The thing to isolate after a failure (input of the fault table)."""

    NOTHING = "nothing"
    """The broker is healthy."""
    TOPIC = "topic"
    """The topic on this broker (permission)."""
    BROKER = "broker"
    """The broker itself is slow, busy, down or unreachable."""


def _rebuild(cls: type[RocketSinkError], text: str, facts: dict[str, Any]) -> RocketSinkError:
    return cls(text, **facts)


class RocketSinkError(Exception):
    """Base class of the package's errors. `code` is a stable name for ledgers and metrics."""

    code: str = "ROCKET_SINK_ERROR"

    def __init__(self, text: str, **facts: Any) -> None:
        super().__init__(text)
        self.text = text
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def copy(self) -> Self:
        """Return a copy to be raised beside this error, with facts and a traceback of its own."""
        duplicate = type(self)(self.text, **self.facts)
        duplicate.__cause__ = self.__cause__
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.text, self.facts)


class ConfigurationError(RocketSinkError):
    """Invalid settings; nothing was sent."""

    code = "CONFIGURATION"


class MissingPackageError(ConfigurationError, ImportError):
    """A package that this feature needs is not installed; the text says how to install it.

    Facts: `package` (str), the name to import.
    """

    code = "MISSING_PACKAGE"


class OptionError(ConfigurationError):
    """An option is unknown, missing, or outside its range."""

    code = "OPTION"


class ColumnError(ConfigurationError):
    """The DataFrame's columns do not fit the row contract; raised on the driver."""

    code = "COLUMN"


class CheckpointError(ConfigurationError):
    """Ledger and checkpoint contradict each other (a ledger ahead of its checkpoint)."""

    code = "CHECKPOINT"


class MessageError(RocketSinkError):
    """An illegal message.

    Facts: `code` (for instance BODY_TOO_LARGE), and `topic`, `keys`, `size`, `limit` where known.
    """

    code = "MESSAGE"
    outcome: ClassVar[Outcome] = Outcome.NOT_SENT
    retriable: ClassVar[bool] = False
    isolates: ClassVar[Isolate] = Isolate.NOTHING

    def about(self, topic: Any, keys: Any, body: Any) -> MessageError:
        """Return the error with the message's topic, keys and size, which may be of any type."""
        facts: dict[str, Any] = {}
        if isinstance(topic, str):
            facts["topic"] = topic
        if keys and isinstance(keys, (str, list, tuple)):
            facts["keys"] = (keys,) if isinstance(keys, str) else tuple(keys)
        if isinstance(body, (bytes, bytearray, memoryview)):
            facts["size"] = len(body)
        words = {"topic": "topic {!r:.140}", "keys": "keys {!r:.140}", "size": "body of {} bytes"}
        named = [words[name].format(v) for name, v in facts.items() if name not in self.facts]
        text = f"{self.text} ({', '.join(named)})" if named else self.text
        return type(self)(text, **{**facts, **self.facts})


class ProtocolError(RocketSinkError):
    """Bytes that are not RocketMQ's remoting protocol."""

    code = "PROTOCOL"


class LocalProtocolError(ProtocolError):
    """A request cannot be encoded (too long, an illegal header value)."""

    code = "LOCAL_PROTOCOL"


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are not a legal frame; the connection is closed."""

    code = "REMOTE_PROTOCOL"


class SendError(RocketSinkError):
    """A send attempt failed.

    Facts, where known: `response_code` (int), `remark` (str, cleaned), `broker_name`,
    `broker_address`, `topic`, `attempts` (int).
    """

    code = "SEND"
    outcome: ClassVar[Outcome] = Outcome.UNKNOWN
    retriable: ClassVar[bool] = True
    """Whether a further attempt may succeed (within the deadline and the number of attempts)."""
    isolates: ClassVar[Isolate] = Isolate.BROKER
    refreshes_route: ClassVar[bool] = False
    """The route may be stale: refresh it before the next attempt."""
    fatal: ClassVar[bool] = False
    """Whether all messages would fail, too: the sender stops at once, without dead letters."""
    avoids_broker: ClassVar[bool] = False
    """The broker is healthy, but another one may accept the message."""
    backs_off: ClassVar[bool] = False
    """The broker is busy: wait (with jitter) before the next attempt."""
    response_codes: ClassVar[tuple[int, ...]] = ()
    """RocketMQ response codes (ResponseCode.java) that mean this error."""


class NotSentError(SendError):
    """The complete frame was not written: sending again cannot store a duplicate."""

    code = "NOT_SENT"
    outcome = Outcome.NOT_SENT


class ConnectError(NotSentError):
    """Connecting to the broker failed or took too long. Facts: `address`."""

    code = "CONNECT"
    refreshes_route = True


class UnknownHostError(ConnectError):
    """A host name could not be looked up, or not in time. Facts: `address`, `host`."""

    code = "UNKNOWN_HOST"


class TlsError(ConnectError):
    """The TLS handshake failed; a retry may succeed. Facts: `address`."""

    code = "TLS"


class TlsRefusedError(TlsError):
    """A certificate or the protocol was refused: the same settings and files will fail again.

    Facts: `address`.
    """

    code = "TLS_REFUSED"
    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class LocalResourcesError(ConnectError):
    """This process has no free descriptor or memory for a connection.

    Facts: `address`, `errno`.
    """

    code = "LOCAL_RESOURCES"
    isolates = Isolate.NOTHING
    refreshes_route = False


class NameServerUnavailableError(NotSentError):
    """No name server answered. Facts: `reasons` {address: reason}."""

    code = "NAME_SERVER_UNAVAILABLE"
    isolates = Isolate.NOTHING


class NoRouteError(NotSentError):
    """The topic has no writable queue."""

    code = "NO_ROUTE"
    isolates = Isolate.NOTHING
    refreshes_route = True


class WindowFullError(NotSentError):
    """The in-flight window had no room before the deadline; nothing was written.

    Java: RemotingTooMuchRequestException.
    """

    code = "WINDOW_FULL"
    isolates = Isolate.NOTHING
    retriable = False


class UnwrittenError(NotSentError):
    """The connection broke, or the deadline passed, before the frame's last byte was written."""

    code = "UNWRITTEN"


class BrokerTooOldError(NotSentError):
    """The broker would ignore what the message asks for (a timed delivery before 5.0).

    Facts: `broker_version` (str, as in 4.9.7), `broker_name`, `broker_address`, `topic`.
    """

    code = "BROKER_TOO_OLD"
    isolates = Isolate.NOTHING
    avoids_broker = True


class ProducerClosedError(NotSentError):
    """The producer is closed."""

    code = "PRODUCER_CLOSED"
    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class RejectedError(SendError):
    """The broker answered that it did not store the message."""

    code = "REJECTED"
    outcome = Outcome.REJECTED


class BrokerBusyError(RejectedError):
    """SYSTEM_BUSY (2) or FLOW_CONTROL (215), answered before anything was stored."""

    code = "BROKER_BUSY"
    response_codes = (2, 215)
    backs_off = True


class ServiceNotAvailableError(RejectedError):
    """SERVICE_NOT_AVAILABLE (14): shut down, slave role, disk full, not the leader."""

    code = "SERVICE_NOT_AVAILABLE"
    response_codes = (14,)
    refreshes_route = True


class GoAwayError(RejectedError):
    """GO_AWAY (1500): the broker is shutting down; a new connection is tried at once."""

    code = "GO_AWAY"
    response_codes = (1500,)
    isolates = Isolate.NOTHING


class TopicNotFoundError(RejectedError):
    """TOPIC_NOT_EXIST (17) and no automatic creation."""

    code = "TOPIC_NOT_FOUND"
    response_codes = (17,)
    isolates = Isolate.NOTHING
    refreshes_route = True


class InvalidQueueError(RejectedError):
    """INVALID_PARAMETER (29): the queue does not exist any more (a topic was shrunk)."""

    code = "INVALID_QUEUE"
    response_codes = (29,)
    isolates = Isolate.NOTHING
    refreshes_route = True


class QueueMovedError(RejectedError):
    """NOT_LEADER_FOR_QUEUE (501): a static topic's queue is on another broker now."""

    code = "QUEUE_MOVED"
    response_codes = (501,)
    isolates = Isolate.NOTHING
    refreshes_route = True
    backs_off = True


class RequesterGoneError(RejectedError):
    """SYSTEM_ERROR (1): the broker has no connection to the client that waits for this reply."""

    code = "REQUESTER_GONE"
    isolates = Isolate.NOTHING
    avoids_broker = True


class MessageIllegalError(RejectedError):
    """MESSAGE_ILLEGAL (13): the broker's own limits refuse this message."""

    code = "MESSAGE_ILLEGAL"
    response_codes = (13,)
    isolates = Isolate.NOTHING
    retriable = False


class PermissionDeniedError(RejectedError):
    """The topic is closed, or the user lacks the right to it (code 16; with ACL 1.0 code 1)."""

    code = "NO_PERMISSION"
    response_codes = (16,)
    isolates = Isolate.TOPIC
    refreshes_route = True


class AuthenticationError(RejectedError):
    """The broker does not know the user, or the signature is wrong (ACL 1.0: 1, ACL 2.0: 16)."""

    code = "AUTH_FAILED"
    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class UnsupportedRequestError(RejectedError):
    """REQUEST_CODE_NOT_SUPPORTED (3): the request reached a name server or a wrong port."""

    code = "REQUEST_CODE_NOT_SUPPORTED"
    response_codes = (3,)
    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class NotStoredError(RejectedError):
    """SYSTEM_ERROR (1) with a remark from before the append."""

    code = "NOT_STORED"


class DegradedError(SendError):
    """`onDegraded=fail`: the message is stored, and a durability condition was missed.

    Facts: `result` (the SendResult, with its `status`), `broker_name`, `topic`.
    """

    code = "DEGRADED"
    outcome = Outcome.ACKED_DEGRADED
    retriable = False
    isolates = Isolate.NOTHING


class UnknownOutcomeError(SendError):
    """A complete frame was written, without a valid answer: the message may be stored."""

    code = "UNKNOWN"
    outcome = Outcome.UNKNOWN


class RequestTimeoutError(UnknownOutcomeError):
    """The answer did not come before the attempt's deadline."""

    code = "REQUEST_TIMEOUT"
    refreshes_route = True


class ConnectionLostError(UnknownOutcomeError):
    """The connection ended after the frame was written and before the answer."""

    code = "CONNECTION_LOST"
    refreshes_route = True


class BrokerError(UnknownOutcomeError):
    """SYSTEM_ERROR (1) or an unknown code."""

    code = "BROKER_ERROR"
    response_codes = (1,)


class ReplyNotTakenError(UnknownOutcomeError):
    """SYSTEM_ERROR (1): the requester did not confirm the reply that the broker pushed to it."""

    code = "REPLY_NOT_TAKEN"
    isolates = Isolate.NOTHING
    retriable = False


class InvalidAnswerError(UnknownOutcomeError):
    """A success answer without queue offset or message id."""

    code = "INVALID_ANSWER"


class ReplyTimeoutError(RocketSinkError):
    """A request was stored, but its reply did not arrive in time; it may have been processed.

    Facts: `message_id`, `correlation_id`.
    """

    code = "REPLY_TIMEOUT"


class DeliveryError(RocketSinkError):
    """A task with failed rows; Spark retries it or fails the epoch.

    Facts: `counts` {outcome: rows}, `first_error` (str).
    """

    code = "DELIVERY"


class LedgerError(RocketSinkError):
    """The ledger cannot be read or written."""

    code = "LEDGER"


class DamagedSpoolError(LedgerError):
    """A spool file is corrupt, not cut. A fold moves it to `_spool/_quarantine` and continues."""

    code = "SPOOL_DAMAGED"


class ClusterError(RocketSinkError):
    """The local cluster cannot start, stop or answer; the text has its last log lines."""

    code = "CLUSTER"
