"""A name server that nobody can reach is one error on the driver, before any task runs."""

import time
from types import SimpleNamespace

import pytest
from pyspark.errors import StreamingQueryException

from rocket_sink.errors import NameServerUnavailableError
from rocket_sink.options import SinkOptions
from rocket_sink.spark.checks import reach
from rocket_sink.spark.sink import RocketSink
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode
from tests.clusters import scripted_cluster
from tests.run_command import run_command

NOBODY = "127.0.0.1:1"
cluster = scripted_cluster(1)


@pytest.fixture(autouse=True)
def pauses_s(monkeypatch):
    """Forget earlier answers, and return the pauses, which are not waited for."""
    pauses: list[float] = []
    monkeypatch.setattr(reach, "_reached", set())
    # Threads of other tests may sleep, so replace `time` in this module only.
    monkeypatch.setattr(reach, "time", SimpleNamespace(sleep=pauses.append, time=time.time))
    return pauses


def session_at(master, answers):
    """Return a session whose executors answer what is in `answers`."""

    def tasks(values, _):
        return SimpleNamespace(map=lambda ask: SimpleNamespace(first=lambda: answers.pop(0)))

    context = SimpleNamespace(master=master, parallelize=tasks)
    return SimpleNamespace(sparkContext=context, _jsparkSession=object())


def test_executors_are_asked_if_the_driver_gets_no_answer():
    options = SinkOptions.parse(nameServer=NOBODY, topic="t")
    answers = [NameServerUnavailableError("no name server answered an executor"), ""]
    session = session_at("spark://host:7077", answers)
    with pytest.raises(NameServerUnavailableError, match="an executor"):
        reach.check_reachable(options, session)
    for _ in range(2):
        reach.check_reachable(options, session)
    assert answers == [], "the last answer is remembered"


def test_a_name_server_that_is_starting_is_asked_again(cluster, pauses_s, caplog):
    session = session_at("local[2]", [])
    with pytest.raises(NameServerUnavailableError, match="check the option nameServer"):
        reach.check_reachable(SinkOptions.parse(nameServer=NOBODY, topic="t"), session)
    assert len(pauses_s) == 2
    caplog.clear()
    for topic in ("", "not-there-yet"):
        options = SinkOptions.parse(nameServer=cluster.name_server, topic=topic)
        reach.check_reachable(options, session)
    assert not cluster.brokers[0].requests
    assert len(pauses_s) == 2 and not caplog.messages, "the workers warn of the topic"


@pytest.mark.parametrize("namespace", ["", "prod"])
def test_a_mistyped_topic_is_one_warning_with_the_nearest_name(cluster, caplog, namespace):
    """Brokers that create topics by themselves store the rows under the wrong name."""
    for name in ("flights", "weather"):
        cluster.create_topic(f"{namespace}%{name}" if namespace else name, 4)
    values = {"nameServer": cluster.name_server, "namespace": namespace}
    for topic in ("flihgts", "flihgts", "flights"):
        options = SinkOptions.parse(topic=topic, **values)
        reach.check_reachable(options, session_at("spark://host:7077", []))
    (record,) = caplog.records
    command = ["check", "-n", cluster.name_server, "-t", "flihgts", "--json"]
    checked = run_command(*command, "-O", f"namespace={namespace}")
    assert checked.code == 0
    assert record.levelname == "WARNING"
    assert "topic flihgts yet" in record.message and "autoCreateTopicEnable" in record.message
    assert record.message.endswith("check its name, the nearest existing topic is flights")
    (finding,) = (f for f in checked.json()["findings"] if f["what"] == "topic flihgts")
    assert "check its name, the nearest existing topic is flights; the first" in finding["text"]


@pytest.mark.parametrize(
    ("topic", "ending"),
    [("orderz-group", "check its name"), ("DLQ_orderz", "check its name"),
     ("ordrs", "the nearest existing topic is orders")],
)  # fmt: skip
def test_no_hint_names_a_topic_that_brokers_use_themselves(cluster, topic, ending):
    for name in ("orders", "%RETRY%orderz-group", "%DLQ%orderz", "%RETRY%ordrs", "rmq_sys_ord"):
        cluster.create_topic(name, 1)
    options = SinkOptions.parse(topic=topic, nameServer=cluster.name_server)
    warning = reach.name_server_answer(options)
    assert isinstance(warning, str) and warning.endswith(ending)


def test_a_topic_list_that_cannot_be_read_fails_no_query(cluster):
    code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    cluster.on_name_server(code, Answer(0), times=None)
    options = SinkOptions.parse(topic="t", nameServer=cluster.name_server, createTopic="")
    warning = reach.name_server_answer(options)
    assert "the topic t: no send creates it, because createTopic is empty" in str(warning)
    assert str(warning).endswith("by default with ordering=strict; check its name")


@pytest.mark.spark
def test_no_task_runs_where_no_name_server_answers(spark, tmp_path, caplog):
    """Tasks waited for more than a minute, and Spark printed a hundred lines."""
    sink = RocketSink(nameServer=NOBODY, topic="t")
    with pytest.raises(NameServerUnavailableError, match="check the option nameServer"):
        sink.write(spark.range(1).selectExpr("'x' AS body"))
    rows = spark.readStream.format("rate").load().selectExpr("'x' AS body")
    with pytest.raises(NameServerUnavailableError):
        sink.stream(rows)
    bare = rows.writeStream.foreach(sink)
    with pytest.raises(StreamingQueryException):
        bare.option("checkpointLocation", str(tmp_path)).start().awaitTermination(120)
    assert f"is ended: no name server answered ({NOBODY}" in caplog.text
