"""The option table: spelling, parsing, ranges, secrets, digests."""

import math
import pickle

import pytest

from rocket_sink import Producer, RocketSink, TableProducer
from rocket_sink.errors import OptionError
from rocket_sink.option_spec import Kind, Option, Secret, resolve_secret
from rocket_sink.options import OPTIONS, SinkOptions, find_option
from rocket_sink.producer.admin.admin import Admin


@pytest.mark.parametrize(
    "spelling", ["nameServer", "name_server", "NAMESERVER", "name.srv.addr", "rocketmq.nameServer"]
)
def test_any_spelling_finds_the_option(spelling):
    assert SinkOptions.parse({spelling: "a:1;b:2"}).name_servers == ("a:1", "b:2")


def test_every_default_passes_its_own_checks():
    for option in OPTIONS:
        if option.default is not None:
            assert option.parse(option.default) == option.default, option.name


def test_every_number_has_a_lower_bound():
    numbers = [option for option in OPTIONS if type(option.default) in (int, float)]
    assert len(numbers) > 20 and all(math.isfinite(option.low) for option in numbers)


def test_names_are_unique_in_every_spelling():
    assert len({find_option(option.name).name for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nameservr": "x"}, ["nameservr", "did you mean 'nameServer'"]),
        ({"rocketmq.serialize.type": "ROCKETMQ"}, ["leave it out: headers are JSON"]),
        ({"mqClientApiTimeout": 3000}, ["connectTimeoutMs"]),
        ({"latencyMax": "50"}, ["faultTable=LATENCY:DURATION"]),
        ({"faultTable": "50:0:1"}, ["faultTable", "4.x, off", "'50:0, 550:2s"]),
        ({"ordering": "strct"}, ["ordering", "best_effort", "did you mean 'strict'"]),
        ({"useTLS": "perhaps"}, ["perhaps"]),
        ({"sendMsgTimeout": "soon"}, ["sendMsgTimeout", "'soon'", "milliseconds"]),
        ({"retryTimesWhenSendFailed": -1}, ["retryTimesWhenSendFailed", "0..100"]),
        ({"accessKey": "a"}, ["secretKey", "missing"]),
        ({"topic": "a", "TOPIC": "b"}, ["topic", "twice"]),
        ({"maxFailures": "nan%"}, ["maxFailures", "as in 100 or 1%"]),
        ({"autoBatch": "0ms"}, ["autoBatch", "1..2.09715e+06"]),
        ({"autoBatch": ", 2MiB"}, ["autoBatch", "'10ms, 32KiB'"]),
        ({"linger.ms": 5}, ["autoBatch=DELAY, SIZE"]),
        ({"defaultTopicQueueNums": 8}, ["createTopic=TBW102:NUMBER"]),
        ({"createTopic": "TBW102:0"}, ["createTopic", "number of queues"]),
        ({"maxFailures": 0.5}, ["maxFailures"]),
        ({"retryTimesWhenSendFailed": True}, ["retryTimesWhenSendFailed"]),
        ({"queueSelector": "wieghted"}, ["'wieghted'", "random, weighted, least_latency"]),
        ({"queueSelector": "a=-1"}, ["queueSelector", "0 to 1e9"]),
        ({"queueSelector": "a=1, a=2"}, ["queueSelector", "broker-a=2, b=1"]),
        ({"producerCacheTimeout": "1.0001s"}, ["producerCacheTimeout", "'1.0001s'"]),
        ({"deadLetterTopic": "dead letters"}, ["deadLetterTopic", "illegal characters"]),
        ({"deadLetterTopic": "n%a", "topic": "a", "namespace": "n"}, ["its own dead letters"]),
        ({"namespace": "a b"}, ["namespace", "illegal characters"]),
        ({"namespace": "n" * 126}, ["namespace", "128 characters", "127"]),
        ({"namespace": "n", "namespaceV2": "n"}, ["namespaceV2", "give one of them"]),
        ({"appId": "nightly$(id>x)"}, ["appId", "commands to paste"]),
        ({"appId": "a' OR '1'='1"}, ["appId", "commands to paste"]),
        ({"appId": "a\nb"}, ["appId", "'a\\nb'"]),
        ({"topic": ["a"]}, ["topic", "['a'] is not text"]),
        ({"addressMap": "10.1.0.0/33:*=a:*"}, ["addressMap", "HOST:PORT"]),
        ({"ledgerRetention": "send=-1d"}, ["ledgerRetention", "durations"]),
    ],
)  # fmt: skip
def test_an_illegal_option_is_explained(given, words):
    with pytest.raises(OptionError) as caught:
        SinkOptions.parse(given)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.facts["option"]


def option(kind, **more):
    return Option("x", "x", kind, None, "group", "help", **more)


@pytest.mark.parametrize(
    ("kind", "values", "parsed"),
    [
        (Kind.MILLISECONDS, ("2 ms", "2", 2, "0.002s"), 2), (Kind.MILLISECONDS, ("1e3",), 1000),
        (Kind.MILLISECONDS, ("10m", "10min", "600s"), 600_000), (Kind.MILLISECONDS, ("1d",), 864e5),
        (Kind.MILLISECONDS, ("1.1h", "3960s"), 3_960_000), (Kind.MILLISECONDS, ("1.001s",), 1001),
        (Kind.BYTES, ("12b", "12", 12, 12.0), 12), (Kind.BYTES, ("2kb",), 2000),
        (Kind.BYTES, ("1KiB", "1k"), 2**10), (Kind.BYTES, ("3 MiB", "3m"), 3 * 2**20),
        (Kind.BYTES, ("1MB", "0.001gb"), 10**6), (Kind.BYTES, ("1GiB", "1g"), 2**30),
        (Kind.BOOLEAN, (True, "1", "Yes", "on"), True), (Kind.BOOLEAN, ("no", 0, "off"), False),
        (Kind.INTEGERS, ("1, 2", [1, "2"]), (1, 2)), (Kind.INTEGERS, (" ",), ()),
        (Kind.COLUMNS, ("a=b", {"a": "b"}), (("a", "b"),)), (Kind.COLUMNS, ("",), ()),
        (Kind.SELECTOR, ("a=0, b=1e9",), "a=0,b=1e9"), (Kind.BUDGET, (" 1 %",), "1%"),
        (Kind.FAULT_TABLE, ("4.X",), "4.x"), (Kind.FAULT_TABLE, ("OFF",), "off"),
        (Kind.BUDGET, ("100%",), "100%"), (Kind.BUDGET, ("99.5%",), "99.5%"),
        (Kind.ADDRESSES, ("10.1.0.7/16:*=g:*; [fd00::1/8]:*=h:2",),
         (("10.1.0.7/16:*", "g:*"), ("[fd00::1/8]:*", "h:2"))),
    ],
)  # fmt: skip
def test_values_have_several_forms(kind, values, parsed):
    for value in values:
        assert option(kind).parse(value) == parsed


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Kind.TEXT, (None, {}, [], (), set())), (Kind.INTEGER, (True, 2.5, "x")),
        (Kind.NUMBER, ("inf", "nan", "x")), (Kind.BOOLEAN, ("maybe", "", 2)),
        (Kind.COLUMNS, ("=b", "a=", "a", "a=b,a=c")), (Kind.SELECTOR, ("", "a=-0.1", "a=1e308")),
        (Kind.FAULT_TABLE, ("50:-1", "50", "50:0:1")), (Kind.BYTES, ("1/2", "0.5", "1 x")),
        (Kind.ADDRESSES, ("a:1=b", "a=b:1", "10.1.0.0/33:*=a:*")), (Kind.BUDGET, ("101%", "-1")),
        (Kind.DURATIONS, ("a=-1d",)),
    ],
)  # fmt: skip
def test_values_of_other_forms_are_refused(kind, values):
    for value in values:
        with pytest.raises(OptionError, match="option x: ") as caught:
            option(kind).parse(value)
        assert caught.value.facts["option"] == "x"


def test_a_range_has_both_its_ends():
    bounded = option(Kind.INTEGERS, low=1, high=3)
    assert bounded.parse("1, 3") == (1, 3)
    for spec, value, text in (
        (bounded, "1, 4", "4 is outside 1..3"), (bounded, "0", "0 is outside 1..3"),
        (option(Kind.BYTES, high=3), 4, "4 is outside any..3 bytes"),
        (option(Kind.MILLISECONDS, low=1), 0, "0 is outside 1..any ms"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=rf"{text}$") as caught:
            spec.parse(value)
        assert caught.value.facts["option"] == "x"


@pytest.mark.parametrize(
    ("text", "ordering", "template", "queues"),
    [("auto", "none", "TBW102", 4), ("auto", "strict", "", 4), ("", "none", "", 4),
     ("mine:8", "strict", "mine", 8), ("auto:2", "none", "TBW102", 2)],
)  # fmt: skip
def test_a_topic_is_made_like_its_template(text, ordering, template, queues):
    options = SinkOptions.parse(createTopic=text, ordering=ordering)
    assert (options.template_topic, options.default_topic_queue_nums) == (template, queues)


def test_a_secret_is_not_printed_and_digests_differ():
    first = SinkOptions.parse(accessKey="ann", secretKey="canary-1")
    two = SinkOptions.parse(accessKey="ann", secretKey="canary-2")
    assert "canary" not in f"{first!r} {first} {first.secret_key!s} {first.given()} {first.digest}"
    assert first.digest != two.digest
    assert pickle.loads(pickle.dumps(first)) == first
    assert first.secret_key == Secret("canary-1") != two.secret_key != "canary-2"
    assert len({first.secret_key, Secret("canary-1"), two.secret_key}) == 2
    assert len(first.secret_key.digest()) == 16 and Secret(first.secret_key) == first.secret_key
    assert repr(Secret("")) == "''" and not Secret("") and first.secret_key


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("useTLS", "true", "verify-full"), ("useTLS", False, "off"),
        ("sendLatencyEnable", "true", "5.x"), ("sendLatencyFaultEnable", "false", "off"),
        ("retryAnotherBrokerWhenNotStoreOK", True, "retry"), ("enableTrace", True, "1.0"),
        ("autoBatch", "true", "10,32768"), ("autoBatch", "false", ""),
        ("autoBatch", "1s, 1MiB", "1000,1048576"),
        ("faultTable", "3s:30s, 50:0, 550 : 2000", "50:0,550:2000,3000:30000"),
        ("queueSelector", " Random", "random"),
        ("queueSelector", "broker-A = 2, b=.5", "broker-A=2,b=.5"),
        ("queueSelector", {"b": 0.5}, "b=0.5"),
        ("ledgerRetention", "send=7d, body=0", "send=604800000,body=0"),
        ("addressMap", "10.1.0.0/16:*=g:*; [::1]:1 = h:2", "10.1.0.0/16:*=g:*,[::1]:1=h:2"),
        ("allowSystemTopics", " Yes", "true"), ("allowSystemTopics", 0, "false"),
    ],
)  # fmt: skip
def test_other_spellings_of_values(name, value, shown):
    spec = find_option(name)
    parsed = getattr(SinkOptions.parse({name: value}), spec.attribute)
    assert spec.shown(parsed) == shown and spec.parse(spec.shown(parsed)) == parsed


def test_with_changes_only_what_is_named():
    base = SinkOptions.parse(nameServer="a:1", ordering="strict")
    assert base.with_(sendMsgTimeout="5s").send_msg_timeout_ms == 5000
    assert base.with_(sendMsgTimeout="5s").ordering == "strict"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a:1,b:2", "'a:1;b:2'"), ("a:1 b:2", "'a:1;b:2'"), ("http://a:1", "'a:1'"),
        ("http://a:1/;b", "'a:1;b:9876'"), ("mq.example.com", "'mq.example.com:9876'"),
    ],
)  # fmt: skip
def test_a_name_server_of_another_form_is_said_with_the_right_form(text, meant):
    with pytest.raises(OptionError, match=rf"HOST:PORT.*did you mean {meant}\?") as caught:
        _ = SinkOptions.parse(nameServer=text).name_servers
    assert caught.value.facts["option"] == "nameServer"
    assert SinkOptions.parse(nameServer=" a:1; [::1]:2 ;").name_servers == ("a:1", "[::1]:2")


@pytest.mark.parametrize("make", [Producer, TableProducer, RocketSink, Admin])
def test_a_client_without_a_name_server_takes_that_of_the_environment(make, monkeypatch):
    def name_servers(*options, **more):
        client = make(*options, **more)
        if make is not RocketSink:
            client.close()
        return client.options.name_servers

    monkeypatch.setenv("NAMESRV_ADDR", "127.0.0.1:1;127.0.0.1:2")
    assert name_servers() == name_servers(SinkOptions()) == ("127.0.0.1:1", "127.0.0.1:2")
    assert name_servers(nameServer="127.0.0.1:3") == ("127.0.0.1:3",)
    monkeypatch.setenv("NAMESRV_ADDR", "")
    with pytest.raises(OptionError, match=r"nameServer is missing: .*, or set NAMESRV_ADDR"):
        name_servers()


def test_notebooks_show_what_was_given_with_its_meaning_and_no_secret():
    options = SinkOptions.parse(
        {"nameServer": "a:1", "topic": "<b>", "accessKey": "user", "secretKey": "hidden-9"}
    )
    shown = options._repr_html_()
    assert "nameServer" in shown and "a:1" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    assert "hidden-9" not in shown
    assert find_option("topic").help.split()[0] in shown
    assert "sendMsgTimeout" not in shown, "a default"


@pytest.mark.parametrize("around", ["", " ", "\n", "\ufeff", "\r\n\t"])
def test_secrets_by_reference_have_nothing_around_them(around, tmp_path, monkeypatch):
    text = f"{around}pass word{around}"
    monkeypatch.setenv("THE_SECRET", text)
    (tmp_path / "se:cret").write_text(text, "utf-8")
    for reference in ("env:THE_SECRET", f"file:{tmp_path / 'se:cret'}"):
        assert resolve_secret("secretKey", Secret(reference)).reveal() == "pass word"
    monkeypatch.setenv("THE_SECRET", around)
    for reference, why in (("env:THE_SECRET", "missing or empty"), ("file:/gone", "cannot read")):
        with pytest.raises(OptionError, match=why) as caught:
            resolve_secret("secretKey", Secret(reference))
        assert caught.value.facts["option"] == "secretKey"


@pytest.mark.parametrize("client", [Producer, TableProducer, Admin])
def test_an_address_is_no_options(client):
    with pytest.raises(OptionError, match=r'a str is no SinkOptions.*nameServer="HOST:9876"'):
        client("127.0.0.1:9876")


@pytest.mark.parametrize(
    ("setting", "ordering", "ledger", "holds"),
    [
        ("auto", "strict", "/l", True), ("auto", "strict", "", False),
        ("auto", "best_effort", "/l", False), ("pass", "strict", "/l", False),
        ("hold", "best_effort", "/l", True),
    ],
)  # fmt: skip
def test_who_holds_pending_keys(setting, ordering, ledger, holds):
    options = SinkOptions.parse(onPendingKey=setting, ordering=ordering, ledger=ledger)
    assert options.holds_pending_keys is holds
