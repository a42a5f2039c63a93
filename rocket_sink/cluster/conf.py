"""Configuration of a local cluster's processes: ports, broker.conf, JVM flags, log settings.

A broker binds its listen port, the "fast" port two below (BrokerController), and the replication
port one above. All are below the range of outgoing connections (32768 up on Linux), so that other
processes seldom take a port first. If a process does, the start is repeated with other ports. A
test compares docker-compose.yml with `BROKER_DEFAULTS`. Values are as in `broker.conf`: text, sizes
in bytes."""

from __future__ import annotations

import errno
import json
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rocket_sink.errors import ClusterError

LOOPBACK = "127.0.0.1"
RANGE = range(20_000, 32_000)
_BLOCK = 4


@dataclass(frozen=True)
class Ports:
    """The name server's port and each broker's listen port."""

    name_server: int
    brokers: tuple[int, ...]

    def all(self) -> list[int]:
        """Return all ports that the cluster binds."""
        bound = [port for listen in self.brokers for port in (listen - 2, listen, listen + 1)]
        return [self.name_server, *bound]

    def save(self, file: Path) -> None:
        """Write the ports to `file`, for the next start in the same home."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def load_ports(file: Path) -> Ports | None:
    """Return the ports saved in `file`; None if it is missing or unreadable."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return Ports(int(saved["name_server"]), tuple(int(port) for port in saved["brokers"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_free(port: int) -> bool:
    """Return whether `port` can be bound now, on loopback and on all interfaces."""
    for host in (LOOPBACK, ""):
        with socket.socket() as probe:
            # The JVM sets this option, too, so it can bind a port in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                raise
    return True


def choose_ports(
    brokers: int, *, wanted: Ports | None = None, free: Callable[[int], bool] = is_free
) -> Ports:
    """Return free ports for a name server and `brokers` brokers: `wanted`, if all its ports are
    free. Raise ClusterError if there are too few free ports."""
    if wanted and len(wanted.brokers) == brokers and all(free(port) for port in wanted.all()):
        return wanted
    blocks: list[int] = []
    starts = range(RANGE.start, RANGE.stop - _BLOCK, _BLOCK)
    for start in random.sample(starts, len(starts)):
        if all(free(port) for port in range(start, start + _BLOCK)):
            blocks.append(start)
        if len(blocks) == brokers + 1:
            return Ports(blocks[0], tuple(block + 2 for block in blocks[1:]))
    raise ClusterError(
        f"No {brokers + 1} free blocks of {_BLOCK} ports between {RANGE.start} and {RANGE.stop}: "
        "stop clusters that run on this machine (rocket-sink cluster down) and try again."
    )


CLUSTER_NAME = "DefaultCluster"

BROKER_DEFAULTS: Mapping[str, str] = {
    "brokerClusterName": CLUSTER_NAME,
    "brokerId": "0",
    "brokerRole": "ASYNC_MASTER",
    "flushDiskType": "ASYNC_FLUSH",
    "brokerIP1": LOOPBACK,
    "brokerIP2": LOOPBACK,
    "autoCreateTopicEnable": "true",
    "autoCreateSubscriptionGroup": "true",
    "defaultTopicQueueNums": "4",
    "traceTopicEnable": "true",
    # A broker of 5.5.0 by default uses two thirds of a core after its first committed message,
    # because TransactionalOpBatchService computes a next wake-up that is in the past. So note each
    # end of a transaction at once (size 1), and let the service wake up once an hour.
    "transactionOpBatchInterval": "3600000",
    "transactionOpMsgMaxSize": "1",
    # By default an idle broker uses 2 % of a core to write its timer wheel to disk.
    "timerFlushIntervalMs": "10000",
    # `Producer.recall` needs this setting, which is off by default.
    "recallMessageEnable": "true",
    "enablePropertyFilter": "true",
    # Lite topics need these two settings, which change nothing for other messages.
    "enableLmq": "true",
    "enableMultiDispatch": "true",
    # Use little disk: files are small, kept for a day, and deleted hourly.
    "mappedFileSizeCommitLog": str(64 << 20),
    "mappedFileSizeConsumeQueue": str(100_000 * 20),
    "mappedFileSizeTimerLog": str(8 << 20),
    "maxHashSlotNum": "500000",
    "maxIndexNum": "2000000",
    "fileReservedTime": "24",
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
    # By default brokers delete files early on a disk that is over 85 % full.
    "diskMaxUsedSpaceRatio": "90",
    "cleanFileForciblyEnable": "false",
}

DISK_NEARLY_FULL_RATIO = 0.85
"""If a larger part of the disk is used, a broker is started with NEARLY_FULL_DISK."""

NEARLY_FULL_DISK: Mapping[str, str] = {
    # A broker refuses messages once its clean-up sees a disk above 90 %, and that limit cannot be
    # raised. A deleteWhen without hours makes each clean-up fail before it looks at the disk. So
    # the broker accepts messages, and deletes no files (DefaultMessageStore.CleanCommitLogService).
    "deleteWhen": "never",
    "cleanResourceInterval": "3600000",
}

LEAST_FREE_MB = 1024
"""The free disk space that a start needs."""

_ADD_OPENS = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
)
_MAIN_CLASSES = {
    "name-server": "org.apache.rocketmq.namesrv.NamesrvStartup",
    "broker": "org.apache.rocketmq.broker.BrokerStartup",
    "admin": "org.apache.rocketmq.tools.command.MQAdminStartup",
    "proxy": "org.apache.rocketmq.proxy.ProxyStartup",
}
_LOGBACK = """<configuration>
  <appender name="file" class="ch.qos.logback.core.rolling.RollingFileAppender">
    <file>${user.home}/rocketmq.log</file>
    <rollingPolicy class="ch.qos.logback.core.rolling.FixedWindowRollingPolicy">
      <fileNamePattern>${user.home}/rocketmq.%i.log</fileNamePattern>
      <minIndex>1</minIndex>
      <maxIndex>1</maxIndex>
    </rollingPolicy>
    <triggeringPolicy class="ch.qos.logback.core.rolling.SizeBasedTriggeringPolicy">
      <maxFileSize>16MB</maxFileSize>
    </triggeringPolicy>
    <encoder><pattern>%d %p %c{0} %t - %m%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="file"/></root>
</configuration>
"""
LOG_FILE = "rocketmq.log"
"""A process's log, in the process's folder. The log and one older file have up to 16 MiB each."""

_AUTH_PACKAGE = "org.apache.rocketmq.auth.authentication.provider"


class Secrets(Protocol):
    """A user's name and password, in any object with these attributes. `rocket_sink.Credentials`
    shows its secret to nobody, so it cannot be used here."""

    @property
    def access_key(self) -> str: ...

    @property
    def secret_key(self) -> str: ...


def broker_name(index: int) -> str:
    """Return a broker's name: broker-a, broker-b, ..., broker-z, broker-26, ..."""
    return f"broker-{chr(ord('a') + index)}" if index < 26 else f"broker-{index}"


def broker_conf(
    name: str, listen: int, name_server: str, store: Path, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the broker.conf of one broker; `extra` overrides all other lines."""
    return {
        **BROKER_DEFAULTS,
        "brokerName": name,
        "namesrvAddr": name_server,
        "bindAddress": LOOPBACK,
        "listenPort": str(listen),
        "haListenPort": str(listen + 1),
        "storePathRootDir": str(store),
        "storePathCommitLog": str(store / "commitlog"),
        **extra,
    }


def acl_conf(version: str, secrets: Secrets) -> dict[str, str]:
    """Return the settings for authentication: ACL 2.0 from 5.x on, aclEnable before."""
    if is_4x(version):
        return {"aclEnable": "true"}
    user = {"username": secrets.access_key, "password": secrets.secret_key}
    inner = {"accessKey": secrets.access_key, "secretKey": secrets.secret_key}
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH_PACKAGE}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{_AUTH_PACKAGE}.LocalAuthenticationMetadataProvider",
        "initAuthenticationUser": json.dumps(user),
        "innerClientAuthenticationCredentials": json.dumps(inner),
    }


def properties_text(lines: Mapping[str, str]) -> str:
    """Return the settings as the text of a Java properties file."""
    # Java reads properties files as Latin-1, and understands the escapes of JSON.
    return "".join(f"{key}={json.dumps(value)[1:-1]}\n" for key, value in lines.items())


def write_rocketmq_home(folder: Path, version: str, secrets: Secrets | None) -> None:
    """Make `folder` a rocketmq.home.dir with log settings and credentials (ACL 1.0, tools)."""
    conf = folder / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    # Version 4.x reads log settings from conf/, 5.x from the file that `jvm_command` names.
    names = ["rmq.logback.xml"]
    if is_4x(version):
        names = [f"logback_{role}.xml" for role in ("broker", "namesrv", "tools")]
    for name in names:
        (conf / name).write_text(_LOGBACK, encoding="utf-8")
    if secrets is None:
        return
    keys = {"accessKey": secrets.access_key, "secretKey": secrets.secret_key}
    # These files are YAML, and JSON is YAML.
    write_private(conf / "tools.yml", json.dumps(keys))
    write_private(conf / "plain_acl.yml", json.dumps({"accounts": [{**keys, "admin": True}]}))


def write_private(file: Path, text: str) -> None:
    """Write a file with mode 0600."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def jvm_command(
    role: str,
    *,
    java: Path,
    folder: Path,
    version: str,
    memory: Sequence[str],
    extra: Sequence[str],
) -> list[str]:
    """Return the command line of a name-server, broker, admin or proxy, without arguments; its
    class path is in CLASSPATH. `folder` is rocketmq.home.dir and user.home, where RocketMQ puts
    stores and logs."""
    opens = [*_ADD_OPENS]
    if is_4x(version):
        opens.append("--add-opens=java.base/java.lang=ALL-UNNAMED")
    return [
        str(java),
        *memory,
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        *opens,
        f"-Drocketmq.home.dir={folder}",
        f"-Duser.home={folder}",
        f"-Drmq.logback.configurationFile={folder / 'conf' / 'rmq.logback.xml'}",
        *extra,
        _MAIN_CLASSES[role],
    ]


def is_4x(version: str) -> bool:
    return version.startswith("4.")
