"""The work of one task: take Arrow record batches, send requests, write ledger rows.

One thread calls the task and its engine. Python code runs per request or per given-up row, never
per sent row. The engine's window, `requestMaxBytes` and the limits of `task.ordering` bound the
memory. If `feed` and `finish` return, each row was delivered or is a dead letter. If they raise,
the task fails, and Spark retries or fails the epoch. Fatal errors (wrong credentials, a wrong port)
are raised at once and make no dead letters, because every other row would fail, too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.errors import (
    BatchTooLargeError,
    DeliveryError,
    InvalidQueueError,
    MessageError,
    NoRouteError,
    Outcome,
    SendError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.message_rules import check_no_system_topic, with_namespace
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.limits import is_limited, rate_limited_options
from rocket_sink.routing.rate_limit import PROXY_BATCH
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.rows.checks import Refused, validate
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.rows.normalise import normalise
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.rows.sort import RowSorter
from rocket_sink.task.dead_letters import DeadLetterTopic, DeadLetterWriter
from rocket_sink.task.encode import encode_requests, parts_of, place_rows, split_rows
from rocket_sink.task.message_ids import FreshIds, MessageIds
from rocket_sink.task.ordering import AbsentBrokers, OrderedQueues
from rocket_sink.task.pending import PendingRequest
from rocket_sink.task.queue_snapshot import Queues, QueueSnapshots, queues_of, with_queues
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.replay import ReplayCheck
from rocket_sink.task.request_factory import RequestFactory
from rocket_sink.task.totals import RowTotals, TaskSummary
from rocket_sink.wire.columns.buffers import bytes_of

if TYPE_CHECKING:
    from rocket_sink.producer.tracing import RequestTraces

_POLL_S: Final = 0.1
_FIFO: Final = "expected type is FIFO"
"""A proxy's remark if it refuses a batch for a FIFO topic (DefaultTopicMessageTypeValidator): it
sees sharding keys only in requests of single messages."""


class RequestSender:
    """Sends the requests of one task, and handles their completions.

    Attributes:
        options: those of the task, with the limits of batches that its brokers take.
        unbatched: topics for which a proxy has refused a batch because of the topic's type.
    """

    def __init__(
        self, options: SinkOptions, engine: SendEngine, recorder: LedgerRecorder,
        totals: RowTotals, replay: ReplayCheck | None, held: Mapping[str, set[str]],
        half_properties: str, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.options = options
        self._engine = engine
        self._recorder = recorder
        self._totals = totals
        self._replay = replay
        self._requests = RequestFactory(options, half_properties)
        self.ordered = OrderedQueues(
            max_messages=options.request_max_messages,
            max_bytes=options.request_max_bytes,
            memory_bytes=options.max_in_flight_bytes,
            clock=clock,
        )
        self.dead_letters = DeadLetterWriter(options, recorder, totals, self.ordered, held)
        self._absent = AbsentBrokers(options, engine.shared, clock)
        self._limited = is_limited(options)
        self.unbatched: set[str] = set()
        self._unhandled: deque[Completion] = deque()
        self._letter_topic = DeadLetterTopic(options, engine, recorder, self._unhandled)
        self._half = bool(half_properties)
        self._traces: RequestTraces | None = None
        if options.trace_sample:
            from rocket_sink.producer.tracing import RequestTraces

            self._traces = RequestTraces(options, engine)

    def cut_off(self, now_s: float) -> None:
        """End all requests without waiting. Record and count the messages that were sent."""
        for completion in [*self._unhandled, *self._engine.drain(now_s)]:
            if not self._is_beside(completion):
                self._recorder.add_attempts(completion)
                request: PendingRequest = completion.token
                self._totals.add_cut_off(
                    completion.outcome, request.message_count,
                    maybe_duplicate=request.maybe_duplicate or completion.maybe_duplicate,
                )  # fmt: skip

    def close(self) -> None:
        self._letter_topic.close()
        if self._traces is not None:
            self._traces.close()
        self.ordered.close()

    @property
    def awaits_answers(self) -> bool:
        engine = self._engine
        traces = 0 if self._traces is None else self._traces.in_flight
        return bool(engine.pending > traces or engine.has_completions or self._unhandled)

    def limit_batches(self, info: TopicPublishInfo) -> None:
        """Make smaller batches from now on if the route is a proxy's, or if one of its brokers has
        refused a larger batch."""
        self._limit_bytes(info.topic)
        options = self.options
        if options.request_max_messages > PROXY_BATCH and info.proxy(options.name_servers):
            self.options = options.with_(requestMaxMessages=PROXY_BATCH)
            self.ordered.max_messages = PROXY_BATCH

    def _limit_bytes(self, topic: str) -> None:
        limit = self._engine.batch_limit(topic)
        if limit is not None and limit < self.options.request_max_bytes:
            self.options = self.options.with_(requestMaxBytes=limit)
            self.ordered.max_bytes = self._requests.max_bytes = limit

    def dispatch(self, request: PendingRequest) -> None:
        queue = self._ordered_queue(request)
        if queue is None:
            self._submit(request)
        elif self.ordered.closing_error(queue):
            self.dead_letters.hold_back(request)
        else:
            self._submit(self.ordered.add(request))

    def _ordered_queue(self, request: PendingRequest) -> MessageQueue | None:
        """Return the queue whose requests are sent one after another; None without an order."""
        in_order = self.options.ordering != "none" and not request.delayed
        return request.queue if in_order else None

    def _strict_queue(self, request: PendingRequest) -> MessageQueue | None:
        """Return the queue for which the request waits in strict order, or None."""
        is_strict = self.options.ordering == "strict"
        return self._ordered_queue(request) if is_strict else None

    def _submit(self, request: PendingRequest | None) -> None:
        if request is None:
            return
        if self._replay is not None:
            self._replay.check()
        self._totals.summary.requests += request.requests
        self._recorder.number_request(request)
        if self._limited:
            # `submit` may wait for the rate limit, so first record the requests on the wire.
            self._recorder.flush_intents()
        send = self._requests.send_request(request)
        if (queue := self._strict_queue(request)) is not None:
            send.timeout_s = self._absent.wait_s(queue)
        self._engine.submit(send)

    def poll(self, timeout_s: float) -> None:
        self._recorder.flush_intents()
        self._unhandled.extend(self._engine.poll(timeout_s))
        while self._unhandled:
            completion = self._unhandled.popleft()
            if not self._is_beside(completion):
                self._complete(completion)

    def _is_beside(self, completion: Completion) -> bool:
        """Handle the completion and return True if it is of a trace or of the dead-letter topic."""
        is_trace = self._traces is not None and self._traces.take(completion)
        return is_trace or self._letter_topic.take(completion)

    def _complete(self, completion: Completion) -> None:
        request: PendingRequest = completion.token
        self._recorder.add_attempts(completion)
        # An attempt of a group counts as one attempt per message.
        attempts = sum(1 for attempt in completion.attempts if attempt.wire_bytes)
        request.attempts += attempts
        self._totals.summary.attempts += attempts * request.requests
        self._requests.note_answer(completion)
        request.maybe_duplicate |= completion.maybe_duplicate
        again: list[PendingRequest] = []
        if completion.outcome.delivered:
            self._note_delivery(request, completion)
        else:
            again = self._handle_failure(request, completion)
        queue = self._ordered_queue(request)
        if queue is not None:
            self._submit(self.ordered.end_request(queue, again))
        else:
            for part in again:
                self._submit(part)

    def _note_delivery(self, request: PendingRequest, completion: Completion) -> None:
        self._totals.add_delivered(
            completion.outcome, request.message_count, maybe_duplicate=request.maybe_duplicate
        )
        if completion.outcome is Outcome.ACKED_DEGRADED and self.options.on_degraded == "fail":
            raise DeliveryError(f"onDegraded=fail: {completion.error}")
        if completion.found_stored:
            self._totals.summary.found_stored += request.message_count
        if (queue := self._strict_queue(request)) is not None:
            self._absent.note_stored(queue)
        if completion.result is not None:
            self._requests.note_move(request, completion.result.queue, self._totals.summary)
        if self._traces is not None:
            self._traces.note(completion, request.messages, half=self._half)

    def _handle_failure(
        self, request: PendingRequest, completion: Completion
    ) -> list[PendingRequest]:
        """Return requests that send all or some of the messages again; if there are none, the
        request was given up, or its messages are stored."""
        error = completion.error
        assert error is not None
        if error.fatal:
            raise error
        if self._replay is not None and (broker := error.facts.get("partly_stored")):
            return self._replay.rest_of(request, broker, self._totals)
        if isinstance(error, BatchTooLargeError) and not request.alone:
            request.first_error = request.first_error or error
            self._limit_bytes(request.topic)
            return request.parts(min(request.byte_count // 2, self.options.request_max_bytes))
        is_fifo = _FIFO in error.text and not (request.alone or request.timed)
        if is_fifo:
            self.unbatched.add(request.topic)
        if is_fifo or self.dead_letters.may_be_one_poison_row(request, completion):
            request.maybe_duplicate |= completion.outcome is Outcome.UNKNOWN
            request.first_error = request.first_error or error
            return request.split()
        self.dead_letters.give_up(request, completion)
        # A broker that is only silent may be frozen, and store the request when it thaws.
        is_absent = completion.outcome is Outcome.NOT_SENT or isinstance(error, InvalidQueueError)
        if is_absent and (queue := self._strict_queue(request)) is not None:
            self._absent.note_failure(queue)
        return []


class TaskSender:
    """Sends the rows of one task.

    Args:
        engine: the caller gives it back to the pool after `finish` or `abort`.
        ids: makes the ids of rows without a `message_id`.
        replay: gives all rows ids, and removes rows that an earlier attempt has stored.
        held: {topic: sharding keys} that must wait for the backfill of earlier dead letters.
        half_properties: properties of half messages (`delivery=transactional`).
        again: an earlier attempt that left no record may have sent the rows, so each stored row
            counts as a possible duplicate. Only `delivery=at_least_once` has such rows.
        keeps_dead_letters: the caller keeps dead letters, so that no source loses them: the task
            needs no ledger for them, and does not fail if all rows fail.
        queues: gives the topics' queues for ordered rows; None: the queues pinned for the query.

    Raises, from `feed` and `finish`:
        DeliveryError: the options want the task to fail, or a row is unaccounted for.
        SendError: a fatal one; or no name server answers; or the option's topic has no route.
    """

    def __init__(
        self, options: SinkOptions, plan: ColumnPlan, *, engine: SendEngine,
        recorder: LedgerRecorder, ids: MessageIds | None = None, replay: ReplayCheck | None = None,
        held: Mapping[str, set[str]] | None = None, half_properties: str = "",
        again: bool = False, keeps_dead_letters: bool = False, queues: Queues | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        options = rate_limited_options(options)
        self._plan = plan
        self._engine = engine
        self._recorder = recorder
        self._ids = ids or FreshIds(repr(recorder.ctx))
        self._replay = replay
        self._again = again and options.delivery == "at_least_once"
        self._clock = clock
        self._started_s = clock()
        self._totals = RowTotals(options, is_source=not keeps_dead_letters)
        self._brokers: set[str] = set()
        """The brokers of the topics that the task has sent to."""
        self.summary = self._totals.summary
        self._sender = RequestSender(
            options, engine, recorder, self._totals, replay, held or {}, half_properties, clock
        )  # fmt: skip
        self._dead_letters = self._sender.dead_letters
        self.letter_keys: Mapping[str, set[str]] = self._dead_letters.keys
        """{topic: sharding keys} of this task's dead letters, whose later rows must wait."""
        self._sorter = RowSorter()
        self._queues = queues or QueueSnapshots(options, recorder.ctx.query_id).queues

    def feed(self, batch: pa.RecordBatch) -> None:
        """Check and send rows, without awaiting all answers. Rows may wait in the task for the sort
        by `order_by`, or for an earlier request of their queue. Block while the engine has no room,
        or while too many bytes wait for queues that answer."""
        for part in parts_of(batch):
            rows = normalise(part, self._plan)
            self.summary.rows_in += len(rows)
            self.summary.body_bytes += bytes_of(rows.body).size
            checked = validate(rows, self._sender.options)
            self._refuse(rows, checked.refused)
            if not len(checked.rows):
                continue
            if checked.rows.order_by is not None:
                self._sorter.add(checked.rows)
            else:
                self._send(checked.rows)

    def drive(self) -> bool:
        """Read answers; return whether answers are outstanding. Call this from time to time while
        you gather rows: an answer that is read late makes its broker look slow."""
        if self._sender.awaits_answers:
            self._sender.poll(0.0)
        return self._sender.awaits_answers

    def finish(self) -> TaskSummary:
        """Await every answer. The task has succeeded if this returns."""
        for rows in self._sorter.sorted_rows():
            self._send(rows)
        while self._sender.awaits_answers or self._sender.ordered.waiting:
            self._sender.poll(_POLL_S)
        self._totals.check_balance(self._brokers)
        self._close(complete=True)
        return self.summary

    def abort(self) -> None:
        """End after an error, without waiting. Record and count the messages that were sent. Rows
        that were not sent are counted in `rows_in` only."""
        self._sender.cut_off(self._clock())
        self._close(complete=False)

    def _close(self, *, complete: bool) -> None:
        self._recorder.add_isolations(self._engine.isolations())
        if self._again or (self._replay is not None and self._replay.may_double):
            self._totals.count_all_as_duplicates()
        duration_s = self._clock() - self._started_s
        self._recorder.add_account(self.summary, complete=complete, duration_s=duration_s)
        self._sender.close()
        self._sorter.close()

    def _send(self, rows: RowBatch) -> None:
        self._sender.ordered.next_batch()
        for group in split_rows(rows, in_order=self._sender.options.ordering != "none"):
            self._send_group(group)
        self._sender.poll(0.0)
        while self._sender.ordered.is_full:
            self._sender.poll(_POLL_S)
        self._recorder.add_isolations(self._engine.isolations())

    def _send_group(self, rows: RowBatch) -> None:
        assert isinstance(rows.topic, str)
        topic = with_namespace(self._sender.options.namespace, rows.topic)
        rows = rows.with_(topic=topic)
        info = self._route(topic, rows)
        if info is None or self._is_system(rows, info):
            return
        if self._replay is not None:
            # Look rows up first: a row that is stored must not become a dead letter and be resent.
            rows = self._replay.unsent(rows, info, self._totals)
        rows = self._dead_letters.without_held(rows)
        if not len(rows):
            return
        sendable, destinations, refused = place_rows(rows, info, self._sender.options.sharding_hash)
        self._refuse(rows, refused)
        for request in encode_requests(
            sendable, destinations, info.queues, self._sender.options, self._ids,
            alone=topic in self._sender.unbatched
        ):  # fmt: skip
            self._sender.dispatch(request)

    def _route(self, topic: str, rows: RowBatch) -> TopicPublishInfo | None:
        try:
            info = self._engine.publish_info(topic)
        except SendError as error:
            # The option's topic is the topic of all rows. If all became dead letters, the query
            # would consume its whole source. So fail the task.
            if self._sender.options.topic or not isinstance(error, NoRouteError):
                self._recorder.add_missing_route(error, topic)
                raise
            if self._replay is not None:
                rows = self._replay.with_ids(rows)  # by which a backfill finds stored rows
            self._dead_letters.give_up_rows(self._dead_letters.without_held(rows), error)
            return None
        self._sender.limit_batches(info)
        queues = queues_of(info) if self._sender.options.ordering == "none" else self._queues(info)
        self._brokers.update(queues.by_broker)
        is_pinned = self._sender.options.ordering != "none" and queues != info.queues
        return with_queues(info, queues) if is_pinned else info

    def _is_system(self, rows: RowBatch, info: TopicPublishInfo) -> bool:
        """Refuse the rows and return True if the topic column names a system topic of brokers."""
        if (
            not info.is_system
            or self._sender.options.topic
            or self._sender.options.allow_system_topics
        ):
            return False
        try:
            check_no_system_topic(info.topic, is_system=True)
        except MessageError as error:
            self._refuse(rows, [Refused(row, error.code, error.text) for row in range(len(rows))])
        return True

    def _refuse(self, rows: RowBatch, refused: Sequence[Refused]) -> None:
        if refused:
            self._recorder.add_refused(rows, refused)
            self._totals.add_invalid(len(refused), refused[0].text)
