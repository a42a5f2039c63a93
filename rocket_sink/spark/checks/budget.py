"""The error budget of an epoch (`maxEpochFailures`), which the driver checks after its tasks.

If more rows failed, the write fails, but messages stay sent and dead letters stay in the ledger.
After a restart, the data source runs the epoch again; foreachBatch goes on with the next epoch: the
ledger has this one. foreach runs nothing on the driver then, so it has no such budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocket_sink.errors import ConfigurationError, DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.task.totals import exceeds


def refuse_budget(options: SinkOptions) -> None:
    """Raise a ConfigurationError if an epoch's budget is set, which foreach cannot keep."""
    if options.max_epoch_failures:
        raise ConfigurationError(
            "maxEpochFailures needs a step on the driver after each epoch, which foreach does not "
            'have: use foreachBatch(sink.write_batch) or format("rocketmq"), or the budget per '
            "task (maxFailures)"
        )


def check_budget(options: SinkOptions, counts: Mapping[str, Any], epoch: int | None = None) -> None:
    if (error := over_budget(options, counts, epoch)) is not None:
        raise error


def over_budget(
    options: SinkOptions, counts: Mapping[str, Any], epoch: int | None = None
) -> DeliveryError | None:
    """Return an error if more rows of the epoch (None: batch write) failed than is
    allowed. `counts` has the tasks' sums of rows_in, dead and unknown, and the first_error."""
    given_up, rows_in = counts["dead"] + counts["unknown"], counts["rows_in"]
    budget = options.max_epoch_failures
    if not exceeds(given_up, budget, rows_in):
        return None
    where, advice = f" of epoch {epoch}", ""
    if epoch is None:
        where, advice = "", ": backfill them; another write would send the stored rows again"
        if options.delivery == "effectively_once" and (options.batch_id or options.app_id):
            name = "batchId" if options.batch_id else "appId"
            advice = f"; another write under the same {name} sends only rows that are not stored"
    return DeliveryError(
        f"{given_up} of {rows_in} rows{where} could not be sent, more than "
        f"maxEpochFailures={budget} allows: {counts['first_error']}. They are dead letters in "
        f"the ledger{advice}",
        counts={name: counts[name] for name in ("rows_in", "dead", "unknown")},
        first_error=counts["first_error"],
    )
