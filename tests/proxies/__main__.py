"""Sends rows by every lane through RocketMQ's proxies, and reads them back by Java's client.

    python -m tests.proxies                    five lanes, three types of topics, two versions
    python -m tests.proxies --types FIFO       a part of that
    python -m tests.proxies --faults 20        two proxies, one slow and then one killed, in 20 s

Exit code 1: a row is missing, doubled, or a dead letter.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.proxy import RocketmqProxy
from rocket_sink.cluster import DEFAULT_VERSION, LocalCluster
from rocket_sink.commands.common.output import line
from rocket_sink.spark.session import build_session
from tests.integration.lanes import LANES
from tests.jvms import SMALL_PLANS
from tests.proxies import faults, lanes

_FROZEN_S = 5.0


def main():
    """Run the trials; return the exit code."""
    names = [lane.name for lane in LANES]
    parser = argparse.ArgumentParser(prog="python -m tests.proxies", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--versions", nargs="+", default=["5.3.3", DEFAULT_VERSION])
    parser.add_argument("--lanes", nargs="+", default=names, choices=names)
    parser.add_argument("--types", nargs="+", default=lanes.TYPES, choices=lanes.TYPES)
    parser.add_argument("--faults", type=float, metavar="SECONDS", default=0)
    arguments = parser.parse_args()
    holds = True
    for version in arguments.versions:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = stack.enter_context(LocalCluster(brokers=2, version=version))
            proxies = [
                stack.enter_context(RocketmqProxy(cluster, folder / f"proxy-{number}", line))
                for number in range(2 if arguments.faults else 1)
            ]
            if arguments.faults:
                finding, causes, _ = faults.send_during_faults(
                    cluster, proxies, arguments.faults, _FROZEN_S
                )
                line(f"{version} {asdict(finding)} {causes}")
                holds &= not finding.lost and not finding.failed
                continue
            spark = build_session("rocket-sink-proxies", master="local[2]", conf=SMALL_PLANS)
            for lane in (lane for lane in LANES if lane.name in arguments.lanes):
                for kind in arguments.types:
                    trial = lanes.run_lane(
                        spark, cluster, proxies[0].address, lane, kind, arguments.rows, folder
                    )
                    line(f"{version} {asdict(trial)}")
                    holds &= trial.holds
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
