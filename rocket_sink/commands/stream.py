"""`rocket-sink stream` and `jobs/stream.py`: send rows of any Spark source to a topic."""

from __future__ import annotations

from typing import Any, Final

import click

from rocket_sink.commands.common.base import Command, json_option, pairs_option
from rocket_sink.commands.common.output import note, print_if_json, show
from rocket_sink.commands.common.sink_input import (
    absolute,
    check_name_server,
    checked_options,
    given_options,
    sink_options,
)
from rocket_sink.commands.common.spark_input import spark_options, spark_session
from rocket_sink.commands.common.stream_run import Source, finish, run_batch, run_stream

LANES: Final = ("foreach", "datasource", "foreachBatch")


@click.command(
    cls=Command,
    example="""
    rocket-sink stream --format parquet --path in/ --checkpoint ck/ -n 127.0.0.1:9876 -t flights \\
      --ledger ledger/ -O bodyFormat=json -O columns=sharding_key=tailnum
    rocket-sink stream --format rate --source-option rowsPerSecond=100 --checkpoint ck/ -t ticks \\
      --select 'cast(value AS string) AS body' --trigger '5 seconds'
    rocket-sink stream --batch --format csv --path cities.csv --source-option header=true -t city \\
      --select 'name AS body'""",
)
@click.option(
    "--format", "form", required=True, help="Spark source: parquet, json, kafka, rate ..."
)
@click.option("--path", help="Path or directory that the source reads.")
@click.option(
    "--schema",
    metavar="DDL",
    help="The source's schema; files without one: that of the files there now.",
)
@pairs_option("--source-option", help="Repeatable.")
@click.option("--where", metavar="SQL", help="Keep rows for which this is true.")
@click.option(
    "--select",
    multiple=True,
    metavar="SQL",
    help="A column of the row contract as an SQL expression with AS; repeatable.",
)
@sink_options("nameServer", "topic", "ledger", "ordering")
@click.option(
    "--lane", type=click.Choice(LANES), default="foreach", help="How rows reach the sink."
)
@click.option("--checkpoint", help="Checkpoint directory of the query.")
@click.option(
    "--trigger",
    metavar="TIME|available-now",
    help="Time between micro-batches as '10 seconds', or available-now: take what is "
    "there and end. Default: as soon as rows come.",
)
@click.option("--batch", is_flag=True, help="Read the source once, as a batch.")
@click.option(
    "--stop-timeout",
    type=click.FloatRange(0),
    default=60.0,
    metavar="SECONDS",
    help="On SIGTERM or Ctrl-C: longest wait for the micro-batch.",
)
@spark_options
@json_option
def stream(
    form: str,
    path: str | None,
    schema: str | None,
    source_option: dict[str, str],
    where: str | None,
    select: tuple[str, ...],
    lane: str,
    checkpoint: str | None,
    trigger: str | None,
    batch: bool,
    stop_timeout: float,
    **spark: Any,
) -> int:
    """Stream rows of any Spark source into a topic.

    Columns that the sink reads: body (or value), topic, tags, keys, sharding_key, properties,
    delay_level, delay_ms, delivery_timestamp, message_id and others (docs/reference/columns.md).

    Prints a line for each micro-batch and, after each fold of the ledger, for new isolations and
    dead letters. SIGTERM and Ctrl-C end the query after the micro-batch that is running.
    """
    if batch and (checkpoint or trigger):
        raise click.UsageError("--checkpoint and --trigger belong to streams, not to --batch")
    if not batch and not checkpoint:
        raise click.UsageError(
            "a stream needs --checkpoint DIR: it remembers there what has been sent "
            "(--batch reads the source once, without)"
        )
    source = Source(form, path, schema, source_option, where, select)
    sink = given_options()
    check_name_server(checked_options(sink))  # Fail before Spark starts.
    with spark_session("stream", **spark) as session:
        if not checkpoint:
            report = run_batch(session, source, sink, lane)
        else:
            report = run_stream(
                session, source, sink, lane, checkpoint=absolute(checkpoint), trigger=trigger,
                stop_timeout_s=stop_timeout,
            )  # fmt: skip
        finish(session, report, sink)
        if not print_if_json(report):
            show(report.as_text())
        if report.error:
            note(f"rocket-sink: {report.error}")
    return 0 if report.error is None else 1
