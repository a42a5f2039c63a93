"""A user without a name and without a home, as OpenShift gives containers."""

import os
import shutil
import subprocess
import sys

import pytest

from rocket_sink.testing import FakeCluster

UID = "54321"
READS_ALL = "+dac_read_search"  # the interpreter of the tests may be in root's home
SCRIPT = """\
import os, pwd, sys
import pyarrow as pa
from rocket_sink import Message, Producer, TableProducer

assert os.getuid() == int(sys.argv[3]) and "HOME" not in os.environ
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    with Producer(nameServer=sys.argv[1]) as producer:
        print(producer.send(Message("t", b"x")).status)
    with TableProducer(nameServer=sys.argv[1], topic="t", ledger=sys.argv[2]) as producer:
        print(producer.send(pa.table({"body": ["a", "b"]})).summary.acked)
"""


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv"
)
def test_what_needs_no_spark_works_without_a_name_and_a_home(tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    without = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "SPARK_LOCAL_DIRS")
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", queues=1)
        result = subprocess.run(
            ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups", "--inh-caps", READS_ALL,
             "--ambient-caps", READS_ALL, sys.executable, "-c", SCRIPT, cluster.name_server,
             str(tmp_path / "ledger"), UID],
            env={name: value for name, value in os.environ.items() if name not in without},
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "SEND_OK\n2\n"), result.stderr
