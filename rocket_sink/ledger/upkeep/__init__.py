"""Merging, retention and erasure: they keep a ledger small for years."""
