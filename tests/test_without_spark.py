"""The parts that work on a machine without Spark, and the error of a Spark lane there."""

import textwrap
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

import rocket_sink
from tests.ledger.night import night
from tests.python import run_python

WITHOUT_SPARK = """
import sys
for name in ("pyspark", "py4j", "delta"):
    sys.modules[name] = None  # an import fails, as where the package is not installed
"""


def run_without_spark(script, *arguments):
    """Run a script in a Python that cannot import Spark; return what the script prints."""
    done = run_python("-c", WITHOUT_SPARK + textwrap.dedent(script), *arguments, timeout_s=120)
    return done.stdout


def test_producers_and_commands_work_without_spark(tmp_path):
    ledger = night(tmp_path / "ledger")
    out = run_without_spark(
        """
        import pyarrow as pa
        from rocket_sink import Ledger, Message, Producer, TableProducer, cli
        from rocket_sink.testing import FakeCluster

        ledger, letters = sys.argv[1:]
        with FakeCluster(brokers=2) as cluster:
            cluster.create_topic("orders", queues=2)
            cluster.create_topic("%DLQ%readers", queues=1)
            names = ["-n", cluster.name_server]
            with Producer(nameServer=cluster.name_server, producerGroup="p") as producer:
                producer.send(Message("orders", b"one"))
            with TableProducer(nameServer=cluster.name_server, topic="orders") as producer:
                producer.send(pa.table({"body": [b"two", b"three"]}))
            assert sorted(m.body for m in cluster.messages("orders")) == [b"one", b"three", b"two"]
            commands = (
                ["check", *names, "-t", "orders"],
                ["topic", "show", *names, "orders"],
                ["send", *names, "-t", "orders", "four"],
                ["tail", *names, "-t", "orders", "--last", "4", "--no-follow"],
                ["dlq", "list", *names, "--group", "readers"],
                ["dlq", "export", *names, "--group", "readers", "--out", letters],
                ["report", ledger],
                ["tune", ledger],
                ["ledger", "show", "epochs", "--ledger", ledger],
                ["options"],
            )
            for command in commands:
                print(command[:2], cli.main(command), file=sys.stderr)
                assert cli.main(command) == 0, command
        assert Ledger(ledger).exists()
        assert "pyspark" not in {name for name in sys.modules if sys.modules[name]}
        """,
        ledger,
        str(tmp_path / "letters.json"),
    )
    assert "four" in out


def test_an_installation_leaves_the_spark_of_a_platform_alone():
    wanted = [Requirement(text) for text in requires("rocket-sink") or ()]
    core = {requirement.name for requirement in wanted if requirement.marker is None}
    assert "pyarrow" in core
    assert not core & {"pyspark", "pyspark-client", "py4j", "delta-spark", "pandas"}


@pytest.mark.parametrize("name", ["RocketSink", "build_session", "register"])
def test_a_spark_lane_without_spark_names_the_command_to_type(name):
    assert name in rocket_sink.__all__
    out = run_without_spark(
        f"""
        try:
            from rocket_sink import {name}
        except ImportError as error:
            print(error)
        """
    )
    assert out == (
        "this needs Spark, and the package pyspark is not installed: pip install "
        "'rocket-sink[spark]', or install rocket-sink where your Spark is\n"
    )


def test_a_command_that_needs_spark_ends_in_one_line_without_it(tmp_path):
    (tmp_path / "rows.json").write_text('{"a": "b"}\n')
    out = run_without_spark(
        """
        import contextlib
        from rocket_sink import cli
        from rocket_sink.testing import FakeCluster

        with FakeCluster(brokers=1) as cluster, contextlib.redirect_stderr(sys.stdout):
            cluster.create_topic("orders", queues=1)
            code = cli.main(["stream", "--batch", "-n", cluster.name_server, "-t", "orders",
                             "--format", "json", "--path", sys.argv[1], "--select", "a AS body"])
        assert code == 1, code
        """,
        str(tmp_path),
    )
    assert "pip install 'rocket-sink[spark]'" in out
    assert len(out.splitlines()) == 1, out


@pytest.mark.parametrize("package", ["numpy", "pyarrow"])
def test_a_missing_package_of_the_core_is_named(package):
    out = run_without_spark(
        """
        sys.modules[sys.argv[1]] = None
        try:
            from rocket_sink import TableProducer
        except ImportError as error:
            print(type(error).__name__, error)
        """,
        package,
    )
    assert out.startswith(
        f"MissingPackageError TableProducer needs the package {package}, which is"
    )
