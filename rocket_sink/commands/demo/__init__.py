"""`rocket-sink demo`: stream rows from files into a topic, break a broker, check the result."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

import click

from rocket_sink.commands.common.base import Command
from rocket_sink.commands.common.output import program
from rocket_sink.errors import ConfigurationError

_FLIGHTS = 336_776
_PARTS = ("flights", "checkpoint", "ledger", "cluster")
"""Files and folders that the demo makes and removes."""


@click.command(
    cls=Command,
    example="""
    rocket-sink demo
    rocket-sink demo --rows 50000 --fault kill --ordering none
    rocket-sink demo --out ./demo --keep""",
)
@click.option(
    "--rows", type=click.IntRange(1, _FLIGHTS), default=_FLIGHTS,
    help="Flights to send.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for input, checkpoint, ledger and brokers; the ledger stays in it. "
    "Default: a temporary one.",
)  # fmt: skip
@click.option(
    "--ordering", type=click.Choice(["none", "best_effort", "strict"]), default="strict",
    help="strict: the broken broker's keys wait for it, all others are sent.",
)  # fmt: skip
@click.option("--brokers", type=click.IntRange(2, 16), default=2, help="Number of brokers.")
@click.option(
    "--fault", type=click.Choice(["freeze", "kill", "none"]), default="freeze",
    help="What happens to one broker in mid-run.",
)  # fmt: skip
@click.option(
    "--fault-seconds", type=click.FloatRange(0.5, 45), default=6.0,
    help="How long the broker stays frozen, or down.",
)  # fmt: skip
@click.option(
    "--keep", is_flag=True, help="Keep the brokers running after the demo, and all files."
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def demo(
    rows: int, out: Path | None, ordering: str, brokers: int, fault: str, fault_seconds: float,
    keep: bool, as_json: bool,
) -> int:  # fmt: skip
    """Stream a year of flights into a local cluster, break a broker, count.

    Starts a real RocketMQ, streams the flights that left New York City in 2013 in time order
    (topic flights, sharding key the tail number), breaks one broker in mid-run, reads every
    message back from the brokers and compares. Exits 0 only if the accounts add up, nothing is
    lost, and (strict) every aircraft's flights are stored in order.
    """
    from rocket_sink.commands.demo.run import Settings, run

    folder = _prepare(out)
    settings = Settings(folder, rows, ordering, brokers, fault, fault_seconds)
    try:
        passed = run(settings, keep=keep, as_json=as_json)
    finally:
        if not keep:
            for name in set(_PARTS) - {"ledger"}:
                shutil.rmtree(folder / name, ignore_errors=True)
    return 0 if passed else 1


def _prepare(out: Path | None) -> Path:
    """Return an empty folder: remove files of an earlier demo, refuse any others."""
    from rocket_sink.cluster import status

    if out is None:
        return Path(tempfile.mkdtemp(prefix="rocket-sink-demo-"))
    folder = out.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out: cannot make the folder {folder}: {error.strerror}; name one that may be made"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--out: {folder} may not be written to; name another folder")
    others = [entry.name for entry in folder.iterdir() if entry.name not in _PARTS]
    if others:
        raise ConfigurationError(
            f"--out {folder} holds other files ({', '.join(sorted(others)[:3])} ...); "
            "give an empty folder"
        )
    home = folder / "cluster"
    if status(home):
        raise ConfigurationError(
            f"the brokers of an earlier demo run in {home} (--keep); end them first: "
            f"{program()} cluster down --home {shlex.quote(str(home))}"
        )
    for name in _PARTS:
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder
