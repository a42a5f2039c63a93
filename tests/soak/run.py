"""A soak in progress: threads that feed, look and read, and one fault after the other."""

import json
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict

from rocket_sink.cluster import DEFAULT_VERSION
from rocket_sink.producer.admin.admin import Admin
from tests.clusters import repair
from tests.crash import ledger_log
from tests.crash.files import write_whole
from tests.crash.judge import judge
from tests.soak import faults, flat
from tests.soak.feed import Source
from tests.soak.place import Place
from tests.soak.spark import Spark
from tests.soak.stored import Reader, Topic

LANES = {
    "foreach": {"delivery": "at_least_once", "ordering": "strict"},
    "foreach_batch": {"delivery": "effectively_once", "ordering": "strict"},
    "source": {"delivery": "at_least_once", "ordering": "none"},
}
_TRIGGER = "5 seconds"
_FILE_S = 5.0
_SAMPLE_S = 15.0
_READ_S = 45.0
_PROGRESS_S = 30.0
_CATCH_UP_S = 420.0
"""The longest time from a fault's end until epochs cover all rows from before."""
_QUIET_S = (20.0, 50.0)
_MAINTENANCE_S = 400.0


class Soak:
    """A soak: call `play` once; `stop`, from a signal handler, ends it early and in order. Its
    terms are the arguments of the command line: seconds, seed, rate, out, samples."""

    def __init__(self, folder, terms):
        self._folder, self._terms = folder, terms
        rows = max(1, round(terms.rate * _FILE_S / len(LANES)))
        self._sources = {name: Source(folder / name, rows) for name in LANES}
        self._topics = {name: Topic(source) for name, source in self._sources.items()}
        self._began_s = time.monotonic()
        self._stopped = threading.Event()
        self._done = threading.Event()
        self._feeding = threading.Event()
        self._samples = []
        self._faults = []
        self._broken = []
        self._missing = dict.fromkeys(LANES, 0)
        self._unread = []
        self._lanes = {}
        self._ended = "not ended"
        self._fed = 0

    def stop(self):
        self._stopped.set()

    @property
    def _elapsed_s(self):
        return time.monotonic() - self._began_s

    def _say(self, text):
        at = int(self._elapsed_s)
        print(f"{at // 3600}:{at // 60 % 60:02d}:{at % 60:02d}  {text}", flush=True)

    def _wrong(self, text):
        if text not in self._broken:
            self._broken.append(text)
            self._say(f"BROKEN: {text}")

    # --- the run ----------------------------------------------------------------------------

    def play(self):
        """Play the soak, store its results and return them."""
        self._say(f"seed {self._terms.seed}, {self._terms.seconds / 60:.0f} minutes")
        try:
            with Place(self._folder) as place:
                self._play(place)
        except Exception:
            self._wrong(f"the soak itself: {traceback.format_exc()[-3000:]}")
        results = self._results()
        self._store(results)
        self._say(f"{len(self._broken)} promises broken" if self._broken else "all was held")
        return results

    def _play(self, place):
        lanes = [
            {"name": name, "topic": f"soak-{name}", "options": dict(options)}
            for name, options in LANES.items()
        ]
        with Admin(nameServer=place.name_server, timeout_s=60.0) as admin:
            for lane in lanes:
                admin.create_topic(lane["topic"], queues=4)
        for source in self._sources.values():
            source.write()
        spark = Spark(place, self._folder, lanes, _TRIGGER)
        reader = Reader(place.name_server, self._folder / "java.log")
        jobs = [
            (self._feed, 0.2), (lambda: self._look_at_streams(spark), _SAMPLE_S),
            (lambda: self._read(reader), _READ_S), (lambda: self._progress(spark), _PROGRESS_S),
        ]  # fmt: skip
        threads = [
            threading.Thread(target=self._again_and_again, args=job, daemon=True) for job in jobs
        ]
        try:
            self._say("starting Spark")
            spark.start()
            self._feeding.set()
            for thread in threads:
                thread.start()
            self._break_things(place, spark)
            self._ended = "stopped early" if self._stopped.is_set() else "run to its end"
            self._finish(place, spark, reader)
        finally:
            self._done.set()
            spark.kill()
            reader.close()

    def _again_and_again(self, job, every_s):
        while not self._done.wait(every_s):
            try:
                job()
            except Exception:
                if not self._done.is_set():
                    self._wrong(f"the soak itself: {traceback.format_exc()[-2000:]}")

    def _break_things(self, place, spark):
        end_s = self._elapsed_s + self._terms.seconds
        half_s, maintained = self._elapsed_s + self._terms.seconds / 2, False
        self._await_covered(spark, "the start")
        for fault in faults.draw(self._terms.seed, quiet_s=_QUIET_S):
            # The last fault leaves time to recover.
            if self._elapsed_s + fault.quiet_s + 60 > end_s or self._stopped.wait(fault.quiet_s):
                break
            if not maintained and self._elapsed_s > half_s:
                self._maintain(place)
                maintained = True
            self._say(f"fault {len(self._faults) + 1}: {fault}")
            record = {
                **asdict(fault), "text": str(fault), "at_s": round(self._elapsed_s), "back_s": None,
            }  # fmt: skip
            self._faults.append(record)
            try:
                faults.apply(fault, place, spark)
            except Exception:
                self._wrong(f"{fault}: {traceback.format_exc()[-2000:]}")
                repair(place)
                if not spark.alive:
                    spark.start()
            over_s = self._elapsed_s
            if self._await_covered(spark, str(fault)):
                record["back_s"] = round(self._elapsed_s - over_s, 1)
                self._say(f"  up to date {record['back_s']} s after its end")
        self._stopped.wait(max(0.0, end_s - self._elapsed_s))

    def _await_covered(self, spark, what):
        """Return whether all lanes catch up: with all files, and with one more while files come."""
        more = int(self._feeding.is_set())
        wanted = {name: source.files + more for name, source in self._sources.items()}
        until_s = self._elapsed_s + _CATCH_UP_S
        while any(self._sources[name].covered() < files for name, files in wanted.items()):
            if not spark.alive:
                self._wrong(f"after {what}: the driver ended by itself: {spark.log()[-1000:]}")
                spark.start()
            if self._elapsed_s > until_s:
                behind = [
                    f"{name} {files - self._sources[name].covered()}"
                    for name, files in wanted.items()
                ]
                self._wrong(
                    f"after {what}: not up to date in {_CATCH_UP_S:.0f} s; files behind: {behind}"
                )
                return False
            time.sleep(0.5)
        return True

    def _maintain(self, place):
        """Maintain the ledgers as users do: beside the streams, by the commands."""
        for name in LANES:
            for command in ("optimize", "vacuum"):
                self._say(f"rocket-sink ledger {command} of {name}")
                words = ["ledger", command, "--ledger", str(self._folder / name / "ledger")]
                log = self._folder / f"{command}-{name}.log"
                process = place.start(
                    [sys.executable, "-m", "rocket_sink.cli", *words, "--master", "local[1]"], log
                )
                try:
                    code = process.wait(_MAINTENANCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = process.wait()
                if code:
                    self._wrong(
                        f"ledger {command} of {name}: code {code}: {log.read_text()[-800:]}"
                    )

    def _finish(self, place, spark, reader):
        self._feeding.clear()
        self._say("no more rows; the streams come to their end")
        self._await_covered(spark, "the end of the sources")
        self._look(spark)
        epochs_by_lane = spark.end()
        self._say("reading what is stored, for the last time")
        with Admin(nameServer=place.name_server, timeout_s=60.0) as admin:
            for name in LANES:
                admin.await_dispatched(f"soak-{name}")
        self._read(reader)
        for unread in self._unread:
            self._wrong(f"the Java client cannot read: {unread}")
        for process in spark.outlived:
            self._wrong(f"a killed driver left it running: {process}")
        errors = spark.stream_errors()
        for name, promise in LANES.items():
            self._lanes[name] = self._verdict(
                place, name, promise, epochs_by_lane[name], errors[name]
            )
        self._judge_flat()

    def _verdict(self, place, name, promise, rows, errors):
        source, topic = self._sources[name], self._topics[name]
        ledger = self._folder / name / "ledger"
        accounts = ledger_log.accounts(ledger, rows)
        expected = {(source.key(number), number) for number in range(source.written)}
        verdict = judge(expected, topic.copies(place.addresses), accounts)
        for what, count in verdict.faults(**promise).items():
            self._wrong(f"{name}: {what} {count}")
        if topic.strange:
            self._wrong(
                f"{name}: {len(topic.strange)} messages that no row is, {topic.strange[0]!r}"
            )
        if topic.skipped:
            self._wrong(f"{name}: the Java client skipped {topic.skipped[:3]}")
        return {
            **promise, **asdict(verdict), "rows": source.written, "epochs": source.epochs(),
            "files": source.files, "letters": len(accounts.letters),
            "announced": sum(epoch.duplicates_possible for epoch in accounts.epochs),
            "failures": len(errors), "errors": sorted({error[:300] for error in errors}),
        }  # fmt: skip

    def _judge_flat(self):
        for verdict in flat.judge(self._samples, self._elapsed_s):
            if verdict.grows:
                self._wrong(
                    f"{verdict.what}: {verdict.measure} grows by {verdict.growth:.1f}, from "
                    f"{verdict.first:.1f} to {verdict.last:.1f}; {verdict.limit:.1f} may be"
                )

    # --- what threads do --------------------------------------------------------------------

    def _feed(self):
        due = int(self._elapsed_s / _FILE_S)
        if self._feeding.is_set() and due > self._fed:
            self._fed = due
            for source in self._sources.values():
                source.write()

    def _look_at_streams(self, spark):
        # At the end the driver reads all accounts, which takes memory that no stream has taken.
        if self._feeding.is_set():
            self._look(spark)

    def _look(self, spark):
        folders = [self._folder / name for name in LANES]
        new = list(flat.look(spark, folders, self._elapsed_s))
        self._samples += new
        if self._terms.samples:
            with self._terms.samples.open("a") as file:
                file.writelines(json.dumps(asdict(sample), default=str) + "\n" for sample in new)

    def _read(self, reader):
        unread = []
        for name, topic in self._topics.items():
            covered = self._sources[name].covered() * self._sources[name].rows
            failed = reader.read(f"soak-{name}", topic)
            unread += [f"soak-{name} {text}" for text in failed]
            if not failed:
                self._missing[name] = topic.missing(covered)
        self._unread = unread

    def _progress(self, spark):
        results = self._results()
        self._store(results)
        newest = {}
        latest_s = self._samples[-1].at_s if self._samples else 0.0
        for sample in reversed(self._samples):
            if sample.at_s < latest_s:
                break
            newest.setdefault((sample.what, sample.measure), []).append(sample.value)
        memory = ", ".join(
            f"{what} {max(values):.0f}" for (what, measure), values in newest.items()
            if measure == "memory MB"
        )  # fmt: skip
        spool = sum(max(v) for (_, measure), v in newest.items() if measure == "spool files")
        failures = sum(map(len, spark.stream_errors().values()))
        self._say(
            f"rows {sum(source.written for source in self._sources.values()):,}, "
            f"stored {sum(len(topic.stored) for topic in self._topics.values()):,}, "
            f"epochs {sum(source.epochs() for source in self._sources.values())}, "
            f"faults {len(self._faults)}, streams failed {failures}, "
            f"lost so far {sum(self._missing.values())}; MB: {memory}; spool files {spool:.0f}"
        )

    # --- results ----------------------------------------------------------------------------

    def _results(self):
        judged = flat.judge(self._samples, self._elapsed_s) if self._samples else []
        return {
            "version": DEFAULT_VERSION, "seed": self._terms.seed, "rate": self._terms.rate,
            "elapsed_s": round(self._elapsed_s), "ended": self._ended,
            "sample_s": _SAMPLE_S, "broken": self._broken, "faults": self._faults,
            "lanes": self._lanes or self._so_far(), "flat": flat.as_rows(judged),
        }  # fmt: skip

    def _so_far(self):
        """Return the results of a soak that was ended by force: those known without the ledger."""
        return {
            name: {
                **promise, "rows": self._sources[name].written,
                "epochs": self._sources[name].epochs(), "lost": self._missing[name],
                "stored": len(self._topics[name].stored),
            }
            for name, promise in LANES.items()
        }  # fmt: skip

    def _store(self, results):
        write_whole(self._terms.out, json.dumps(results, indent=1) + "\n")
