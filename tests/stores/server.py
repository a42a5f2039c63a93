"""Object stores on loopback: moto's S3 API, Azurite and fake-gcs-server, with counted requests.

moto checks for an object and stores the new object in two steps, in a thread per request. S3 does
both at once, so the server lets one write through at a time.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

KEY = "key-of-the-test"
SECRET = "secret-of-the-test"
REGION = "us-east-1"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_HOST = f"{AZURE_ACCOUNT}.dfs.core.windows.net"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The account and key that Azurite has for everybody."""
_HOLD_S = 5.0
"""The longest wait for the other writer of a commit."""

HEADERS = "tests.headers"
"""Key of WSGI's environment: the request's headers."""
_LOST = "500 Internal Server Error"

_CONDITIONS = {"HTTP_IF_NONE_MATCH": "*", "HTTP_X_GOOG_IF_GENERATION_MATCH": "0"}
"""Headers of a write that must not overwrite: of S3 and Azure, and of Google."""


@dataclass
class Requests:
    """The requests of a span by method; a listing is `LIST`, a copy `COPY`."""

    by_method: Counter[str] = field(default_factory=Counter)
    commits: list[tuple[str, bool, str]] = field(default_factory=list)
    """Writes to a table's log: the file's path, whether the write is on condition, the status."""

    @property
    def total(self):
        return sum(self.by_method.values())


class StoreServer:
    """A running server before `store`; `endpoint` is its address.

    Args:
        conditional: False ignores If-None-Match, as some stores with an S3 API do.
    """

    def __init__(self, store, *, conditional=True):
        self.conditional = conditional
        self._store = store
        self._write = threading.Lock()
        self._guard = threading.Lock()
        self._spans = []
        self._together = _Together()
        self._to_lose = 0
        self._then_fails = self._fails = False
        self._status = _LOST
        self._server = make_server("127.0.0.1", 0, self._answer, True, request_handler=_Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def counted(self):
        """Count the requests while this is open."""
        span = Requests()
        with self._guard:
            self._spans.append(span)
        try:
            yield span
        finally:
            with self._guard:
                self._spans.remove(span)

    def let_commits_meet(self, times):
        """Hold the first writer of a version until another writes the same version, `times` times.

        Both have seen by then that the version is free.
        """
        self._together.allow(times)

    def lose_answers(self, times, *, then_fail=False):
        """Store `times` commits and answer them with an error, like a proxy that gives up."""
        self._to_lose, self._then_fails = times, then_fail

    def fail(self, fails, status=_LOST):
        """Set whether every request is answered with an error."""
        self._fails, self._status = fails, status

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ, start):
        method, path = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"])
        condition = any(environ.get(name) == value for name, value in _CONDITIONS.items())
        if not self.conditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        is_commit = method == "PUT" and "/_delta_log/" in path and path.endswith(".json")
        status = []
        if self._fails:
            start(self._status, [("Content-Length", "0")])
            return []

        def started(code, headers, *more):
            if is_commit and self._to_lose and code.startswith("20"):
                self._to_lose -= 1
                self._fails = self._then_fails and not self._to_lose
                code, headers = _LOST, [("Content-Length", "0")]
            status.append(code)
            return start(code, headers, *more)

        if is_commit:
            self._together.meet(path)
        if method in ("PUT", "POST", "DELETE"):
            with self._write:
                body = list(self._store(environ, started))
        else:
            body = list(self._store(environ, started))
        if status[0] == _LOST:
            body = []
        with self._guard:
            for span in self._spans:
                span.by_method[_kind(method, environ)] += 1
                if is_commit:
                    span.commits.append((path, condition, status[0].partition(" ")[0]))
        return body


class S3Server(StoreServer):
    """A running S3 API."""

    def __init__(self, *, conditional=True):
        super().__init__(DomainDispatcherApplication(create_backend_app), conditional=conditional)

    @property
    def storage_options(self):
        """Return delta-rs's options, for a reader that knows nothing of Spark."""
        return s3_options(self.endpoint)

    def uri(self, bucket, name):
        return f"s3a://{bucket}/{name}"

    def make_bucket(self, bucket):
        self.client().create_bucket(Bucket=bucket)

    def client(self):
        """Return a client of boto3, the judge of what is stored."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET,
            region_name=REGION,
        )  # fmt: skip


def s3_options(endpoint):
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION, "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip


def _kind(method, environ):
    query = environ.get("QUERY_STRING", "")
    if method == "GET" and ("list-type" in query or "prefix=" in query):
        return "LIST"
    return "COPY" if "HTTP_X_AMZ_COPY_SOURCE" in environ else method


class _Together:
    """Holds the writers of a path until there are two."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting = Counter()
        self._times = 0

    def allow(self, times):
        with self._changed:
            self._times = times

    def meet(self, path):
        with self._changed:
            if self._times <= 0:
                return
            self._waiting[path] += 1
            if self._waiting[path] >= 2:
                self._times -= 1
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: self._waiting[path] >= 2, _HOLD_S)
            self._waiting[path] = 0


class _Handler(MotoRequestHandler):
    def make_environ(self):
        """Keep the headers as they came: WSGI drops names with an underscore."""
        return {**super().make_environ(), HEADERS: list(self.headers.items())}

    def handle_expect_100(self):
        """Send nothing, because werkzeug sends the answer 100; without a body none may be sent.
        Azure's client misreads a second answer, and a result that follows an answer at once."""
        if self.headers.get("Content-Length", "0") == "0":
            del self.headers["Expect"]
        return True

    def log_request(self, code="-", size="-"):
        """Log nothing."""
