"""`format("rocketmq")` without `register`: Spark finds the package `pyspark_rocketmq` by itself.

Each test starts a process of its own like a user: the session here may have registered the source.
The long forms need pip install "pyspark[connect,pipelines]".
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from rocket_sink.java import find_java
from tests.clusters import scripted_cluster
from tests.integration.test_spark_submit import environment
from tests.java_client import FOLDER, GENERATIONS, java_command

FRAMES_AND_SQL = """
import sys
from rocket_sink.spark.session import prepare_environment
from pyspark.sql import SparkSession

prepare_environment()
name_server, folder = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
options = {"nameServer": name_server, "topic": "t"}
rows = spark.range(10).selectExpr("concat('frame ', cast(id AS string)) AS body")
rows.write.format("rocketmq").mode("append").options(**options).save()
stream = spark.readStream.schema("body string").json(f"{folder}/in")
writer = stream.writeStream.format("rocketmq").options(**options)
writer = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
writer.start().awaitTermination()
spark.sql(
    "CREATE TEMPORARY VIEW out (body STRING) USING rocketmq "
    f"OPTIONS (nameServer '{name_server}', topic 't')"
)
spark.sql("INSERT INTO out SELECT concat('sql ', cast(id AS string)) FROM range(10)")
spark.stop()
"""
SQL = """
CREATE TEMPORARY VIEW out (body STRING)
USING rocketmq OPTIONS (nameServer '{name_server}', topic 't');
INSERT INTO out SELECT concat('sql ', cast(id AS string)) FROM range(10);
"""
SCALA = (
    """spark.range(10).selectExpr("concat('scala ', cast(id AS string)) AS body")"""
    """.write.format("rocketmq").mode("append").option("nameServer", "{name_server}")"""
    """.option("topic", "t").save(); System.exit(0)\n"""
)
PIPELINE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
dp.create_sink("out", "rocketmq", {{"nameServer": "{name_server}", "topic": "t"}})


@dp.append_flow(target="out")
def flow():
    return spark.readStream.schema("body string").json("{folder}/in")
"""


def run(command, **more):
    environ = {**environment(), "JAVA_HOME": str(find_java().home)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=800, **more
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def bodies(cluster):
    return sorted(message.body.decode() for message in cluster.messages("t"))


cluster = scripted_cluster(1, t=4)


def put_rows(folder):
    """Write ten rows to the folder `in` of this one."""
    (folder / "in").mkdir()
    rows = [json.dumps({"body": f"stream {number}"}) for number in range(10)]
    (folder / "in" / "rows.json").write_text("\n".join(rows))


@pytest.fixture
def rows_folder(tmp_path):
    put_rows(tmp_path)
    return tmp_path


def wanted(*kinds):
    return sorted(f"{kind} {number}" for kind in kinds for number in range(10))


@pytest.mark.spark
def test_data_frames_streams_and_sql(cluster, rows_folder):
    run([sys.executable, "-c", FRAMES_AND_SQL, cluster.name_server, str(rows_folder)])
    assert bodies(cluster) == wanted("frame", "stream", "sql")


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["sql", "scala", "java"])
def test_who_writes_without_python(cluster, kind, tmp_path):
    """spark-sql, spark-shell and a Java program: only Spark's workers are Python."""
    bin_folder = Path(pyspark.__file__).parent / "bin"
    address = cluster.name_server
    (tmp_path / "write.scala").write_text(SCALA.format(name_server=address))
    commands = {
        "sql": ["spark-sql", "-e", SQL.format(name_server=address)],
        "scala": ["spark-shell", "-i", "write.scala"],
        "java": ["spark-submit", "--class", "WriteFrame", "spark-internal", address],
    }
    name, *arguments = commands[kind]
    options = ["--master", "local[1]", "--conf", "spark.ui.enabled=false"]
    if kind == "java":
        jars = sorted((bin_folder.parent / "jars").glob("*.jar"))
        _, class_path = java_command(FOLDER / "WriteFrame.java", GENERATIONS[0], jars)
        options += ["--driver-class-path", class_path.partition(os.pathsep)[0]]
    run([str(bin_folder / name), *options, *arguments], cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert bodies(cluster) == wanted(kind)


@pytest.mark.slow
@pytest.mark.spark
def test_a_declarative_pipeline(cluster, rows_folder):
    pytest.importorskip("grpc", reason='pip install "pyspark[pipelines]"')
    folder = rows_folder / "pipeline"
    (folder / "transformations").mkdir(parents=True)
    text = PIPELINE.format(name_server=cluster.name_server, folder=rows_folder)
    (folder / "transformations" / "flow.py").write_text(text)
    (folder / "spark-pipeline.yml").write_text(
        f"name: out\nstorage: file://{folder}/storage\n"
        "libraries:\n  - glob:\n      include: transformations/**\n"
    )
    command = Path(sys.executable).parent / "spark-pipelines"
    run([str(command), "run", "--spec", "spark-pipeline.yml"], cwd=folder)
    assert bodies(cluster) == wanted("stream")
