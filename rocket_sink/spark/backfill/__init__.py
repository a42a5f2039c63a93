"""Backfill: dead letters, or the rows of a table, are sent again."""
