"""The official Python client (gRPC) as a process, with the arguments of `sender`.

It runs with that client's packages on its path, and needs `endpoints` beside them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib import import_module
from typing import Any

from benchmarks.rows import body_of
from benchmarks.sender.tally import Tally


def main(arguments: list[str]) -> None:
    """Warm up, say so, send, print the figures."""
    options = dict(argument.split("=", 1) for argument in arguments)
    client: Any = import_module("rocketmq")
    configuration = client.ClientConfiguration(options["endpoints"], client.Credentials())
    producer = client.Producer(configuration, (options["topic"],))
    producer.startup()
    tally = Tally(time.monotonic())
    sender = _Sender(client, producer, options, tally)
    send = sender.sync if options["mode"] == "sync" else sender.concurrent
    send(int(options.get("warmup", "1")))
    print("READY", flush=True)  # noqa: T201
    sys.stdin.readline()
    tally.restart(time.monotonic())
    cpu_s, began_s = time.process_time(), time.monotonic()
    send(int(options["messages"]))
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    figures = {**tally.as_dict(), "seconds": took_s, "cpu_s": cpu_s}
    print(json.dumps(figures), flush=True)  # noqa: T201
    producer.shutdown()


class _Sender:
    def __init__(self, client: Any, producer: Any, given: dict[str, str], tally: Tally) -> None:
        self._client = client
        self._producer = producer
        self._topic = given["topic"]
        self._size = int(given.get("size", "256"))
        self._inflight = int(given.get("inflight", "400"))
        self._tally = tally

    def sync(self, messages: int) -> None:
        """Send the messages one after the other."""
        for number in range(messages):
            message, began_s = self._message(number), time.monotonic()
            try:
                self._producer.send(message)
            except Exception as error:
                self._failed(began_s, error, number)
            else:
                self._tally.succeeded(began_s, time.monotonic(), range(number, number + 1))

    def concurrent(self, messages: int) -> None:
        """Send the messages with up to `inflight` of them in flight."""
        window = threading.BoundedSemaphore(self._inflight)

        def ended(future: Any, began_s: float, number: int) -> None:
            error = future.exception()
            if error is not None:
                self._failed(began_s, error, number)
            else:
                self._tally.succeeded(began_s, time.monotonic(), range(number, number + 1))
            window.release()  # last: when all room is back, the counters are read

        for number in range(messages):
            message = self._message(number)
            window.acquire()
            began_s = time.monotonic()
            future = self._producer.send_async(message)
            future.add_done_callback(lambda f, b=began_s, n=number: ended(f, b, n))
        for _ in range(self._inflight):
            window.acquire()

    def _message(self, number: int) -> Any:
        message = self._client.Message()
        message.topic = self._topic
        message.body = body_of(number, self._size)
        message.tag = "tag"
        message.keys = f"key{number}"
        return message

    def _failed(self, began_s: float, error: BaseException, number: int) -> None:
        numbers = range(number, number + 1)
        self._tally.failed_with(began_s, time.monotonic(), error, numbers, unknown=True)


if __name__ == "__main__":
    main(sys.argv[1:])
