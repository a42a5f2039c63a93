"""Ask brokers which topics want keys, before a batch without keys goes to a broker.

A broker refuses a single message without keys in a topic with `cleanup.policy=COMPACTION`
(MESSAGE_ILLEGAL), but takes such messages in a batch, where no consumer ever sees them
(SendMessageProcessor: `sendMessage` looks, `sendBatchMessage` does not). Routes do not have the
policy, so each broker is asked for the topic's configuration, once, and again in the background
each AGE_S: a policy changes when the topic is deleted and made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rocket_sink.errors import RemoteProtocolError, SendError
from rocket_sink.net import log
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.producer.engine.brokers import SendTarget
from rocket_sink.routing.retry import error_for_answer, error_is
from rocket_sink.routing.topic_publish_info import TOPICS_MAX
from rocket_sink.wire import requests
from rocket_sink.wire.codes import V5_0_0, ResponseCode
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.responses import decode_topic_attributes

CLEANUP_POLICY: Final = "cleanup.policy"
COMPACTION: Final = "COMPACTION"
AGE_S: Final = 30.0
"""An older answer is asked for again, while batches go by the old one."""
Asked = Callable[[SendError | None, float], None]

_log = log.logger(__name__)


class TopicPolicies:
    """The policies of the topics that one engine sends batches without keys to."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self._wants_keys: dict[tuple[str, str], tuple[bool, float]] = {}
        """{(topic, broker name): the answer, and when the broker was asked last}"""
        self._asking: dict[tuple[str, str], list[Asked]] = {}
        self._warned: set[str] = set()

    def wants_keys(self, topic: str, target: SendTarget, now_s: float) -> bool | None:
        """Return whether the broker wants keys in the topic's messages; None: not known yet."""
        wants_keys, asked_s = self._wants_keys.get((topic, target.home), (None, now_s))
        if wants_keys is not None and now_s - asked_s >= AGE_S:
            self._wants_keys[topic, target.home] = wants_keys, now_s
            self.ask(topic, target, lambda error, at_s: None, now_s + AGE_S, now_s)
        return wants_keys

    def ask(
        self, topic: str, target: SendTarget, on_known: Asked, deadline_s: float, now_s: float
    ) -> None:
        """Ask the broker; `on_known(None, now)` follows its answer, `on_known(error, now)` the
        lack of one. While the broker is asked, others wait for the same answer."""
        key = topic, target.home
        waiting = self._asking.setdefault(key, [])
        waiting.append(on_known)
        if len(waiting) > 1:
            return

        def ended(answer: Frame | None, error: SendError | None, at_s: float) -> None:
            if answer is not None:
                error = self._learn(topic, target, answer, at_s)
            for on_end in self._asking.pop(key, ()):
                on_end(error and error.copy(), at_s)

        frame = requests.get_topic_config(topic)
        self._client.call(target.address, frame, Call(ended), deadline_s=deadline_s, now_s=now_s)

    def forget_requests(self) -> None:
        """Ask anew from now on: the engine has begun anew, and no answer will come."""
        self._asking.clear()

    def _learn(
        self, topic: str, target: SendTarget, answer: Frame, now_s: float
    ) -> SendError | None:
        """Keep what the broker says; the error of a broker that is too busy to say it."""
        wants_keys, reason = False, None
        if answer.code == ResponseCode.SUCCESS:
            try:
                wants_keys = decode_topic_attributes(answer).get(CLEANUP_POLICY) == COMPACTION
            except RemoteProtocolError as unreadable:
                reason = str(unreadable)
        elif not _has_no_policies(answer):
            error = error_for_answer(answer.code, answer.remark, broker_name=target.home)
            if error is not None and error_is(error, "backs_off"):
                return error
            reason = str(error)
        if len(self._wants_keys) >= TOPICS_MAX:
            self._wants_keys.clear()
        self._wants_keys[topic, target.home] = wants_keys, now_s
        if reason is not None and topic not in self._warned:
            self._warned.add(topic)
            _log.warning(
                "%s does not tell the cleanup.policy of topic %s (%s). If it is COMPACTION, "
                "messages without keys are lost there unseen. Grant the right Get on the topic, or "
                "give each message keys.",
                target.home, topic, reason, extra={"peer": target.address},
            )  # fmt: skip
        return None


def _has_no_policies(answer: Frame) -> bool:
    """The topic is not there yet, and will be made without a policy; or the broker is older than
    policies (5.0 was first to answer the request)."""
    is_old = answer.version < V5_0_0 and answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    return is_old or answer.code == ResponseCode.TOPIC_NOT_EXIST
