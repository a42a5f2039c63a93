"""The faults: drawn from a seed, applied to a place and a driver."""

import contextlib
import itertools
import random
import time
from dataclasses import dataclass

import psutil

_READY_S = 300
_NETWORK = ("drop", "latency", "loss")
KINDS = (
    "broker killed", "broker frozen", "workers killed", "executor killed", "driver killed",
    *_NETWORK,
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault to apply.

    Attributes:
        broker: the number of the broker that it hits, if it is a broker's fault.
        seconds: its duration.
        strength: 0 to 1, of a latency or a loss.
        quiet_s: the time without a fault before it.
    """

    kind: str
    broker: int
    seconds: float
    strength: float
    quiet_s: float

    def __str__(self):
        name = f"broker-{'ab'[self.broker]}"
        return {
            "broker killed": f"{name} killed, back after {self.seconds:.0f} s",
            "broker frozen": f"{name} frozen for {self.seconds:.0f} s",
            "workers killed": "Python workers killed",
            "executor killed": "an executor killed",
            "driver killed": "the driver killed and started again",
            "drop": f"{name}: all packets dropped for {self.seconds:.0f} s",
            "latency": f"{name}: {self.latency_ms:.0f} ms each way for {self.seconds:.0f} s",
            "loss": f"{name}: {self.loss:.0%} of packets lost for {self.seconds:.0f} s",
        }[self.kind]

    @property
    def latency_ms(self):
        return 200 + 800 * self.strength

    @property
    def loss(self):
        return 0.05 + 0.25 * self.strength


def draw(seed, *, quiet_s):
    """Yield faults without end: all kinds in a random order, again and again.

    A driver dies only in every third round: growth shows only in drivers that live long.
    """
    rng = random.Random(seed)
    for number in itertools.count():
        kinds = [kind for kind in KINDS if kind != "driver killed" or number % 3 == 0]
        for kind in rng.sample(kinds, len(kinds)):
            yield Fault(
                kind, rng.randrange(2), rng.uniform(4, 15), rng.random(), rng.uniform(*quiet_s)
            )


def apply(fault, place, spark):
    """Apply a fault; return when it is over."""
    if fault.kind in _NETWORK:
        impairment = {
            "drop": {"loss_in": 1.0, "loss_out": 1.0},
            "latency": {"delay_ms": fault.latency_ms},
            "loss": {"loss_in": fault.loss, "loss_out": fault.loss},
        }[fault.kind]
        host = place.hosts[fault.broker]
        host.impair(**impairment)
        time.sleep(fault.seconds)
        host.heal()
    elif fault.kind == "driver killed":
        spark.kill()
        spark.start()
    elif fault.kind == "executor killed":
        _kill(spark.executors()[:1])
    elif fault.kind == "workers killed":
        _kill(spark.workers()[: 1 + int(3 * fault.strength)])
    else:
        broker = place.brokers[fault.broker]
        if fault.kind == "broker killed":
            broker.kill()
            time.sleep(fault.seconds)
            broker.restart(_READY_S)
        else:
            broker.freeze()
            time.sleep(fault.seconds)
            broker.thaw()


def _kill(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
