"""The path of a ledger, for Spark and for pyarrow's file systems.

A path without a scheme is local, whatever Spark's default file system is. So pyarrow in the tasks
and Spark on the driver use the same folder. Functions import `pyarrow.fs` themselves, because the
data source uses this module in processes that live for one call (`spark.datasource`).

If pyarrow cannot reach a ledger, Spark still reads its table and appends to it. Only the files
beside the table (notes, locks) are out of reach, and `LedgerPath.filesystem` raises an error with
the reason. Spark then brings the tasks' ledger rows to the driver. They wait for the next fold in a
folder of the driver's user (`LedgerPath.driver_folder`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.storage import Properties, host_of, is_classic, open_store, properties_for
from rocket_sink.private_file import rights

if TYPE_CHECKING:
    from pyarrow import fs
    from pyspark.sql import SparkSession

LOG_FOLDER: Final = "_delta_log"
SPOOL: Final = "_spool"
"""Folder of spool files in the table's folder; Delta ignores names that start with `_`."""
NOTES: Final = "_notes"
SHARE: Final = (
    "if they are several, give the folder a group of all of them (`chgrp -R`, `chmod -R g+rwX`, "
    "and `chmod g+s` for its folders), and run them with `umask 002`"
)
"""Advice for a local ledger that several users write to."""
_PART_LENGTH: Final = 80
_DIGEST_LENGTH: Final = 32
_OTHERS: Final = re.compile(rb"[^A-Za-z0-9.-]")
_OURS: Final = "rocket_sink.errors."

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""A URI's scheme has two characters or more, because a single letter is a Windows drive."""
_ARROW_SCHEMES: Final = {"s3a": "s3", "s3n": "s3", "wasbs": "abfs", "abfss": "abfs"}
"""{scheme in Hadoop: scheme in pyarrow}."""
_KNOWN: Final = frozenset({"s3", "gs", "gcs", "abfs", "hdfs", "viewfs", "file"})
"""Schemes that `pyarrow.fs.FileSystem.from_uri` knows."""
_SETTINGS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, for a store that is not "
    "Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET",
    "hdfs": "HADOOP_HOME, JAVA_HOME and CLASSPATH (`hadoop classpath --glob`)",
    "viewfs": "HADOOP_HOME, JAVA_HOME and CLASSPATH (`hadoop classpath --glob`)",
}
"""Environment variables that pyarrow reads, by scheme."""


@dataclass(frozen=True)
class LedgerPath:
    """The folder of a ledger's table.

    Attributes:
        uri: absolute URI for Spark; `file:/...` if local, because Delta takes `file:///...` for
            another location. Characters are not escaped, as in Hadoop's paths.
        root: the folder's path in `filesystem()`.
        is_local: the folder is on a file system that appends, renames and locks.
        problem: the reason why pyarrow cannot reach the folder; empty if it can.
        storage: the store's address and credentials, as far as Spark's configuration has them.
    """

    uri: str
    root: str
    is_local: bool
    problem: str = field(default="", compare=False, repr=False)
    storage: Properties = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return plain_path(self.uri)

    @property
    def spool(self) -> str:
        return f"{self.root}/{SPOOL}"

    @property
    def locks(self) -> str:
        return f"{self.root}/{NOTES}/locks"

    @property
    def quarantine(self) -> str:
        """Folder of damaged spool files; they keep their paths below the spool."""
        return f"{self.spool}/_quarantine"

    @property
    def driver_folder(self) -> LedgerPath:
        """Folder on the driver's host, below `$XDG_STATE_HOME`, for rows that Spark brought to the
        driver. The folder is for this host and user; only its spool is used. It has a folder for
        each host of a store, because two stores may have a ledger of one URI."""
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        uri = f"{_scheme(self.uri)}:{self.uri.partition(':')[2]}"
        name = hashlib.sha256(uri.encode()).hexdigest()[:16]
        host = folder_part(host_of(uri, self.storage))
        root = Path(state).expanduser() / "rocket-sink" / "ledgers" / name / host
        return LedgerPath(self.uri, str(root), is_local=True)

    @property
    def spools(self) -> tuple[LedgerPath, ...]:
        """The folders whose spools may hold rows of this ledger, the preferred one first."""
        if self.is_local:
            return (self,)
        return (self.driver_folder,) if self.problem else (self, self.driver_folder)

    @property
    def remedy(self) -> str:
        """Advice for the error of a task or driver that cannot use the folder."""
        if self.is_local:
            return (
                f"{rights(Path(self.root))}; let the users of driver and executors write to this "
                f"folder, on every host: {SHARE}"
            )
        return _remedy(_scheme(self.uri))

    def filesystem(self) -> fs.FileSystem:
        """Return a new pyarrow file system, because its handles must not cross a fork. On a local
        ledger it follows no links below the ledger's folder (`plain_files`). Raise LedgerError if
        pyarrow has no such file system, or cannot reach it."""
        if self.is_local:
            from rocket_sink.plain_files import plain_files

            return plain_files(self.root)
        return _remote(self.uri, self.storage)[0]


@contextlib.contextmanager
def failing(
    before: str, path: str, after: str = "", kinds: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Raise the block's errors of these `kinds` as a LedgerError with the text `before: <error>`
    and then `after`; `path` is a fact of the LedgerError."""
    try:
        yield
    except kinds as error:
        raise LedgerError(f"{before}: {error}{after}", path=path) from error


def first_line(error: BaseException) -> str:
    """Return an error as one line; for Java's errors, their message without the stack. If an error
    of this package failed a task, return that error, which may be only in the stack."""
    text = str(error)
    lines = (*text.splitlines(), *str(getattr(error, "_stackTrace", "")).splitlines())
    message = next((line.partition(_OURS)[2] for line in lines if _OURS in line), None)
    if message is not None:
        return message
    # py4j's own first line only says that an error occurred. At a driver's end Java may be gone.
    with contextlib.suppress(Exception):
        java = getattr(error, "java_exception", None)
        text = text if java is None else str(java.toString())
    return (text.strip() or type(error).__name__).splitlines()[0]


def path_part(text: str) -> str:
    """Return `text`, for example a query's id, as one component of a path.

    Different texts have different results: `=` and two hex digits stand for each byte that is no
    ASCII letter, digit, `.` or `-`. So the result has no `_` and no `~`, and names can be joined by
    them. A long text is cut, and its digest follows `==`. A file system may not tell upper from
    lower case, so a note that is read back has the text in it, too."""
    data = text.encode("utf-8", "surrogatepass")
    part = _OTHERS.sub(lambda byte: b"=%02X" % ord(byte[0]), data).decode()
    if len(part) <= _PART_LENGTH:
        return part
    digest = hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]
    return f"{part[: _PART_LENGTH - 2 - _DIGEST_LENGTH]}=={digest}"


def folder_part(text: str) -> str:
    """Return `text` as a folder's name that is not empty and does not start with `_` or `.`."""
    return "q-" + path_part(text)


def is_object_store(filesystem: fs.FileSystem) -> bool:
    """Return whether the file system is an object store. There a reader sees only complete files,
    except for an empty one that pyarrow is just writing to Azure. An empty folder is an object that
    stays."""
    return filesystem.type_name in ("s3", "gcs", "abfs")


def make_folder_of(filesystem: fs.FileSystem, path: str) -> None:
    """Make the parent folder of a file that is to be written, unless the store has no folders."""
    if not is_object_store(filesystem):
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)


def check_encoding(spark: SparkSession, path: str) -> None:
    """Raise ConfigurationError if Java would take a path for another one. Without a UTF-8 locale,
    as in many containers, Java uses `?` for characters that are not ASCII: Spark would not see a
    folder that Python sees, and would make another one beside it."""
    if not path or is_remote(path) or not is_classic(spark):
        return
    path = str(Path(path).absolute())
    if path.isascii():
        return
    jvm: Any = spark._jvm
    encoding = str(jvm.java.lang.System.getProperty("sun.jnu.encoding"))
    with contextlib.suppress(LookupError, UnicodeError):
        if path.encode(encoding) == os.fsencode(path):
            return
    raise ConfigurationError(
        f"Spark's Java cannot use the path {path}: its encoding of file names "
        f"(sun.jnu.encoding) is {encoding}, so Java would use another path. Nothing was read or "
        "sent. Set LC_ALL=C.UTF-8 in the environment of spark-submit and, as "
        "spark.executorEnv.LC_ALL and spark.yarn.appMasterEnv.LC_ALL, of the cluster's processes. "
        "The setting -Dsun.jnu.encoding has no effect"
    )


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether the text of a path names a store, and not a local folder."""
    text = os.fspath(path).strip()
    return _SCHEME.match(text) is not None and not text.startswith("file:")


def plain_path(uri: str) -> str:
    """Return a `LedgerPath.uri` for messages: a local one without its scheme."""
    return uri.removeprefix("file:")


_TABLE: Final = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+")


def is_table_name(ledger: str) -> bool:
    """Return whether a ledger is given by the name `catalog.schema.table` and not by its path."""
    return _TABLE.fullmatch(ledger.strip()) is not None


def resolve_path(path: str | os.PathLike[str] | LedgerPath) -> LedgerPath:
    """Return the path as a `LedgerPath`. Call this on the driver, because it makes paths absolute.

    The `uri` of the result resolves to the same path. In a `file://` URI, `%` and two hex digits
    stand for a byte. Raise LedgerError if the path is empty, or if Spark, pyarrow and delta-rs
    would read it differently, or if the text is a table's name, which only the lanes of Spark and
    `Ledger` look up."""
    if isinstance(path, LedgerPath):
        return path
    text = os.fspath(path).strip().rstrip("/")
    if is_table_name(text):
        raise LedgerError(
            f"the ledger {text} is the name of a table: give its location here. A folder of that "
            f"name is ./{text}",
            path=text,
        )
    if not text:
        raise LedgerError("the ledger's path is empty; give a folder, as in ledger=/data/ledger")
    if _SCHEME.match(text) is None:
        return _local(text)
    if text.startswith("file:"):
        return _local(_path_of(text))
    storage = properties_for(text)
    try:
        root = _remote(text, storage)[1]
    except LedgerError as error:
        return LedgerPath(text, _guessed_root(text), False, str(error), storage)
    return LedgerPath(text, root, is_local=False, storage=storage)


def _path_of(uri: str) -> str:
    if not uri.startswith("file://"):
        return uri.removeprefix("file:")
    host, slash, path = uri.removeprefix("file://").partition("/")
    if "#" in uri or "?" in uri or host not in ("", "localhost"):
        raise LedgerError(
            f"in the ledger's URI {uri} everything behind # or ?, and a host before the path, is "
            "no part of the path; give the path without file://, or write file:///, %23 for # and "
            "%3F for ?",
            path=uri,
        )
    return unquote(slash + path)


def _local(path: str) -> LedgerPath:
    # Python keeps `//` at the start. In a URI the first folder would then be the host.
    root = os.path.normpath(re.sub("^//", "/", str(Path(path).absolute())))
    if root != root.rstrip():
        raise LedgerError(
            f"the name of the ledger's folder {root!a} ends in white space, which rocket-sink "
            "cuts off options; rename the folder",
            path=root,
        )
    return LedgerPath(f"file:{root}", root, is_local=True)


def _scheme(uri: str) -> str:
    scheme = uri.partition(":")[0]
    return _ARROW_SCHEMES.get(scheme, scheme)


def _remote(uri: str, storage: Properties) -> tuple[fs.FileSystem, str]:
    scheme = _scheme(uri)
    try:
        store = open_store(uri, storage)
        if store is None and scheme in _KNOWN:
            from pyarrow import fs

            store = fs.FileSystem.from_uri(f"{scheme}:{uri.partition(':')[2]}")
    except (OSError, ValueError, NotImplementedError) as error:
        raise LedgerError(
            f"driver and tasks write files beside the table of the ledger {uri} by pyarrow, but "
            f"pyarrow cannot reach it: {error}; {_remedy(scheme)}",
            path=uri,
        ) from error
    if store is None:
        raise LedgerError(
            f"the ledger {uri} can have no files beside its table: pyarrow, by which tasks write "
            f"them, has no file system for {uri.partition(':')[0]}: (it has local folders, s3, gs, "
            f"abfs and hdfs{_OSS_TOO if scheme == 'oss' else ''}). All lanes can use this ledger "
            "if Spark can, with delivery=at_least_once and without appId, ordering=strict, "
            "onPendingKey=hold and ledgerVia=spool; backfills cannot",
            path=uri,
        )
    filesystem, root = store
    return filesystem, root.rstrip("/")


_OSS_TOO: Final = (
    "; and oss with spark.hadoop.fs.oss.endpoint, accessKeyId and accessKeySecret, which are not "
    "all set here"
)


def _remedy(scheme: str) -> str:
    return (
        f"rocket-sink takes spark.hadoop.fs.s3a.*, fs.oss.* and fs.azure.account.key.* from the "
        f"driver's session; if they are not set there, set "
        f"{_SETTINGS.get(scheme, 'what pyarrow needs')} in the environment of the driver and, as "
        "spark.executorEnv.NAME, of the executors"
    )


def _guessed_root(uri: str) -> str:
    """Return the root that `FileSystem.from_uri` would return if it reached the file system."""
    parts = urlsplit(uri)
    host = "" if _scheme(uri) in ("hdfs", "viewfs") else parts.netloc.partition("@")[0]
    return f"{host}{parts.path}".rstrip("/")
