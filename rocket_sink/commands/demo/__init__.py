"""`rocket-sink demo`: stream rows from files into a topic, break a broker, check the result."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from rocket_sink.commands.common.base import Command
from rocket_sink.errors import ConfigurationError

_FLIGHTS = 336_776


@click.command(
    cls=Command,
    example="""
    rocket-sink demo
    rocket-sink demo --rows 50000 --fault kill --out ./demo""",
)
@click.option(
    "--rows", type=click.IntRange(1, _FLIGHTS), default=_FLIGHTS,
    help="Flights to send.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path),
    help="Empty folder for input, checkpoint and ledger; the ledger stays in it. "
    "Default: a temporary one.",
)  # fmt: skip
@click.option(
    "--fault", type=click.Choice(["freeze", "kill"]), default="freeze",
    help="What happens to one of the two brokers in mid-run.",
)  # fmt: skip
def demo(rows: int, out: Path | None, fault: str) -> int:
    """Stream a year of flights into a local cluster, break a broker, count.

    Starts a real RocketMQ, streams the flights that left New York City in 2013 in time order
    (topic flights, sharding key the tail number, strict order), breaks one broker in mid-run, reads
    every message back from the brokers and compares. Exits 0 only if the accounts add up, nothing
    is lost, and every aircraft's flights are stored in order.
    """
    from rocket_sink.commands.demo.run import run

    folder = _empty_folder(out)
    try:
        passed = run(folder, rows, fault)
    finally:
        for name in ("flights", "checkpoint"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return 0 if passed else 1


def _empty_folder(out: Path | None) -> Path:
    if out is None:
        return Path(tempfile.mkdtemp(prefix="rocket-sink-demo-"))
    folder = out.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
        if not names:
            folder.joinpath("flights").mkdir()
    except OSError as error:
        raise ConfigurationError(
            f"--out: {error.strerror}: {folder}; name a folder that may be made and written to"
        ) from None
    if names:
        raise ConfigurationError(
            f"--out {folder} holds other files ({', '.join(names[:3])} ...); give an empty folder"
        )
    return folder
