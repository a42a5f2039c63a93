"""The sink's options as the driver reads them from Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.append.named import located
from rocket_sink.ledger.path import resolve_path
from rocket_sink.options import SinkOptions, constructor_options


def read_options(given: Mapping[str, str]) -> SinkOptions:
    """Return the sink's options, parsed from all options that Spark passes."""
    return on_driver(constructor_options(None, own_options(given)))


def on_driver(options: SinkOptions) -> SinkOptions:
    """Check name servers' addresses; make the ledger's path absolute, because workers' folders
    differ. If the ledger is a table's name, look its location up; make a missing table."""
    _ = options.name_servers
    if not options.ledger:
        return options
    return options.with_(ledger=resolve_path(located(options.ledger, makes=True)).uri)


def own_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options without Spark's own ones."""
    return {name: value for name, value in given.items() if name.lower() not in _SPARKS_OWN}


_SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})


def refuse_batch_id(options: SinkOptions) -> None:
    """Raise a ConfigurationError if a stream is to be sent under the id of a batch write."""
    if options.batch_id:
        raise ConfigurationError(
            "batchId names one batch write, and this is a stream, whose epochs the checkpoint "
            "names: leave batchId out"
        )
