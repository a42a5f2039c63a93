"""A send engine that stores messages in lists and fails as scripted."""

from collections import deque
from collections.abc import Callable

from rocket_sink.errors import NoRouteError, Outcome, SendError
from rocket_sink.message import MessageQueue, SendResult
from rocket_sink.producer.engine.attempt import AttemptRecord, Completion, SendRequest
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.task.pending import DecodedMessage, PendingRequest

Judge = Callable[[SendRequest, MessageQueue], "SendError | Outcome | None"]


def publish_info(topic, spans):
    masters = {name: f"{name}:10911" for name, _ in spans}
    return TopicPublishInfo._of_spans(topic, spans, masters)


class StubEngine:
    """A stand-in that answers the requests in turn when it is polled; `judge` decides how.

    `judge` returns None for stored, Outcome.ACKED_DEGRADED, or the error to complete with.
    """

    def __init__(self, judge=None, spans=(("a", 4), ("b", 4))):
        self.judge = judge or (lambda request, queue: None)
        self.spans = list(spans)
        self.requests: list[SendRequest] = []
        self.stored: dict[MessageQueue, list[DecodedMessage]] = {}
        self.unavailable: set[str] = set()
        self.unknown_topics: set[str] = set()
        self.routes: dict[str, TopicPublishInfo] = {}
        self.most_in_flight: dict[MessageQueue, int] = {}
        self.is_broken = self.finds_stored = False
        self.shared = SharedBrokerState.in_process()
        self._waiting: deque[tuple[SendRequest, MessageQueue]] = deque()
        self._ended_groups: list[Completion] = []
        self._turn = 0

    def publish_info(self, topic, *, timeout_s=None):
        if topic in self.unknown_topics:
            raise NoRouteError(f"no route of the topic {topic!r}", topic=topic)
        return self.routes.get(topic) or publish_info(topic, self.spans)

    def batch_limit(self, topic):
        return None

    def submit(self, request):
        if request.group is not None:
            assert request.timed or not request.token.timed
            # An engine does the same for a busy broker: each message goes by itself.
            for index in range(request.message_count):
                self.submit(request.group.leave(index, index + 1))
            self._ended_groups.append(Completion(request.token, Outcome.ACKED, None, None))
            return
        queue = self._queue_of(request)
        self.requests.append(request)
        self._waiting.append((request, queue))
        home = request.token.queue
        if home is not None:
            flying = sum(r.token.queue == home for r, _ in self._waiting)
            self.most_in_flight[home] = max(flying, self.most_in_flight.get(home, 0))

    def poll(self, timeout_s=0.0):
        """Answer one request, or all of them if there is a time-out: so requests pile up."""
        count = len(self._waiting) if timeout_s else min(1, len(self._waiting))
        groups, self._ended_groups = self._ended_groups, []
        return groups + [self._answer(*self._waiting.popleft()) for _ in range(count)]

    def drain(self, deadline_s=None):
        return self.poll(1.0)

    @property
    def pending(self):
        return len(self._waiting)

    @property
    def has_completions(self):
        return bool(self._ended_groups)

    def available(self, broker_name):
        return broker_name not in self.unavailable

    def isolations(self):
        return []

    def close(self):
        self.is_broken = True

    def bodies(self, queue=None):
        queues = [queue] if queue else list(self.stored)
        return [message.body for place in queues for message in self.stored.get(place, [])]

    def _queue_of(self, request):
        info = self.publish_info(request.topic)
        if request.queue is not None:
            return request.queue
        if request.choose is not None:
            chosen = request.choose(info, self.available)
            assert chosen is not None
            return chosen
        self._turn += 1
        return info.queues[self._turn % len(info.queues)]

    def _answer(self, request, queue):
        verdict = self.judge(request, queue)
        if isinstance(verdict, SendError):
            attempt = _attempt(request, queue, verdict.outcome, verdict.code)
            unknown = verdict.outcome is Outcome.UNKNOWN
            return Completion(request.token, verdict.outcome, None, verdict, [attempt], unknown)
        outcome = verdict or Outcome.ACKED
        pending: PendingRequest = request.token
        kept = self.stored.setdefault(queue, [])
        result = SendResult(outcome, "SEND_OK", "", "", queue, len(kept), "a:1")
        kept.extend(pending.messages())
        return Completion(
            request.token, outcome, result, None, [_attempt(request, queue, outcome)],
            found_stored=self.finds_stored,
        )  # fmt: skip


def _attempt(request, queue, outcome, code=None):
    return AttemptRecord(
        1, request.topic, queue.broker_name, "a:1", queue.queue_id, 0, 1_700_000_000_000,
        0.1, 0.0, 1.5, request.message_count, 10, 20, outcome, error_code=code,
    )  # fmt: skip
