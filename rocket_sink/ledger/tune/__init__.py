"""What other settings would have made of the sends that a ledger has recorded."""

from __future__ import annotations

from rocket_sink.ledger.tune.suggest import tune
from rocket_sink.ledger.tune.values import Candidate, Suggestion, SuspicionFigures, Tuning

__all__ = ["Candidate", "Suggestion", "SuspicionFigures", "Tuning", "tune"]
