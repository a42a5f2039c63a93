"""Bad networks: how `Producer` and the Spark lanes do in each, as the Java client sees it.

    .venv/bin/python -m tests.hosts.networks                 # all cases, some ten minutes
    .venv/bin/python -m tests.hosts.networks --only drop --only hole
    .venv/bin/python -m tests.hosts.networks --page          # docs/networks.md from the stored run

Two brokers, two name servers and a client on hosts of their own. In each case all modes send at
steady rates for some seconds, a fault begins, ends, and they go on. Results are stored in
conf/networks.json, from which the page is made.
"""

import shutil
from pathlib import Path

from tests.hosts import nodes, tables
from tests.hosts.bed import Bed
from tests.hosts.play import PATIENT, SHORT_PAUSES, Case, Field, Run, judged, run_command

RESULTS = Path("conf/networks.json")
PAGE = Path("docs/networks.md")
SHORT = ("drop_out", "hole", "names")
"""The cases of CI: lost answers, frames that vanish by their size, names that move."""


class Networks(Field):
    """The hosts of all cases."""

    def __init__(self, bed, say):
        self.bed = bed
        self.names = [bed.host("names-1"), bed.host("names-2")]
        self.a, self.b = bed.host("broker-a"), bed.host("broker-b")
        self.spare, self.client = bed.host("spare"), bed.host("client")
        self.name_server = f"names:{nodes.NAME_SERVER_PORT}"
        bed.rename({"names": self.names[0].address})
        say("starting name servers and brokers")
        self.name_servers = [nodes.name_server(host) for host in self.names]
        for server in self.name_servers:
            server.wait_ready(120)
        self._addresses = [server.address for server in self.name_servers]
        self.brokers = [self._broker(self.a, "broker-a"), self._broker(self.b, "broker-b")]
        for broker in self.brokers:
            broker.wait_ready(180)

    def _broker(self, host, name):
        return nodes.broker(host, name, self._addresses, known_as=host.name)

    @property
    def witness_at(self):
        """Return the address of a name server that lives."""
        return next(server.address for server in self.name_servers if server.alive)

    def await_routes(self, topic):
        for broker in self.brokers:
            broker.wait_routed(topic, 180)

    # --- faults -----------------------------------------------------------------------------

    def one(self, **what):
        self.b.impair(**what)

    def both(self, **what):
        self.a.impair(**what)
        self.b.impair(**what)

    def heal(self):
        self.a.heal()
        self.b.heal()

    def change_names(self):
        """Point the name servers' name to the other one, and give broker-b another address."""
        self.name_servers[0].kill()
        self.b.move()
        self.bed.rename({"names": self.names[1].address, "broker-b": self.b.address})

    def restore_names(self):
        self.name_servers[0].spawn()
        self.name_servers[0].wait_ready(120)
        self.bed.rename({"names": self.names[0].address})

    def move_broker(self):
        """Move broker-b with its disk to another host while no name server lives."""
        for server in self.name_servers:
            server.kill()
        self.brokers[1].kill()
        shutil.move(self.b.disk / "broker-b", self.spare.disk / "broker-b")
        self.brokers[1] = self._broker(self.spare, "broker-b")

    def start_name_servers(self):
        for server in self.name_servers:
            server.spawn()
        for server in self.name_servers:
            server.wait_ready(120)


def _case(name, title, begin, end=Networks.heal, **more):
    return Case(name, title, begin, end, **more)


_ALL = {"covered": False, "may_fail": True}

CASES = (
    _case("none", "no fault", lambda at: None),
    _case("drop", "broker-b: all packets dropped", lambda at: at.one(loss_in=1, loss_out=1)),
    _case("drop_in", "broker-b: packets to it dropped", lambda at: at.one(loss_in=1)),
    _case("drop_out", "broker-b: packets from it dropped", lambda at: at.one(loss_out=1)),
    _case("drop_all", "both brokers: all packets dropped",
          lambda at: at.both(loss_in=1, loss_out=1), **_ALL),
    _case("reject", "broker-b: its port rejects", lambda at: at.one(reject=nodes.BROKER_PORT)),
    _case("latency", "broker-b: 2 s latency", lambda at: at.one(delay_ms=1000)),
    _case("latency_all", "both brokers: 2 s latency", lambda at: at.both(delay_ms=1000),
          options=PATIENT, **_ALL),
    _case("loss", "broker-b: 30 % loss each way", lambda at: at.one(loss_in=0.3, loss_out=0.3)),
    _case("loss_all", "both brokers: 30 % loss towards them", lambda at: at.both(loss_in=0.3),
          covered=False, options=PATIENT),
    _case("rate", "broker-b: 64 kbit/s", lambda at: at.one(rate_bps=64_000)),
    _case("resets", "both brokers: connections reset each second",
          lambda at: at.both(reset_every_s=1.0)),
    _case("hole", "broker-b: frames over 1,000 bytes vanish",
          lambda at: at.one(longest_frame=1000)),
    _case("names", "names change: name server and broker-b have other addresses",
          Networks.change_names, Networks.restore_names),
    _case("moved", "no name server for 60 s, broker-b moves to another host",
          Networks.move_broker, Networks.start_name_servers, seconds=60.0),
)  # fmt: skip


def write_page():
    """Write the tables of the page from the stored results, without a run."""
    results = judged(RESULTS, CASES)
    limits = {
        "covered": "nothing fails, short pause", "open": "nothing fails",
        "may_fail": "`Producer` may fail",
    }  # fmt: skip
    table = tables.verdicts(results["cases"], limits)
    head = f"RocketMQ {results['version']}. {SHORT_PAUSES}"
    text = f"{head}\n\n{table}\n## By mode\n\n{tables.modes(results['cases'])}"
    tables.write_parts(PAGE, {"networks": text})


def play(cases, say, options):
    """Play cases and yield their results."""
    with Bed() as bed:
        run = Run(Networks(bed, say), say, options)
        for case in cases:
            yield run.play(case)


if __name__ == "__main__":
    raise SystemExit(run_command(__spec__.name, __doc__, CASES, SHORT, play, RESULTS, write_page))
