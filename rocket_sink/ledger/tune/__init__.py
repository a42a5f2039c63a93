"""Tuning: how other settings would have treated the sends that a ledger has recorded."""
