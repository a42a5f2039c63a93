"""The search for credentials in everything that a Spark job leaves behind, on all of its hosts.

Brokers ask for an access key and a secret key. All lanes get keys as plain options, which is the
worst way: first the right keys, then wrong ones, so that errors and remarks of brokers are written.
Then the canary searches every file of the master, the workers and the driver: local folders of
Spark, logs, event logs, checkpoints, ledgers, spools.
"""

from __future__ import annotations

import base64
import gzip
import secrets
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.hosts.bed import Bed
from tests.hosts.standalone.place import SHARED, Standalone
from tests.hosts.standalone.play import LANES, make_cells

_EVENTS = SHARED / "events"
_TEMPORARY = Path("/tmp")


@dataclass(frozen=True)
class Keys:
    access_key: str
    secret_key: str

    @classmethod
    def made(cls):
        return cls(f"canary{secrets.token_hex(12)}", f"canary{secrets.token_hex(12)}")


def play(say):
    """Run all lanes twice and search. Return a row, whose `held` is a sentence, by its name."""
    right, wrong = Keys.made(), Keys.made()
    began_s = time.time()
    with Bed() as bed, closing(Standalone(bed, say, secrets=right)) as at:
        _EVENTS.mkdir()
        broken = []
        for name, keys in (("right", right), ("wrong", wrong)):
            say(f"all lanes with the {name} credentials")
            reports = _run(at, f"canary-{name}", keys)
            broken += [
                f"{lane} with the {name} credentials: {report['errors'][-1:] or 'no error'}"
                for lane, report in reports.items()
                if report["ended"] != (keys is right)
            ]
        say("searching")
        hosts = (at.master, *at.workers, *at.drivers)
        findings = search(
            [*(host.disk for host in hosts), SHARED, _TEMPORARY],
            {"the access key": right.access_key, "the secret key": right.secret_key,
             "the wrong access key": wrong.access_key, "the wrong secret key": wrong.secret_key},
            # A search that does not find these words is blind.
            controls={"_delta_log": "canary-right-foreach", "part-": "canary-right-foreach",
                      "events": "rocket-sink-tests", "stderr": "canary-wrong"},
            since_s=began_s,
        )  # fmt: skip
    broken += findings.pop("broken")
    say(f"  {findings} {broken or 'held'}")
    verdict = "; ".join(broken) or "the keys are in none"
    return {"all lanes": {**findings, "held": verdict, "broken": broken}}


def _run(at, name, keys):
    options = {"accessKey": keys.access_key, "secretKey": keys.secret_key}
    plan = {
        "name": name,
        "conf": {
            "spark.task.maxFailures": "2", "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": _EVENTS.as_uri(), "spark.eventLog.compress": "false",
        },
        "cells": [{**cell, "tries": 1} for cell in make_cells(at, name, LANES, options)],
    }  # fmt: skip
    at.start_driver(0, plan)
    return at.told(plan)


def search(folders, words, *, controls, since_s):
    """Find the files that have one of the words.

    Args:
        words: secret words by their descriptions.
        controls: by part of a path, a word that some file with such a path must have.
        since_s: older files (in the temporary folder) are skipped.
    """
    forms = {name: _forms(word) for name, word in words.items()}
    missing = dict(controls)
    files = size = 0
    broken = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_mtime < since_s:
                continue
            parts = list(_texts(path))
        except (FileNotFoundError, PermissionError):
            continue
        files += 1
        size += sum(map(len, parts))
        broken += [
            f"{path} has {name}: {part[max(0, part.index(form) - 200) : part.index(form)]!r}"
            for name, encodings in forms.items()
            for form in encodings
            for part in parts
            if form in part
        ]
        for place, word in list(missing.items()):
            if place in str(path) and any(word.encode() in part for part in parts):
                del missing[place]
    broken += [f"no file of {place} has {word!r}: bad search" for place, word in missing.items()]
    return {"files": files, "megabytes": round(size / 1e6, 1), "broken": broken}


def _forms(word):
    """Return the encodings of a word. Base64 has three forms, by the word's place in the text."""
    raw = word.encode()
    forms = [raw, word.encode("utf-16-le"), raw.hex().encode(), raw.hex().upper().encode()]
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + raw)
        # The slice removes the characters that depend on neighbouring bytes.
        forms.append(encoded[-(-before * 4 // 3) + (before > 0) : -4])
    return forms


def _texts(path):
    """Yield the texts of a file, decompressed for known formats."""
    data = path.read_bytes()
    yield data
    if data[:4] == b"PAR1":
        for column in pq.read_table(path).columns:
            yield repr(column.to_pylist()).encode()
    elif data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    elif data[:4] == b"\x28\xb5\x2f\xfd":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            yield stream.read()
