"""Two proxies; the one in use is slow for a while, and killed later, while a producer sends."""

import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from rocket_sink import Message, Producer
from rocket_sink.errors import SendError
from tests.clusters import make_topic
from tests.java_client import read_with_java


@dataclass(frozen=True)
class Result:
    """The result of sends during faults.

    Attributes:
        lost: messages that were acknowledged, and that Java's client does not find.
        failed: errors of sends by class.
        doubled: further copies of messages.
        pauses_s: the longest time without an answer, beginning with each fault.
        by_address: acknowledged messages by the proxy that answered.
    """

    sent: int
    lost: int
    failed: dict[str, int]
    doubled: int
    pauses_s: dict[str, float]
    by_address: dict[str, int]


def send_during_faults(cluster, proxies, count, rate, frozen_s):
    """Send `count` messages at `rate` a second: freeze the proxy in use after a quarter of them
    for `frozen_s`, and kill the proxy in use after three quarters.
    """
    topic = f"faults-{time.monotonic_ns()}"
    make_topic(cluster, topic)
    acked = {}
    failed = Counter()
    answered_s = []
    faults = {}

    def took(name, result, error):
        if error is None:
            acked[name] = result.broker_address
            answered_s.append(time.monotonic())
        else:
            failed[f"{type(error).__name__}: {error}"[:160]] += 1

    def in_use():
        address = acked[max(acked, key=int)]
        return next(proxy for proxy in proxies if proxy.address == address)

    futures = []
    with Producer(nameServer=";".join(proxy.address for proxy in proxies)) as producer:
        for number in range(count):
            name = str(number)
            future = producer.send_async(Message(topic, name.encode()))
            futures.append((name, future))
            future.add_done_callback(
                lambda future, name=name: took(
                    name, None if future.exception() else future.result(), future.exception()
                )
            )
            if number == count // 4:
                faults["frozen"] = time.monotonic()
                proxy = in_use()
                proxy.freeze()
                threading.Timer(frozen_s, proxy.thaw).start()
            elif number == 3 * count // 4:
                faults["killed"] = time.monotonic()
                in_use().kill()
            time.sleep(1 / rate)
        for _, future in futures:
            try:
                future.result(60)
            except SendError:
                continue  # counted by the callback
    times = sorted(answered_s)
    copies = Counter(
        (message.body or b"").decode()
        for message in read_with_java(cluster, topic, cluster.version)
    )
    return Result(
        sent=count,
        lost=sum(1 for name in acked if not copies[name]),
        failed=dict(failed),
        doubled=sum(copies.values()) - len(copies),
        pauses_s={name: _pause(times, at_s) for name, at_s in faults.items()},
        by_address=dict(Counter(acked.values())),
    )


def _pause(times, began_s):
    """Return the longest time between answers in the ten seconds after a fault."""
    during = [began_s, *(at_s for at_s in times if began_s < at_s < began_s + 10)]
    return max((after - before for before, after in pairwise(during)), default=10.0)
