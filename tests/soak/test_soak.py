"""The judges of a soak see the faults that they are there for. The soak itself is a command."""

import itertools
import json

from tests.soak import faults, flat, page
from tests.soak.feed import KEYS, TOGETHER, Source
from tests.soak.flat import WARM_JVM_S, WARM_S, Sample
from tests.soak.stored import Topic

_RUN_S = 3600.0
_NOISE = (3, -2, 0, 1, -1, 2, -3)


def _judged(value, *, lives=1, measure="threads", what="driver"):
    """Return the verdict on a process with so many lives; `value` is a function of its age."""
    long_s = _RUN_S / lives
    samples = [
        Sample(life * long_s + age_s, what, measure, life, value(age_s) + _NOISE[age_s % 7])
        for life in range(lives)
        for age_s in range(0, int(long_s), 15)
    ]
    (found,) = flat.judge(samples, _RUN_S)
    return found


def test_a_leak_grows_and_noise_does_not():
    assert not _judged(lambda age_s: 50.0).grows
    assert _judged(lambda age_s: 50.0 + age_s / 60).grows


def test_a_leak_shows_over_processes_that_are_started_again():
    assert _judged(lambda age_s: 50.0 + age_s / 60, lives=6).grows
    assert not _judged(lambda age_s: 50.0, lives=6).grows


def test_growth_at_the_beginning_is_left_out():
    assert not _judged(lambda age_s: min(age_s, WARM_S)).grows


def test_what_a_jvm_compiles_is_left_out_and_its_leak_is_not():
    def compiled(age_s):
        return 1300.0 + 145.0 * min(1.0, age_s / WARM_JVM_S)

    jvm = {"measure": "memory MB", "what": "driver's JVM", "lives": 4}
    assert not _judged(compiled, **jvm).grows
    assert _judged(lambda age_s: compiled(age_s) + age_s / 10, **jvm).grows


def test_what_was_seen_too_briefly_is_not_judged():
    assert not _judged(lambda age_s: age_s, lives=20).judged


def test_the_table_may_grow():
    assert not _judged(lambda age_s: age_s, measure="table files").grows


def test_a_seed_gives_the_same_faults():
    def drawn(seed):
        return list(itertools.islice(faults.draw(seed, quiet_s=(1, 2)), 8))

    assert drawn(7) == drawn(7) != drawn(8)
    assert {fault.kind for fault in drawn(7)} == set(faults.KINDS)
    assert all(str(fault) for fault in drawn(7))


def test_no_two_files_of_an_epoch_have_a_key_in_common(tmp_path):
    source = Source(tmp_path, rows=100)
    files = [{source.key(number) for number in range(i * 100, i * 100 + 100)} for i in range(9)]
    for start in range(9 - TOGETHER):
        together = files[start : start + TOGETHER]
        assert sum(map(len, together)) == len(set().union(*together)) <= KEYS


def test_rows_of_committed_epochs_are_covered(tmp_path):
    source = Source(tmp_path, rows=10)
    for _ in range(5):
        source.write()
    assert (source.written, source.covered(), source.epochs()) == (50, 0, 0)
    logs, commits = tmp_path / "checkpoint" / "sources" / "0", tmp_path / "checkpoint" / "commits"
    logs.mkdir(parents=True)
    commits.mkdir()

    def log(name, *files):
        lines = [json.dumps({"path": f"{file}", "batchId": 0}) for file in files]
        (logs / name).write_text("\n".join(["v1", *lines]))

    log("0", 0)
    log("1.compact", 0, 1)
    log("2", 2, 3)
    log("3", 4)
    (commits / "1").touch()
    (commits / "2").touch()
    assert (source.covered(), source.epochs()) == (4, 3)


def _topic(tmp_path):
    topic = Topic(Source(tmp_path, rows=4))
    topic.source.write()
    for number, intact in ((0, 1), (2, 1), (2, 1), (3, 0)):
        body = f"{topic.source.key(number)}:{number}".encode().hex()
        topic.take(["message", "broker-a", "1", str(number), "ID", str(intact), body])
    return topic


def test_rows_that_are_not_stored_are_missed(tmp_path):
    topic = _topic(tmp_path)
    # A message that a killed broker kept only in part counts as missing.
    assert [topic.missing(rows) for rows in range(5)] == [0, 0, 1, 1, 2]
    copies = topic.copies({"broker-a": "h:1"})
    assert [(copy.row[1], copy.queue, copy.torn) for copy in copies] == [
        (0, ("h:1", 1), False), (2, ("h:1", 1), False), (2, ("h:1", 1), False),
        (3, ("h:1", 1), True),
    ]  # fmt: skip


def test_bodies_of_no_row_are_strange(tmp_path):
    topic = _topic(tmp_path)
    bodies = [b"no row", b"k9-9:1", b"k1-0:77", b"\xff"]
    for body in bodies:
        topic.take(["message", "broker-a", "1", "0", "ID", "1", body.hex()])
    topic.take(["skipped", "broker-a", "1", "5", "7"])
    assert (topic.strange, topic.skipped) == (bodies, ["broker-a 1 5 7"])


def test_the_page_says_what_was_broken():
    fault = {"kind": "loss", "back_s": 4.2}
    row = dict.fromkeys(("rows", "epochs", "lost"), 1)
    results = {
        "version": "5.5.0", "seed": 1, "rate": 10, "elapsed_s": 7200,
        "ended": "run to its end", "sample_s": 15, "faults": [fault],
        "lanes": {"foreach": {**row, "delivery": "at_least_once", "ordering": "strict"}},
        "flat": flat.as_rows([_judged(lambda age_s: 50 + age_s / 60)]),
        "broken": ["driver: threads grows"],
    }  # fmt: skip
    section = page.section(results)
    assert "2.0 hours" in section and "driver: threads grows" in section
    assert "| foreach | at_least_once, order strict | 1 | 1 |" in section
    assert "GROWS" in section
