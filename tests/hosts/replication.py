"""Replicated brokers: how `Producer` and the Spark lanes do at fail-overs and dead replicas.

    .venv/bin/python -m tests.hosts.replication                 # all cases, some ten minutes
    .venv/bin/python -m tests.hosts.replication --only failover
    .venv/bin/python -m tests.hosts.replication --page          # docs/clusters.md

Each replica has a host of its own. Results are stored in conf/clusters.json.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rocket_sink.cluster import DEFAULT_VERSION, admin
from rocket_sink.cluster.probe import Probe, ProbeFailed
from rocket_sink.errors import ClusterError, RocketSinkError
from rocket_sink.producer.admin.admin import Admin
from tests.hosts import load, nodes, tables
from tests.hosts.bed import Bed
from tests.hosts.play import BACK_LIMIT_MS, SHORT_PAUSES, Case, Field, Run, judged, run_command
from tests.producer.waiting import until

RESULTS = Path("conf/clusters.json")
PAGE = Path("docs/clusters.md")
SHORT = ("frozen", "failover")
"""The cases of CI: replicas that do not answer, and a master that dies."""

_CONTROLLER_PORT = 9878
_DLEDGER_PORT = 40911
_READY_S = 240.0
_ROUTED_S = 90.0


class Replicas(Field):
    """A name server, a client, and replicas of brokers; see the classes below.

    Attributes:
        replicas: by names of their hosts, under which clients reach them.
    """

    version = DEFAULT_VERSION

    def __init__(self, bed, say):
        self._bed = bed
        self.client = bed.host("client")
        say(f"starting {type(self).__name__}: {self.__doc__}")
        self._server = self._start_name_server()
        self.name_server = self._server.address
        self._server.wait_ready(_READY_S)
        self.replicas = {}
        self._start()

    def _start_name_server(self, **settings):
        host = self._bed.host("names")
        return nodes.name_server(host, version=self.version, **settings)

    def _replica(self, host, name, **settings):
        self.replicas[host] = nodes.broker(
            self._bed.host(host), name, [self.name_server],
            known_as=host, folder=host, version=self.version, **settings,
        )  # fmt: skip

    def _start_pairs(self, role, **settings):
        """Start two brokers with a slave each."""
        for name in ("broker-a", "broker-b"):
            self._replica(name, name, brokerRole=role, **settings)
            self._replica(f"{name}-slave", name, brokerRole="SLAVE", brokerId="1", **settings)
        self.await_masters("broker-a", "broker-b")

    @property
    def witness_at(self):
        return self.name_server

    def close(self):
        for node in (*self.replicas.values(), self._server):
            node.kill()

    def await_routes(self, topic):
        """Wait until all masters are in the route."""

        def is_complete():
            return set(self.masters(topic)) == set(self.masters())

        until(is_complete, _READY_S, 0.2, f"no route of {topic}")

    def masters(self, topic=""):
        """Return the addresses of the masters by broker name, of a topic's route or of all."""
        try:
            with Admin(nameServer=self.name_server, timeout_s=5.0) as tool:
                brokers = tool.topic_route(topic).brokers if topic else ()
                by_route = {broker.name: broker.addresses for broker in brokers}
                by_name = by_route if topic else tool.cluster()
        except RocketSinkError:
            return {}
        return {name: addresses[0] for name, addresses in by_name.items() if 0 in addresses}

    def await_masters(self, *names):
        """Wait until each broker has a master that stores messages."""
        probe = Probe()

        def stores():
            masters = self.masters()
            try:
                for name in names:
                    probe.check_broker(self.name_server, name, masters.get(name, "none:1"))
            except ProbeFailed:
                return False
            return True

        until(stores, _READY_S, 0.2, f"no masters of {names}")

    # --- faults -----------------------------------------------------------------------------

    def thaw(self):
        for replica in self.replicas.values():
            replica.thaw()

    def kill_master(self, name="broker-a"):
        address = self.masters()[name]
        self._dead = next(
            replica for replica in self.replicas.values() if replica.address == address
        )
        self._watch = _Watch(lambda: self.masters(name).get(name, address) != address)
        self._dead.kill()

    def await_failover(self):
        """Return the time of the new master in the route, and start the old one as its slave."""
        at_ms = self._watch.at_ms()
        self._dead.spawn()
        return at_ms


class _Watch:
    """A watch that notes the time at which a condition becomes true."""

    def __init__(self, check):
        self._found_ms = 0
        self._thread = threading.Thread(target=self._look, args=(check,), daemon=True)
        self._thread.start()

    def _look(self, check):
        until(check, _ROUTED_S, 0.05)
        self._found_ms = time.time_ns() // 1_000_000

    def at_ms(self):
        self._thread.join()
        assert self._found_ms, "no new master came into the route"
        return self._found_ms


class Slaves(Replicas):
    """two SYNC_MASTERs with a slave each, two copies of each message"""

    def _start(self):
        self._start_pairs("SYNC_MASTER", inSyncReplicas="2", slaveTimeout="500")
        until(self._copied, _READY_S, 0.2, "the slaves do not follow")

    def _copied(self):
        with Admin(nameServer=self.name_server, timeout_s=5.0) as tool:
            return all(1 in addresses for addresses in tool.cluster().values())

    def freeze(self):
        for name in ("broker-a-slave", "broker-b-slave"):
            self.replicas[name].freeze()

    def kill_slave(self):
        self.replicas["broker-a-slave"].kill()

    def start_slave(self):
        self.replicas["broker-a-slave"].spawn()


class Controlled(Replicas):
    """controller mode: a broker of two replicas, acknowledged by both (allAckInSyncStateSet)"""

    def _start_name_server(self):
        host = self._bed.host("names")
        self._controller = f"{host.address}:{_CONTROLLER_PORT}"
        return nodes.name_server(
            host, version=self.version, enableControllerInNamesrv="true",
            controllerDLegerGroup="group1", controllerDLegerSelfId="n0",
            controllerDLegerPeers=f"n0-{self._controller}", mappedFileSize=str(16 << 20),
            scanNotActiveBrokerInterval="1000",
        )  # fmt: skip

    def _start(self):
        for host in ("replica-0", "replica-1"):
            self._replica(
                host, "broker-a", brokerId="-1", brokerRole="SLAVE", enableControllerMode="true",
                controllerAddr=self._controller, allAckInSyncStateSet="true", slaveTimeout="500",
                controllerHeartBeatTimeoutMills="3000",
            )  # fmt: skip
        self.await_masters("broker-a")
        self.await_sync()

    def await_sync(self):
        """Wait until both replicas are in the sync state set, by the admin tool."""

        def both():
            try:
                states = admin(
                    self.name_server, "getSyncStateSet", "-a", self._controller, "-b", "broker-a",
                    version=self.version,
                )  # fmt: skip
            except ClusterError:
                # The tool's own wait for the controller's answer may end on a busy machine.
                return False
            return states.partition("#NotInSyncReplica")[0].count("InSyncReplica:") == 2

        until(both, _READY_S, 0.2, "the replicas do not come into sync")

    def make_topic(self, topic):
        self.await_sync()
        super().make_topic(topic)

    def _slave(self):
        master = self.masters()["broker-a"]
        return next(replica for replica in self.replicas.values() if replica.address != master)

    def freeze(self):
        self._slave().freeze()


class Acting(Replicas):
    """slaves that act for a dead master (enableSlaveActingMaster), two brokers"""

    def _start_name_server(self):
        return super()._start_name_server(supportActingMaster="true")

    def _start(self):
        self._start_pairs("ASYNC_MASTER", enableSlaveActingMaster="true")

    def kill_master(self, name="broker-a"):
        self.replicas[name].kill()

    def start_master(self):
        broker = self.replicas["broker-a"]
        broker.spawn()
        watch = _Watch(lambda: self.masters("broker-a").get("broker-a") == broker.address)
        return watch.at_ms()


class Raft(Replicas):
    """DLedger of RocketMQ 4.9.7: a broker of three peers"""

    version = "4.9.7"

    def _start(self):
        hosts = [self._bed.host(f"peer-{number}") for number in range(3)]
        peers = ";".join(
            f"n{number}-{host.address}:{_DLEDGER_PORT}" for number, host in enumerate(hosts)
        )
        for number, host in enumerate(hosts):
            self.replicas[host.name] = nodes.broker(
                host, "broker-a", [self.name_server], known_as=host.name, folder=host.name,
                version=self.version, enableDLegerCommitLog="true", dLegerGroup="broker-a",
                dLegerPeers=peers, dLegerSelfId=f"n{number}",
            )  # fmt: skip
        self.await_masters("broker-a")


class Mapped(Replicas):
    """a static topic: eight queues that move from one broker to the other"""

    def _start(self):
        for name in ("broker-a", "broker-b"):
            self._replica(name, name)
        self.await_masters("broker-a", "broker-b")

    def make_topic(self, topic):
        self._topic = topic
        admin(
            self.name_server, "updateStaticTopic", "-t", topic, "-qn", "8", "-c", "DefaultCluster"
        )
        self.await_routes(topic)

    def remap(self):
        admin(self.name_server, "remappingStaticTopic", "-t", self._topic, "-b", "broker-b")


_ALL_MODES = (*load.MODES, "ordered")
_LONG = {"sendMsgTimeout": 60_000, "retryTimesWhenSendFailed": 30}
"""Options for a dead master: it refuses at once, and the default attempts end in two seconds."""


def _case(name, title, begin, end, **more):
    return Case(name, title, begin, end, **{"covered": False, "modes": _ALL_MODES, **more})


LAYOUTS = {
    Slaves: (
        _case("slaves_frozen", "SYNC_MASTER: both slaves do not answer",
              Slaves.freeze, Slaves.thaw, degraded=True),
        _case("slave_killed", "SYNC_MASTER: one of two slaves is dead",
              Slaves.kill_slave, Slaves.start_slave, covered=True, modes=load.MODES),
    ),
    Controlled: (
        _case("frozen", "controller mode: the other replica does not answer",
              Controlled.freeze, Controlled.thaw, seconds=8.0, degraded=True),
        _case("failover", "controller mode: the master dies", Controlled.kill_master,
              Controlled.await_failover, seconds=5.0, options=_LONG, strict=True),
        _case("failover_again", "controller mode: the next master dies", Controlled.kill_master,
              Controlled.await_failover, seconds=5.0, options=_LONG, strict=True),
    ),
    Acting: (
        _case("acting", "acting master: a master dies, its slave is read only",
              Acting.kill_master, Acting.start_master, options=_LONG, strict=True),
    ),
    Mapped: (
        _case("remapped", "static topic: its queues move to the other broker",
              Mapped.remap, lambda at: None, seconds=5.0, options=_LONG, strict=True,
              # The offsets of a moved queue go on at the next ten thousand.
              may_skip=True),
    ),
    Raft: (
        _case("raft", "DLedger of 4.9.7: the leader dies", Raft.kill_master,
              Raft.await_failover, seconds=5.0, options=_LONG, strict=True),
    ),
}  # fmt: skip
CASES = [case for cases in LAYOUTS.values() for case in cases]


def write_page():
    """Write the tables of the page from the stored results, without a run."""
    results = judged(RESULTS, CASES)
    limits = {"covered": "nothing fails, short pause", "open": "nothing fails"}
    more = {"back_ms": "on again s", "degraded": "degraded"}
    table = tables.verdicts(results["cases"], limits, **more)
    head = (
        f"RocketMQ {results['version']}. Where a master dies every sender goes on "
        f"{BACK_LIMIT_MS / 1000:g} s after the route has the next one, at the latest. "
    )
    text = (
        f"{head}{SHORT_PAUSES}\n\n{table}\n## By mode\n\n{tables.modes(results['cases'], **more)}"
    )
    tables.write_parts(PAGE, {"replication": text})


def play(cases, say, options):
    """Play cases and yield their results."""
    for layout, all_cases in LAYOUTS.items():
        names = [case.name for case in all_cases]
        chosen = [case for case in cases if case.name in names]
        if not chosen:
            continue
        with Bed() as bed:
            field = layout(bed, say)
            run = Run(field, say, options)
            for case in chosen:
                yield run.play(case)
            run.end()
            field.close()


if __name__ == "__main__":
    raise SystemExit(run_command(__spec__.name, __doc__, CASES, SHORT, play, RESULTS, write_page))
