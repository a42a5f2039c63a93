"""The transports, by which the ledger rows of a task attempt become durable."""
