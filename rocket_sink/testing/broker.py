"""A scripted broker. It stores messages in memory, and fails as scripted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rocket_sink.testing.script import SEND_CODES, Scripted, perform, unsupported
from rocket_sink.testing.server import Loop, Peer, Port
from rocket_sink.testing.store import Halves, MemoryStore, now_ms
from rocket_sink.wire.codes import CURRENT_VERSION, PermName, RequestCode, ResponseCode
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import ONEWAY_FLAG, Frame, response_to
from rocket_sink.wire.ids import decode_recall_handle
from rocket_sink.wire.properties import decode_properties, split_keys
from rocket_sink.wire.stored import StoredMessage

_HEADER = {"producerGroup": "a", "topic": "b", "sysFlag": "f", "bornTimestamp": "g", "flag": "h",
           "properties": "i", "queueId": "e"}  # fmt: skip


@dataclass(frozen=True)
class TopicConfig:
    """A topic on one broker. `attributes`: {name: value}, such as cleanup.policy. `read_queues`:
    the number of queues that may be read, if it is not `queues`."""

    queues: int = 4
    perm: int = PermName.READ | PermName.WRITE
    attributes: Mapping[str, str] = field(default_factory=dict)
    read_queues: int | None = None

    @property
    def readable(self) -> int:
        return self.queues if self.read_queues is None else self.read_queues


_WRITES = SEND_CODES | {RequestCode.END_TRANSACTION}


class FakeBroker(Scripted):
    """A broker of a `FakeCluster`.

    Attributes:
        name: the name in routes, such as `broker-a`.
        topics: {topic: its settings on this broker}.
        requests: every request received, in order, for assertions.
        version: the release in the headers of its answers (MQVersion ordinal); settable.
        registered: the address in routes, if not empty, as if brokerIP1 were wrong; settable.
        is_master: if False, routes have only a slave, as during a fail-over; settable.
    """

    def __init__(self, loop: Loop, name: str, topics: dict[str, TopicConfig], *, seed: int) -> None:
        super().__init__(seed)
        self.name = name
        self.requests: list[Frame] = []
        self.version = CURRENT_VERSION
        self.is_master = True
        self._loop = loop
        self.topics = topics
        self._port = Port(loop, self._handle)
        loop.call(self._port.open)
        self.registered = ""
        self.store = MemoryStore(("127.0.0.1", self._port.number))
        self._halves = Halves(self.store)
        self._handlers: dict[int, Callable[[Frame], Frame | None]] = {
            **dict.fromkeys((RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT), _ok),
            RequestCode.END_TRANSACTION: self._halves.end,
            RequestCode.RECALL_MESSAGE: self._recall,
            RequestCode.GET_MAX_OFFSET: self.store.max_offset,
            RequestCode.GET_MIN_OFFSET: self.store.min_offset,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.store.offset_by_time,
            RequestCode.PULL_MESSAGE: self._pull,
            RequestCode.QUERY_MESSAGE: self.store.query,
            RequestCode.VIEW_MESSAGE_BY_ID: self.store.view,
            RequestCode.UPDATE_AND_CREATE_TOPIC: self._create_topic,
            RequestCode.GET_TOPIC_CONFIG: self._topic_config,
            **dict.fromkeys(SEND_CODES, self._send),
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    @property
    def address(self) -> str:
        return self._port.address

    @property
    def addresses(self) -> dict[int, str]:
        """{broker id: address} in routes."""
        return {0 if self.is_master else 1: self.registered or self.address}

    @property
    def alive(self) -> bool:
        return self._port.is_open

    # --- for tests --------------------------------------------------------------------------

    def freeze(self, *, reads: bool = False) -> None:
        """Answer nothing, as after SIGSTOP; the kernel still accepts bytes. With `reads`, the
        broker handles requests, and only the answers wait."""
        self._loop.call(lambda: self._port.freeze(reads))

    def thaw(self) -> None:
        """Handle the requests that came since `freeze`, and go on."""
        self._loop.call(self._port.thaw)

    def kill(self) -> None:
        """Refuse connections and reset the open ones; the store survives."""
        self._loop.call(self._port.close)

    def restart(self) -> None:
        """Listen again on the same port."""
        self._loop.call(self._port.open)

    def fail_over(self) -> None:
        """Move to a new address, with the same store; the old address refuses connections."""
        self._loop.call(self._port.close)
        self._port = Port(self._loop, self._handle)
        self._loop.call(self._port.open)

    def reset_connections(self) -> None:
        """Reset the open connections; new ones are accepted."""
        self._loop.call(self._port.reset_peers)

    def send_request(self, frame: Frame) -> None:
        """Send a request to every connected client."""
        data = encode_frame(frame)

        def send_all() -> None:
            for peer in list(self._port.peers):
                peer.send(data)

        self._loop.call(send_all)

    def half_messages(self) -> list[StoredMessage]:
        """Return the transactional messages that are neither committed nor rolled back."""
        return self._halves.messages()

    def lose_half_messages(self) -> None:
        """Delete the half messages, as when their part of the commit log is deleted."""
        self._loop.call(self._halves.lose)

    def check_transactions(self) -> None:
        """Send a transaction check for each half message to every connected client."""
        self._loop.call(self._check_transactions)

    def _check_transactions(self) -> None:
        # Run in the loop's thread, which also ends transactions.
        for half in self._halves.messages():
            self.send_request(self._halves.check(half))

    # --- requests ---------------------------------------------------------------------------

    def _handle(self, peer: Peer, request: Frame) -> None:
        self.requests.append(request)
        behaviour = self.script.decide(request)
        if behaviour and request.code in _WRITES and not behaviour.keeps_message:
            answer: Frame | None = response_to(request, ResponseCode.SYSTEM_ERROR)
        else:
            answer = self._answer(request)
        if answer is None:
            return
        answer.version = self.version
        if behaviour or not (request.is_oneway or request.is_response):
            perform(peer, behaviour, answer)

    def _answer(self, request: Frame) -> Frame | None:
        handler = self._handlers.get(request.code)
        if handler is None:
            return unsupported(request)
        try:
            return handler(request)
        except Exception as error:  # as NettyRemotingAbstract; one thread serves all brokers
            return response_to(request, ResponseCode.SYSTEM_ERROR, remark=repr(error))

    def _send(self, request: Frame) -> Frame:
        ext = request.ext or {}
        topic = self.topics.get(ext["b"])
        if topic is None:
            template = self.topics.get(ext.get("c", ""))
            if template is None:
                return response_to(
                    request, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{ext['b']}] not exist"
                )
            queues = min(template.queues, int(ext.get("d", "4")))
            topic = self.topics[ext["b"]] = replace(template, queues=queues)
        if not topic.perm & PermName.WRITE:
            return response_to(
                request, ResponseCode.NO_PERMISSION,
                remark=f"the topic[{ext['b']}] sending message is forbidden",
            )  # fmt: skip
        queue_id = int(ext.get("e", "0"))
        if queue_id >= topic.queues:
            return response_to(
                request, ResponseCode.INVALID_PARAMETER,
                remark=f"request queueId[{queue_id}] is illegal",
            )  # fmt: skip
        is_batch = request.code == RequestCode.SEND_BATCH_MESSAGE
        wants_keys = not is_batch and topic.attributes.get("cleanup.policy") == "COMPACTION"
        if wants_keys and not "".join(split_keys(decode_properties(ext.get("i", "")))).strip():
            remark = "Required message key is missing"
            return response_to(request, ResponseCode.MESSAGE_ILLEGAL, remark=remark)
        target = self._halves if self._halves.is_half(request) else self.store
        stored = target.put(request, max(queue_id, 0))
        return _ok(
            request,
            {
                "msgId": ",".join(message.offset_message_id for message in stored),
                "queueId": str(stored[0].queue_id),
                "queueOffset": str(stored[0].queue_offset),
                "MSG_REGION": "DefaultRegion",
                "TRACE_ON": "true",
            },
        )

    def _pull(self, request: Frame) -> Frame:
        ext = request.ext or {}
        topic = self.topics.get(ext["topic"])
        if topic is not None and int(ext["queueId"]) >= topic.readable:
            remark = f"queueId[{ext['queueId']}] is illegal, topic:[{ext['topic']}]"
            return response_to(request, ResponseCode.INVALID_PARAMETER, remark=remark)
        return self.store.pull(request)

    def _reply(self, request: Frame) -> Frame:
        """Store the reply and push it to every client, as ReplyMessageProcessor does to the
        requester, which knows its correlation id."""
        answer = self._send(request)
        if answer.code == ResponseCode.SUCCESS:
            ext = request.ext or {}
            fields = {long: ext.get(short, "0") for long, short in _HEADER.items()}
            fields["storeTimestamp"] = str(now_ms())
            code = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
            self.send_request(Frame(code, fields, request.body, flag=ONEWAY_FLAG))
        return answer

    def _recall(self, request: Frame) -> Frame:
        handle = decode_recall_handle((request.ext or {})["recallHandle"])
        if handle.broker_name != self.name or not self.store.recall(handle.message_id):
            return response_to(request, ResponseCode.ILLEGAL_OPERATION, remark="recall failed")
        return _ok(request, {"msgId": handle.message_id})

    def _create_topic(self, request: Frame) -> Frame:
        ext = request.ext or {}
        pairs = filter(None, ext.get("attributes", "").split(","))
        attributes = dict(pair.removeprefix("+").split("=", 1) for pair in pairs)
        self.topics[ext["topic"]] = TopicConfig(
            int(ext["writeQueueNums"]), int(ext["perm"]), attributes
        )
        return response_to(request, ResponseCode.SUCCESS)

    def _topic_config(self, request: Frame) -> Frame:
        topic = self.topics.get((request.ext or {})["topic"])
        if topic is None:
            return response_to(request, ResponseCode.TOPIC_NOT_EXIST, remark="No topic")
        body = json.dumps({"attributes": dict(topic.attributes)}).encode()
        return response_to(request, ResponseCode.SUCCESS, body=body)


def _ok(request: Frame, ext: dict[str, str] | None = None) -> Frame:
    return response_to(request, ResponseCode.SUCCESS, ext=ext)
