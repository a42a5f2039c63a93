"""Signatures, against Java's constants and precomputed values."""

import pickle

import pytest

from rocket_sink.errors import OptionError
from rocket_sink.wire.acl import Credentials, canonical_fields
from rocket_sink.wire.requests import query_message
from tests.decoding import sign

C62_EXT = {
    "a": "PG", "b": "TopicTest", "c": "TBW102", "d": "4", "e": "1", "f": "0",
    "g": "1700000000000", "h": "0", "i": "KEYS\x01k1\x02UNIQ_KEY\x010A0B\x02", "j": "0",
    "k": "false", "m": "false", "n": "broker-a",
}  # fmt: skip
CANARY = "canary-5b1f"


@pytest.mark.parametrize(
    ("content", "secret", "expected"),
    [
        pytest.param("RocketMQ", "12345678", "IUc8rrO/0gDch8CjObLQsW2rsiA=", id="C57"),
        pytest.param("test", "test", "DJRRXBXlCVuKh6ULoN87847QX+Y=", id="C58"),
        pytest.param("20231227T194619Z", "abc", "0YqcvN26kEHWaTJo/vFamJ5kQws=", id="C60"),
    ],
)
def test_signatures(content, secret, expected):
    signer = Credentials("any", secret).signer()
    assert signer.signature(content, None) == expected
    assert signer.signature("", content.encode()) == expected
    middle = len(content) // 2
    parts = [memoryview(content.encode())[middle:]]
    assert signer.signature(content[:middle], parts) == expected


def test_c59_the_canonical_text_of_a_long_header():
    ext = {
        "topic": "topic-test", "queueId": "0", "bornTimestamp": "117036786441330",
        "bname": "brokerName-1", "AccessKey": "abc", "Signature": "old",
    }  # fmt: skip
    assert canonical_fields(ext) == "abcbrokerName-11170367864413300topic-test"
    # U+FF5E comes after U+1F600 in Java, whose text is UTF-16.
    assert canonical_fields({"\uff5e": "2", "\U0001f600": "1"}) == "12"


@pytest.mark.parametrize(
    ("body", "token", "expected"),
    [
        (b"hello", None, "waDBgLkrHPbOLujF1/lT1i+JDjY="),
        (None, None, "H2HL8pTZMPf56/Y65Rl30uU+FXE="), (b"", None, "H2HL8pTZMPf56/Y65Rl30uU+FXE="),
        (b"hello", "tok", "PK1LHaW4u0ees8fzq8QUUYjT5c0="),
    ],
)  # fmt: skip
def test_c62_a_send(body, token, expected):
    added = sign(C62_EXT, body, "RocketMQ", "12345678", token)
    # Signing again skips the old signature (C61).
    assert sign({**C62_EXT, **added}, body, "RocketMQ", "12345678", token) == added
    assert added.pop("Signature") == expected
    assert added == {"AccessKey": "RocketMQ"} | ({"SecurityToken": token} if token else {})


V4_9_3 = 399
"""The ordinal of V4_9_3 in MQVersion.java."""


def test_a_query_by_id_is_signed_as_brokers_of_all_versions_check_it():
    """Brokers of 4.9 leave the flag out; those of 5.x do so for requests of clients up to 4.9.3."""
    frame = query_message(topic="t", key="k", max_num=3, unique_key=True)
    assert frame.version <= V4_9_3
    plain = {name: value for name, value in frame.ext.items() if name != "_UNIQUE_KEY_QUERY"}
    assert len(plain) == len(frame.ext) - 1
    assert sign(frame.ext, None, "user", "secret") == sign(plain, None, "user", "secret")


@pytest.mark.parametrize(("access", "secret"), [("", "s"), ("a", ""), ("", "")])
def test_c64_half_credentials_are_an_error(access, secret):
    """Java switches ACL off then: the broker's refusal would be the first sign of the mistake."""
    with pytest.raises(OptionError, match="belong together"):
        Credentials(access, secret)


def test_c65_secrets_do_not_print():
    credentials = Credentials("RocketMQ", CANARY, CANARY + "-token")
    for text in (repr(credentials), str(credentials), repr(credentials.signer())):
        assert "RocketMQ" not in text
        assert CANARY not in text


def test_credentials_travel_in_task_closures():
    credentials = pickle.loads(pickle.dumps(Credentials("RocketMQ", "12345678", "tok")))
    assert credentials.signer()(C62_EXT, b"hello")["Signature"] == "PK1LHaW4u0ees8fzq8QUUYjT5c0="
