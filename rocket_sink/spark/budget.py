"""The error budget of a whole epoch, checked on the driver where Spark lets it look.

After the tasks, so what is sent stays sent and the letters stay in the ledger; what a stop means:
a data source's epoch is run again after a restart; a foreachBatch epoch is in the ledger already,
so a restart goes on behind it; a batch write raises. The foreach lane has no step on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocket_sink.errors import ConfigurationError, DeliveryError
from rocket_sink.options import SinkOptions


def has_budget(options: SinkOptions) -> bool:
    """Whether an epoch has a budget at all."""
    return options.max_epoch_failures >= 0 or options.max_epoch_failure_ratio < 1


def refuse_budget(options: SinkOptions) -> None:
    """For the foreach lane.

    Raises:
        ConfigurationError: an epoch's budget is set.
    """
    if has_budget(options):
        raise ConfigurationError(
            "maxEpochFailures and maxEpochFailureRatio need a step on the driver after each epoch, "
            "which foreach does not have: use foreachBatch(sink.write_batch) or "
            'format("rocketmq"), or the budget per task (maxFailures, maxFailureRatio)'
        )


def check_budget(options: SinkOptions, counts: Mapping[str, Any], epoch: int) -> None:
    """Raise if the epoch gave up more rows than the options allow.

    Args:
        counts: sums over the epoch's tasks: rows_in, dead, unknown, and the first_error.

    Raises:
        DeliveryError
    """
    given_up, rows_in = counts["dead"] + counts["unknown"], counts["rows_in"]
    limit, ratio = options.max_epoch_failures, options.max_epoch_failure_ratio
    reason = ""
    if 0 <= limit < given_up:
        reason = f"maxEpochFailures={limit}"
    elif given_up > ratio * rows_in:
        reason = f"maxEpochFailureRatio={ratio:g}"
    if reason:
        raise DeliveryError(
            f"{given_up} of {rows_in} rows of epoch {epoch} could not be sent, more than {reason} "
            f"allows: {counts['first_error']}. They are dead letters in the ledger",
            counts={name: counts[name] for name in ("rows_in", "dead", "unknown")},
            first_error=counts["first_error"],
        )
