"""Two proxies; the one in use is slow for a while, and killed later, while a producer sends."""

import threading
import time

from tests.clusters import make_topic
from tests.hosts import load, witness


def send_during_faults(cluster, proxies, seconds, frozen_s):
    """Send 1,000 messages a second: freeze the proxy in use after a quarter of the time for
    `frozen_s`, and kill the proxy in use after three quarters.

    Return the witness's finding, the sender's errors, and the addresses that sent answers.
    """
    topic = f"faults-{time.monotonic_ns()}"
    make_topic(cluster, topic)
    name_server = ";".join(proxy.address for proxy in proxies)
    mode = load.Mode("fast", topic, {"nameServer": name_server})

    def in_use():
        return next(proxy for proxy in proxies if proxy.address == mode.addresses[-1])

    mode.start()
    time.sleep(seconds / 4)
    since_ms, frozen = time.time_ns() // 1_000_000, in_use()
    frozen.freeze()
    threading.Timer(frozen_s, frozen.thaw).start()
    time.sleep(seconds / 2)
    in_use().kill()
    time.sleep(seconds / 4)
    mode.stop()
    report = mode.report(time.time_ns() // 1_000_000)
    stored = witness.read(cluster.name_server, topic, version=cluster.version)
    finding = witness.finding("fast", witness.told_by_producer(report), stored, since_ms)
    return finding, mode.causes, set(mode.addresses)
