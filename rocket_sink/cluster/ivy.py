"""Run the Ivy that PySpark ships to fetch jars from the registry Ivy itself knows.

With a lock, the versions are known: no pom is read and the jars are fetched by several Ivy
processes side by side, each with its own cache folder because two must not share one. Without a
lock one Ivy process resolves the whole graph, which takes minutes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import quoteattr

from rocket_sink.cluster.lock import Artifact
from rocket_sink.errors import ClusterError
from rocket_sink.java import Java

SETTINGS_ENV = "ROCKET_SINK_IVY_SETTINGS"
"""A user's own ivysettings.xml (a mirror, a proxy, credentials) instead of Ivy's default."""

ROOTS = ("rocketmq-namesrv", "rocketmq-broker", "rocketmq-tools")
"""The modules of org.apache.rocketmq that the cluster runs."""

_FLAT = "[artifact]-[revision](-[classifier]).[ext]"
_NESTED = "[organisation]/[module]/[revision]/" + _FLAT

_HINTS = {
    "PKIX": "Java does not trust the certificate that it was shown, maybe a proxy's: set "
    "JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore=FILE to a store that has it. ",
    ": not found": "Not every version's server modules are in the registry: try another. ",
}

_SETTINGS = """<ivysettings>
  <!-- every jar is checked against the lock's SHA-256: one request less for each -->
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="central"/>
  <timeout-constraints>
    <timeout-constraint name="bounded" connectionTimeout="20000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers>
    <ibiblio name="central" m2compatible="true" usepoms="{poms}" timeoutConstraint="bounded"/>
  </resolvers>
</ivysettings>
"""
_MODULE = """<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="rocket-sink" module="cluster"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{dependencies}
  </dependencies>
</ivy-module>
"""


@dataclass(frozen=True)
class IvyRun:
    """Where an Ivy run works: `work` is a scratch folder, `on_jar` is called per fetched jar."""

    java: Java
    work: Path
    on_jar: Callable[[], None]

    def fetch(self, artifacts: Sequence[Artifact], into: Path, processes: int) -> None:
        """Fetch the artifacts as `into/<file name>`, by up to `processes` Ivy side by side.

        Checks no digest. Raises ClusterError with Ivy's last lines when Ivy fails.
        """
        parts = [artifacts[start::processes] for start in range(processes)]
        with ThreadPoolExecutor(processes) as pool:
            runs = [
                pool.submit(
                    self._run, f"part-{number}", locked_module(part), into / _FLAT, poms=False
                )
                for number, part in enumerate(part for part in parts if part)
            ]
        for run in runs:
            run.result()

    def resolve(self, version: str, into: Path) -> None:
        """Resolve the whole graph as `into/group/name/version/name-version[-classifier].jar`.

        Raises ClusterError with Ivy's last lines when Ivy fails.
        """
        self._run("whole", full_module(version), into / _NESTED, poms=True)

    def resolve_modules(self, modules: Sequence[str], into: Path) -> None:
        """Resolve `group:name:version` modules with all they need, as `into/<file name>`.

        Checks no digest but the registry's own. Raises ClusterError as above.
        """
        pattern = into / _FLAT
        self._run("modules", graph_module(modules), pattern, poms=True, what=", ".join(modules))

    def _run(
        self, name: str, module: str, pattern: Path, *, poms: bool, what: str = "Apache RocketMQ"
    ) -> None:
        folder = self.work / name
        folder.mkdir(parents=True)
        ivy_file = folder / "ivy.xml"
        ivy_file.write_text(module, encoding="utf-8")
        command = [
            *(str(self.java.executable), "-jar", str(find_ivy())),
            *("-settings", str(_settings_file(folder, poms=poms)), "-cache", str(folder / "cache")),
            *("-ivy", str(ivy_file), "-types", "jar", "bundle", "-retrieve", str(pattern)),
        ]
        code, last_lines = self._watch(command)
        if code != 0:
            printed = "\n".join(last_lines)
            hint = "".join(text for sign, text in _HINTS.items() if sign in printed)
            raise ClusterError(
                f"Ivy could not fetch {what} (exit code {code}). Check the network; "
                f"behind a mirror or proxy set {SETTINGS_ENV} to your ivysettings.xml. "
                f"{hint}Its last lines:\n{printed}"
            )

    def _watch(self, command: list[str]) -> tuple[int, list[str]]:
        last: deque[str] = deque(maxlen=25)
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                if "[SUCCESSFUL ]" in line:
                    self.on_jar()
        return process.returncode, list(last)


def find_ivy() -> Path:
    """The Ivy jar among PySpark's own; ClusterError when PySpark has none."""
    spec = find_spec("pyspark")
    home = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(home.glob("jars/ivy-*.jar")) if home else []
    if not found:
        raise ClusterError(
            "No Ivy jar in PySpark's jars folder, and RocketMQ is fetched by it. Install PySpark "
            "from its pip package (pip install pyspark): the variants without jars do not do."
        )
    return found[-1]


def locked_module(artifacts: Iterable[Artifact]) -> str:
    """The ivy.xml that asks for exactly these jars and nothing that they depend on."""
    lines = []
    ordered = sorted(artifacts)
    for key, group in itertools.groupby(ordered, lambda a: (a.group, a.name, a.version)):
        lines.append(f'    <dependency {_module(*key)} transitive="false" conf="default">')
        for artifact in group:
            classifier = artifact.classifier
            extra = f" m:classifier={quoteattr(classifier)}" if classifier else ""
            name = quoteattr(artifact.name)
            lines.append(f'      <artifact name={name} type="jar" ext="jar"{extra}/>')
        lines.append("    </dependency>")
    return _MODULE.format(dependencies="\n".join(lines))


def full_module(version: str) -> str:
    """The ivy.xml that asks for the name server, broker and tools with their dependencies."""
    return graph_module([f"org.apache.rocketmq:{root}:{version}" for root in ROOTS])


def graph_module(modules: Iterable[str]) -> str:
    """The ivy.xml that asks for `group:name:version` modules and all that they depend on."""
    mapping = 'conf="default-&gt;compile,runtime,master"'
    lines = [f"    <dependency {_module(*module.split(':'))} {mapping}/>" for module in modules]
    return _MODULE.format(dependencies="\n".join(lines))


def _module(group: str, name: str, version: str) -> str:
    return f"org={quoteattr(group)} name={quoteattr(name)} rev={quoteattr(version)}"


def _settings_file(folder: Path, *, poms: bool) -> Path:
    own = os.environ.get(SETTINGS_ENV)
    if own:
        if not Path(own).is_file():
            raise ClusterError(f"{SETTINGS_ENV} names {own}, which is no file: mend or unset it.")
        return Path(own)
    file = folder / "ivysettings.xml"
    file.write_text(_SETTINGS.format(poms=str(poms).lower()), encoding="utf-8")
    return file
