"""`rocket-sink topic`, and the commands that `check` names for a topic."""

import shlex

import pytest

from rocket_sink import cli
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import PermName, RequestCode
from rocket_sink.wire.route import QueueData, decode_route
from tests.clusters import scripted_cluster
from tests.run_command import run_command

cluster = scripted_cluster()


def settings(cluster, topic):
    """Return {broker: (write queues, read queues, permission)}."""
    return {
        queue.broker_name: (queue.write, queue.read, queue.perm)
        for queue in cluster.route(topic).queues
    }


BOTH = {"broker-a", "broker-b"}
CREATIONS = [
    # (the topic before, arguments, its brokers then, their settings)
    (None, "", BOTH, (4, 4, 6)),
    (None, "--queues 8 --permission write", BOTH, (8, 8, 2)),
    (None, "--broker broker-b", {"broker-b"}, (4, 4, 6)),
    (None, "--cluster FakeCluster", BOTH, (4, 4, 6)),
    ({"queues": 8, "perm": 2}, "", BOTH, (8, 8, 2)),
    ({"queues": 8, "brokers": ["broker-a"]}, "", BOTH, (8, 8, 6)),
    ({"queues": 8, "read_queues": 2}, "", BOTH, (8, 8, 6)),
    ({"queues": 8}, "--queues 2 --force", BOTH, (2, 2, 6)),
]


@pytest.mark.parametrize(("before", "arguments", "brokers", "wanted"), CREATIONS)
def test_all_brokers_get_the_same_settings_however_often(
    before, arguments, brokers, wanted, cluster
):
    if before:
        cluster.create_topic("t", **before)
    for _ in range(2):
        done = run_command(
            "topic", "create", "t", "-n", cluster.name_server, *arguments.split(), "--json"
        )
        assert done.code == 0, done.err
        assert settings(cluster, "t") == dict.fromkeys(brokers, wanted)
        assert {row["broker"]: row["writeQueues"] for row in done.json()} == dict.fromkeys(
            brokers, wanted[0]
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--queues 2", "topic t has 4 queues on broker-a"),
        ("--broker broker-c",
         "no master of broker-c: start it, or name others by --broker (known: broker-a, "),
        ("--cluster Other", "no master of any broker in the cluster Other"),
        ("--permission execute", "one of"), ("--type odd", "one of"),
    ],
)  # fmt: skip
def test_a_refused_change_reaches_no_broker(arguments, text, cluster):
    cluster.create_topic("t")
    done = run_command("topic", "create", "t", "-n", cluster.name_server, *arguments.split())
    assert done.code != 0 and text in done.err
    codes = {frame.code for frame in cluster.requests()}
    assert RequestCode.UPDATE_AND_CREATE_TOPIC not in codes


def test_show_and_list(cluster):
    cluster.create_topic("t", attributes={"message.type": "FIFO"})
    cluster.create_topic("u", brokers=["broker-b"])
    for name in ("rmq_sys_x", "broker-a", "FakeCluster_REPLY_TOPIC"):
        cluster.create_topic(name)
    shown = run_command("topic", "show", "t", "-n", cluster.name_server)
    address = cluster.brokers[0].address
    row = f"broker-a {address} - 4 4 read and write FIFO"
    heads = "topic t broker master slaves write queues read queues permission type"
    assert " ".join(shown.out.split()).startswith(heads) and row in " ".join(shown.out.split())
    cluster.brokers[0].kill()
    shown = run_command("topic", "show", "t", "-n", cluster.name_server, "--json")
    assert [(row["broker"], row["writeQueues"]) for row in shown.json()] == [
        ("broker-a", 4), ("broker-b", 4),
    ]  # fmt: skip
    listed = run_command("topic", "list", "-n", cluster.name_server, "--json").json()
    assert [(row["topic"], row["broker"]) for row in listed] == [
        ("t", "broker-a"), ("t", "broker-b"), ("u", "broker-b"),
    ]  # fmt: skip
    own = run_command("topic", "list", "-n", cluster.name_server).out
    assert own.startswith("2 topics") and "rmq_sys_x" not in own
    assert "rmq_sys_x" in run_command("topic", "list", "--all", "-n", cluster.name_server).out


def test_a_broker_that_lacks_the_topic_gets_its_type(cluster):
    cluster.create_topic("t", brokers=["broker-a"], attributes={"message.type": "FIFO"})
    done = run_command("topic", "create", "t", "-n", cluster.name_server, "--json")
    assert [row["type"] for row in done.json()] == ["FIFO", "FIFO"]
    cluster.on(RequestCode.GET_TOPIC_CONFIG, Answer(3, "not supported"), times=None)
    done = run_command("topic", "create", "t", "--type", "fifo", "-n", cluster.name_server)
    assert done.code == 1 and "broker-a, broker-b keeps no type" in done.err


FAULTS = [
    # (the topic, options of `check`, a text of the finding)
    (None, (), "on no other"),
    (None, (), "no broker makes topics by itself"),
    (None, ("-O", "ordering=strict"), "createTopic is empty"),
    ({"brokers": ["broker-a"]}, (), "put it on all brokers"),
    ({"perm": PermName.READ}, (), "it is closed"),
    ({"queues": 8, "read_queues": 2}, (), "lets nobody read the queues"),
    ({"attributes": {"message.type": "FIFO"}}, ("-O", "columns=delay_ms=wait"), "change it with"),
]


@pytest.mark.parametrize(("topic", "options", "text"), FAULTS)
def test_the_command_that_check_names_mends_the_topic(topic, options, text, cluster):
    if text == "no broker makes topics by itself":
        cluster.delete_topic("TBW102")
    if topic:
        cluster.create_topic("t", **topic)

    def commands():
        done = run_command("check", "-n", cluster.name_server, "-t", "t", *options, "--json")
        texts = [each["text"] for each in done.json()["findings"]]
        return [each for each in texts if "rocket-sink topic create" in each]

    finding, *_ = commands()
    assert text in finding
    words = shlex.split(finding.partition("rocket-sink topic create")[2].partition(";")[0])
    assert cli.main(["topic", "create", *words]) == 0
    assert commands() == [] and settings(cluster, "t").keys() == BOTH


@pytest.mark.cluster
def test_mqadmin_sees_what_was_created(local_cluster):
    names = {f"created-{kind}" for kind in ("normal", "fifo", "delay", "transaction", "lite")}
    for name in names:
        arguments = [name, "-n", local_cluster.name_server, "--type", name.rpartition("-")[2]]
        assert cli.main(["topic", "create", *arguments, "--queues", "3"]) == 0
    route = decode_route(local_cluster.admin("topicRoute", "-t", "created-lite").encode())
    brokers = {broker.name for broker in local_cluster.brokers}
    assert set(route.queues) == {QueueData(broker, 3, 3, 6) for broker in brokers}
    assert names <= set(local_cluster.admin("topicList").split())
