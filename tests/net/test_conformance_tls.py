"""C66, the cases of Java's TlsTest: who verifies whom, and what it comes to.

Java's client trusts everybody in its test mode; here that takes tlsMode=insecure. A refusal of our
certificate is known to be NOT_SENT, although TLS 1.3 tells it after the request was written.
"""

import ssl

import pytest

from rocket_sink.errors import OptionError, TlsError
from tests.net.test_transport import IP, Authority, ask, authority, serve

assert authority and serve  # fixtures


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def version(request):
    return request.param


def mutual(authority, serve, version, need, server=None):
    def trust(context):
        context.maximum_version = version
        context.verify_mode = need
        context.load_verify_locations(authority.file)

    return serve(server or authority.server("ip", IP), prepare=trust)


def trusted(authority, **more):
    return {"tlsMode": "verify-full", "tlsCa": authority.file, **more}


def client(authority, password=None):
    cert, key = authority.server("client", password=password)
    return {"tlsCert": cert, "tlsKey": key}


def test_c66_the_clients_key_has_a_password(authority, serve, version, tmp_path, monkeypatch):
    """Client and server verify each other. The password is read from its source."""
    address = mutual(authority, serve, version, ssl.CERT_REQUIRED)
    keys = client(authority, password="1234")
    monkeypatch.setenv("KEY_PASSWORD", "1234")
    (tmp_path / "password").write_text("1234\n")
    for source in ("1234", "env:KEY_PASSWORD", f"file:{tmp_path / 'password'}"):
        assert ask(address, **trusted(authority, **keys, tlsKeyPassword=source)) == b"hello"
    for wrong in ("4321", "env:KEY_PASSWORT", "file:/nowhere/password"):
        with pytest.raises(OptionError, match=r"tlsKeyPassword.*(\.key|KEY_PASSWORT|nowhere)"):
            ask(address, **trusted(authority, **keys, tlsKeyPassword=wrong))


def test_c66_no_client_certificate_of_a_known_authority(authority, serve, version, tmp_path):
    address = mutual(authority, serve, version, ssl.CERT_REQUIRED)
    with pytest.raises(TlsError, match=r"client certificate|closed the connection"):
        ask(address, **trusted(authority))
    keys = client(Authority(tmp_path / "bad", "bad-ca"))
    with pytest.raises(TlsError, match="tlsCert"):
        ask(address, **trusted(authority, **keys))


def test_c66_a_server_certificate_of_an_unknown_authority(authority, serve, version, tmp_path):
    server = Authority(tmp_path / "bad", "bad-ca").server("ip", IP)
    address = mutual(authority, serve, version, ssl.CERT_OPTIONAL, server)
    for mode in ("verify-full", "verify-ca"):
        with pytest.raises(TlsError, match="tlsCa"):
            ask(address, **trusted(authority, tlsMode=mode))
    assert ask(address, tlsMode="insecure") == b"hello", "accepted only when nothing is verified"
