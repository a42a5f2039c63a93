"""The error tree, ordered by whose fault it is, and the five outcomes of a send.

    RocketSinkError
    ├── ConfigurationError          the caller's settings; raised before anything is sent
    │   ├── OptionError             unknown, missing or illegal option
    │   ├── ColumnError             the DataFrame does not fit the row contract
    │   └── CheckpointError         ledger and checkpoint do not belong together
    ├── MessageError                one message's data (a dead letter in the Spark lanes)
    ├── ProtocolError               the bytes on the wire
    │   ├── LocalProtocolError      we were asked to send what the protocol cannot say
    │   └── RemoteProtocolError     the peer sent what the protocol does not allow
    ├── SendError                   a send ended without a good answer
    │   ├── NotSentError            no complete frame left this process: safe to send again
    │   ├── RejectedError           the broker said that it did not store the message
    │   ├── DegradedError           stored with less durability than asked for (onDegraded=fail)
    │   └── UnknownOutcomeError     a complete frame left, no valid answer came: maybe stored
    ├── DeliveryError               a Spark task or epoch that cannot vouch for all its rows
    ├── LedgerError                 the Delta ledger, its spool or its fold
    │   └── DamagedSpoolError       a spool file that does not hold what was written
    └── ClusterError                the local RocketMQ cluster

Retry facts are class attributes, so that the decision tables of `rocket_sink.routing` are built
from the classes and no `if code ==` ladder exists. Every error pickles: Spark ships them between
processes. Facts are keyword arguments and become attributes; the text is the first argument.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar


class Outcome(enum.Enum):
    """How one send attempt ended, as far as this side can know.

    Java mixes "certainly not stored" with "maybe stored" in the same exceptions; everything that
    counts, retries or isolates here asks this value instead.
    """

    ACKED = "acked"
    """The broker stored the message (response code 0)."""
    ACKED_DEGRADED = "acked_degraded"
    """Stored, but a durability condition was missed (codes 10, 11, 12)."""
    REJECTED = "rejected"
    """The broker says that it did not store the message."""
    NOT_SENT = "not_sent"
    """No complete frame left this host."""
    UNKNOWN = "unknown"
    """A complete frame left and no valid answer came back: a re-send may double it."""

    @property
    def delivered(self) -> bool:
        """True when the message is stored on the broker that answered."""
        return self in (Outcome.ACKED, Outcome.ACKED_DEGRADED)


class Isolate(enum.Enum):
    """What a failure says about the health of a broker (input of the fault table)."""

    NOTHING = "nothing"
    """The failure is the message's or the caller's: the broker is healthy."""
    TOPIC = "topic"
    """This topic does not work on this broker (permission): isolate the pair only."""
    BROKER = "broker"
    """The broker itself is slow, busy, down or unreachable."""


def _rebuild(cls: type[RocketSinkError], text: str, facts: dict[str, Any]) -> RocketSinkError:
    return cls(text, **facts)


class RocketSinkError(Exception):
    """Root of everything that this package raises on purpose.

    `code` names the class of failure in ledgers and metrics; it is stable, upper-case text.
    """

    code: str = "ROCKET_SINK_ERROR"

    def __init__(self, text: str, **facts: Any) -> None:
        super().__init__(text)
        self.text = text
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.text, self.facts)


class ConfigurationError(RocketSinkError):
    """The caller's settings cannot work; nothing has been sent."""

    code = "CONFIGURATION"


class OptionError(ConfigurationError):
    """An option is unknown, missing, or outside its range; the text names the way out."""

    code = "OPTION"


class ColumnError(ConfigurationError):
    """The DataFrame's columns do not fit the row contract; raised on the driver."""

    code = "COLUMN"


class CheckpointError(ConfigurationError):
    """Ledger and checkpoint contradict each other (a ledger ahead of its checkpoint)."""

    code = "CHECKPOINT"


class MessageError(RocketSinkError):
    """One message is not acceptable, whatever broker it is sent to.

    Facts: `code` (for instance BODY_TOO_LARGE), and `topic`, `keys`, `size`, `limit` where known.
    """

    code = "MESSAGE"
    outcome: ClassVar[Outcome] = Outcome.NOT_SENT
    retriable: ClassVar[bool] = False
    isolates: ClassVar[Isolate] = Isolate.NOTHING

    def about(self, topic: Any, keys: Any, body: Any) -> MessageError:
        """The same error, naming the message that it is about; its fields may be anything yet."""
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
    """A request cannot be expressed on the wire (too long, an illegal header value)."""

    code = "LOCAL_PROTOCOL"


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are not a legal frame; the connection is closed."""

    code = "REMOTE_PROTOCOL"


class SendError(RocketSinkError):
    """A send attempt ended without a good answer.

    Facts, where known: `response_code` (int), `remark` (str, cleaned), `broker_name`,
    `broker_address`, `topic`, `attempts` (int).
    """

    code = "SEND"
    outcome: ClassVar[Outcome] = Outcome.UNKNOWN
    retriable: ClassVar[bool] = True
    """Another attempt may succeed (within the deadline and the number of attempts)."""
    isolates: ClassVar[Isolate] = Isolate.BROKER
    refreshes_route: ClassVar[bool] = False
    """The route that led here is stale: ask the name server before the next attempt."""
    fatal: ClassVar[bool] = False
    """No other message will fare better: stop at once, never a dead letter."""
    avoids_broker: ClassVar[bool] = False
    """A healthy broker, but another one may do what it cannot."""
    backs_off: ClassVar[bool] = False
    """The broker is busy: wait (with jitter) before the next attempt."""
    response_codes: ClassVar[tuple[int, ...]] = ()
    """RocketMQ response codes (ResponseCode.java) that mean this error."""


class NotSentError(SendError):
    """No complete frame left this process. Sending again cannot double the message."""

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
    """The TLS handshake failed, and may succeed the next time. Facts: `address`."""

    code = "TLS"


class TlsRefusedError(TlsError):
    """A certificate or the protocol was refused: the same settings and files will fail again.

    The text names the check that failed and the option for it. Facts: `address`.
    """

    code = "TLS_REFUSED"
    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class LocalResourcesError(ConnectError):
    """This process has no descriptor or memory left for a connection; the peer is not to blame.

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
    """The name servers know no writable queue for the topic."""

    code = "NO_ROUTE"
    isolates = Isolate.NOTHING
    refreshes_route = True


class WindowFullError(NotSentError):
    """No place in the in-flight window before the deadline; nothing was written.

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


class MessageIllegalError(RejectedError):
    """MESSAGE_ILLEGAL (13): the broker's own limits refuse this message."""

    code = "MESSAGE_ILLEGAL"
    response_codes = (13,)
    isolates = Isolate.NOTHING
    retriable = False


class PermissionDeniedError(RejectedError):
    """NO_PERMISSION (16) without a word about authentication: the topic is closed here."""

    code = "NO_PERMISSION"
    response_codes = (16,)
    isolates = Isolate.TOPIC
    refreshes_route = True


class AuthenticationError(RejectedError):
    """The broker does not accept our signature (ACL 1.0: code 1, ACL 2.0: code 16)."""

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
    """SYSTEM_ERROR (1) with a remark that proves that nothing was stored."""

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
    """A complete frame left and no valid answer came: the message may be stored."""

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
    """SYSTEM_ERROR (1) or a code that this client does not know: a Java exception's text."""

    code = "BROKER_ERROR"
    response_codes = (1,)


class InvalidAnswerError(UnknownOutcomeError):
    """The answer says success but lacks what proves it (queue offset, message id)."""

    code = "INVALID_ANSWER"


class ReplyTimeoutError(RocketSinkError):
    """A request was stored, and its reply did not come in time; it may have been processed.

    Facts: `message_id`, `correlation_id`.
    """

    code = "REPLY_TIMEOUT"


class DeliveryError(RocketSinkError):
    """A task cannot vouch for all its rows; Spark retries it or fails the epoch.

    Facts: `counts` {outcome: rows}, `first_error` (str).
    """

    code = "DELIVERY"


class LedgerError(RocketSinkError):
    """The ledger cannot be read or written as it is; the text says what to do."""

    code = "LEDGER"


class DamagedSpoolError(LedgerError):
    """A spool file that its task closed does not hold what the task wrote.

    A fold puts such a file aside, below `_spool/_quarantine`, and goes on with the others.
    """

    code = "SPOOL_DAMAGED"


class ClusterError(RocketSinkError):
    """The local cluster cannot start, stop or answer; the text holds its last log lines."""

    code = "CLUSTER"
