"""A ledger's report: a verdict, figures, tables for terminals and notebooks, and a page."""

from __future__ import annotations

from rocket_sink.ledger.report.queries import figures
from rocket_sink.ledger.report.tables import Report, to_html
from rocket_sink.ledger.sql import Scope

__all__ = ["Report", "Scope", "figures", "to_html"]
