"""The work of a task on its rows: encode, order, send, account for. No Spark in here."""
