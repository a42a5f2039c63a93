"""A process on a host that sends by `Producer` in each mode at steady rates until it is stopped.

The argument is a plan (JSON): nameServer, topic, modes, options, report (a file). The process
prints "sending" once each mode has an answer, and stops at a line on standard input. Message N of
mode M has the key M.N. The report has for each mode a list of [N, kind, announced].
`kind` is acked, degraded, not_sent, rejected or unknown; `announced` says whether the message may
be stored twice.
"""

import json
import sys
import threading
import time
from pathlib import Path

from rocket_sink import Message, Producer
from rocket_sink.errors import Outcome, SendError, UnknownOutcomeError

MODES = ("sync", "async", "batch", "paced")
_BODY = b"x" * 300
_BATCH = 30
_PER_S = {"sync": 50, "async": 100, "fast": 1000, "batch": 3, "ordered": 50}
_PACED = 50
_KINDS = {
    Outcome.ACKED: "acked", Outcome.ACKED_DEGRADED: "degraded", Outcome.NOT_SENT: "not_sent",
    Outcome.REJECTED: "rejected", Outcome.UNKNOWN: "unknown",
}  # fmt: skip


class Mode:
    """A mode of sending and the answers to its messages."""

    def __init__(self, name, topic, options):
        self.name, self.topic = name, topic
        if name == "paced":
            options = {**options, "maxMessagesPerSecond": _PACED}
        if name == "ordered":
            options = {**options, "ordering": "strict"}
        self.producer = Producer(**options)
        self.told = []
        self.causes = {}
        self.addresses = []
        """The address that sent each answer, in the order of the answers."""
        self._lock = threading.Lock()
        self._next = 0
        self._stop = threading.Event()
        work = self._send_async if name in ("async", "fast") else self._send
        self._threads = [
            threading.Thread(target=work, daemon=True) for _ in range(2 if name == "paced" else 1)
        ]

    def start(self):
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._stop.set()

    def report(self, ended_ms):
        """Await all answers and return them; the last message was submitted at `ended_ms`."""
        for thread in self._threads:
            thread.join()
        self.producer.close(60)
        return {"told": self.told, "causes": self.causes, "ended_ms": ended_ms}

    def _numbers(self, count):
        with self._lock:
            self._next += count
            return list(range(self._next - count, self._next))

    def _message(self, number):
        key = f"k{number % 8}" if self.name == "ordered" else None
        return Message(self.topic, _BODY, keys=(f"{self.name}.{number}",), sharding_key=key)

    def _answered(self, numbers, result):
        self.addresses.append(result.broker_address)
        self._note(numbers, result.outcome, result.maybe_duplicate)

    def _note(self, numbers, outcome, announced):
        with self._lock:
            self.told += [(number, _KINDS[outcome], announced) for number in numbers]

    def _failed(self, numbers, error):
        outcome = error.outcome if isinstance(error, SendError) else Outcome.UNKNOWN
        cause = f"{type(error).__name__}: {error}"[:300]
        with self._lock:
            self.causes[cause] = self.causes.get(cause, 0) + len(numbers)
        self._note(numbers, outcome, isinstance(error, UnknownOutcomeError))

    def _send(self):
        count = _BATCH if self.name == "batch" else 1
        for _ in self._ticks():
            numbers = self._numbers(count)
            messages = [self._message(number) for number in numbers]
            try:
                if self.name == "batch":
                    (result,) = self.producer.send_batch(messages)
                else:
                    result = self.producer.send(messages[0])
            except Exception as error:
                self._failed(numbers, error)
            else:
                self._answered(numbers, result)

    def _send_async(self):
        for _ in self._ticks():
            (number,) = self._numbers(1)
            try:
                self.producer.send_async(self._message(number), self._on_answer(number))
            except Exception as error:
                self._failed([number], error)

    def _on_answer(self, number):
        def on_answer(result, error):
            if error is not None:
                self._failed([number], error)
            else:
                self._answered([number], result)

        return on_answer

    def _ticks(self):
        """Yield at the mode's rate; missed ticks are not made up for."""
        period_s = 1 / _PER_S[self.name] if self.name in _PER_S else 0.0
        at_s = time.monotonic()
        while not self._stop.wait(max(0.0, at_s - time.monotonic())):
            at_s = max(at_s + period_s, time.monotonic())
            yield


def main(plan):
    options = {"nameServer": plan["nameServer"], **plan["options"]}
    modes = [Mode(name, plan["topic"], {**options, "instanceName": name}) for name in plan["modes"]]
    for mode in modes:
        mode.start()
    while not all(mode.told for mode in modes):
        time.sleep(0.05)
    print("sending", flush=True)
    sys.stdin.readline()
    for mode in modes:
        mode.stop()
    ended_ms = time.time_ns() // 1_000_000
    report = {mode.name: mode.report(ended_ms) for mode in modes}
    Path(plan["report"]).write_text(json.dumps(report))
    print("ended", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
