"""Appends to the ledger's table, by delta-rs or by Spark's Delta."""
