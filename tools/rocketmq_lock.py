"""Make the lock file of a RocketMQ version, with which `rocket-sink cluster up` can run it.

    python -m tools.rocketmq_lock 5.5.0 > rocket_sink/cluster/rocketmq-5.5.0.lock

Ivy resolves all dependencies in some minutes and checks the registry's SHA-1; the lock file has the
SHA-256 of each jar.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rocket_sink.cluster.jars import FLAT, MODULE, ROOTS, Artifact, run_ivy, sha256_of
from rocket_sink.java import find_java

_NESTED: Final = f"[organisation]/[module]/[revision]/{FLAT}"


def graph_module(modules: Iterable[str]) -> str:
    """Return the ivy.xml for `group:name:version` modules with their dependencies."""
    lines = []
    for module in modules:
        group, name, version = module.split(":")
        lines.append(
            f'    <dependency org="{group}" name="{name}" rev="{version}" '
            'conf="default-&gt;compile,runtime,master"/>'
        )
    return MODULE.format(dependencies="\n".join(lines))


def artifacts_of(version: str, folder: Path) -> list[Artifact]:
    """Fetch the jars of a version into an empty folder; return them with their digests. Raise
    ClusterError if Ivy fails."""
    nested = folder / "nested"
    module = graph_module(f"org.apache.rocketmq:{root}:{version}" for root in ROOTS)
    run_ivy(find_java(), folder / "ivy", module, nested / _NESTED, lambda: None, poms=True)
    artifacts = []
    for path in sorted(nested.glob("*/*/*/*.jar")):
        group, name, revision = path.relative_to(nested).parts[:3]
        classifier = path.stem.removeprefix(f"{name}-{revision}").removeprefix("-")
        artifacts.append(Artifact(group, name, revision, classifier, sha256_of(path)))
    return artifacts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.writelines(f"{each.line}\n" for each in artifacts_of(sys.argv[1], Path(scratch)))
