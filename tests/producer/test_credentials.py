"""Credentials from a callable: asked at the start, and again when a broker refuses them."""

import pytest

from rocket_sink.errors import AuthenticationError, OptionError, Outcome
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.headers import HeaderTemplates
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Answer
from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.codes import RequestCode
from tests.decoding import sign
from tests.producer.waiting import until

REFUSED = Answer(16, "check signature failed.")


class Vault:
    """A callable that returns its credentials in turn and counts the calls."""

    def __init__(self, *given):
        self.credentials, self.asked = list(given), 0

    def __call__(self):
        self.asked += 1
        now = self.credentials.pop(0) if len(self.credentials) > 1 else self.credentials[0]
        if isinstance(now, Exception):
            raise now
        return now


@pytest.fixture
def queue(cluster):
    return MessageQueue("orders", cluster.brokers[0].name, 0)


def users(cluster):
    return [frame.ext["AccessKey"] for frame in cluster.brokers[0].requests if frame.body == b"x"]


def test_new_ones_are_used_after_one_refusal(cluster, make_producer, queue):
    vault = Vault(Credentials("old", "s1"), Credentials("new", "s2", "token"))
    producer = make_producer(credentials=vault)
    producer.send(Message("orders", b"x"), queue=queue)
    assert vault.asked == 1
    cluster.brokers[0].on_send(REFUSED, times=1)
    result = producer.send(Message("orders", b"x"), queue=queue)
    assert result.outcome is Outcome.ACKED and vault.asked == 2
    assert users(cluster) == ["old", "old", "new"]
    last = [frame for frame in cluster.brokers[0].requests if frame.body == b"x"][-1]
    ext = {k: v for k, v in last.ext.items() if k not in ("AccessKey", "Signature")}
    assert ext["SecurityToken"] == "token"
    assert sign(ext, b"x", "new", "s2", "token")["Signature"] == last.ext["Signature"]


@pytest.mark.parametrize(
    ("newest", "asked", "end", "tried"),
    [("new", [2], type(None), ["new"] * 8), ("old", [2, 3], AuthenticationError, [])],
)
def test_all_that_were_signed_with_the_old_ones_go_again(
    cluster, make_producer, queue, newest, asked, end, tried
):
    """The callable is asked once for all: the second refusal finds no newer credentials."""
    vault = Vault(Credentials("old", "s1"), Credentials(newest, "s1"))
    producer = make_producer(credentials=vault)
    producer.send(Message("orders", b"warm"), queue=queue)
    cluster.brokers[0].on_send(REFUSED, times=8)
    cluster.brokers[0].freeze(reads=True)
    futures = [producer.send_async(Message("orders", b"x"), queue=queue) for _ in range(8)]
    until(lambda: len(users(cluster)) == 8)
    cluster.brokers[0].thaw()
    assert {type(future.exception(10)) for future in futures} == {end}
    assert vault.asked in asked and sorted(users(cluster)) == tried + ["old"] * 8


def test_credentials_are_read_once_after_a_refusal(caplog):
    first, second = Credentials("old-user", "old-secret"), Credentials("new-user", "new-secret")
    vault = Vault(first, second, second, RuntimeError("sealed"))
    headers = HeaderTemplates(SinkOptions(name_server="h:1"), "g", vault)
    old = headers.template("t", batch=False)
    for signed_s, has_changed, questions in (
        (10.0, True, 2), (11.0, True, 2), (11.5, False, 3), (11.5, False, 3), (12.75, False, 4),
    ):  # fmt: skip
        assert headers.reread(signed_s, signed_s + 1.0) is has_changed and vault.asked == questions
    assert headers.template("t", batch=False) is not old and "sealed" in caplog.text
    hidden = headers.hide("old-user old-secret new-user new-secret")
    assert not {"old", "new"} & set(hidden.replace("-", " ").split())


@pytest.mark.parametrize(("refusal", "asked"), [(REFUSED, 2), (Answer(2, "busy"), 1)])
def test_the_end_of_a_transaction_goes_again_too(cluster, make_producer, refusal, asked):
    """But only if the broker has refused the credentials."""
    vault = Vault(Credentials("old", "s1"), Credentials("new", "s2"))
    cluster.on(RequestCode.END_TRANSACTION, refusal, times=1)
    result = make_producer(credentials=vault).send_in_transaction(
        Message("orders", b"x"), lambda message, arg: COMMIT
    )
    assert result.ended is (asked == 2) and vault.asked == asked
    assert len(cluster.messages("orders")) == asked - 1


@pytest.mark.parametrize(
    ("further", "tried"),
    [
        ([Credentials("user-a", "s1")], ["user-a"]), ([RuntimeError("it is down")], ["user-a"]),
        ([Credentials("user-b", "2"), Credentials("c", "3")], ["user-a", "user-b"]),
    ],
)  # fmt: skip
def test_a_refusal_is_final_without_new_credentials_and_a_second_one_always(
    cluster, make_producer, queue, further, tried
):
    vault = Vault(Credentials("user-a", "s1"), *further)
    producer = make_producer(credentials=vault)
    refused = Answer(16, "User:user-a is not user-b")
    cluster.brokers[0].on_send(refused, times=len(tried))
    with pytest.raises(AuthenticationError, match=r"User:\*+ is not ") as caught:
        producer.send(Message("orders", b"x"), queue=queue)
    assert not any(user in str(caught.value) for user in tried)
    assert vault.asked == 2 and users(cluster) == tried


def test_a_missing_variable_at_the_second_reading_is_no_crash(
    cluster, make_producer, queue, monkeypatch
):
    monkeypatch.setenv("RMQ_SECRET", "old")
    producer = make_producer(accessKey="alice", secretKey="env:RMQ_SECRET")
    monkeypatch.delenv("RMQ_SECRET")
    cluster.brokers[0].on_send(REFUSED, times=1)
    with pytest.raises(AuthenticationError):
        producer.send(Message("orders", b"x"), queue=queue)
    assert producer.send(Message("orders", b"x"), queue=queue).outcome is Outcome.ACKED


def test_what_it_raises_at_the_start_comes_out(make_producer):
    with pytest.raises(OptionError):
        make_producer(credentials=Vault(OptionError("no vault")))


def test_a_provider_that_has_none_for_a_while_is_asked_again(cluster, make_producer, queue):
    vault = Vault(Credentials("user-of-old", "s1"), None, Credentials("new", "s2"))
    producer = make_producer(credentials=vault)
    producer.send(Message("orders", b"x"), queue=queue)
    cluster.brokers[0].on_send(Answer(16, "User:user-of-old check signature failed."), times=2)
    with pytest.raises(AuthenticationError) as caught:
        producer.send(Message("orders", b"x"), queue=queue)
    assert "user-of-old" not in str(caught.value)
    assert producer.send(Message("orders", b"x"), queue=queue).outcome is Outcome.ACKED
    assert users(cluster)[-1] == "new"
