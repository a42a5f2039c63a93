"""`python -m tests.hosts.standalone`: see the package."""

from contextlib import closing
from types import SimpleNamespace

from tests.hosts.bed import Bed
from tests.hosts.play import run_command
from tests.hosts.standalone import __doc__ as about
from tests.hosts.standalone import canary, page, play, ship
from tests.hosts.standalone.place import Standalone
from tests.jvms import fetch_packages

_SHIP = SimpleNamespace(name="ship", title="the package on executors that lack it", play=ship.play)
_CANARY = SimpleNamespace(name="canary", title="secrets", play=canary.play)
_ALONE = (_SHIP, _CANARY)
"""The cases that need a cluster of their own."""


def _prepare(names):
    fetch_packages()
    if _SHIP.name in names:
        ship.prepare()


def _play(cases, say, options):
    shared = [case for case in cases if case not in _ALONE]
    lanes = play.SHORT_LANES if options.short else play.LANES
    if shared:
        with Bed() as bed, closing(Standalone(bed, say)) as at:
            for case in shared:
                say(case.title)
                yield _said(play.play(at, case, lanes), say)
    for case in cases[len(shared) :]:
        yield {"name": case.name, "title": case.title, "rows": case.play(say)}


def _said(result, say):
    for lane, row in result["rows"].items():
        counts = {name: row[name] for name in ("stored", *page.COLUMNS)}
        say(f"  {lane:14} {counts} {'; '.join(row['broken']) or 'held'}")
        for error in row["errors"]:
            say(f"      {error[:200]}")
    return result


if __name__ == "__main__":
    raise SystemExit(
        run_command(
            "tests.hosts.standalone", about, (*play.CASES, *_ALONE), play.SHORT, _play,
            page.RESULTS, page.write_page, _prepare,
        )
    )  # fmt: skip
