"""The error tree, and the five outcomes of a send.

docs/reference/errors.md lists all of them with their codes. The four classes directly below
`SendError` say what is known of a message: not sent, rejected, degraded, or perhaps stored. Class
attributes tell `rocket_sink.routing.retry` whether and how to retry. All errors pickle, because
Spark passes them between processes. The first argument is the text. Facts are keyword arguments,
and become attributes."""

from __future__ import annotations

import enum
import re
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class Outcome(enum.Enum):
    """The outcome of a send attempt.

    Java's exceptions do not distinguish "certainly not stored" from "maybe stored"."""

    ACKED = "acked"
    """The broker stored the message (response code 0)."""
    ACKED_DEGRADED = "acked_degraded"
    """The broker stored the message, but missed a durability condition (codes 10, 11, 12)."""
    REJECTED = "rejected"
    """The broker answered that it did not store the message."""
    NOT_SENT = "not_sent"
    """The frame was not completely written."""
    UNKNOWN = "unknown"
    """The frame was written, and no valid answer came: a retry may store a duplicate."""

    @property
    def delivered(self) -> bool:
        """Whether the message is stored."""
        return self in (Outcome.ACKED, Outcome.ACKED_DEGRADED)


class Isolate(enum.Enum):
    """The part of the cluster to avoid for a while after a failure (input of the fault table)."""

    NOTHING = "nothing"
    """The broker is healthy."""
    TOPIC = "topic"
    """The topic on this broker (permission)."""
    BROKER = "broker"
    """The broker itself is slow, busy, down or unreachable."""


class RocketSinkError(Exception):
    """Base class of the package's errors.

    `code` is a stable name for ledgers and metrics. By default it is made from the class's name:
    CONNECTION_LOST for ConnectionLostError."""

    code: str = "ROCKET_SINK_ERROR"

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__ and "code" not in vars(cls):
            words = re.findall("[A-Z][a-z]+", cls.__name__.removesuffix("Error"))
            cls.code = "_".join(words).upper()

    def __init__(self, text: str, **facts: Any) -> None:
        super().__init__(text)
        self.text = text
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def copy(self) -> Self:
        """Return a copy that can be raised in another place, with a traceback of its own."""
        duplicate = type(self)(self.text, **self.facts)
        duplicate.__cause__ = self.__cause__
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.text, **self.facts), ()


class ConfigurationError(RocketSinkError):
    """Invalid settings; nothing was sent."""


class MissingPackageError(ConfigurationError, ImportError):
    """A package that this feature needs is not installed; the text says how to install it.

    Facts: `package` (str), the name to import."""


class OptionError(ConfigurationError):
    """An option is unknown, missing, or outside its range."""


class ColumnError(ConfigurationError):
    """The DataFrame's columns do not fit the row contract; raised on the driver."""


class CheckpointError(ConfigurationError):
    """Ledger and checkpoint contradict each other (a ledger ahead of its checkpoint)."""


class MessageError(RocketSinkError):
    """An illegal message.

    Facts: `code` (for instance BODY_TOO_LARGE), and `topic`, `keys`, `size`, `limit` where known.
    """

    outcome: ClassVar[Outcome] = Outcome.NOT_SENT
    retriable: ClassVar[bool] = False
    isolates: ClassVar[Isolate] = Isolate.NOTHING
    fatal: ClassVar[bool] = False

    def about(self, topic: Any, keys: Any, body: Any) -> MessageError:
        """Return the error with these facts of the message; values of wrong types are left out."""
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


class LocalProtocolError(ProtocolError):
    """A request cannot be encoded (too long, an illegal header value)."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are not a legal frame; the connection is closed."""


class SendError(RocketSinkError):
    """A send attempt failed.

    Facts, where known: `response_code` (int), `remark` (str, cleaned), `broker_name`,
    `broker_address`, `topic`, `attempts` (int)."""

    outcome: ClassVar[Outcome] = Outcome.UNKNOWN
    retriable: ClassVar[bool] = True
    """Whether a further attempt may succeed (within the deadline and the number of attempts)."""
    isolates: ClassVar[Isolate] = Isolate.BROKER
    refreshes_route: ClassVar[bool] = False
    """Whether to refresh the route before the next attempt, because it may be stale."""
    fatal: ClassVar[bool] = False
    """Whether other messages would fail, too: the sender stops at once, without dead letters."""
    avoids_broker: ClassVar[bool] = False
    """Whether the next attempt avoids this broker, although the broker is healthy."""
    backs_off: ClassVar[bool] = False
    """Whether to wait (with jitter) before the next attempt, because the broker is busy."""
    response_codes: ClassVar[tuple[int, ...]] = ()
    """RocketMQ response codes (ResponseCode.java) that mean this error."""


class NotSentError(SendError):
    """The frame was not completely written: sending again cannot store a duplicate."""

    outcome = Outcome.NOT_SENT


class ConnectError(NotSentError):
    """Connecting to the broker failed or took too long. Facts: `address`."""

    refreshes_route = True


class UnknownHostError(ConnectError):
    """A host name was not resolved, or not in time. Facts: `address`, `host`."""


class TlsError(ConnectError):
    """The TLS handshake failed; a retry may succeed. Facts: `address`."""


class TlsRefusedError(TlsError):
    """A certificate or the protocol was refused: the same settings and files will fail again.
    Facts: `address`."""

    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class LocalResourcesError(ConnectError):
    """This process has no free descriptor or memory for a connection. Facts: `address`, `errno`."""

    isolates = Isolate.NOTHING
    refreshes_route = False


class NameServerUnavailableError(NotSentError):
    """No name server answered. Facts: `reasons` {address: reason}."""

    isolates = Isolate.NOTHING


class NoRouteError(NotSentError):
    """The topic has no writable queue."""

    isolates = Isolate.NOTHING
    refreshes_route = True


class WindowFullError(NotSentError):
    """The in-flight window had no room before the deadline; nothing was written.

    Java: RemotingTooMuchRequestException."""

    isolates = Isolate.NOTHING
    retriable = False


class UnwrittenError(NotSentError):
    """The connection broke, or the deadline passed, before the frame's last byte was written."""


class BrokerTooOldError(NotSentError):
    """The broker would ignore what the message asks for (a timed delivery before 5.0).

    Facts: `broker_version` (str, as in 4.9.7), `broker_name`, `broker_address`, `topic`."""

    isolates = Isolate.NOTHING
    avoids_broker = True


class ProducerClosedError(NotSentError):
    """The producer is closed."""

    isolates = Isolate.NOTHING
    retriable = False
    fatal = True


class RejectedError(SendError):
    """The broker answered that it did not store the message."""

    outcome = Outcome.REJECTED


class BrokerBusyError(RejectedError):
    """SYSTEM_BUSY (2) or FLOW_CONTROL (215), answered before anything was stored."""

    response_codes = (2, 215)
    backs_off = True


class ServiceNotAvailableError(RejectedError):
    """SERVICE_NOT_AVAILABLE (14): shut down, slave role, disk full, not the leader."""

    response_codes = (14,)
    refreshes_route = True


class GoAwayError(RejectedError):
    """GO_AWAY (1500): the broker is shutting down; a new connection is tried at once."""

    response_codes = (1500,)
    isolates = Isolate.NOTHING


class TopicNotFoundError(RejectedError):
    """TOPIC_NOT_EXIST (17): the broker lacks the topic, and does not create topics by itself."""

    response_codes = (17,)
    isolates = Isolate.NOTHING
    refreshes_route = True


class InvalidQueueError(RejectedError):
    """INVALID_PARAMETER (29): the queue no longer exists (a topic was shrunk)."""

    response_codes = (29,)
    isolates = Isolate.NOTHING
    refreshes_route = True


class QueueMovedError(RejectedError):
    """NOT_LEADER_FOR_QUEUE (501): a static topic's queue is on another broker now."""

    response_codes = (501,)
    isolates = Isolate.NOTHING
    refreshes_route = True
    backs_off = True


class RequesterGoneError(RejectedError):
    """SYSTEM_ERROR (1): the broker has no connection to the client that waits for this reply."""

    isolates = Isolate.NOTHING
    avoids_broker = True


class MessageIllegalError(RejectedError):
    """MESSAGE_ILLEGAL (13): the broker's own limits refuse this message."""

    response_codes: ClassVar[tuple[int, ...]] = (13,)
    isolates = Isolate.NOTHING
    retriable = False


class BatchTooLargeError(MessageIllegalError):
    """SYSTEM_ERROR (1): the batch is larger than the broker's maxMessageSize."""

    response_codes = ()


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
    """SYSTEM_ERROR (1) with a remark that brokers give before they store anything."""


class DegradedError(SendError):
    """`onDegraded=fail`: the message is stored, and a durability condition was missed.

    Facts: `result` (the SendResult, with its `status`), `broker_name`, `topic`."""

    outcome = Outcome.ACKED_DEGRADED
    retriable = False
    isolates = Isolate.NOTHING


class UnknownOutcomeError(SendError):
    """The frame was written, and no valid answer came: the message may be stored."""

    code = "UNKNOWN"


class RequestTimeoutError(UnknownOutcomeError):
    """The answer did not come before the attempt's deadline."""

    refreshes_route = True


class ConnectionLostError(UnknownOutcomeError):
    """The connection ended after the frame was written and before the answer."""

    refreshes_route = True


class BrokerError(UnknownOutcomeError):
    """SYSTEM_ERROR (1) or an unknown code."""

    code = "BROKER_ERROR"
    response_codes = (1,)


class ReplyNotTakenError(UnknownOutcomeError):
    """SYSTEM_ERROR (1): the requester did not confirm the reply that the broker pushed to it."""

    isolates = Isolate.NOTHING
    retriable = False


class InvalidAnswerError(UnknownOutcomeError):
    """A success answer without queue offset or message id."""


class ReplyTimeoutError(RocketSinkError):
    """A request was stored, but its reply did not arrive in time; it may have been processed.

    Facts: `message_id`, `correlation_id`."""


class DeliveryError(RocketSinkError):
    """Rows were not delivered; Spark runs the task again or fails the epoch.

    Facts: `counts` {outcome: rows}, `first_error` (str)."""


class LedgerError(RocketSinkError):
    """The ledger cannot be read or written."""


class DamagedSpoolError(LedgerError):
    """A spool file is corrupt, not just cut short. A fold moves it to `_spool/_quarantine`."""

    code = "SPOOL_DAMAGED"


class ClusterError(RocketSinkError):
    """The local cluster cannot start, stop or answer; the text has its last log lines."""
