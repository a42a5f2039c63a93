"""A ledger's report: a verdict, figures, tables for terminals and notebooks, and a page."""

from __future__ import annotations

from rocket_sink.ledger.report.queries import figures
from rocket_sink.ledger.report.tables import Report, render_report, to_html
from rocket_sink.ledger.report.values import (
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    Finding,
    IsolationFigures,
    Totals,
)
from rocket_sink.ledger.sql import Scope

__all__ = [
    "BrokerFigures", "DeadLetterFigures", "EpochFigures", "ErrorFigures", "Finding",
    "IsolationFigures", "Report", "Scope", "Totals", "figures", "render_report",
    "to_html",
]  # fmt: skip
