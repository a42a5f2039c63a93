"""`python -m tests.hosts.standalone`: see the package."""

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path

from rocket_sink.cluster import DEFAULT_VERSION
from tests.hosts import replication, tables, world
from tests.hosts.bed import Bed
from tests.hosts.standalone import canary, page, play, ship
from tests.hosts.standalone.place import Standalone
from tests.java_client import fetch_generations
from tests.jvms import fetch_packages

_SHIP, _CANARY = "ship", "canary"
_NAMES = (*(case.name for case in play.CASES), _SHIP, _CANARY)


def main():
    """Run the command and return its exit code: 1 if a promise was broken."""
    parser = argparse.ArgumentParser("tests.hosts.standalone")
    parser.add_argument("--only", action="append", choices=_NAMES)
    parser.add_argument("--out", type=Path, default=page.RESULTS, help="file of the results (JSON)")
    parser.add_argument("--short", action="store_true", help="the form for CI: prints its results")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    options = parser.parse_args()
    if options.page:
        replication.write_page()
        return 0
    wanted = options.only or (play.SHORT if options.short else _NAMES)
    if not world.inside():
        fetch_generations()
        fetch_packages()
        if _SHIP in wanted:
            ship.prepare()
    world.enter("tests.hosts.standalone")
    began = time.monotonic()

    def say(text):
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    results = _play(wanted, say, options.out, short=options.short)
    if options.short:
        print(json.dumps(results))
    elif options.out == page.RESULTS:
        replication.write_page()
    parts = [*(row for case in results["cases"] for row in case["rows"].values())]
    parts += [*results.get(_SHIP, []), results.get(_CANARY, {})]
    return int(any(part.get("broken") for part in parts))


def _play(wanted, say, out, *, short):
    results = {"version": DEFAULT_VERSION, "cases": []}
    older = json.loads(out.read_text()) if out.exists() and not short else {}
    results |= {name: older[name] for name in (_SHIP, _CANARY) if name in older}

    def keep():
        if not short:
            tables.store(out, results, whole=wanted is _NAMES)

    cases = [case for case in play.CASES if case.name in wanted]
    if cases:
        with Bed() as bed, closing(Standalone(bed, say)) as at:
            for case in cases:
                say(case.title)
                results["cases"].append(
                    play.play(at, case, play.SHORT_LANES if short else play.LANES)
                )
                keep()
                _tell(results["cases"][-1], say)
    if _SHIP in wanted:
        results[_SHIP] = ship.play(say)
        keep()
    if _CANARY in wanted:
        results[_CANARY] = canary.play(say)
        keep()
    return results


def _tell(case, say):
    for lane, row in case["rows"].items():
        counts = {name: row[name] for name in ("stored", *page.COLUMNS)}
        say(f"  {lane:14} {counts} {'; '.join(row['broken']) or 'held'}")
        for error in row["errors"]:
            say(f"      {error[:200]}")


if __name__ == "__main__":
    raise SystemExit(main())
