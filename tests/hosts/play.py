"""Plays faults: senders on a client host, the fault, its end, and what came of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from rocket_sink.cluster import DEFAULT_VERSION
from tests.hosts import lanes, load, tables, witness, world
from tests.hosts.bed import Host
from tests.java_client import fetch_generations

WARM_S = 3.0
TAIL_S = 6.0
SHORT_SCALE = 0.4
PATIENT = {"sendMsgTimeout": 12_000}
PAUSE_LIMIT_MS = {"lanes": 13_000, "producer": 2000}
"""Where another broker will do. At a silent broker a lane's first attempt takes a third of
`deliveryTimeoutMs`, 10 s, a send's a third of `sendMsgTimeout`, 1 s. Epochs take some seconds."""
BACK_LIMIT_MS = 2000
"""From the moment in which the route has a new master to the first message that is stored."""


class Field(Protocol):
    """The hosts of some cases.

    Attributes:
        client: host of the senders.
        name_server: the option nameServer for them.
        witness_at: a name server that lives.
    """

    client: Host
    name_server: str

    @property
    def witness_at(self) -> str: ...

    def make_topic(self, topic: str) -> None: ...

    def await_routes(self, topic: str) -> None:
        """Wait until the route has all brokers, so that the witness reads all."""


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        begin: makes it; `end` mends it. What `end` returns is the time (ms since 1970) from which
            on every mode must go on within `BACK_LIMIT_MS`; None: there is none.
        covered: another broker will do, so no pause may be long.
        may_fail: messages of `Producer` may fail; dead letters of the lanes may not.
        degraded: messages are stored less durably than asked for, and all senders are told so.
        may_skip: queues get offsets without a message.
        strict: the lanes keep the order of their keys, as the mode `ordered` does.
        options: of all senders, besides the defaults.
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


class Run:
    """Cases one after the other, in one field."""

    def __init__(self, field: Field, say: Callable[[str], None], *, spark: bool, scale: float):
        self._field, self._say, self._scale = field, say, scale
        self._lanes: subprocess.Popen[str] | None = None
        if spark:
            say("starting Spark")
            self._lanes = self._start("tests.hosts.lanes")
            self._heard(self._lanes)

    def end(self) -> None:
        """End the lanes' session."""
        if self._lanes is not None:
            assert self._lanes.stdin is not None
            self._lanes.stdin.close()
            self._lanes.wait()

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        host = self._field.client
        log = (host.disk / f"{module}.log").open("a")
        with log:
            return host.start(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
            )  # fmt: skip

    def _heard(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            logs = "".join(
                file.read_text()[-4000:] for file in self._field.client.disk.glob("*.log")
            )
            raise AssertionError(f"a sender died: {logs}")
        return line

    def _ask(self, **command: Any) -> Any:
        assert self._lanes is not None and self._lanes.stdin is not None
        self._lanes.stdin.write(json.dumps(command) + "\n")
        return json.loads(self._heard(self._lanes))

    def play(self, case: Case) -> dict[str, Any]:
        self._say(case.title)
        field, topic = self._field, f"case-{case.name}"
        folder = field.client.disk / case.name
        folder.mkdir()
        field.make_topic(topic)
        plan = {"nameServer": field.name_server, "topic": topic, "options": dict(case.options)}
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
        assert sender.stdin is not None
        sender.stdin.write("stop\n")
        self._heard(sender)
        sender.wait()
        by_lane = self._ask(do="end") if self._lanes is not None else {}
        by_mode = json.loads(report.read_text())
        told = {mode: witness.told_by_producer(one) for mode, one in by_mode.items()}
        told |= {lane: witness.told_by_lane(one) for lane, one in by_lane.items()}
        field.await_routes(topic)
        stored = witness.read(field.witness_at, topic, may_skip=case.may_skip)
        rows = {
            mode: self._row(
                case,
                mode,
                witness.finding(
                    mode,
                    one,
                    stored,
                    since_ms,
                    back_at_ms=back_at_ms,
                    ordered=mode == "ordered" or (case.strict and mode in lanes.LANES),
                ),
            )
            for mode, one in told.items()
        }
        for mode, one in {**by_mode, **by_lane}.items():
            rows[mode]["causes"] = sorted(one["causes"], key=one["causes"].get)[-3:]
            rows[mode]["errors"] = one.get("errors", [])
        for mode, row in rows.items():
            self._say(f"  {mode:8} {tables.figures(row)} {'; '.join(row['broken']) or 'held'}")
            for text in (*row["causes"], *row["errors"]):
                self._say(f"           {text}")
        return {
            "name": case.name, "title": case.title, "seconds": case.seconds,
            "options": dict(case.options), "covered": case.covered, "may_fail": case.may_fail,
            "rows": rows,
        }  # fmt: skip

    def _row(self, case: Case, mode: str, found: witness.Finding) -> dict[str, Any]:
        broken = broken_promises(found, case, lane=mode in lanes.LANES)
        return {**asdict(found), "broken": broken}


def broken_promises(found: witness.Finding, case: Case, *, lane: bool) -> list[str]:
    """What was promised and is not so."""
    limit_ms = PAUSE_LIMIT_MS["lanes" if lane else "producer"]
    back_ms = found.back_ms or 0
    checks = {
        f"{found.lost} acknowledged messages are lost": found.lost,
        f"{found.unannounced} messages are doubled in silence": found.unannounced,
        f"{found.denied} messages are stored that were said not to be": found.denied,
        f"{found.disordered} messages are out of order": found.disordered,
        "the stream failed, or its accounts do not add up": not found.accounted,
        f"{found.failed} messages failed": found.failed and (lane or not case.may_fail),
        "nothing was told to be degraded": case.degraded and not found.degraded,
        f"a pause of {found.pause_ms / 1000:.1f} s, longer than {limit_ms / 1000:g} s": (
            case.covered and found.pause_ms > limit_ms
        ),
        f"on again {back_ms / 1000:.1f} s after the new route": back_ms > BACK_LIMIT_MS,
    }
    return [text for text, wrong in checks.items() if wrong]


def judged(results: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """A stored run, by today's promises."""
    run: dict[str, Any] = json.loads(results.read_text())
    by_name = {case.name: case for case in cases}
    order = list(by_name)
    run["cases"].sort(key=lambda played: order.index(played["name"]))
    names = [field.name for field in fields(witness.Finding)]
    for played in run["cases"]:
        case = by_name[played["name"]]
        played |= {"covered": case.covered, "may_fail": case.may_fail, "title": case.title}
        for mode, row in played["rows"].items():
            found = witness.Finding(**{name: row[name] for name in names})
            row["broken"] = broken_promises(found, case, lane=mode in lanes.LANES)
    return run


Play = Callable[..., Iterator[dict[str, Any]]]
"""Of cases, `say`, `spark` and `scale`; results of each case."""


def run_command(
    module: str, about: str, cases: Sequence[Case], short: Sequence[str], play: Play,
    results: Path, page_file: Path, page: Callable[[Mapping[str, Any]], str],
) -> int:  # fmt: skip
    """The command of a table's module; its exit code: 1 when a promise was broken.

    Args:
        short: names of the cases of the form for CI.
        play: plays cases.
        results: the stored run, from which `page` makes the text of `page_file`.
    """
    parser = argparse.ArgumentParser(module, description=about.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=[case.name for case in cases])
    parser.add_argument("--short", action="store_true", help="the form for CI: prints its results")
    parser.add_argument("--no-spark", action="store_true", help="only the modes of Producer")
    parser.add_argument("--out", type=Path, default=results, help="file of the results (JSON)")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    given = parser.parse_args()
    if given.page:
        page_file.write_text(page(judged(results, cases)))
        return 0
    if not world.inside():
        fetch_generations()
    world.enter(module)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    wanted = given.only or (short if given.short else [case.name for case in cases])
    chosen = [case for case in cases if case.name in wanted]
    if given.short:
        # A busy machine is no fault of the network.
        chosen = [replace(case, options={**PATIENT, **case.options}) for case in chosen]
    found: dict[str, Any] = {"version": DEFAULT_VERSION, "cases": []}
    scale = SHORT_SCALE if given.short else 1.0
    for case in play(chosen, say, spark=not given.no_spark, scale=scale):
        found["cases"].append(case)
        if not given.short:
            tables.store(given.out, found, whole=not given.only)
    if given.short:
        print(json.dumps(found))
    elif given.out == results:
        page_file.write_text(page(judged(results, cases)))
    return int(any(row["broken"] for case in found["cases"] for row in case["rows"].values()))
