"""How an attempt ends, and what follows from it: the one retry loop of all send modes."""

from __future__ import annotations

from typing import Any, Final

from rocket_sink.errors import (
    AuthenticationError,
    ConnectError,
    InvalidAnswerError,
    InvalidQueueError,
    Isolate,
    NoRouteError,
    Outcome,
    SendError,
    TopicNotFoundError,
)
from rocket_sink.producer.core import EngineCore
from rocket_sink.producer.flight import Flight
from rocket_sink.producer.outcomes import (
    attempt_of,
    completed,
    degraded,
    given_up,
    result_of,
)
from rocket_sink.producer.values import Attempt, Completion
from rocket_sink.routing.retry import Action, Decision, decide, decide_degraded
from rocket_sink.routing.verdict import SEND_STATUS, error_for_answer
from rocket_sink.wire.answers import DEFAULT_REGION, SendAnswer, decode_send_answer
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.stored import StoredMessage

_STALE_ROUTE: Final = (InvalidQueueError, NoRouteError, TopicNotFoundError)
"""The route lacks the queue or its broker's master, or the broker says that it is wrong: without a
new one the next attempt fails alike."""


class AttemptEnds(EngineCore):
    """The half of the engine that deals with answers and failures."""

    def _answered(self, flight: Flight, frame: Frame, sent_s: float | None, now_s: float) -> None:
        rtt_s, broker = now_s - (sent_s or flight.handed_s), flight.broker
        assert broker is not None
        if flight.hooked is not None:
            self.pump.rpc_hooks.after(flight.address, flight.hooked, frame)
        stored = frame.code in SEND_STATUS
        self.brokers.answered(broker, rtt_s, now_s, stored=stored)
        if stored and broker.window is not None:
            broker.stored(self.options.max_in_flight)
        if not stored:
            error = error_for_answer(
                frame.code,
                frame.remark,
                topic=flight.request.topic,
                broker_name=flight.broker_name,
                broker_address=flight.address,
            )
            assert error is not None
            self._failed(flight, error, sent_s, now_s)
            return
        try:
            answer = decode_send_answer(frame)
        except InvalidAnswerError as error:
            self._failed(flight, error, sent_s, now_s)
            return
        self._landed(flight)
        if frame.code and self._sends_degraded_again(flight, answer, rtt_s, sent_s, now_s):
            return
        attempts: list[Attempt] = []
        if self._record or flight.story is not None:
            outcome = result_outcome(frame.code)
            attempts = self._recorded(flight, now_s, sent_s, outcome, answer=answer)
        end = degraded if frame.code else completed
        self._complete(flight, end(flight, result_of(flight, answer, rtt_s), attempts), now_s)

    def _failed(self, flight: Flight, error: SendError, sent_s: float | None, now_s: float) -> None:
        """An attempt ended without being stored, or nobody knows."""
        in_flight = flight.broker is not None
        if flight.broker is not None:
            if error.backs_off:
                flight.broker.busy(flight.handed_s, now_s)
            self._landed(flight)
        story = flight.told()
        if flight.request.proof and flight.counted < (
            flight.request.attempts or self._bounds.max_attempts
        ):
            # The long wait for a sure answer must not use up the time of the next attempt.
            flight.deadline_s = max(flight.deadline_s, now_s + self._bounds.timeout_s)
        decision = self._decide(flight, error, now_s)
        story.earlier.append(type(error))
        story.last_error = error
        story.last_broker = flight.home if decision.avoid_broker else None
        asks = error.outcome is Outcome.UNKNOWN and bool(flight.request.proof)
        asks = asks and in_flight and not self._stopping
        if error.outcome is Outcome.UNKNOWN and not asks and story.unknown is None:
            story.unknown = error
        if decision.refresh_route and not self._stopping:
            self.routes.refresh(flight.request.topic, now_s)
        if in_flight:
            self._draw_conclusions(flight, decision, error, sent_s, now_s)
            self._recorded(flight, now_s, sent_s, error.outcome, error=error)
        if asks:
            self._inquire(flight, error, now_s)
        else:
            self._follow(flight, decision, error, now_s)

    def _follow(self, flight: Flight, decision: Decision, error: SendError, now_s: float) -> None:
        """Another attempt, or the request's end."""
        if self._stopping or not decision.retries or now_s >= flight.deadline_s:
            self._fatal = self._fatal or decision.action is Action.FATAL
            self._complete(flight, given_up(flight, error), now_s)
            return
        again = self._again(flight, now_s, counts=decision.counts)
        if decision.action is Action.RETRY_SAME_QUEUE:
            again.pinned = flight.queue
        topic, delay_s = flight.request.topic, decision.delay_s
        stale = isinstance(error, _STALE_ROUTE)
        if isinstance(error, ConnectError) and decision.action is not Action.RETRY_NOW:
            look_up_s = self.routes.next_look_up_s(topic, now_s)
            # Half of what is left is kept for the attempt itself.
            half_s = (flight.deadline_s - now_s) / 2
            stale = look_up_s is not None and look_up_s <= half_s
            delay_s = max(delay_s, min(look_up_s or 0.0, half_s))
        if stale and self.routes.fetching(topic):
            self._after_look_up(again, now_s)
        elif delay_s > 0:
            self._later(again, now_s + delay_s)
        else:
            self._dispatch(again, now_s)

    # --- the end of an inquiry (producer.inquiry) ---------------------------------------------

    def _proved_stored(self, flight: Flight, message: StoredMessage, now_s: float) -> None:
        """The attempt without an answer did store it."""
        code = int(ResponseCode.SUCCESS)
        answer = SendAnswer(
            code, SEND_STATUS[code], message.offset_message_id, message.queue_id,
            message.queue_offset, None, None, DEFAULT_REGION, None, trace_on=True,
        )  # fmt: skip
        attempts = self._recorded(flight, now_s, None, Outcome.ACKED, answer=answer)
        if attempts:
            attempts[-1].remark = "no answer came; found stored by its id"
        completion = completed(flight, result_of(flight, answer, 0.0), attempts)
        completion.found_stored = True
        self._complete(flight, completion, now_s)

    def _proved_absent(self, flight: Flight, error: SendError, now_s: float) -> None:
        """The attempt without an answer did not store it: the broker's word makes it a refusal."""
        error.facts["outcome"] = Outcome.REJECTED
        vars(error)["outcome"] = Outcome.REJECTED
        self._failed(flight, error, None, now_s)

    def _undecided(self, flight: Flight, error: SendError, now_s: float) -> None:
        """Nobody could say whether it is stored."""
        story = flight.told()
        story.unknown = story.unknown or error
        self._complete(flight, given_up(flight, error), now_s)

    def _decide(self, flight: Flight, error: SendError, now_s: float) -> Decision:
        request, story = flight.request, flight.told()
        if isinstance(error, NoRouteError) and self.routes.hopeless(request.topic):
            return Decision(Action.GIVE_UP)
        if (
            isinstance(error, AuthenticationError)
            and AuthenticationError not in story.earlier
            and self._heads.reread(flight.handed_s, now_s)
        ):
            return Decision(Action.RETRY_NOW, counts=False)
        tried = [type(error), *story.earlier]
        refused = sum(issubclass(one, ConnectError) for one in tried)
        return decide(
            error,
            attempt=flight.counted,
            max_attempts=request.attempts or self._bounds.max_attempts,
            now_s=now_s,
            deadline_s=flight.deadline_s,
            ordering=flight.ordering,
            fixed_queue=request.queue is not None,
            patient=request.patient,
            # Refusals cost no time: all attempts would be over before a new route can help.
            alternatives=len(self.routes.addresses()) > max(1, refused),
            earlier=story.earlier,
            policies=self._policies,
            rng=self._rng,
        )

    def _draw_conclusions(
        self,
        flight: Flight,
        decision: Decision,
        error: SendError,
        sent_s: float | None,
        now_s: float,
    ) -> None:
        """What the failure says about the broker and the connection."""
        home, topic = flight.home, flight.request.topic
        rtt_ms = (now_s - (sent_s or flight.handed_s)) * 1000
        if not self._stopping and decision.isolate is Isolate.BROKER:
            # A broker that answers others in the meantime is slow, not dead.
            heard = flight.link is not None and flight.link.heard_s > flight.handed_s
            self.brokers.isolate(
                home, rtt_ms, now_s, error.code, reachable=decision.reachable or heard
            )
        elif not self._stopping and decision.isolate is Isolate.TOPIC:
            self.brokers.isolate_topic(topic, home, now_s, error.code)
        if decision.reconnect and flight.link is not None and not flight.link.retired:
            self.pump.retire(flight.link, now_s)

    def _sends_degraded_again(
        self, flight: Flight, answer: SendAnswer, rtt_s: float, sent_s: float | None, now_s: float
    ) -> bool:
        decision = decide_degraded(
            answer.code,
            attempt=flight.counted,
            max_attempts=flight.request.attempts or self._bounds.max_attempts,
            now_s=now_s,
            deadline_s=flight.deadline_s,
            ordering=flight.ordering,
            fixed_queue=flight.request.queue is not None,
            policies=self._policies,
        )
        if not decision.retries or self._stopping:
            return False
        story = flight.told()
        self._recorded(flight, now_s, sent_s, Outcome.ACKED_DEGRADED, answer=answer)
        story.degraded = story.degraded or result_of(flight, answer, rtt_s)
        story.last_broker = flight.home if decision.avoid_broker else None
        self._dispatch(self._again(flight, now_s, counts=True), now_s)
        return True

    def _again(self, flight: Flight, now_s: float, *, counts: bool) -> Flight:
        later = flight.successor(now_s, counts=counts)
        self._lanes.replace(flight, later)
        return later

    def _landed(self, flight: Flight) -> None:
        """It is not in flight at its broker any more."""
        broker, flight.broker = flight.broker, None
        assert broker is not None
        broker.in_flight -= 1
        self.brokers.total_in_flight -= 1
        if broker.held and broker.has_room:
            self._later(broker.held.popleft(), 0.0)

    def _recorded(
        self,
        flight: Flight,
        now_s: float,
        sent_s: float | None,
        outcome: Outcome,
        **ending: Any,
    ) -> list[Attempt]:
        if not self._record:
            return flight.story.attempts if flight.story is not None else []
        attempt = attempt_of(flight, now_s, sent_s, outcome=outcome, **ending)
        if self._on_attempt is not None:
            self._on_attempt(attempt)
        if flight.story is None:
            return [attempt]
        flight.story.attempts.append(attempt)
        return flight.story.attempts

    def _complete(self, flight: Flight, completion: Completion, now_s: float) -> None:
        flight.done = True
        self.window.give_back(flight.body_bytes)
        self._done.append(completion)
        if flight.lane is not None:
            following = self._lanes.leave(flight)
            if following is not None and not self._stopping:
                self._later(following, now_s)


def result_outcome(code: int) -> Outcome:
    return Outcome.ACKED if code == 0 else Outcome.ACKED_DEGRADED
