"""Readers of the ledger in drivers and tasks: views, new rows, pending keys, marks of backfills."""
