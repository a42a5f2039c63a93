"""Backfill: sends the dead letters of a ledger again, or sends the rows of a table."""
