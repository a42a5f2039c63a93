"""The conductor runs driver processes side by side and lets the scheduled events happen."""

import json
import os
import shutil
import time

from rocket_sink.errors import RocketSinkError

from .cell import Cell
from .files import write_whole
from .processes import LOCAL_CLUSTER, Driver, await_gone, kill
from .schedule import EVENTS

_POLL_S = 0.05
_FREEZE_S = 3.0
_DEADLINE_S = 1500.0


class Round:
    """Schedules that are played at once on one cluster. `cells` has the results after `play`."""

    def __init__(self, schedules, cluster, folder):
        self._cluster = cluster
        self._folder = folder
        self.cells = [
            Cell(schedule, folder / f"{number:03d}", cluster, number)
            for number, schedule in enumerate(schedules)
        ]
        groups = {name: self._of(name) for name in ("local", "killed", "executors")}
        rivals = self._at_event("two_drivers")
        # Each cell may have one task that waits at its moment; the others end by themselves.
        master = f"local[{len(self.cells) + 2},4]"
        # A JVM takes longer than most cells, so "local" also runs cells of "killed" later.
        self._local = Driver("local", master, groups["local"], folder, later=groups["killed"])
        self._killed = Driver("killed", master, groups["killed"], folder, later=rivals)
        # Cells of executors run one by one: when an executor dies, the next cell begins.
        master = f"local-cluster[{min(2, len(groups['executors']))},4,1024]"
        self._executors = Driver("executors", master, groups["executors"], folder, LOCAL_CLUSTER)
        self._jobs = [self._steps(cell) for cell in groups["local"] + groups["executors"]]
        self._jobs += [self._brokers(), self._kill_and_start_again()]

    def _of(self, group):
        return [cell for cell in self.cells if EVENTS[cell.schedule.event].group == group]

    @property
    def refusals(self):
        """The errors of each lane without `allowSpeculation` when speculation is on."""
        return dict(self._executors.report["refusals"])

    def play(self):
        """Play all cells.

        Raises:
            AssertionError: a driver died by itself, or the round did not end.
        """
        for cell in self.cells:
            cell.prepare()
        drivers = [self._local, self._killed, self._executors]
        until_s = time.monotonic() + _DEADLINE_S
        try:
            for driver in drivers:
                if driver.cells or driver.later:
                    driver.start()
            while not all(self._ended(cell) for cell in self.cells):
                self._jobs = [job for job in self._jobs if next(job, self) is not self]
                for driver in drivers:
                    driver.check()
                waiting = [cell.folder.name for cell in self.cells if not self._ended(cell)]
                assert time.monotonic() < until_s, f"no end of {waiting}: {self._folder}"
                time.sleep(_POLL_S)
        finally:
            for driver in drivers:
                driver.end()
            for broker in self._cluster.brokers:
                broker.thaw()
        for cell in self.cells:
            # If a cell had two drivers, the last one to end has seen all.
            done = max(cell.folder.glob("done.*.json"), key=lambda path: path.stat().st_mtime_ns)
            cell.result = json.loads(done.read_text())

    def _driver_of(self, cell):
        group = EVENTS[cell.schedule.event].group
        return self._executors if group == "executors" else self._local

    def _ended(self, cell):
        return self._driver_of(cell).is_done(cell)

    # The methods below are jobs: generators that are resumed until they end.

    def _steps(self, cell):
        if cell.schedule.moment:
            yield from _until(lambda: cell.reached or self._ended(cell))
            if not cell.reached:
                return
        if event := _EVENTS.get(cell.schedule.event):
            yield from event(self, cell)

    def _kill(self, cell):
        """Kill the worker or the executor, as the event's name says."""
        kill(_who(cell)[cell.schedule.event.removesuffix("_killed")])
        yield

    def _fail_task(self, cell):
        write_whole(cell.folder / "go", "fail")
        yield

    def _rival(self, cell):
        """Let the second driver end the query while the first one waits in the middle of it."""
        self._killed.begin(cell)
        yield from _until(lambda: self._killed.is_done(cell))
        write_whole(cell.folder / "go", "on")

    def _change_queues(self, cell):
        yield from _persist(lambda: cell.create_topic(queues=8))
        write_whole(cell.folder / "go", "on")
        yield from self._after_failure(cell, 1, cell.create_topic)

    def _after_failure(self, cell, number, repair):
        role = self._driver_of(cell).role
        failed = cell.folder / f"failed.{role}.{number}"
        yield from _until(lambda: failed.exists() or self._ended(cell))
        if not failed.exists():
            return
        yield from _persist(repair)
        write_whole(cell.folder / f"again.{role}.{number}", "again")
        yield from self._after_failure(cell, number + 1, lambda: None)

    def _delete_topic(self, cell):
        yield from self._first_stage(cell)
        yield from _persist(cell.keep_copies)
        yield from _persist(lambda: self._cluster.delete_topic(cell.topic))
        cell.take_late_files()
        write_whole(cell.folder / "stage.2", "")
        yield from self._after_failure(cell, 1, cell.create_topic)

    def _delete_checkpoint(self, cell):
        yield from self._first_stage(cell)
        shutil.rmtree(cell.folder / "checkpoint")
        write_whole(cell.folder / "stage.2", "")
        yield from self._after_failure(cell, 1, lambda: None)

    def _first_stage(self, cell):
        stage = cell.folder / "stage.1"
        yield from _until(lambda: stage.exists() or self._ended(cell))

    def _brokers(self):
        """Play an event once for all cells that wait for it, because brokers are shared."""
        first, second = self._cluster.brokers[:2]
        yield from _until(lambda: all(cell.has_queues or self._ended(cell) for cell in self.cells))
        if killing := self._at_event("broker_killed"):
            yield from self._all_reached(killing)
            first.kill()
            _go(killing)
            first.restart(300)
        if freezing := self._at_event("broker_frozen"):
            yield from self._all_reached(freezing)
            second.freeze()
            _go(freezing)
            until_s = time.monotonic() + _FREEZE_S
            yield from _until(lambda: time.monotonic() >= until_s)
            second.thaw()

    def _at_event(self, name):
        return [cell for cell in self.cells if cell.schedule.event == name]

    def _all_reached(self, cells):
        return _until(lambda: all(cell.reached or self._ended(cell) for cell in cells))

    def _kill_and_start_again(self):
        killed, cells = self._killed, self._killed.cells
        if not cells:
            return
        yield from _until(lambda: all(cell.reached or killed.is_done(cell) for cell in cells))
        # Rivals run in the same process. A rival never begins if its cell missed the moment.
        yield from _until(
            lambda: all(killed.is_done(cell) or self._ended(cell) for cell in killed.later)
        )
        killed.kill()
        waiting = [_who(cell) for cell in cells if cell.reached]
        # If a driver itself waits, its parent is this process, which does not end.
        pids = {pid for who in waiting for pid in (who["worker"], who["daemon"])}
        await_gone(pids - {os.getpid()})
        for cell in cells:
            (cell.folder / "armed.json").unlink(missing_ok=True)
            self._local.begin(cell)


_EVENTS = {
    "worker_killed": Round._kill, "executor_killed": Round._kill, "task_failed": Round._fail_task,
    "two_drivers": Round._rival, "queues_changed": Round._change_queues,
    "topic_deleted": Round._delete_topic,
    "checkpoint_deleted": Round._delete_checkpoint,
}  # fmt: skip


def _until(condition):
    while not condition():
        yield


def _persist(action):
    """Repeat a request to brokers: another cell may have killed or frozen one just now."""
    while True:
        try:
            return action()
        except RocketSinkError:
            yield


def _who(cell):
    return dict(json.loads((cell.folder / "reached.json").read_text()))


def _go(cells):
    for cell in cells:
        write_whole(cell.folder / "go", "on")
