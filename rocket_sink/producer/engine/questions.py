"""Questions to brokers before a send: the broker's version, and whether a topic wants keys.

In a topic with `cleanup.policy=COMPACTION`, a broker refuses a single message without keys
(MESSAGE_ILLEGAL). In a batch it takes such messages, but no consumer ever sees them
(SendMessageProcessor: `sendMessage` checks, `sendBatchMessage` does not). Routes do not contain the
policy, so the client asks each broker for the topic's configuration. It asks again in the
background every `AGE_S`, because a topic may be deleted and created again. A send request that
waits for an answer is dispatched again and again, perhaps to another broker."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Final

from rocket_sink.errors import NotSentError, RemoteProtocolError, SendError
from rocket_sink.net import log
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.producer.engine.brokers import SendTarget
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.routing.topic_publish_info import TopicCache
from rocket_sink.wire import requests
from rocket_sink.wire.codes import V5_0_0, ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import decode_topic_attributes

CLEANUP_POLICY: Final = "cleanup.policy"
COMPACTION: Final = "COMPACTION"
AGE_S: Final = 30.0
"""Age of an answer at which the client asks again; batches use the old answer meanwhile."""
QUESTION_S: Final = 3.0
"""Longest wait for an answer. After it the client asks again if a send request still waits."""
Learn = Callable[[Frame, float], SendError | None]
"""A function that keeps an answer, or returns an error if the broker was too busy to answer."""

_log = log.logger(__name__)


class Questions:
    """The questions of one engine. No question is asked again while it is under way. `events` gets
    the key of each question that ends."""

    def __init__(self, client: NetworkClient, events: set[Hashable]) -> None:
        self._client = client
        self._events = events
        self._asked: TopicCache[Hashable, tuple[SendError | None, float]] = TopicCache()
        """{question: (error, time)}; the error is None while the question is under way."""
        self._wants_keys: TopicCache[tuple[str, str], tuple[bool, float]] = TopicCache()
        """{(topic, broker name): (wants keys, time of the answer)}"""
        self._warned: set[str] = set()

    def ask(
        self, key: Hashable, address: str, frame: Frame, learn: Learn, since_s: float, now_s: float
    ) -> None:
        """Ask the broker, unless the same question is under way. Raise SendError if the question
        failed after `since_s`, and a send would fail in the same way."""
        error, at_s = self._asked.get(key, (None, now_s))
        if key not in self._asked or (error is not None and at_s < since_s):
            self._asked[key] = None, now_s
            call = Call(partial(self._take_answer, key, learn))
            self._client.call(address, frame, call, deadline_s=now_s + QUESTION_S, now_s=now_s)
            error, at_s = self._asked.get(key, (None, now_s))
        if error is not None:
            raise error.copy()

    def _take_answer(
        self,
        key: Hashable,
        learn: Learn,
        answer: Frame | None,
        error: SendError | None,
        now_s: float,
    ) -> None:
        self._events.add(key)
        if answer is not None:
            error = learn(answer, now_s)
        if error is not None and (isinstance(error, NotSentError) or error.backs_off):
            self._asked[key] = error, now_s
        else:
            # A missing answer is no error for messages, because `Brokers` notices silent brokers.
            self._asked.pop(key, None)

    def wants_keys(
        self, topic: str, target: SendTarget, since_s: float, now_s: float
    ) -> bool | None:
        """Return whether the broker wants keys in the topic's messages; None: not known yet. Raise
        SendError as in `ask`, if there is no earlier answer."""
        key = topic, target.home
        wants_keys, known_s = self._wants_keys.get(key, (None, now_s))
        if wants_keys is None or now_s - known_s >= AGE_S:
            frame = requests.get_topic_config(topic)
            learn = partial(self._learn_policy, topic, target)
            try:
                self.ask(key, target.address, frame, learn, since_s, now_s)
            except SendError:
                if wants_keys is None:
                    raise
        return wants_keys

    def _learn_policy(
        self, topic: str, target: SendTarget, answer: Frame, now_s: float
    ) -> SendError | None:
        wants_keys, reason = False, None
        if answer.code == ResponseCode.SUCCESS:
            try:
                wants_keys = decode_topic_attributes(answer).get(CLEANUP_POLICY) == COMPACTION
            except RemoteProtocolError as unreadable:
                reason = str(unreadable)
        elif not _has_no_policies(answer):
            error = error_for_answer(answer.code, answer.remark, broker_name=target.home)
            if error is not None and error.backs_off:
                return error
            reason = str(error)
        self._wants_keys[topic, target.home] = wants_keys, now_s
        # A proxy knows no policies, so it gets one warning for all topics.
        is_proxy = answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        subject = "any topic" if is_proxy else f"topic {topic}"
        if reason is not None and subject not in self._warned:
            self._warned.add(subject)
            log.about(target.address, _log).warning(
                "%s does not tell the cleanup.policy of %s (%s). If it is COMPACTION, messages "
                "without keys are lost there unseen. %s.",
                target.home, subject, reason,
                "Give messages of such topics keys: docs/deploy/proxy.md" if is_proxy
                else "Grant the right Get on the topic, or give each message keys",
            )  # fmt: skip
        return None


def _has_no_policies(answer: Frame) -> bool:
    """Return whether the topic has no policy: it does not exist yet, or the broker is older than
    5.0, which introduced policies and this request."""
    is_old = answer.version < V5_0_0 and answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    return is_old or answer.code == ResponseCode.TOPIC_NOT_EXIST
