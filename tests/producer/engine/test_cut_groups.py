"""Groups for which a broker has room in part: the part is sent before others can take the room."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

from rocket_sink.message import MessageQueue
from rocket_sink.producer.engine.attempt import SendAttempt, SendRequest, Wait
from rocket_sink.producer.engine.brokers import Broker, SendTarget
from rocket_sink.producer.engine.frame_group import GroupAttempt
from rocket_sink.producer.engine.request_flow import RequestFlow
from rocket_sink.producer.engine.waiting import WaitingRequests

ROOM = 8


@dataclass
class Group:
    name: str
    size: int
    in_parts = True
    body_bytes = 0

    def __len__(self):
        return self.size

    def leave(self, first, last):
        return request(self.name, last - first)


def request(name, count):
    group = Group(name, count) if count > 1 else None
    return SendRequest("t", b"", message_count=count, token=name, group=group)


class Dispatcher:
    """Sends to one broker with `ROOM` places; counts attempts that were dispatched in vain."""

    def __init__(self):
        self.broker = Broker("b")
        self.broker.window = SimpleNamespace(
            room_for=lambda requests, in_flight: max(0, min(requests, ROOM - in_flight))
        )
        self.sent = []
        self.in_vain = 0

    def send(self, attempt, now_s):
        attempt.target = SendTarget(MessageQueue("t", "b", 0), "b", "b:1", self.broker)
        room = attempt.room_at(self.broker)
        if room < attempt.requests:
            self.in_vain += not room
            attempt.target = attempt.target if room else None
            return Wait.BROKER
        self.broker.in_flight += attempt.requests
        self.sent.append((attempt.request.token, attempt.requests))
        return None

    def room_deadline_s(self, attempt, now_s):
        return 99.0


def flow_with(dispatcher):
    anything = SimpleNamespace(
        stopping=False, give_back=lambda *_: None, get=lambda *_: True, ranks={},
        open_to=lambda *_: [dispatcher.broker],
    )  # fmt: skip
    waiting = WaitingRequests(set(), anything, anything)
    return RequestFlow(
        time.monotonic, anything, anything, dispatcher, anything, anything, waiting, anything
    )


def test_requests_behind_a_cut_group_keep_their_order():
    dispatcher = Dispatcher()
    flow = flow_with(dispatcher)
    dispatcher.broker.in_flight = ROOM
    for name, count in (("g", 20), *((f"s{n}", 1) for n in range(ROOM)), ("h", 8)):
        kind = GroupAttempt if count > 1 else SendAttempt
        flow.send(kind(flow.ends, request(name, count), (), 0, False, 0.0, 99.0), 0.0)
    steps = []
    dispatcher.in_vain = 0
    for step in range(5):
        dispatcher.broker.in_flight -= ROOM
        dispatcher.sent.clear()
        flow.settle(float(step))
        steps.append(list(dispatcher.sent))
    assert steps == [
        [("g", 8)], [(f"s{n}", 1) for n in range(ROOM)], [("h", 8)], [("g", 8)], [("g", 4)],
    ]  # fmt: skip
    assert dispatcher.in_vain <= len(steps), "only the other part of a group, once a step"


def test_a_defect_in_a_part_leaves_the_other_part_to_be_sent():
    """The connection has the part already, and ends it."""

    class Defect(Dispatcher):
        def send(self, attempt, now_s):
            if attempt.requests == ROOM:
                attempt.channel = SimpleNamespace()
                raise RuntimeError("a defect")
            return super().send(attempt, now_s)

    flow = flow_with(Defect())
    flow.send(GroupAttempt(flow.ends, request("g", ROOM + 2), (), 0, False, 0.0, 99.0), 0.0)
    assert flow._dispatcher.sent == [("g", 2)]


def test_groups_that_are_released_at_once_are_not_cut_for_the_same_room():
    dispatcher = Dispatcher()
    flow = flow_with(dispatcher)
    dispatcher.broker.in_flight = ROOM
    for name in ("g", "h", "i"):
        attempt = GroupAttempt(flow.ends, request(name, 20), (), 0, False, 0.0, 99.0)
        flow.send(attempt, 0.0)
    while flow.waiting.size:
        dispatcher.broker.in_flight -= ROOM
        flow.waiting._brokers.ranks = dict(flow.waiting._brokers.ranks)
        flow.settle(1.0)
    assert sorted(size for _, size in dispatcher.sent) == [4, 4, 4, 8, 8, 8, 8, 8, 8]
