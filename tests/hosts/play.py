"""The player of faults: senders on a client host, the fault, its end, and the result."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rocket_sink.cluster import DEFAULT_VERSION
from rocket_sink.producer.admin.admin import Admin
from tests.hosts import lanes, load, tables, witness, world
from tests.java_client import fetch_generations

WARM_S = 3.0
TAIL_S = 6.0
SHORT_SCALE = 0.4
PATIENT = {"sendMsgTimeout": 12_000}
PAUSE_LIMIT_MS = {"lanes": 13_000, "producer": 2000}
"""The longest pauses if another broker can take over.

A lane's first attempt at a silent broker takes a third of `deliveryTimeoutMs`, 10 s; a send's takes
a third of `sendMsgTimeout`, 1 s. Epochs take some seconds."""
SHORT_PAUSES = (
    f"A short pause is at most {PAUSE_LIMIT_MS['producer'] // 1000} s of `Producer`, "
    f"{PAUSE_LIMIT_MS['lanes'] // 1000} s of a stream."
)
BACK_LIMIT_MS = 2000
"""The longest time from a new master in the route to the first stored message."""


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        begin: makes the fault; `end` mends it. `end` returns the time (ms since 1970) after which
            every mode must go on within `BACK_LIMIT_MS`, or None.
        covered: another broker can take over, so no pause may be long.
        may_fail: messages of `Producer` may fail; lanes may never have dead letters.
        degraded: messages are stored less durably than asked for, and all senders are told so.
        may_skip: queues get offsets without a message.
        strict: the lanes keep the order of their keys, as the mode `ordered` does.
        options: further options of all senders.
    """

    name: str
    title: str
    begin: Callable[[Any], None]
    end: Callable[[Any], int | None]
    seconds: float = 15.0
    covered: bool = True
    may_fail: bool = False
    degraded: bool = False
    may_skip: bool = False
    strict: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    modes: Sequence[str] = load.MODES


class Field:
    """The hosts of some cases.

    Attributes:
        client: host of the senders.
        name_server: the senders' option nameServer.
        witness_at: a name server that lives.
        await_routes: waits until a topic's route has all brokers, so that the witness reads all.
    """

    def make_topic(self, topic):
        with Admin(nameServer=self.witness_at, timeout_s=60.0) as admin:
            admin.create_topic(topic, queues=4)
        self.await_routes(topic)


class Run:
    """A run of cases, one after the other, in one field."""

    def __init__(self, field, say, options):
        self._field, self._say = field, say
        self._scale = SHORT_SCALE if options.short else 1.0
        self._lanes = None
        if not options.no_spark:
            say("starting Spark")
            self._lanes = self._start("tests.hosts.lanes")
            self._heard(self._lanes)

    def end(self):
        """End the lanes' session."""
        if self._lanes is not None:
            self._lanes.stdin.close()
            self._lanes.wait()

    def _start(self, module, *arguments):
        host = self._field.client
        log = (host.disk / f"{module}.log").open("a")
        with log:
            return host.start(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
            )  # fmt: skip

    def _heard(self, process):
        line = process.stdout.readline()
        if not line:
            logs = "".join(
                file.read_text()[-4000:] for file in self._field.client.disk.glob("*.log")
            )
            raise AssertionError(f"a sender died: {logs}")
        return line

    def _ask(self, **command):
        self._lanes.stdin.write(json.dumps(command) + "\n")
        return json.loads(self._heard(self._lanes))

    def play(self, case):
        self._say(case.title)
        field, topic = self._field, f"case-{case.name}"
        folder = field.client.disk / case.name
        folder.mkdir()
        field.make_topic(topic)
        # A busy machine must not count as a fault of the network.
        options = {**(PATIENT if self._scale < 1 else {}), **case.options}
        plan = {"nameServer": field.name_server, "topic": topic, "options": options}
        if self._lanes is not None:
            order = {"ordering": "strict"} if case.strict else {}
            begin = {**plan, "options": {**plan["options"], **order}, "folder": str(folder)}
            self._ask(do="begin", lanes=lanes.LANES, **begin)
        report = folder / "report.json"
        plan = {**plan, "modes": case.modes, "report": str(report)}
        sender = self._start("tests.hosts.load", json.dumps(plan))
        self._heard(sender)
        time.sleep(WARM_S * self._scale)
        since_ms = time.time_ns() // 1_000_000
        case.begin(field)
        time.sleep(case.seconds * self._scale)
        back_at_ms = case.end(field)
        time.sleep(TAIL_S * self._scale)
        sender.stdin.write("stop\n")
        self._heard(sender)
        sender.wait()
        by_lane = self._ask(do="end") if self._lanes is not None else {}
        by_mode = json.loads(report.read_text())
        field.await_routes(topic)
        stored = witness.read(field.witness_at, topic, may_skip=case.may_skip)
        rows = {}
        for mode, mode_report in {**by_mode, **by_lane}.items():
            is_lane = mode in lanes.LANES
            told = (witness.told_by_lane if is_lane else witness.told_by_producer)(mode_report)
            figures = witness.finding(
                mode, told, stored, since_ms, back_at_ms=back_at_ms,
                ordered=mode == "ordered" or (case.strict and is_lane),
            )  # fmt: skip
            row = rows[mode] = {
                **asdict(figures), "broken": broken_promises(figures, case, lane=is_lane),
                "causes": sorted(mode_report["causes"], key=mode_report["causes"].get)[-3:],
                "errors": mode_report.get("errors", []),
            }  # fmt: skip
            self._say(f"  {mode:8} {tables.figures(row)} {'; '.join(row['broken']) or 'held'}")
            for text in (*row["causes"], *row["errors"]):
                self._say(f"           {text}")
        return {
            "name": case.name, "title": case.title, "seconds": case.seconds,
            "options": options, "covered": case.covered, "may_fail": case.may_fail,
            "rows": rows,
        }  # fmt: skip


def broken_promises(figures, case, *, lane):
    """Return a text for each broken promise."""
    limit_ms = PAUSE_LIMIT_MS["lanes" if lane else "producer"]
    back_ms = figures.back_ms or 0
    checks = {
        f"{figures.lost} acknowledged messages are lost": figures.lost,
        f"{figures.unannounced} messages are doubled in silence": figures.unannounced,
        f"{figures.denied} messages are stored that were said not to be": figures.denied,
        f"{figures.disordered} messages are out of order": figures.disordered,
        "the stream failed, or its accounts do not add up": not figures.accounted,
        f"{figures.failed} messages failed": figures.failed and (lane or not case.may_fail),
        "nothing was told to be degraded": case.degraded and not figures.degraded,
        f"a pause of {figures.pause_ms / 1000:.1f} s, longer than {limit_ms / 1000:g} s": (
            case.covered and figures.pause_ms > limit_ms
        ),
        f"on again {back_ms / 1000:.1f} s after the new route": back_ms > BACK_LIMIT_MS,
    }
    return [text for text, wrong in checks.items() if wrong]


def judged(results, cases):
    """Judge a stored run by today's promises."""
    run = json.loads(results.read_text())
    by_name = {case.name: case for case in cases}
    order = list(by_name)
    run["cases"].sort(key=lambda played: order.index(played["name"]))
    names = [field.name for field in fields(witness.Finding)]
    for played in run["cases"]:
        case = by_name[played["name"]]
        played |= {"covered": case.covered, "may_fail": case.may_fail, "title": case.title}
        for mode, row in played["rows"].items():
            figures = witness.Finding(**{name: row[name] for name in names})
            row["broken"] = broken_promises(figures, case, lane=mode in lanes.LANES)
    return run


def run_command(module, about, cases, short, play, results, write_page, prepare=lambda names: None):
    """Run the command of a table's module. Return its exit code, 1 if a promise was broken.

    Args:
        short: names of the cases for CI.
        play: function of cases, `say` and `options` (short, no_spark) that yields the result of
            each case.
        results: the stored run, from which `write_page` makes a page.
        prepare: called with the names of the cases, while there is a network.
    """
    parser = argparse.ArgumentParser(module, description=about.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=[case.name for case in cases])
    parser.add_argument("--short", action="store_true", help="the form for CI: prints its results")
    parser.add_argument("--no-spark", action="store_true", help="only the modes of Producer")
    parser.add_argument("--out", type=Path, default=results, help="file of the results (JSON)")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    options = parser.parse_args()
    if options.page:
        write_page()
        return 0
    wanted = options.only or (short if options.short else [case.name for case in cases])
    if not world.inside():
        fetch_generations()
        prepare(wanted)
    world.enter(module)
    began = time.monotonic()

    def say(text):
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    chosen = [case for case in cases if case.name in wanted]
    run = {"version": DEFAULT_VERSION, "cases": []}
    for case in play(chosen, say, options):
        run["cases"].append(case)
        if not options.short:
            tables.store(options.out, run, whole=not options.only)
    if options.short:
        print(json.dumps(run))
    elif options.out == results:
        write_page()
    return int(any(row["broken"] for case in run["cases"] for row in case["rows"].values()))
