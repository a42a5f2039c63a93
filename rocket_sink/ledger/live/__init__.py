"""A ledger as it grows: for a terminal that shows a run, and for metrics."""
