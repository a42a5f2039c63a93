"""From the end of an attempt to the values that the caller sees."""

from __future__ import annotations

from rocket_sink.errors import BrokerTooOldError, DegradedError, Outcome, SendError
from rocket_sink.message import MessageQueue, SendResult
from rocket_sink.producer.flight import Flight
from rocket_sink.producer.values import Attempt, Completion
from rocket_sink.routing.verdict import outcome_of_code
from rocket_sink.wire.answers import SendAnswer
from rocket_sink.wire.codes import version_name


def attempt_of(
    flight: Flight,
    now_s: float,
    sent_s: float | None,
    *,
    outcome: Outcome,
    answer: SendAnswer | None = None,
    error: SendError | None = None,
) -> Attempt:
    """The attempt's record."""
    link, handed_s = flight.link, flight.handed_s or now_s
    connect_ms = 0.0
    if link is not None and link.opened_s >= handed_s:
        connect_ms = ((link.ready_s or now_s) - link.opened_s) * 1000
    code = answer.code if answer is not None else getattr(error, "response_code", None)
    return Attempt(
        attempt=flight.attempt,
        topic=flight.request.topic,
        broker_name=flight.broker_name,
        broker_address=flight.address,
        queue_id=flight.queue.queue_id if flight.queue is not None else -1,
        queue_offset=answer.queue_offset if answer is not None else -1,
        started_ms=flight.wall_ms,
        queue_wait_ms=(handed_s - flight.ready_s) * 1000,
        connect_ms=connect_ms,
        rtt_ms=(now_s - (sent_s or handed_s)) * 1000,
        message_count=flight.request.message_count,
        body_bytes=flight.body_bytes,
        wire_bytes=flight.wire_bytes,
        outcome=outcome,
        response_code=code,
        error_code=error.code if error is not None else None,
        remark=getattr(error, "remark", None) or (error.text if error is not None else None),
        message_id=flight.request.message_id,
        # the first one only: a record must not keep the ids of a whole batch
        offset_message_id=answer.offset_message_id.partition(",")[0] if answer is not None else "",
    )


def result_of(flight: Flight, answer: SendAnswer, rtt_s: float) -> SendResult:
    """The broker's answer as the caller's result."""
    request, story, place = flight.request, flight.story, flight.place
    assert place is not None
    queue = place.queue
    if queue.queue_id != answer.queue_id:
        queue = MessageQueue(request.topic, queue.broker_name, answer.queue_id)
    return SendResult(
        outcome_of_code(answer.code) if answer.code else Outcome.ACKED,
        answer.status,
        request.message_id,
        answer.offset_message_id,
        queue,
        answer.queue_offset,
        place.address,
        flight.attempt,
        rtt_s * 1000,
        story is not None and (story.unknown is not None or story.degraded is not None),
        answer.transaction_id,
        answer.region_id,
        answer.recall_handle,
        answer.trace_on,
    )


def completed(flight: Flight, result: SendResult, attempts: list[Attempt]) -> Completion:
    return Completion(
        flight.request.token, result.outcome, result, None, attempts, result.maybe_duplicate
    )


def degraded(flight: Flight, result: SendResult, attempts: list[Attempt]) -> Completion:
    """Stored, less durably than asked for: by `onDegraded` the result, or an error that has it."""
    completion = completed(flight, result, attempts)
    if flight.engine.options.on_degraded == "fail":
        completion.result = None
        completion.error = DegradedError(
            f"{result.queue.broker_name} stored the message and answered {result.status}, which "
            "onDegraded=fail does not accept; sent again it is stored twice",
            result=result, broker_name=result.queue.broker_name, topic=flight.request.topic,
        )  # fmt: skip
    return completion


def given_up(flight: Flight, error: SendError) -> Completion:
    """The request's end without an acknowledgement of its last attempt.

    An earlier attempt that was stored, if less durably than asked for, is its result. An earlier
    attempt whose outcome is unknown makes the whole unknown, with that attempt's error.
    """
    story = flight.told()
    if story.degraded is not None:
        return degraded(flight, story.degraded, story.attempts)
    cause = story.unknown or error
    if cause is not error and error.__cause__ is None:
        cause.__cause__ = error
    facts = {"topic": flight.request.topic, "attempts": flight.attempt}
    for name, value in facts.items():
        cause.facts.setdefault(name, value)
        if not hasattr(cause, name):
            setattr(cause, name, value)
    return Completion(
        flight.request.token,
        cause.outcome,
        None,
        cause,
        story.attempts,
        maybe_duplicate=story.unknown is not None,
    )


def too_old(topic: str, broker_name: str, address: str, version: int) -> BrokerTooOldError:
    """The error for a broker that would ignore what a timed message asks for."""
    name = version_name(version)
    return BrokerTooOldError(
        f"broker {broker_name} ({address}) is RocketMQ {name} and would deliver a timed message "
        "at once: timed delivery came with 5.0; use a delay_level, or a newer broker",
        topic=topic, broker_name=broker_name, broker_address=address, broker_version=name,
    )  # fmt: skip
