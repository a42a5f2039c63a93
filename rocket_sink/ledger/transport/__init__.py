"""The ways on which the ledger rows of a task attempt become durable."""
