"""The ways in which the ledger rows of a task attempt become durable."""
