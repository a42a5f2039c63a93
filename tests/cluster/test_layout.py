"""The files of each process (broker.conf, JVM flags, credentials), and docker-compose.yml."""

import json
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml
from cryptography.x509 import DNSName, SubjectAlternativeName, load_pem_x509_certificate

from rocket_sink.cluster import conf, layout, tls
from rocket_sink.cluster.conf import Ports, jvm_command
from rocket_sink.cluster.jars import DEFAULT_VERSION
from rocket_sink.cluster.layout import Runtime, Wanted, build
from rocket_sink.cluster.probe import Probe
from rocket_sink.cluster.tls import make_certificates
from rocket_sink.errors import ClusterError
from rocket_sink.java import Java

ROOT = Path(__file__).parents[2]
PORTS = Ports(20_000, (20_006, 20_010))


@dataclass(frozen=True)
class Keys:
    access_key: str = "user"
    secret_key: str = 'a"b\\c'


@pytest.fixture
def runtime(tmp_path):
    java = Java(Path("/jdk"), 17, "test")
    return Runtime(Wanted(), tmp_path, java, "/jars/a.jar", "the-mark", print)


def built(wanted, runtime):
    return build(replace(runtime, wanted=wanted), PORTS, dict)


def test_each_broker_has_its_own_ports_and_store(runtime):
    nodes = built(Wanted(), runtime)
    first, second = (broker.spec.settings for broker in nodes.brokers)
    assert (first["brokerName"], second["brokerName"]) == ("broker-a", "broker-b")
    assert (conf.broker_name(25), conf.broker_name(26)) == ("broker-z", "broker-26")
    assert (first["listenPort"], first["haListenPort"]) == ("20006", "20007")
    assert first["namesrvAddr"] == "127.0.0.1:20000" == nodes.name_server.address
    assert first["storePathRootDir"] != second["storePathRootDir"]
    assert first["storePathCommitLog"].startswith(str(runtime.home / "broker-a"))
    assert first["bindAddress"] == first["brokerIP1"] == first["brokerIP2"] == "127.0.0.1"
    assert nodes.brokers[1].address == "127.0.0.1:20010"
    assert nodes.name_server.spec.settings == {"listenPort": "20000", "bindAddress": "127.0.0.1"}


def test_processes_take_little_memory(runtime, monkeypatch):
    # The session's fixture adds options for quick tests.
    monkeypatch.setattr(conf, "jvm_command", jvm_command)
    nodes = built(Wanted(heap_mb=128), runtime)
    for node, flags in (
        (nodes.name_server, {"-Xms32m", "-Xmx128m"}),
        (nodes.brokers[0], {"-Xms128m", "-Xmx128m", "-XX:MaxDirectMemorySize=128m"}),
        (built(Wanted(), runtime).brokers[0], {"-Xms256m", "-Xmx512m"}),
    ):
        assert flags <= {*node.spec.command}
    folder, tiered = runtime.home / "name-server", "-XX:TieredStopAtLevel=1"
    assert nodes.name_server.spec.command == (
        str(runtime.java.executable), "-Xms32m", "-Xmx128m", tiered,
        "-XX:+UseSerialGC", "-XX:-UsePerfData",
        *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.nio", "sun.nio.ch")),
        *(f"--add-exports=java.base/{name}=ALL-UNNAMED" for name in (
            "sun.nio.ch", "jdk.internal.ref")),
        f"-Drocketmq.home.dir={folder}", f"-Duser.home={folder}",
        f"-Drmq.logback.configurationFile={folder}/conf/rmq.logback.xml",
        f"-D{layout.MARK_PROPERTY}=the-mark", "-Dtls.server.mode=disabled",
        "org.apache.rocketmq.namesrv.NamesrvStartup",
    )  # fmt: skip
    assert nodes.brokers[0].spec.command[-1] == "org.apache.rocketmq.broker.BrokerStartup"
    assert (folder / "conf" / "rmq.logback.xml").read_text().startswith("<configuration>")


def test_the_users_lines_have_the_last_word(runtime):
    wanted = Wanted(queues=9, broker_config={"autoCreateTopicEnable": "false", "x": "y"})
    settings = built(wanted, runtime).brokers[0].spec.settings
    assert settings["defaultTopicQueueNums"] == "9"
    assert (settings["autoCreateTopicEnable"], settings["x"]) == ("false", "y")
    assert set(conf.BROKER_DEFAULTS) <= set(settings)
    assert built(Wanted(), runtime).brokers[0].spec.settings["defaultTopicQueueNums"] == "4"


def test_the_command_line_carries_the_mark_and_not_the_secret(runtime):
    wanted = Wanted(acl=Keys())
    spec = built(wanted, runtime).brokers[0].spec
    assert f"-D{layout.MARK_PROPERTY}=the-mark" in spec.command
    assert 'a"b' not in " ".join((*spec.command, repr(spec), repr(wanted)))


def test_acl_2_is_switched_on_as_json(runtime):
    settings = built(Wanted(acl=Keys()), runtime).brokers[0].spec.settings
    assert settings["authenticationEnabled"] == "true"
    assert json.loads(settings["initAuthenticationUser"])["password"] == 'a"b\\c'
    # Java's Properties.load reads two backslashes as one.
    assert conf.properties_text({"x": "a\\b"}) == "x=a\\\\b\n"
    tools = runtime.home / "broker-a" / "conf" / "tools.yml"
    assert yaml.safe_load(tools.read_text()) == {"accessKey": "user", "secretKey": 'a"b\\c'}
    assert tools.stat().st_mode & 0o077 == 0


def test_acl_1_of_4x(runtime):
    broker = built(Wanted(version="4.9.7", acl=Keys()), runtime).brokers[0]
    assert broker.spec.settings["aclEnable"] == "true"
    home = runtime.home / "broker-a" / "conf"
    (account,) = yaml.safe_load((home / "plain_acl.yml").read_text())["accounts"]
    assert account == {"accessKey": "user", "secretKey": 'a"b\\c', "admin": True}
    assert {file.name for file in home.glob("logback*")} == {
        f"logback_{role}.xml" for role in ("broker", "namesrv", "tools")
    }
    assert "--add-opens=java.base/java.lang=ALL-UNNAMED" in broker.spec.command


def test_a_nearly_full_disk_still_takes_messages(runtime, monkeypatch):
    def delete_when(used):
        usage = SimpleNamespace(used=used << 30, free=(100 - used) << 30)
        monkeypatch.setattr(layout.shutil, "disk_usage", lambda _folder: usage)
        return built(Wanted(), runtime).brokers[0].spec.settings["deleteWhen"]

    assert "00" in delete_when(80)
    assert delete_when(93) == "never"
    with pytest.raises(ClusterError, match="0 MiB left"):
        delete_when(100)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("brokers", 0, 1), ("brokers", 65, 64), ("tls", "on", "permissive"), ("queues", 0, 1),
     ("tls_client_auth", "yes", "optional")],
)  # fmt: skip
def test_what_cannot_be_is_refused(name, wrong, right):
    with pytest.raises(ClusterError, match=f"{name}={wrong!r}"):
        replace(Wanted(), **{name: wrong})
    assert replace(Wanted(), **{name: right})


def test_certificates_are_made_once(tmp_path):
    folder = tmp_path / "new" / "tls"
    certificates = make_certificates(folder)
    text = certificates.server_key.read_text()
    for key in (certificates.server_key, certificates.client_key):
        assert key.read_text().startswith("-----BEGIN PRIVATE KEY-----"), "Netty reads PKCS#8 only"
    assert make_certificates(folder) == certificates
    assert certificates.server_key.read_text() == text
    certificates.client_key.unlink()
    assert make_certificates(folder).client_key.exists()
    authority = load_pem_x509_certificate(certificates.ca.read_bytes())
    for path, key in (
        (certificates.server_cert, certificates.server_key),
        (certificates.client_cert, certificates.client_key),
    ):
        ssl.create_default_context().load_cert_chain(path, key)
        cert = load_pem_x509_certificate(path.read_bytes())
        cert.verify_directly_issued_by(authority)
        names = cert.extensions.get_extension_for_class(SubjectAlternativeName).value
        assert names.get_values_for_type(DNSName) == ["localhost"]


@pytest.mark.parametrize(
    ("mode", "auth", "is_asked"),
    [("enforcing", "none", "false"), ("permissive", "optional", "true"),
     ("permissive", "require", "true")],
)  # fmt: skip
def test_java_s_settings_of_tls(mode, auth, is_asked, tmp_path):
    names = ("ca", "server_cert", "server_key", "client_cert", "client_key")
    certificates = tls.TestCertificates(*(Path("/tls", name) for name in names))
    file = tmp_path / "p"
    flags = [f"-Dtls.server.mode={mode}", f"-Dtls.config.file={file}"]
    enables = ["-Dtls.enable=true"]
    expected = [*flags, *enables] if mode == "enforcing" else flags
    assert certificates.jvm_flags(mode, file, auth) == expected
    server = dict(line.split("=") for line in file.read_text().splitlines())
    assert certificates.client_flags(file) == [*enables, flags[1]]
    client = dict(line.split("=") for line in file.read_text().splitlines())
    assert client == {
        "tls.test.mode.enable": "false", "tls.client.authServer": "true",
        "tls.client.trustCertPath": "/tls/ca", "tls.client.certPath": "/tls/client_cert",
        "tls.client.keyPath": "/tls/client_key",
    }  # fmt: skip
    assert server == client | {
        "tls.server.need.client.auth": auth, "tls.server.authClient": is_asked,
        "tls.server.keyPath": "/tls/server_key", "tls.server.certPath": "/tls/server_cert",
        "tls.server.trustCertPath": "/tls/ca",
    }  # fmt: skip


def test_the_probe_has_the_clusters_secrets(runtime):
    files = MagicMock()
    plain, with_tls = Probe(Keys()), Probe(Keys(), files.ca, files.client)
    for certificates, probe in ((None, plain), (files, with_tls)):
        own = replace(runtime, certificates=certificates)
        assert built(Wanted(acl=Keys()), own).brokers[0].probe == probe


def test_processes_are_stopped_side_by_side():
    together = Barrier(3, timeout=60)
    nodes = [SimpleNamespace(stop=together.wait) for _ in range(3)]
    layout.Nodes(nodes[0], nodes[1:]).stop()
    assert not together.broken


class TestCompose:
    """docker-compose.yml starts what LocalCluster starts."""

    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

    def test_the_services_are_the_processes(self):
        assert list(self.compose["services"]) == [
            layout.NAME_SERVER, conf.broker_name(0), conf.broker_name(1),
        ]  # fmt: skip
        page = (ROOT / "docs" / "deploy" / "docker.md").read_text(encoding="utf-8")
        assert f"--network {self.compose['name']}_default" in page
        images = {service["image"] for service in self.compose["services"].values()}
        assert images == {f"apache/rocketmq:{DEFAULT_VERSION}"}

    @pytest.mark.parametrize(("name", "port"), [("broker-a", 10911), ("broker-b", 10921)])
    def test_the_brokers_have_our_settings(self, name, port):
        content = self.compose["configs"][name]["content"]
        settings = dict(line.split("=", 1) for line in content.splitlines())
        own = {"brokerName": name, "listenPort": str(port), "namesrvAddr": "name-server:9876"}
        assert settings == {**conf.BROKER_DEFAULTS, **own}
        service = self.compose["services"][name]
        assert f"127.0.0.1:{port}:{port}" in service["ports"]
        assert f"127.0.0.1:{port - 2}:{port - 2}" in service["ports"]
        assert service["configs"] == [{"source": name, "target": "/etc/rocketmq/broker.conf"}]
        assert str(port) in service["healthcheck"]["test"][-1]


def test_java_reads_the_settings_as_they_were_meant():
    """Write settings in ASCII, because Java reads the file as Latin-1."""
    text = conf.properties_text({"storePathRootDir": "/tmp/Zoë 😀\\x", "user": '{"a": "b"}'})
    assert text.isascii()
    values = [line.partition("=")[2] for line in text.splitlines()]
    assert [json.loads(f'"{value}"') for value in values] == ["/tmp/Zoë 😀\\x", '{"a": "b"}']


def test_a_home_that_brokers_would_cut_in_two_is_refused(tmp_path):
    home = tmp_path / "one,two"
    with pytest.raises(ClusterError, match=r"has a comma.*choose another"):
        Runtime.make(Wanted(), home, None)


@pytest.mark.parametrize(("days", "stays"), [("29", False), ("60", True)])
def test_certificates_that_expire_are_made_again(days, stays, tmp_path, monkeypatch):
    """A home may outlive its certificates: brokers would start, and no client would trust them."""
    monkeypatch.setattr(tls, "_DAYS", days)
    old = make_certificates(tmp_path).server_cert.read_bytes()
    monkeypatch.undo()
    new = make_certificates(tmp_path).server_cert.read_bytes()
    assert (new == old) is stays
    assert make_certificates(tmp_path).server_cert.read_bytes() == new
