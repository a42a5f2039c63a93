"""Whether a broker has a message: a look-up by the client id that the message was sent with.

Source: QueryMessageProcessor.queryMessage with `_UNIQUE_KEY_QUERY`, IndexService.buildIndex. The
index follows the log by some milliseconds and is kept as long as the log. A broker that crashed
drops the newest file of it (IndexService.load) and fills it again from the log files that it
recovers, or from all with `messageIndexSafe=true`. A message that is delivered later is indexed
under the topic in which it waits, until it is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rocket_sink.errors import InvalidAnswerError, RocketSinkError, SendError
from rocket_sink.net.pump import Pump
from rocket_sink.net.rpc import Call
from rocket_sink.routing.verdict import error_for_answer
from rocket_sink.wire.answers import decode_query_answer
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.properties import UNIQ_KEY
from rocket_sink.wire.requests import query_message
from rocket_sink.wire.stored import StoredMessage

Done = Callable[["StoredMessage | None", "SendError | None", float], None]

CLOCKS_APART_MS: Final = 86_400_000
"""Clocks of sender and broker may differ by so much; older index files are not looked into."""
LOOK_UP_S: Final = 3.0
"""Longest wait for the answer to one question."""
_MOST: Final = 32
"""As the broker's defaultQueryMaxNum: an index entry may be another message's of the same hash."""
_WAITING: Final = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")
_ANSWERS: Final = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)


def topics_of(topic: str, *, timed: bool) -> tuple[str, ...]:
    """The topics under which a message may be indexed."""
    return (topic, *_WAITING) if timed else (topic,)


def look_up(
    pump: Pump,
    address: str,
    topic: str,
    message_id: str,
    done: Done,
    *,
    since_ms: int,
    deadline_s: float,
    now_s: float,
) -> None:
    """Ask one broker for one id; `done(message, error, now_s)` is called once.

    The message comes without its body, which is not inflated. It is a torn one
    (`StoredMessage.torn`) only if the broker has no whole one.

    Args:
        since_ms: the message was not stored before this time (ms since 1970).
    """

    def ended(answer: Frame | None, error: SendError | None, at_s: float) -> None:
        message = None
        if answer is not None:
            try:
                message = _found(answer, message_id)
            except SendError as refused:
                error = refused
            except RocketSinkError as broken:
                error = InvalidAnswerError(f"the answer to a look-up: {broken}")
        done(message, error, at_s)

    frame = query_message(
        topic=topic,
        key=message_id,
        max_num=_MOST,
        begin_ms=max(0, since_ms - CLOCKS_APART_MS),
        unique_key=True,
    )
    pump.call(address, frame, Call(ended), deadline_s=deadline_s, now_s=now_s)


def _found(answer: Frame, message_id: str) -> StoredMessage | None:
    if answer.code not in _ANSWERS:
        error = error_for_answer(answer.code, answer.remark)
        raise error or InvalidAnswerError(f"a look-up was answered by code {answer.code}")
    if answer.code != ResponseCode.SUCCESS:
        return None
    found = decode_query_answer(
        answer, wanted=lambda properties: properties.get(UNIQ_KEY) == message_id, bodies=False
    )
    return min(found, key=lambda message: message.torn, default=None)
