"""The spool: a task attempt's ledger rows on their way to the fold."""
