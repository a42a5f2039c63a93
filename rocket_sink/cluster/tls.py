"""Test certificates: an authority, a server certificate for 127.0.0.1, and a client certificate.
`openssl` makes them in the home folder for a year; they are made again before they expire. They are
for tests and local use only: the private keys are in the home folder."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from rocket_sink.cluster.conf import properties_text
from rocket_sink.errors import ClusterError

_DAYS = "365"
_LEFT_S = str(30 * 86_400)
_EXTENSIONS = """basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature,keyEncipherment
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=DNS:localhost,IP:127.0.0.1
"""


@dataclass(frozen=True)
class TestCertificates:
    """The files: the trusted authority `ca`, and certificates and keys of servers and clients."""

    __test__ = False

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    @property
    def client(self) -> tuple[Path, Path]:
        return self.client_cert, self.client_key

    def jvm_flags(self, mode: str, settings: Path, client_auth: str = "none") -> list[str]:
        """Write the servers' TLS settings to `settings`; return the JVM flags for them. `mode` is
        permissive, or enforcing (servers, too, use TLS between each other); `client_auth` is none,
        optional or require."""
        lines = {
            **self._client_lines(),
            "tls.server.need.client.auth": client_auth,
            "tls.server.keyPath": str(self.server_key),
            "tls.server.certPath": str(self.server_cert),
            "tls.server.authClient": "false" if client_auth == "none" else "true",
            "tls.server.trustCertPath": str(self.ca),
        }
        settings.write_text(properties_text(lines), encoding="utf-8")
        flags = [f"-Dtls.server.mode={mode}", f"-Dtls.config.file={settings}"]
        return [*flags, "-Dtls.enable=true"] if mode == "enforcing" else flags

    def client_flags(self, settings: Path) -> list[str]:
        """Write settings of a TLS client that trusts only `ca`; return the JVM flags for them."""
        settings.write_text(properties_text(self._client_lines()), encoding="utf-8")
        return ["-Dtls.enable=true", f"-Dtls.config.file={settings}"]

    def _client_lines(self) -> dict[str, str]:
        return {
            "tls.test.mode.enable": "false",
            "tls.client.authServer": "true",
            "tls.client.trustCertPath": str(self.ca),
            "tls.client.certPath": str(self.client_cert),
            "tls.client.keyPath": str(self.client_key),
        }


def make_certificates(folder: Path) -> TestCertificates:
    """Return the certificates in `folder`. Make them if they are missing, or expire within a month.
    Raise ClusterError if `openssl` is missing or fails."""
    names = ("ca.pem", "server.pem", "server-key.pem", "client.pem", "client-key.pem")
    certificates = TestCertificates(*(folder / name for name in names))
    if all((folder / name).is_file() for name in names) and _is_valid(certificates.client_cert):
        return certificates
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    # Use -newkey because it writes PKCS#8, which Netty needs.
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", _DAYS, "-sha256"),
        *("-subj", "/CN=rocket-sink test CA", "-keyout", str(folder / "ca-key.pem")),
        *("-out", str(certificates.ca), "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    _sign(folder, "localhost", certificates.server_cert, certificates.server_key)
    _sign(folder, "rocket-sink test client", certificates.client_cert, certificates.client_key)
    return certificates


def _is_valid(last_made: Path) -> bool:
    try:
        _openssl("x509", "-in", str(last_made), "-noout", "-checkend", _LEFT_S)
    except ClusterError:
        return False
    return True


def _sign(folder: Path, name: str, cert: Path, key: Path) -> None:
    request, extensions = folder / "request.csr", folder / "extensions"
    extensions.write_text(_EXTENSIONS, encoding="utf-8")
    _openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
        *("-keyout", str(key), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(folder / "ca.pem")),
        *("-CAkey", str(folder / "ca-key.pem"), "-CAcreateserial", "-days", _DAYS, "-sha256"),
        *("-extfile", str(extensions), "-out", str(cert)),
    )


def _openssl(*arguments: str) -> None:
    try:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ClusterError(
            "A cluster with TLS needs the openssl program to make its test certificate: install "
            "it, or start the cluster with tls=None."
        ) from error
    if done.returncode != 0:
        raise ClusterError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")
