"""Azure's blobs, Google's store and HDFS on loopback, for the same cases as S3.

Azurite comes from npm, fake-gcs-server from Go's module proxy, HDFS from Hadoop's own jar for
tests, which runs in Spark's Java. pyarrow reaches HDFS by the C library libhdfs, which is in no
registry; the source distribution of pydoop contains its sources. All are made once, in the user's
cache.
"""

import base64
import http.client
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode

import pyspark
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from platformdirs import user_cache_path

from benchmarks.ports import free_port
from rocket_sink.cluster.jars import Artifact, locked_module, only_one, run_ivy
from rocket_sink.cluster.probe import accepts
from rocket_sink.java import find_java
from tests.producer.waiting import until
from tests.stores.server import AZURE_ACCOUNT, AZURE_HOST, HEADERS, Requests, StoreServer
from tests.stores.session import hadoop_version

AZURITE = "azurite@3.35.0"
FAKE_GCS = "github.com/fsouza/fake-gcs-server@v1.56.1"
PYDOOP = "pydoop==2.0.0"
_CACHE = user_cache_path("rocket-sink") / "stores"


class _Emulator(StoreServer):
    """A process behind the server; pyarrow and delta-rs take its address from the environment."""

    def __init__(self, request, answer):
        self._folder = tempfile.TemporaryDirectory()
        self._port = free_port()
        super().__init__(_forward(self._port, request, answer))

    def _start(self, *command, **environment):
        """Start the process, and set the environment."""
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        at, failure = f"127.0.0.1:{self._port}", f"no start of {command[0]}"
        until(lambda: accepts(at), poll_s=0.1, failure=failure)
        self._environment = environment
        os.environ.update(environment)

    def close(self):
        super().close()
        self._process.terminate()
        self._process.wait(60)
        self._folder.cleanup()
        for name in self._environment:
            del os.environ[name]


class AzureServer(_Emulator):
    """Azurite."""

    def __init__(self):
        super().__init__(_azure_request, _azure_answer)
        self._start(
            str(_made("azurite/node_modules/.bin/azurite-blob", _install_azurite)),
            "--location", self._folder.name, "--blobPort", str(self._port),
            "--skipApiVersionCheck", "--loose", "--silent", "--disableTelemetry",
            AZURE_STORAGE_ENDPOINT=f"{self.endpoint}/{AZURE_ACCOUNT}",
        )  # fmt: skip

    def uri(self, bucket, name):
        return f"abfss://{bucket}@{AZURE_HOST}/{name}"

    def make_bucket(self, bucket):
        from rocket_sink.ledger.path import resolve_path

        resolve_path(self.uri(bucket, "x")).filesystem().create_dir(bucket)


class GoogleServer(_Emulator):
    """fake-gcs-server."""

    def __init__(self):
        super().__init__(_google_request, _google_answer)
        self._host = self.endpoint.partition("://")[2]
        file = Path(self._folder.name, "account.json")
        file.write_text(json.dumps(_service_account(self.endpoint)))
        self._start(
            str(_made("bin/fake-gcs-server", _install_fake_gcs)), "-scheme", "http",
            "-host", "127.0.0.1", "-port", str(self._port), "-backend", "memory", "-public-host",
            self._host, "-external-url", self.endpoint,
            CLOUD_STORAGE_EMULATOR_ENDPOINT=self.endpoint,
            GOOGLE_APPLICATION_CREDENTIALS=str(file), GOOGLE_SERVICE_ACCOUNT=str(file),
        )  # fmt: skip

    def uri(self, bucket, name):
        return f"gs://{bucket}/{name}"

    def make_bucket(self, bucket):
        connection = http.client.HTTPConnection(self._host)
        connection.request("POST", "/storage/v1/b", json.dumps({"name": bucket}))
        assert connection.getresponse().status == 200


class HdfsServer:
    """A name node and a data node in a Java process. No request is counted, and no answer lost.

    libhdfs starts a Java in each Python process that reaches HDFS.
    """

    def __init__(self):
        java = find_java()
        spark_jars = f"{Path(pyspark.__file__).parent}/jars"
        jar = _made(f"jars/hadoop-client-minicluster-{hadoop_version()}.jar", _install_hdfs)
        library = _made("libhdfs/libhdfs.so", _compile_libhdfs)
        os.environ |= {
            "ARROW_LIBHDFS_DIR": str(library.parent), "JAVA_HOME": str(java.home),
            "CLASSPATH": ":".join(str(path) for path in Path(spark_jars).glob("*.jar")),
        }  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [str(java.executable), "-Xmx400m", "-cp", f"{jar}:{spark_jars}/*",
             str(Path(__file__).with_name("Hdfs.java")), self._folder.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        lines = iter(self._process.stdout.readline, "")
        self._root = next(line.strip() for line in lines if line.startswith("hdfs://"))

    def uri(self, bucket, name):
        return f"{self._root}/{bucket}/{name}"

    def make_bucket(self, bucket):
        """Do nothing: a folder is made with its first file."""

    @contextmanager
    def counted(self):
        yield Requests()

    def let_commits_meet(self, times):
        """Do nothing."""

    lose_answers = let_commits_meet

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()


def _forward(port, request, answer):
    """Return an application that passes requests to an emulator.

    Args:
        request: returns (method, target) of the request to pass on.
        answer: returns (content, further headers) of the answer to pass on.
    """

    def application(environ, start):
        sent = -1 if environ.get("wsgi.input_terminated") else environ.get("CONTENT_LENGTH")
        body = environ["wsgi.input"].read(int(sent or 0))
        method, target = request(environ)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        headers = [(n, v) for n, v in environ[HEADERS] if n.lower() not in _OF_A_HOP]
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        content = response.read()
        content, more = answer(environ, content)
        kept = [(n, v) for n, v in response.getheaders() if n.lower() not in _OF_A_HOP]
        length = response.getheader("Content-Length") if method == "HEAD" else None
        kept += [("Content-Length", length or str(len(content))), *more.items()]
        kept.append(("Connection", "close"))
        start(f"{response.status} {response.reason}", kept)
        connection.close()
        return [content]

    return application


_OF_A_HOP = (
    "transfer-encoding", "content-length", "connection", "keep-alive", "expect",
)  # fmt: skip


def _azure_request(environ):
    return environ["REQUEST_METHOD"], environ["RAW_URI"]


def _azure_answer(environ, content):
    """Leave out blobs before `startFrom`, which Azurite ignores."""
    start = parse_qs(environ["QUERY_STRING"]).get("startFrom", [""])[0]
    pattern = rb"<Blob><Name>(.*?)</Name>.*?</Blob>"
    return (_without(content, pattern, lambda name: name < start) if start else content), {}


def _google_request(environ):
    """Turn an upload by Google's XML API, which the emulator lacks, into one by the JSON API."""
    if not _is_upload(environ):
        return environ["REQUEST_METHOD"], environ["RAW_URI"]
    bucket, _, name = environ["PATH_INFO"].lstrip("/").partition("/")
    query = {"uploadType": "media", "name": name}
    generation = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
    if generation is not None:
        query["ifGenerationMatch"] = generation
    return "POST", f"/upload/storage/v1/b/{quote(bucket)}/o?{urlencode(query)}"


def _is_upload(environ):
    return environ["REQUEST_METHOD"] == "PUT" and not environ["PATH_INFO"].startswith("/upload/")


def _google_answer(environ, content):
    """Leave out objects up to `start-after`, which the emulator ignores."""
    if _is_upload(environ):
        return b"", {"ETag": json.loads(content).get("etag", "")}
    start = parse_qs(environ["QUERY_STRING"]).get("start-after", [""])[0]
    pattern = rb"<Contents><Key>(.*?)</Key>.*?</Contents>"
    return (_without(content, pattern, lambda name: name <= start) if start else content), {}


def _without(content, pattern, is_before):
    return re.sub(
        pattern, lambda m: b"" if is_before(m[1].decode()) else m[0], content, flags=re.DOTALL
    )


def _service_account(endpoint):
    """Return a service account that delta-rs asks for no token; pyarrow signs one by the key."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account", "project_id": "p", "client_email": "a@example.com",
        "private_key_id": base64.b16encode(b"key").decode(), "private_key": key.decode(),
        "token_uri": f"{endpoint}/token", "gcs_base_url": endpoint, "disable_oauth": True,
    }  # fmt: skip


def _made(name, make):
    """Return a file of the cache; let `make` fill the cache's folder with it first, if needed."""
    with only_one(_CACHE / "lock", print):
        if not (_CACHE / name).exists():
            make(_CACHE)
    return _CACHE / name


def _install_azurite(folder):
    _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder / "azurite"), AZURITE)


def _install_fake_gcs(folder):
    _run("go", "install", FAKE_GCS, GOBIN=str(folder / "bin"))


def _install_hdfs(folder):
    jar = Artifact("org.apache.hadoop", "hadoop-client-minicluster", hadoop_version(), "", "")
    with tempfile.TemporaryDirectory() as scratch:
        run_ivy(
            find_java(), Path(scratch, "ivy"), locked_module([jar]),
            folder / "jars" / "[artifact]-[revision].[ext]", lambda: None, poms=False,
        )  # fmt: skip


def _compile_libhdfs(folder):
    java = find_java().home
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "old.txt").write_text("setuptools<70\n")
        _run(
            sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d",
            scratch, PYDOOP, PIP_CONSTRAINT=f"{scratch}/old.txt", JAVA_HOME=str(java),
        )  # fmt: skip
        [archive] = Path(scratch).glob("pydoop-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        sources = next(Path(scratch).glob("pydoop-*/src/libhdfs"))
        files = [*sources.glob("*.c"), *sources.glob("common/*.c"), *sources.glob("os/posix/*.c")]
        folders = ["", "include", "os/posix", "common"]
        (folder / "libhdfs").mkdir(exist_ok=True)
        _run(
            "gcc", "-shared", "-fPIC", "-O1", "-w", *(f"-I{sources}/{name}" for name in folders),
            f"-I{java}/include", f"-I{java}/include/linux", *map(str, files),
            f"-L{java}/lib/server", "-ljvm", f"-Wl,-rpath,{java}/lib/server",
            "-o", str(folder / "libhdfs" / "libhdfs.so"),
        )  # fmt: skip


def _run(*command, **environment):
    subprocess.run(command, check=True, timeout=900, env={**os.environ, **environment},
                   stdout=subprocess.DEVNULL)  # fmt: skip
