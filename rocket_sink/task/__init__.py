"""What one task does with its rows: encode, order, send, account for. No Spark in here."""
