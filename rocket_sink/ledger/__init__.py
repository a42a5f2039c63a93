"""The ledger: one append-only Delta table of what was sent, what was not, and why."""
